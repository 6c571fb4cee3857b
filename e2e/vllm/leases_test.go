//go:build vllm

package vllm

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/realengines"
)

// TestRealLeases has D come late for KV: its core stands still while its API server answers /health, or it has no room
// to run more. P meanwhile computes other prompts in the memory that it has freed. A request gets the text of the
// reference, or an error without any text (docs/security.md#wrong-text).
//
//	LEASES=default ENGINES=1 e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealLeases -v ./e2e/vllm
//	LEASES=120 ENGINES=1 e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealLeases -v ./e2e/vllm
func TestRealLeases(t *testing.T) {
	settings := os.Getenv("TANDEM_VLLM_LEASES")
	if settings == "" {
		t.Skip("engines whose leases are not tried: LEASES")
	}
	s := &leases{
		suite: &suite{stack: runningEngines(t), prompts: prompts{rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))}, report: &report{}},
		lease: lease,
	}
	s.report.versions = s.versions(t) + ", leases: " + settings
	defer s.report.print(t)
	if settings != "default" {
		n, err := strconv.Atoi(settings)
		require.NoError(t, err)
		s.lease, s.pool = time.Duration(n)*time.Second, fmt.Sprintf("  nixl: {declineExpired: true, lease: %ds}\n", n)
	}
	s.run(t, "in time", func(t *testing.T) {
		s.held(t, "D is free", 0, func() func() { return func() {} })
	})
	stands := []time.Duration{20 * time.Second, 36 * time.Second}
	queues := []time.Duration{s.lease * 4 / 3}
	switch {
	case s.lease < 30*time.Second:
		stands, queues = []time.Duration{10 * time.Second}, []time.Duration{10 * time.Second, 16 * time.Second}
	case s.lease > 30*time.Second:
		stands, queues = []time.Duration{36 * time.Second}, []time.Duration{40 * time.Second}
	}
	for _, d := range stands {
		s.run(t, "core stands still for "+d.String(), func(t *testing.T) {
			s.held(t, fmt.Sprintf("D's core stands still for %s", d), d, func() func() { return stopCore(t) })
		})
	}
	for _, d := range queues {
		s.run(t, "queue of "+d.String(), func(t *testing.T) {
			s.held(t, fmt.Sprintf("D runs 8 other requests for %s", d), d, func() func() { return s.fill(t) })
		})
	}
}

type leases struct {
	*suite
	lease time.Duration
	pool  string // further settings
}

// held sends 8 requests, 4 of them streamed, while hold keeps D from running them for so long.
func (s *leases) held(t *testing.T, name string, long time.Duration, hold func() (release func())) {
	s.front.addr, s.admin = realengines.Serve(t, fmt.Sprintf("- name: tiny\n  models: [\"*\"]\n  kvTransfer: nixl\n  split: always\n"+
		"  binding: immediate\n%s  endpoints:\n  - {address: %q, role: prefill}\n  - {address: %q, role: decode}\n",
		s.pool, s.prefill[0].addr, s.decode[0].addr))
	require.Eventually(t, func() bool {
		m, err := scrape(s.admin)
		return err == nil && m.sum("tandem_scrapes_total", `result="ok"`) >= 4
	}, time.Minute, 100*time.Millisecond)
	const n = 8
	requests, want := make([]request, n), make([]answer, n)
	for i := range requests {
		requests[i] = request{api: []api{chat, completions}[i%2], prompt: s.prompts.words(60), tokens: 24, stream: i >= n/2}
		want[i] = s.fromReference(t, requests[i])
	}
	warm, err := send(t.Context(), s.front.addr, request{api: chat, prompt: s.prompts.words(5), tokens: 2}, 0)
	require.NoError(t, err)
	require.Equal(t, 200, warm.status, "%s", warm.raw)
	release := hold()
	before, expired := promptTokens(t, s.decode...), total(t, s.prefill, expiredPrefills)
	results := make([]string, n)
	var all, others sync.WaitGroup
	for i := range requests {
		all.Go(func() { results[i] = outcome(t.Context(), s.front.addr, requests[i], want[i]) })
	}
	if long > 0 {
		others.Go(func() { // the memory that P frees is used again within seconds; P has room for this beside what it keeps
			for end := time.Now().Add(long + time.Second); time.Now().Before(end); time.Sleep(time.Second) {
				_, _ = send(t.Context(), s.prefill[0].addr, request{api: completions, prompt: s.prompts.words(500), tokens: 1}, 0)
			}
		})
	}
	time.Sleep(long)
	release()
	all.Wait()
	others.Wait()
	counts := map[string]int{}
	for i, result := range results {
		require.False(t, strings.HasPrefix(result, "wrong"), "%s: %s", requests[i], result)
		counts[result]++
	}
	if long == 0 {
		require.Equal(t, n, counts["right"], "%v", results)
	}
	var seen []string
	for _, result := range slices.Sorted(maps.Keys(counts)) {
		seen = append(seen, fmt.Sprintf("%d %s", counts[result], result))
	}
	m, err := scrape(s.admin)
	require.NoError(t, err)
	s.report.row(name, n, fmt.Sprintf("%s; decode: %s; leases expired at P: %.0f; tandem_kv_outdated_total %.0f", strings.Join(seen, ", "),
		promptTokens(t, s.decode...).minus(before), total(t, s.prefill, expiredPrefills)-expired, m.sum("tandem_kv_outdated_total", "")))
	requireAlive(t, s.engines())
}

// outcome sends a request, and says right, refused with an error's code and no text, or wrong.
func outcome(ctx context.Context, addr string, r request, want answer) string {
	a, err := send(ctx, addr, r, 0)
	kind := map[bool]string{false: "plain", true: "streamed"}[r.stream]
	_, code, _ := bytes.Cut(a.raw, []byte(`"code":"`))
	code, _, _ = bytes.Cut(code, []byte(`"`))
	switch text := strings.Join(a.text, ""); {
	case err == nil && a.status == 200 && slices.Equal(a.text, want.text):
		return "right"
	case text == "" && a.status >= 500 && len(code) > 0:
		return fmt.Sprintf("%s: %d %s", kind, a.status, code)
	case text == "" && a.status == 200 && len(code) > 0:
		return fmt.Sprintf("%s: an error event %s", kind, code)
	}
	return fmt.Sprintf("wrong: %v, status %d, text %q, the reference's is %q: %s", err, a.status, a.text, want.text, a.raw)
}

// fill has D run 8 requests, all that it may, until release.
func (s *leases) fill(t *testing.T) (release func()) {
	ctx, stop := context.WithCancel(t.Context())
	for range 8 {
		r := request{api: completions, prompt: s.prompts.words(5), tokens: 8000, stream: true, extra: `,"ignore_eos":true`}
		go func() { _, _ = send(ctx, s.decode[0].addr, r, 0) }()
	}
	require.Eventually(t, func() bool { return total(t, s.decode, "vllm:num_requests_running") == 8 }, time.Minute, 50*time.Millisecond)
	return stop
}

// stopCore stops D's EngineCore, and no other process of D, until release.
func stopCore(t *testing.T) (release func()) {
	t.Helper()
	parent, core := os.Getenv("TANDEM_VLLM_DECODE_PID"), 0
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(t, err)
	for _, file := range stats {
		text, err := os.ReadFile(file) // pid (name) state parent ...
		if name, rest, ok := strings.Cut(string(text), ") "); err == nil && ok && strings.Contains(name, "EngineCor") && strings.Fields(rest)[1] == parent {
			core, err = strconv.Atoi(strings.Fields(name)[0])
			require.NoError(t, err)
		}
	}
	require.NotZero(t, core, "no EngineCore below process %s", parent)
	require.NoError(t, syscall.Kill(core, syscall.SIGSTOP))
	release = sync.OnceFunc(func() { _ = syscall.Kill(core, syscall.SIGCONT) })
	t.Cleanup(release)
	return release
}
