package process

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// Machine returns the processor's name and the number of cores.
func Machine() string {
	name := runtime.GOARCH
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			name = strings.TrimSpace(value)
		}
	}
	return fmt.Sprintf("%s, %d cores", name, runtime.NumCPU())
}

// Program returns the path of the first program that is there; "" if none is.
func Program(candidates ...string) string {
	for _, c := range candidates {
		if path, err := exec.LookPath(c); err == nil {
			if abs, err := filepath.Abs(path); err == nil {
				return abs
			}
		}
	}
	return ""
}

// EnvoyVersion returns Envoy's version: `envoy --version` ends in "version: COMMIT/1.40.0/Clean/RELEASE/BoringSSL".
func EnvoyVersion(ctx context.Context, path string) string {
	out, _ := exec.CommandContext(ctx, path, "--version").Output()
	_, version, _ := strings.Cut(string(out), "version: ")
	if parts := strings.Split(version, "/"); len(parts) > 1 {
		return "Envoy " + parts[1]
	}
	return "Envoy of unknown version"
}
