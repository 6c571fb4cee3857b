package version

import (
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestText(t *testing.T) {
	const commit = "0123456789abcdef0123456789abcdef01234567"
	for name, tt := range map[string]struct{ builtAs, stamped, commit, want string }{
		"a release":             {"1.2.3", "(devel)", commit, "1.2.3 0123456789ab 2026-11-28 go1.99"},
		"on the way to one":     {"1.2.3-dev+0123456789ab", "(devel)", commit, "1.2.3-dev+0123456789ab 2026-11-28 go1.99"},
		"of a release's script": {"1.2.3 0123456789ab 2026-11-28", "(devel)", commit, "1.2.3 0123456789ab 2026-11-28 go1.99"},
		"without the linker":    {"", "v1.2.3", "", "v1.2.3 go1.99"},
		"from a plain folder":   {"", "(devel)", "", "(devel) go1.99"},
	} {
		t.Run(name, func(t *testing.T) {
			info := debug.BuildInfo{GoVersion: "go1.99", Main: debug.Module{Version: tt.stamped}}
			if tt.commit != "" {
				info.Settings = []debug.BuildSetting{
					{Key: "vcs.revision", Value: tt.commit}, {Key: "vcs.time", Value: "2026-11-28T22:01:52Z"}}
			}
			require.Equal(t, tt.want, text(tt.builtAs, &info))
		})
	}
	require.Contains(t, Text("1.2.3"), "1.2.3", "whatever this test was built as")
}
