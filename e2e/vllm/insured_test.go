//go:build vllm

package vllm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/realengines"
)

// cutter stands before a decode engine, and cuts the connections of streams behind so many events as their request ids
// say: insured-N-cut-EVENTS. The engine that takes over is left alone: a second one that dies at once ends the answer.
type cutter struct {
	mu    sync.Mutex
	tries map[string]int
	cuts  *atomic.Int64
}

func (c *cutter) before(t *testing.T, e engine) string {
	t.Helper()
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: e.addr})
	proxy.FlushInterval = -1
	proxy.Transport = &http.Transport{DisableKeepAlives: true}
	proxy.ErrorLog = slog.NewLogLogger(slog.NewTextHandler(t.Output(), nil).WithAttrs([]slog.Attr{slog.String("before", e.addr)}), slog.LevelError)
	proxy.ModifyResponse = func(r *http.Response) error {
		var n, events int
		id := r.Request.Header.Get("X-Request-Id")
		if _, err := fmt.Sscanf(id, "insured-%d-cut-%d", &n, &events); err != nil {
			return nil // another request
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.tries[id]++; c.tries[id] == 1 {
			c.cuts.Add(1)
			r.Body = &cutBody{r.Body, events}
		}
		return nil
	}
	// The whole body first: an engine may answer before the proxy has seen its end, and then net/http closes the body
	// under the proxy, which drops the engine's answer.
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// cutBody ends with an error behind so many events.
type cutBody struct {
	io.ReadCloser
	events int
}

func (b *cutBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p[:min(len(p), 64)])
	if b.events -= bytes.Count(p[:n], []byte("\n\n")); b.events <= 0 {
		return 0, errors.New("cut")
	}
	return n, err
}

// insured has an Envoy that has Tandem loaded before the engines that run, and a cutter before each decode engine.
func insured(t *testing.T, seed uint64) (*suite, *cutter) {
	t.Helper()
	library := os.Getenv("TANDEM_LIBRARY")
	if library == "" {
		t.Skip("TANDEM_LIBRARY names no folder of libtandem.so (make carrier)")
	}
	s := &suite{stack: runningEngines(t), prompts: prompts{rand.New(rand.NewPCG(seed, 0))}}
	cut := &cutter{tries: map[string]int{}, cuts: &atomic.Int64{}}
	pool := "- name: tiny\n  models: [\"*\"]\n  kvTransfer: nixl\n  split: always\n  decodeAlone: fallback\n  continueStreams: {}\n  endpoints:\n"
	for _, e := range s.prefill {
		pool += fmt.Sprintf("  - {address: %q, role: prefill}\n", e.addr)
	}
	for _, e := range s.decode {
		pool += fmt.Sprintf("  - {address: %q, role: decode}\n", cut.before(t, e))
	}
	s.front.addr, s.admin = realengines.ServeInside(t, pool, library)
	return s, cut
}

// continued returns how many streams another engine has continued or repeated.
func (s *suite) continued(t *testing.T) float64 {
	t.Helper()
	m, err := scrape(s.admin)
	require.NoError(t, err)
	return m.sum("tandem_streams_continued_total", `result="continued"`)
}

// TestRealInsured cuts a hundred streams of real vLLM between their decode engine and an Envoy that has Tandem loaded,
// and requires the texts of engines that were left alone. Then it kills an engine under 32 streams.
//
//	TANDEM_LIBRARY=$PWD/bin e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealInsured -v ./e2e/vllm
func TestRealInsured(t *testing.T) {
	s, cut := insured(t, 1)
	same := func(r request) {
		want := s.fromReference(t, clean(r))
		got, err := send(t.Context(), s.front.addr, r, 0)
		require.NoError(t, err, "%s", r)
		require.Equal(t, 200, got.status, got.raw)
		require.Equal(t, want.text, got.text, "%s: %s", r, got.raw)
	}
	const streams = 100
	for i := range streams {
		tokens := 16 + i%40
		same(request{api: []api{chat, completions}[i%2], prompt: s.prompts.words(10 + 3*i), tokens: tokens, stream: true,
			header: http.Header{"X-Request-Id": {fmt.Sprintf("insured-%d-cut-%d", i, 1+rand.IntN(tokens+2))}}})
	}
	t.Logf("%d streams, %d times cut: all equal", streams, cut.cuts.Load())

	before := s.continued(t)
	written := total(t, s.decode[:1], generated)
	var wg sync.WaitGroup
	asked := make([]request, 32)
	got := make([]answer, len(asked))
	for i := range asked {
		asked[i] = request{api: chat, prompt: s.prompts.words(40), tokens: 200, stream: true}
		wg.Go(func() { got[i], _ = send(t.Context(), s.front.addr, asked[i], 0) })
	}
	killAtWork(t, s.decode[0], written)
	wg.Wait()
	for i, r := range asked {
		require.Equal(t, s.fromReference(t, clean(r)).text, got[i].text, "%s", r)
	}
	require.Positive(t, s.continued(t)-before)
	t.Logf("%v streams continued before an engine was killed, %v of 32 behind that", before, s.continued(t)-before)
}

// generated counts the tokens that an engine has written.
const generated = "vllm:generation_tokens_total"

// killAtWork kills an engine when it has written some tokens more than that and goes on.
func killAtWork(t *testing.T, e engine, written float64) {
	t.Helper()
	require.Eventually(t, func() bool {
		m := e.metrics(t)
		return m.sum(generated, "") >= written+20 && m.sum("vllm:num_requests_running", "") > 0
	}, time.Minute, 10*time.Millisecond, "the engine is at work")
	kill(t, e)
}

// kill kills an engine's process.
func kill(t *testing.T, e engine) {
	t.Helper()
	_, port, _ := strings.Cut(e.addr, ":")
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, file := range all {
		line, _ := os.ReadFile(file)
		var pid int
		if _, err := fmt.Sscanf(file, "/proc/%d/cmdline", &pid); err == nil && pid != os.Getpid() &&
			bytes.Contains(line, []byte("serve\x00")) && bytes.Contains(line, []byte("--port\x00"+port+"\x00")) {
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
			return
		}
	}
	require.Fail(t, "no process listens on "+port)
}
