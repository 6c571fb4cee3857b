package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The cost of an idle Tandem, with 100 endpoints: under 2 % of a core, under 100 MB.
func TestIdle(t *testing.T) {
	if os.Getenv("IDLE") == "" {
		t.Skip("set IDLE, or run make idle")
	}
	const endpoints, length = 100, 60 * time.Second
	p := ports(t, 5)
	file := filepath.Join(t.TempDir(), "tandem.yaml")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, "extProc: {listen: %q}\nreplan: {listen: %q}\nadmin: {listen: %q}\nenvoy: {listen: %q, admin: %q}\npools:\n- name: chat\n  kvTransfer: nixl\n  endpoints:\n%s",
		p[0], p[1], p[2], p[3], p[4], idleEngines(t, endpoints)), 0o600))
	f := &fleet{t: t, dir: t.TempDir()}
	f.startTandem(0, file, "http://"+p[2])
	require.Eventually(t, func() bool { return len(f.state(0)) == endpoints }, 30*time.Second, 100*time.Millisecond)
	<-time.After(5 * time.Second) // the first requests for models
	before := metric(t, f.admins[0], "process_cpu_seconds_total")
	<-time.After(length)
	cpu := (metric(t, f.admins[0], "process_cpu_seconds_total") - before) / length.Seconds()
	memory := resident(f.tandems[0])
	t.Logf("idle with %d endpoints: %.2f %% of a core, %.1f MiB", endpoints, 100*cpu, memory)
	require.Less(t, cpu, 0.02)
	require.Less(t, memory, 100.0)
}

// idleEngines starts engines that only list their model, and returns them as endpoints of a pool.
func idleEngines(t *testing.T, n int) string {
	models := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"tiny","object":"model"}]}`)
		}
	})
	var list strings.Builder
	for i := range n {
		engine := httptest.NewServer(models)
		t.Cleanup(engine.Close)
		fmt.Fprintf(&list, "  - {address: %q, role: %s}\n", engine.Listener.Addr().String(), []string{"prefill", "decode"}[i%2])
	}
	return list.String()
}

// Concurrent open streams cost Tandem less than 64 KB each: it sees none of their bytes. STREAMS is their number (512), ENDPOINTS that
// of endpoints of another pool (2). The more streams there are, the longer a token takes, as the machine has to write them all.
func TestOpenStreams(t *testing.T) {
	if os.Getenv("IDLE") == "" {
		t.Skip("set IDLE, or run make idle")
	}
	streams := fromEnv("STREAMS", 512)
	step := time.Duration(streams) * 200 * time.Microsecond
	f := start(t, options{
		engineArgs: []string{"--decode-step", step.String(), "--record=false"},
		pools: "pools:\n- name: chat\n  models: [tiny]\n  kvTransfer: nixl\n  split: always\n  endpoints:\n" +
			"  - {address: %P, role: prefill}\n  - {address: %P, role: prefill}\n  - {address: %D, role: decode}\n  - {address: %D, role: decode}\n" +
			"- name: spare\n  models: [spare]\n  kvTransfer: nixl\n  endpoints:\n" + idleEngines(t, fromEnv("ENDPOINTS", 2)),
	})
	f.lenient = true // clients leave
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true) // else there are too many connections for the descriptors of a process
	streaming := &http.Client{Transport: &http.Transport{Protocols: protocols}}
	ask := func(n, tokens int) (stop func()) {
		var begun atomic.Int64
		var wg sync.WaitGroup
		release := make(chan struct{})
		for i := range n {
			wg.Go(func() {
				body := fmt.Sprintf(`{"model":"tiny","stream":true,"ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":"%d %s"}]}`, tokens, i, strings.Repeat("all is well. ", 80))
				resp, err := streaming.Post(f.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				defer resp.Body.Close()
				lines := bufio.NewScanner(resp.Body)
				for lines.Scan() {
					if strings.HasPrefix(lines.Text(), "data: ") {
						break
					}
				}
				begun.Add(1)
				<-release
			})
		}
		require.Eventually(t, func() bool { return begun.Load() == int64(n) }, 5*time.Minute, 20*time.Millisecond, "streams have begun")
		return func() { close(release); wg.Wait() }
	}
	ask(streams, 2)() // memory that grows once has grown
	<-time.After(2 * time.Second)
	before, heapBefore := resident(f.tandems[0]), f.liveHeap()
	stop := ask(streams, 300)
	during, heap := resident(f.tandems[0]), f.liveHeap()
	require.InDelta(t, streams, metric(t, f.admins[0], "tandem_reservations"), 5, "all of them are open")
	t.Logf("%d endpoints, Envoy %.1f MiB", len(f.state(0)), resident(f.envoy))
	t.Logf("%d streams: memory %.1f -> %.1f MiB (%.1f KiB each), live heap %.2f -> %.2f MiB (%.1f KiB each), %v goroutines",
		streams, before, during, (during-before)*1024/float64(streams), heapBefore, heap, (heap-heapBefore)*1024/float64(streams), metric(t, f.admins[0], "go_goroutines"))
	require.Less(t, (during-before)*1024/float64(streams), 64.0)
	stop()
}

// liveHeap returns the reachable part of the replica's heap, in MiB: a heap profile with gc=1 collects before.
func (f *fleet) liveHeap() float64 {
	resp, err := client.Get(f.admins[0] + "/debug/pprof/heap?gc=1")
	require.NoError(f.t, err)
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return metric(f.t, f.admins[0], "go_memstats_heap_alloc_bytes") / (1 << 20)
}
