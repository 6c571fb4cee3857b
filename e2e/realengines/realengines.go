// Package realengines starts Tandem and Envoy for tests against real engines (e2e/vllm, e2e/sglang), which
// servers.sh runs.
package realengines

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

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

// Envoy finds Envoy: $ENVOY, PATH, or the one that make tools has installed below root.
func Envoy(t *testing.T, root string) string {
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
