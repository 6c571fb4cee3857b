package scrape

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// TestMain also runs the engines of TestHundredEndpoints, as a separate process.
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

// An endpoint that refuses connections is to be checked, and one that answers is not, whatever it answers.
func TestRefusedIsChecked(t *testing.T) {
	silent := httptest.NewServer(http.NotFoundHandler())
	defer silent.Close()
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	at := func(s *httptest.Server) string { return strings.TrimPrefix(s.URL, "http://") }
	state, _ := fleet(at(silent), at(gone))
	checked := make(chan string, 100)
	run(t, New(state, everything, func(e *kvstate.Endpoint) { checked <- e.Addr }, slog.New(slog.DiscardHandler)))
	for range 2 {
		select {
		case addr := <-checked:
			require.Equal(t, at(gone), addr)
		case <-time.After(30 * time.Second):
			t.Fatal("not checked")
		}
	}
}

func run(t *testing.T, s *Scraper) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
}

// An engine whose metrics have another path is found there, the trust in a silent one falls, and none is asked that
// another replica asks.
func TestScraper(t *testing.T) {
	var silent atomic.Bool
	var asked, polled, refused, lost atomic.Int64
	vllm := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if silent.Load() {
			refused.Add(1)
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		assertPath(t, "/metrics", r)
		polled.Add(1)
		fmt.Fprint(w, "vllm:num_requests_running{engine=\"0\"} 3.0\nvllm:num_requests_waiting{engine=\"0\"} 1.0\n")
	}))
	defer vllm.Close()
	trtllm := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			lost.Add(1)
			fmt.Fprint(w, `[{"iter":1}]`)
			return
		}
		assertPath(t, "/prometheus/metrics", r)
		polled.Add(1)
		fmt.Fprint(w, "trtllm_num_requests_running 5\n")
	}))
	defer trtllm.Close()
	others := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer others.Close()
	at := func(s *httptest.Server) string { return strings.TrimPrefix(s.URL, "http://") }

	state, pool := fleet(at(vllm), at(trtllm), at(others))
	e := func(s *httptest.Server) *kvstate.Endpoint { return pool.Endpoint(at(s)) }
	scraper := New(state, func(_ *kvstate.Pool, e *kvstate.Endpoint) bool { return e.Addr != at(others) }, nil, slog.New(slog.DiscardHandler))
	run(t, scraper)
	require.Eventually(t, func() bool { return e(vllm).Signals() != nil && e(trtllm).Signals() != nil }, 30*time.Second, 10*time.Millisecond)
	require.Equal(t, int64(3), e(vllm).Signals().Running)
	require.Equal(t, int64(5), e(trtllm).Signals().Running)
	require.Equal(t, int64(-1), e(trtllm).Signals().Waiting)

	var v kvstate.View
	require.Eventually(t, func() bool { state.View(pool, nil, &v); return v.Endpoints[0].Trust == 1 }, 30*time.Second, time.Millisecond)
	require.Nil(t, v.Endpoints[2].Signals)
	require.Zero(t, v.Endpoints[2].Trust)
	silent.Store(true)
	require.Eventually(t, func() bool { return refused.Load() > 0 }, 30*time.Second, 10*time.Millisecond)
	last := e(vllm).Signals().At
	require.Eventually(t, func() bool { return e(trtllm).Signals().At.Sub(last) > 3*time.Second }, 30*time.Second, 10*time.Millisecond)
	require.Equal(t, last, e(vllm).Signals().At, "it has said nothing since")
	require.Equal(t, int64(3), e(vllm).Signals().Running, "what it said stays, and ages")
	require.Zero(t, asked.Load())
	require.Eventually(t, func() bool {
		ok, failed := scraper.Counts()
		return ok == polled.Load() && failed == refused.Load()+lost.Load() && ok > 2 && failed > 1
	}, 30*time.Second, time.Millisecond, "what came of each time that somebody was asked")
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Each endpoint is asked every 2 s to the tick, in a small fleet and in one that needs several ticks, and never more
// at a time than allowed. Three are asked together, a hundred in groups of a dozen.
func TestGroups(t *testing.T) {
	for _, tt := range []struct {
		endpoints, groups int
		takes             time.Duration // an answer
	}{{3, 1, time.Millisecond}, {100, 8, time.Millisecond}, {1000, 8, 10 * time.Millisecond}} {
		t.Run(strconv.Itoa(tt.endpoints), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var addrs []string
				for i := range tt.endpoints {
					addrs = append(addrs, fmt.Sprintf("10.0.%d.%d:8000", i/256, i%256))
				}
				state, _ := fleet(addrs...)
				s := New(state, everything, nil, slog.New(slog.DiscardHandler))
				began := time.Now()
				var mu sync.Mutex
				asked := map[string][]time.Duration{}
				at := map[time.Duration]int{} // number of requests by tick, in this round of 2 s
				now := 0
				s.client = enginehttp.Over(roundTrip(func(r *http.Request) (*http.Response, error) {
					mu.Lock()
					when := time.Since(began)
					asked[r.URL.Host] = append(asked[r.URL.Host], when)
					at[when.Truncate(tick)%askEvery]++
					now++
					if now > askAtOnce {
						t.Errorf("%d are asked at a time", now)
					}
					mu.Unlock()
					time.Sleep(tt.takes)
					mu.Lock()
					now--
					mu.Unlock()
					return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader("vllm:num_requests_running 1\n"))}, nil
				}), askTimeout)
				run(t, s)
				time.Sleep(10*askEvery - time.Millisecond)
				synctest.Wait()
				mu.Lock()
				defer mu.Unlock()
				require.Len(t, asked, tt.endpoints)
				for addr, times := range asked {
					require.Len(t, times, 10, addr)
					for i, when := range times[1:] {
						require.InDelta(t, askEvery, when-times[i], float64(tick), addr)
					}
				}
				require.Len(t, at, tt.groups)
				for when, n := range at {
					require.InDelta(t, tt.endpoints/tt.groups*10, n, byFours*10, "%v", when)
				}
			})
		})
	}
}

// However many engines hang, the others are asked in time.
func TestHangingEnginesDelayNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var addrs []string
		for i := range 120 {
			addrs = append(addrs, fmt.Sprintf("10.0.%d.1:8000", i))
		}
		hangs := func(addr string) bool { return !strings.HasSuffix(addr, "0.1:8000") } // all but one in ten
		state, pool := fleet(addrs...)
		s := New(state, everything, nil, slog.New(slog.DiscardHandler))
		s.client = enginehttp.Over(roundTrip(func(r *http.Request) (*http.Response, error) {
			if hangs(r.URL.Host) {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader("vllm:num_requests_running 1\n"))}, nil
		}), askTimeout)
		run(t, s)
		time.Sleep(6 * askEvery) // hanging ones are detected
		for range 50 {
			time.Sleep(tick)
			synctest.Wait()
			for _, e := range pool.Endpoints() {
				if !hangs(e.Addr) {
					require.LessOrEqual(t, time.Since(e.Signals().At), askEvery+tick, e.Addr)
				}
			}
		}
	})
}

// A pause without any scrape leaves the groups as they were.
func TestGroupsOutliveAPause(t *testing.T) {
	var addrs []string
	for i := range 96 {
		addrs = append(addrs, fmt.Sprintf("10.0.%d.1:8000", i))
	}
	state, _ := fleet(addrs...)
	s := New(state, everything, nil, slog.New(slog.DiscardHandler))
	var asked atomic.Int64
	s.client = enginehttp.Over(roundTrip(func(*http.Request) (*http.Response, error) {
		asked.Add(1)
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader("vllm:num_requests_running 1\n"))}, nil
	}), askTimeout)
	round := func(now int) int64 {
		asked.Store(0)
		var asking sync.WaitGroup
		s.round(context.Background(), now, &asking)
		asking.Wait()
		return asked.Load()
	}
	for now := range 8 {
		require.Equal(t, int64(12), round(now))
	}
	require.Equal(t, int64(96), round(43))
	for now := 44; now < 60; now++ {
		require.Equal(t, int64(12), round(now), now)
	}
}

// A hundred endpoints with pages like vLLM's, each asked every 2 s, cost under 2 % of a core.
func TestHundredEndpoints(t *testing.T) {
	if os.Getenv("TANDEM_SPEED") == "" || budget.Race {
		t.Skip("measures CPU time: make speed")
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
	run(t, New(state, everything, func(*kvstate.Endpoint) {}, slog.New(slog.DiscardHandler))) // the first may be refused
	require.Eventually(t, func() bool {
		for _, e := range pool.Endpoints() {
			if e.Signals() == nil {
				return false
			}
		}
		return true
	}, 30*time.Second, 10*time.Millisecond)
	began, before := time.Now(), cpu(t)
	time.Sleep(6 * time.Second)
	share := (cpu(t) - before).Seconds() / time.Since(began).Seconds()
	for _, e := range pool.Endpoints() {
		require.Less(t, time.Since(e.Signals().At), 5*time.Second)
	}
	t.Logf("%.2f %% of a core", 100*share)
	require.Less(t, share, .03, "half as much again as the budget, for machines that do something else")
}

func cpu(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// assertPath reports a wrong path; handlers run on goroutines that may not end the test.
func assertPath(t *testing.T, want string, r *http.Request) {
	if r.URL.Path != want {
		t.Errorf("asked for %s, want %s", r.URL.Path, want)
	}
}

// An engine that has nothing to do is asked half as often. It is asked within a second of a reservation and as often as
// any other from then on, and what it gets from elsewhere is known one turn later than usual.
func TestEnginesAtRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var addrs []string
		for i := range 64 {
			addrs = append(addrs, fmt.Sprintf("10.0.%d.1:8000", i))
		}
		state, pool := fleet(addrs...)
		s := New(state, everything, nil, slog.New(slog.DiscardHandler))
		var mu sync.Mutex
		asked, inTick := map[string][]time.Time{}, map[time.Duration]int{}
		running, began := map[string]int{}, time.Now()
		s.client = enginehttp.Over(roundTrip(func(r *http.Request) (*http.Response, error) {
			mu.Lock()
			defer mu.Unlock()
			asked[r.URL.Host] = append(asked[r.URL.Host], time.Now())
			inTick[time.Since(began)%(restTurns*askEvery)]++
			page := fmt.Sprintf("vllm:num_requests_running %d\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"+
				"vllm:prompt_tokens_total 7\n", running[r.URL.Host])
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(page))}, nil
		}), askTimeout)
		run(t, s)
		passes := func(d time.Duration) map[string][]time.Time {
			synctest.Wait()
			mu.Lock()
			clear(asked)
			clear(inTick)
			mu.Unlock()
			time.Sleep(d)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			return asked
		}
		time.Sleep(restAfter*askEvery + askEvery - time.Millisecond)
		for addr, times := range passes(10 * restTurns * askEvery) {
			require.Len(t, times, 10, addr)
		}
		require.Len(t, inTick, 16, "all turns have as many")
		for when, n := range inTick {
			require.Equal(t, 10*byFours, n, when)
		}

		busy := pool.Endpoints()[5]
		busy.SetRemoteLoad(kvstate.RemoteLoad{Requests: 1})
		reserved := time.Now()
		times := passes(20 * time.Second)[busy.Addr]
		require.LessOrEqual(t, times[0].Sub(reserved), checkTicks*tick)
		for i, at := range times[1:] {
			require.LessOrEqual(t, at.Sub(times[i]), askEvery)
		}
		busy.SetRemoteLoad(kvstate.RemoteLoad{})
		time.Sleep(restTurns * askEvery)
		require.Len(t, passes(10 * restTurns * askEvery)[busy.Addr], 10, "it rests again")

		elsewhere := pool.Endpoints()[6]
		mu.Lock()
		running[elsewhere.Addr] = 3
		mu.Unlock()
		time.Sleep((restTurns + 1) * askEvery)
		synctest.Wait()
		require.Equal(t, int64(3), elsewhere.Signals().External)
		require.InDelta(t, 1, elsewhere.Signals().Trust(time.Now()), 0)
	})
}
