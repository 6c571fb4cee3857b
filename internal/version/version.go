// Package version says which version a program is, in the same words for all programs of the release.
package version

import (
	"cmp"
	"runtime/debug"
	"strings"
)

// Text is builtAs, which the linker set, or what the Go toolchain stamped into the binary; the commit, unless the
// release names it, and its day (UTC); and Go's version.
func Text(builtAs string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return cmp.Or(builtAs, "(unknown)")
	}
	return text(builtAs, info)
}

func text(builtAs string, info *debug.BuildInfo) string {
	v := cmp.Or(builtAs, info.Main.Version)
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 && !strings.Contains(v, s.Value[:12]) {
			v += " " + s.Value[:12]
		}
		if day, _, timed := strings.Cut(s.Value, "T"); s.Key == "vcs.time" && timed && !strings.Contains(v, day) {
			v += " " + day
		}
	}
	return v + " " + info.GoVersion
}
