package discovery

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// engine is a server whose answers to probes the test sets.
type engine struct {
	health, models, status atomic.Int64 // counts of requests; status of /health, 0: 200
	list                   atomic.Value // string: the answer to /v1/models
	h2c                    atomic.Bool  // it received HTTP/2
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.h2c.Store(r.ProtoMajor == 2)
	switch r.URL.Path {
	case "/health":
		e.health.Add(1)
		if status := int(e.status.Load()); status != 0 {
			w.Header().Set("location", "/v1/models")
			w.WriteHeader(status)
		}
	case "/v1/models":
		e.models.Add(1)
		list, _ := e.list.Load().(string)
		_, _ = io.WriteString(w, list)
	}
}

// start runs the engine behind a scheme, as the only endpoint of a new state.
func (e *engine) start(t *testing.T, scheme string) (*kvstate.State, *kvstate.Endpoint) {
	server := httptest.NewUnstartedServer(e)
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	switch scheme {
	case "https":
		server.StartTLS()
	case "h2c":
		server.Config.Protocols = new(http.Protocols)
		server.Config.Protocols.SetUnencryptedHTTP2(true)
		server.Start()
	default:
		server.Start()
	}
	t.Cleanup(server.Close)
	return stateOf(server.Listener.Addr().String(), scheme)
}

func stateOf(addr, scheme string) (*kvstate.State, *kvstate.Endpoint) {
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "p", Models: []string{"*"}},
		[]kvstate.EndpointSpec{{Name: addr, Addr: addr, Scheme: scheme, Role: kvstate.RoleBoth}})
	return s, s.Pool("p").Endpoints()[0]
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func run(t *testing.T, s *kvstate.State) {
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { NewProber(s, quiet()).Run(ctx); close(done) }()
	t.Cleanup(func() { stop(); <-done })
}

func TestProber(t *testing.T) {
	for _, scheme := range []string{"", "http", "https", "h2c"} {
		t.Run("scheme "+scheme, func(t *testing.T) {
			t.Parallel()
			e := &engine{}
			e.list.Store(`{"object":"list","data":[{"id":"m","x":1},{"id":"lora","parent":"m"},{"id":""}]}`)
			s, endpoint := e.start(t, scheme)
			e.status.Store(503)
			run(t, s)
			require.Eventually(t, func() bool { return len(s.Models(s.Pool("p"))) == 2 }, 30*time.Second, 5*time.Millisecond)
			require.Equal(t, scheme == "h2c", e.h2c.Load())
			require.Zero(t, e.health.Load(), "nobody asks those that are well")

			asked := e.models.Load()
			s.Health.MarkFailed(endpoint)
			require.Eventually(t, func() bool { return e.health.Load() >= 2 }, 30*time.Second, 5*time.Millisecond)
			require.True(t, endpoint.Failed())
			e.status.Store(0)
			require.Eventually(t, func() bool { return !endpoint.Failed() }, 30*time.Second, 5*time.Millisecond)
			require.Equal(t, asked, e.models.Load(), "known: every minute")
		})
	}
}

// An endpoint with requests is excluded if it does not answer in time. SGLang takes a second at least.
func TestBusyEndpointsAreChecked(t *testing.T) {
	for took, excluded := range map[time.Duration]bool{
		1100 * time.Millisecond: false, healthTimeout - time.Millisecond: false, healthTimeout + time.Millisecond: true,
	} {
		synctest.Test(t, func(t *testing.T) {
			var changes []kvstate.HealthCause
			s := kvstate.New(kvstate.Options{HealthChanged: func(_ *kvstate.Endpoint, _ bool, cause kvstate.HealthCause, _ string) {
				changes = append(changes, cause)
			}})
			s.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{{Addr: "engine:1", Role: kvstate.RoleBoth}})
			e := s.Pool("p").Endpoints()[0]
			var asked atomic.Int64
			p := NewProber(s, quiet())
			p.client = enginehttp.Over(roundTrip(func(r *http.Request) (*http.Response, error) {
				if r.URL.Path == "/health" && asked.Add(1) < 10 {
					select {
					case <-time.After(took):
					case <-r.Context().Done():
						return nil, r.Context().Err()
					}
				}
				return &http.Response{StatusCode: 200, Body: http.NoBody}, nil
			}), 0)
			ctx, stop := context.WithCancel(t.Context())
			go p.Run(ctx)
			time.Sleep(time.Minute)
			require.Zero(t, asked.Load(), "it has nothing to do")
			booked := s.Bookings.Reserve(e, kvstate.Booking{For: kvstate.RoleDecode})
			time.Sleep(2 * time.Minute)
			require.Greater(t, asked.Load(), int64(10))
			require.False(t, e.Failed())
			if excluded {
				require.Equal(t, []kvstate.HealthCause{kvstate.CauseCheck, kvstate.CauseCheck}, changes, "out and back")
			} else {
				require.Empty(t, changes)
			}
			s.Bookings.Release(booked)
			stop()
			synctest.Wait()
			require.Empty(t, p.checking)
		})
	}
}

// A requested check begins at once: an endpoint that refuses connections is then excluded. A broken connection is not
// a failure yet.
func TestCheck(t *testing.T) {
	for _, test := range []struct {
		name     string
		errs     []error // of the first requests
		excluded time.Duration
	}{
		{"refused", []error{syscall.ECONNREFUSED, syscall.ECONNREFUSED, syscall.ECONNREFUSED}, 0},
		{"broken, then good", []error{io.ErrUnexpectedEOF}, -1},
		{"broken, then refused", []error{syscall.ECONNRESET, syscall.ECONNREFUSED, syscall.ECONNREFUSED}, probeFailedEvery},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				changes := make(chan time.Time, 2)
				s := kvstate.New(kvstate.Options{HealthChanged: func(*kvstate.Endpoint, bool, kvstate.HealthCause, string) { changes <- time.Now() }})
				s.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{{Addr: "engine:1", Role: kvstate.RoleBoth}})
				p := NewProber(s, quiet())
				errs := make(chan error, len(test.errs))
				p.client = enginehttp.Over(roundTrip(func(*http.Request) (*http.Response, error) {
					select {
					case err := <-errs:
						return nil, err
					default:
						return &http.Response{StatusCode: 200, Body: http.NoBody}, nil
					}
				}), 0)
				ctx, stop := context.WithCancel(t.Context())
				go p.Run(ctx)
				time.Sleep(time.Second) // the models are known
				for _, err := range test.errs {
					errs <- err
				}
				begun := time.Now()
				for range 3 {
					p.Check(s.Pool("p").Endpoints()[0])
				}
				time.Sleep(10 * time.Second)
				if test.excluded < 0 {
					require.Empty(t, changes)
				} else {
					require.Equal(t, test.excluded, (<-changes).Sub(begun))
					require.Len(t, changes, 1, "and it is back")
				}
				require.False(t, s.Pool("p").Endpoints()[0].Failed())
				stop()
				synctest.Wait()
			})
		})
	}
}

func TestFailedEndpointsComeBack(t *testing.T) {
	for status, back := range map[int64]bool{200: true, 204: true, 404: true, 401: true, 307: true, 500: false, 503: false} {
		e := &engine{}
		e.status.Store(status)
		s, endpoint := e.start(t, "")
		s.Health.MarkFailed(endpoint)
		p := NewProber(s, quiet())
		p.checkHealth(t.Context(), endpoint)
		require.Equal(t, back, !endpoint.Failed(), "status %d", status)
		require.Zero(t, e.models.Load(), "redirects are not followed")
	}
}

// What refused connections while it was away is another process when it is back: it holds nothing that was routed to the
// one before. One that only failed is the same.
func TestRestartedEnginesHoldNothing(t *testing.T) {
	for name, c := range map[string]struct {
		refuses bool
		holds   int
	}{"it was gone": {true, 0}, "it answered 503": {false, 2}} {
		t.Run(name, func(t *testing.T) {
			s, e := stateOf("engine:1", "")
			pool := s.Pool("p")
			p, away := NewProber(s, quiet()), true
			p.client = enginehttp.Over(roundTrip(func(*http.Request) (*http.Response, error) {
				switch {
				case away && c.refuses:
					return nil, syscall.ECONNREFUSED
				case away:
					return &http.Response{StatusCode: 503, Body: http.NoBody}, nil
				}
				return &http.Response{StatusCode: 200, Body: http.NoBody}, nil
			}), time.Second)
			blocks := []uint64{1, 2}
			s.Routed(pool, e, blocks)
			holds := func() int {
				var v kvstate.View
				s.View(pool, blocks, &v)
				return v.Endpoints[0].Hit
			}
			s.Health.MarkFailed(e)
			p.checkHealth(t.Context(), e)
			require.True(t, e.Failed())
			require.Equal(t, 2, holds())
			away = false
			p.checkHealth(t.Context(), e)
			require.False(t, e.Failed())
			require.Equal(t, c.holds, holds())
		})
	}
}

func TestModelsThatMakeNoSense(t *testing.T) {
	for _, list := range []string{"", "{", "[]", `{"data":7}`, `{"data":[{"id":7}]}`, `{"data":[{"id":"` + strings.Repeat("x", maxModels) + `"}]}`} {
		e := &engine{}
		e.list.Store(list)
		s, endpoint := e.start(t, "")
		s.SetModels(endpoint, []kvstate.Model{{ID: "known"}})
		NewProber(s, quiet()).askModels(t.Context(), endpoint)
		require.Equal(t, []string{"known"}, s.ModelNames(s.Pool("p")))
		require.False(t, endpoint.Failed())
	}
}

// roundTrip is an engine without a network, so that time can be synthetic.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// The intervals of checks, by synthetic time: an endpoint that hangs has one check at a time and delays no other.
func TestProbeIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := kvstate.New(kvstate.Options{})
		s.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{
			{Addr: "hangs:1", Role: kvstate.RoleBoth}, {Addr: "well:1", Role: kvstate.RoleBoth}, {Addr: "mute:1", Role: kvstate.RoleBoth},
		})
		asked := make(map[string][]time.Duration)
		begun, lock := time.Now(), make(chan struct{}, 1)
		p := NewProber(s, quiet())
		p.client = enginehttp.Over(roundTrip(func(r *http.Request) (*http.Response, error) {
			lock <- struct{}{}
			key := r.URL.Host + r.URL.Path
			asked[key] = append(asked[key], time.Since(begun))
			<-lock
			body := `{"data":[{"id":"m"}]}`
			switch r.URL.Hostname() {
			case "hangs":
				<-r.Context().Done()
				return nil, r.Context().Err()
			case "mute":
				body = ""
			}
			return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
		}), 0)
		s.Health.MarkFailed(s.Pool("p").Endpoints()[0])
		ctx, stop := context.WithCancel(t.Context())
		go p.Run(ctx)
		<-time.After(100 * time.Second)
		stop()
		synctest.Wait()

		hung := asked["hangs:1/health"]
		require.Less(t, hung[0], time.Second)
		for i := range hung[1:] {
			require.InDelta(t, healthTimeout+probeFailedEvery/2, hung[i+1]-hung[i], float64(probeFailedEvery))
		}
		require.Empty(t, asked["well:1/health"])
		require.Len(t, asked["well:1/v1/models"], 2, "known: every minute")
		require.InDelta(t, 10, len(asked["mute:1/v1/models"]), 1, "not known: every ten seconds")
		require.Empty(t, asked["hangs:1/v1/models"])
		require.Empty(t, p.asking)
	})
}

func TestProberForgets(t *testing.T) {
	s, _ := stateOf("127.0.0.1:1", "")
	p := NewProber(s, quiet())
	p.asked[s.Pool("p").Endpoints()[0]] = time.Now().Add(time.Hour)
	s.RetainPools(nil)
	p.round(t.Context(), nil)
	require.Empty(t, p.asked)
}

// Engines are asked for their models at once when a request needs it: each once at a time, and not again soon.
func TestAskForModels(t *testing.T) {
	e := &engine{}
	e.list.Store(`{"data":[{"id":"m"}]}`)
	s, endpoint := e.start(t, "")
	p := NewProber(s, quiet())
	p.Ask(t.Context(), s.Pool("p").Endpoints(), time.Minute)
	require.Equal(t, []string{"m"}, endpoint.Models())
	e.list.Store(`{"data":[{"id":"m"},{"id":"sql","parent":"m"}]}`)
	p.Ask(t.Context(), s.Pool("p").Endpoints(), time.Minute)
	require.EqualValues(t, 1, e.models.Load(), "it was asked a moment ago")
	var together sync.WaitGroup
	for range 20 {
		together.Go(func() { p.Ask(t.Context(), s.Pool("p").Endpoints(), 0) })
	}
	together.Wait()
	require.Equal(t, []string{"m", "sql"}, endpoint.Models())
	asked := e.models.Load()
	s.Health.MarkFailed(endpoint)
	p.Ask(t.Context(), s.Pool("p").Endpoints(), 0)
	require.Equal(t, asked, e.models.Load(), "one that has failed is not asked")
}
