// Package realengines starts Tandem and Envoy for tests against engines that Tandem's authors did not write: real ones
// (e2e/vllm, e2e/sglang), which servers.sh runs, and other projects' simulators (e2e/foreign).
package realengines

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
)

// Serve runs Tandem for one pool, and Envoy in front of it, until the test ends. pool is an entry of the
// configuration's pools, more are further lines of its top. front is Envoy's address for clients, admin Tandem's for
// operators. Tests run in a folder two below the repository's root.
func Serve(t *testing.T, pool string, more ...string) (front, admin string) {
	return serve(t, pool, "", more...)
}

// ServeInside runs Tandem inside Envoy, which loads libtandem.so from a folder.
func ServeInside(t *testing.T, pool, library string) (front, admin string) {
	t.Setenv("ENVOY_DYNAMIC_MODULES_SEARCH_PATH", library)
	return serve(t, pool, ", run: inside")
}

func serve(t *testing.T, pool, run string, more ...string) (front, admin string) {
	t.Helper()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	tandem := filepath.Join(root, "bin/tandem")
	require.FileExists(t, tandem, "make build")
	dir, addrs := t.TempDir(), loopback.Addresses(t, 5)
	admin, front = addrs[2], addrs[3]
	config := filepath.Join(dir, "tandem.yaml")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `extProc: {listen: %q}
replan:  {listen: %q}
admin:   {listen: %q}
envoy:   {listen: %q, admin: %q%s}
%s
pools:
%s`, addrs[0], addrs[1], admin, front, addrs[4], run, strings.Join(more, "\n"), pool), 0o600))
	if run == "" {
		Start(t, dir, "tandem", tandem, "serve", "-f", config)
	}
	bootstrap, err := exec.CommandContext(t.Context(), tandem, "envoy", "-f", config).Output()
	require.NoError(t, err, "tandem envoy")
	file := filepath.Join(dir, "envoy.yaml")
	require.NoError(t, os.WriteFile(file, bootstrap, 0o600))
	Start(t, dir, "envoy", envoy(t, root), "-c", file, "--log-level", "warning", "--use-dynamic-base-id")
	require.Eventually(t, func() bool { return OK(admin, "/readyz") && OK(front, "/v1/models") },
		time.Minute, 100*time.Millisecond, "Tandem and Envoy did not become ready")
	return front, admin
}

// Start runs a program in a directory until the test ends; then it must exit within 30 s of SIGTERM, with status 0.
// Its output is shown if the test failed.
func Start(t *testing.T, dir, name, program string, args ...string) {
	t.Helper()
	var log bytes.Buffer
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), program, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &log, &log
	require.NoError(t, cmd.Start(), name)
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() })
		err := cmd.Wait()
		kill.Stop()
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if t.Failed() {
			t.Logf("%s:\n%s", name, lastLines(log.String(), 60))
		}
	})
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// OK reports whether a GET of a path is answered with 200.
func OK(addr, path string) bool {
	answer, err := http.Get("http://" + addr + path)
	if err != nil {
		return false
	}
	_ = answer.Body.Close()
	return answer.StatusCode == http.StatusOK
}

// envoy finds Envoy: $ENVOY, PATH, or the one that make tools has installed below root.
func envoy(t *testing.T, root string) string {
	t.Helper()
	if path := os.Getenv("ENVOY"); path != "" {
		return path
	}
	if path, err := exec.LookPath("envoy"); err == nil {
		return path
	}
	path := filepath.Join(root, ".tools/bin/envoy")
	require.FileExists(t, path, "make tools")
	return path
}

// Check runs `tandem serve --check --live` with a configuration file. said is all that it prints; failed: it found an
// error.
func Check(t *testing.T, file string) (said string, failed bool) {
	t.Helper()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	out, err := exec.CommandContext(t.Context(), filepath.Join(root, "bin/tandem"), "serve", "-f", file, "--check",
		"--live").CombinedOutput()
	return string(out), err != nil
}
