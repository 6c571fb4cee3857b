package scrape

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// TestMain is also the engines of TestHundredEndpoints, as a process of their own.
func TestMain(m *testing.M) {
	if addr := os.Getenv("SCRAPE_TEST_SERVE"); addr != "" {
		text, _ := os.ReadFile("testdata/vllm-0.32.0.txt")
		_ = http.ListenAndServe(addr, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(text) }))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func everything(*kvstate.Pool, *kvstate.Endpoint) bool { return true }

func fleet(addrs ...string) (*kvstate.State, *kvstate.Pool) {
	s := kvstate.New(kvstate.Options{})
	var eps []kvstate.EndpointSpec
	for _, a := range addrs {
		eps = append(eps, kvstate.EndpointSpec{Name: a, Addr: a, Role: kvstate.RoleBoth})
	}
	s.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, eps)
	return s, s.Pool("chat")
}

func run(t *testing.T, s *Scraper) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
}

// An engine whose metrics lie elsewhere is found there, one that falls silent is trusted less and less, and none is asked that
// another replica asks.
func TestScraper(t *testing.T) {
	var silent atomic.Bool
	var asked atomic.Int64
	vllm := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if silent.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		assertPath(t, "/metrics", r)
		fmt.Fprint(w, "vllm:num_requests_running{engine=\"0\"} 3.0\nvllm:num_requests_waiting{engine=\"0\"} 1.0\n")
	}))
	defer vllm.Close()
	trtllm := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			fmt.Fprint(w, `[{"iter":1}]`)
			return
		}
		assertPath(t, "/prometheus/metrics", r)
		fmt.Fprint(w, "trtllm_num_requests_running 5\n")
	}))
	defer trtllm.Close()
	others := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer others.Close()
	at := func(s *httptest.Server) string { return strings.TrimPrefix(s.URL, "http://") }

	state, pool := fleet(at(vllm), at(trtllm), at(others))
	e := func(s *httptest.Server) *kvstate.Endpoint { return pool.Endpoint(at(s)) }
	run(t, New(state, func(_ *kvstate.Pool, e *kvstate.Endpoint) bool { return e.Addr != at(others) }, slog.New(slog.DiscardHandler)))
	require.Eventually(t, func() bool { return e(vllm).Signals() != nil && e(trtllm).Signals() != nil }, 10*time.Second, 10*time.Millisecond)
	require.Equal(t, int64(3), e(vllm).Signals().Running)
	require.Equal(t, int64(5), e(trtllm).Signals().Running)
	require.Equal(t, int64(-1), e(trtllm).Signals().Waiting)

	var v kvstate.View
	state.View(pool, nil, &v)
	require.InDelta(t, 1, v.Endpoints[0].Trust, 0)
	require.Nil(t, v.Endpoints[2].Signals)
	require.Zero(t, v.Endpoints[2].Trust)
	silent.Store(true)
	last := e(vllm).Signals().At
	require.Eventually(t, func() bool { return e(trtllm).Signals().At.Sub(last) > 3*time.Second }, 20*time.Second, 10*time.Millisecond)
	require.Less(t, e(vllm).Signals().At.Sub(last), 2*time.Second, "it has said nothing since")
	require.Equal(t, int64(3), e(vllm).Signals().Running, "what it said stays, and ages")
	require.Zero(t, asked.Load())
}

// A hundred endpoints with pages like vLLM's, each asked every 2 s, cost under 2 % of a core.
func TestHundredEndpoints(t *testing.T) {
	if testing.Short() || underRace {
		t.Skip("measures CPU time, for seconds")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	require.NoError(t, l.Close())
	engines := exec.Command(os.Args[0])
	engines.Env = append(os.Environ(), "SCRAPE_TEST_SERVE=:"+port)
	engines.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, engines.Start())
	defer func() { _ = engines.Process.Kill(); _ = engines.Wait() }()

	var addrs []string
	for i := range 100 {
		addrs = append(addrs, fmt.Sprintf("127.0.1.%d:%s", i+1, port))
	}
	state, pool := fleet(addrs...)
	run(t, New(state, everything, slog.New(slog.DiscardHandler)))
	require.Eventually(t, func() bool {
		for _, e := range pool.Endpoints() {
			if e.Signals() == nil {
				return false
			}
		}
		return true
	}, 20*time.Second, 10*time.Millisecond)
	began, before := time.Now(), cpu(t)
	time.Sleep(6 * time.Second)
	share := (cpu(t) - before).Seconds() / time.Since(began).Seconds()
	for _, e := range pool.Endpoints() {
		require.Less(t, time.Since(e.Signals().At), 5*time.Second)
	}
	t.Logf("%.2f %% of a core", 100*share)
	require.Less(t, share, .04, "twice the budget, for machines that do something else")
}

func cpu(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// assertPath says what a handler was asked for wrongly; handlers run on goroutines that may not end the test.
func assertPath(t *testing.T, want string, r *http.Request) {
	if r.URL.Path != want {
		t.Errorf("asked for %s, want %s", r.URL.Path, want)
	}
}
