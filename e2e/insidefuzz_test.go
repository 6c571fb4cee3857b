package e2e

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The library in an Envoy that is none (carrier/testdata/envoy.c): its hooks are called in any order that Envoy may
// choose, with whatever clients and endpoints may say, and memory that is gone after the hook. Nothing crashes or
// panics, and nothing stays reserved. TANDEM_SEED and TANDEM_REQUESTS (of each of four workers) make it another or
// a longer run.
func TestInsideFakeEnvoy(t *testing.T) {
	onlyInside(t)
	dialects := []string{"nixl", "nixl-push", "sglang", "mooncake"}
	f := start(t, options{inside: true, mix: dialects, prefills: 4, decodes: 8,
		poolOf: map[string]string{"nixl": "  engine: vllm\n  continueStreams: {header: x-insured}\n"}})
	fake, admin := filepath.Join(t.TempDir(), "envoy"), ports(t, 1)[0]
	build := exec.Command("gcc", "-std=gnu11", "-O1", "-g", "-Wall", "-rdynamic", "-pthread", "-o", fake, "../carrier/testdata/envoy.c", "-ldl")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))
	text, err := os.ReadFile(f.config)
	require.NoError(t, err)
	file := f.config + ".fake"
	require.NoError(t, os.WriteFile(file, []byte(strings.Replace(string(text), strings.TrimPrefix(f.admins[0], "http://"), admin, 1)), 0o600))

	seed := fromEnv("TANDEM_SEED", int(time.Now().Unix()))
	run := exec.Command(fake, filepath.Join(os.Getenv("ENVOY_DYNAMIC_MODULES_SEARCH_PATH"), "libtandem.so"), file,
		strconv.Itoa(seed), strconv.Itoa(fromEnv("TANDEM_REQUESTS", 1000)))
	var said strings.Builder
	run.Stderr = &said
	t.Cleanup(func() {
		t.Logf("TANDEM_SEED=%d", seed)
		if t.Failed() {
			s := said.String()
			t.Logf("%s", s[max(0, len(s)-20000):])
		}
	})
	in, err := run.StdinPipe()
	require.NoError(t, err)
	stdout, err := run.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, run.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err, "it ended before its time")
	t.Log(strings.TrimSpace(line))
	url := "http://" + admin
	for _, name := range []string{"tandem_reservations", "tandem_held_bytes"} {
		soon(t, name+" is 0", func() bool { return metric(t, url, name) == 0 })
	}
	require.Zero(t, metric(t, url, "tandem_panics_total"))
	for _, route := range []string{"split", "decode_alone"} {
		require.Positive(t, metric(t, url, "tandem_decisions_total", `route="`+route+`"`), route)
	}
	require.Positive(t, metric(t, url, "tandem_streams_insured_total", `result="insured"`))
	_, _ = io.WriteString(in, "\n")
	require.NoError(t, run.Wait())
}
