package latebinding

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/picker"
)

// ends counts how waits ended.
type ends map[string]int

func (ends) QueueChanged(string, float64)               {}
func (e ends) WaitEnded(_, end string, _ time.Duration) { counting.Lock(); e[end]++; counting.Unlock() }

var counting sync.Mutex

// A request waits while the only prefill endpoint is busy, without a stream; every way to end the wait is seen.
func TestChoose(t *testing.T) {
	for name, tt := range map[string]struct {
		limits Limits
		do     func(free, leave, drain func())
		after  time.Duration
		end    string
		err    error
	}{
		"its turn":         {do: func(free, _, _ func()) { free() }, end: bound},
		"its time is over": {limits: Limits{MaxTime: time.Second}, do: func(_, _, _ func()) { time.Sleep(time.Second) }, after: time.Second, end: expired},
		"the client left":  {do: func(_, leave, _ func()) { leave() }, end: gone, err: io.EOF},
		"the server ends":  {do: func(_, _, drain func()) { drain() }, end: early},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				state := kvstate.New(kvstate.Options{})
				state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
					{Name: "p1", Addr: "p1:1", Role: kvstate.RolePrefill}, {Name: "d1", Addr: "d1:1", Role: kvstate.RoleDecode},
				})
				pool, counted, draining := state.Pool("chat"), ends{}, make(chan struct{})
				q := New(&Options{
					State: state, Guard: guard.New(slog.New(slog.DiscardHandler), func(string) {}), Observer: counted,
					Started: time.Now(), Draining: draining, ShortOfMemory: func() bool { return false },
				}, "chat")
				q.Apply(&plan.Policy{Dialect: kvtransfer.Named("nixl"), Split: true, Place: picker.Policy{Late: true}}, tt.limits)
				busy := state.Bookings.Reserve(pool.Endpoint("p1:1"), kvstate.Booking{
					For: kvstate.RolePrefill, PromptTokens: 1000, Uncached: 1000, Work: time.Minute,
				})
				ctx, leave := context.WithCancel(t.Context())
				defer leave()

				r := &plan.Request{Pool: pool, Tokens: 1000, Began: time.Now()}
				require.NoError(t, r.Client.Scan(openai.Chat, []byte(`{"model":"m","messages":[]}`), openai.Limits{}))
				var waiter Waiter
				var v kvstate.View
				state.View(pool, nil, &v)
				_, _, err := q.Choose(AtOnce(ctx), &waiter, r, &v, &picker.Request{PromptTokens: 1000, Split: true})
				require.ErrorIs(t, err, ErrWaits)
				require.Equal(t, Status{}, q.Status(), "a caller that cannot wait leaves nothing behind")
				done := make(chan struct{})
				var c picker.Choice
				go func() {
					c, _, err = q.Choose(ctx, &waiter, r, &v, &picker.Request{PromptTokens: 1000, Split: true})
					close(done)
				}()
				synctest.Wait()
				require.Equal(t, Status{Waiting: 1, Running: true}, q.Status())
				tt.do(func() { state.Bookings.Release(busy) }, leave, func() { close(draining) })
				<-done
				require.Equal(t, ends{tt.end: 1}, counted)
				require.ErrorIs(t, err, tt.err)
				require.Equal(t, "p1:1", waiter.BlockedOn.Endpoint)
				require.GreaterOrEqual(t, waiter.Took, tt.after)
				if tt.err == nil {
					require.Equal(t, 0, c.Prefill)
					require.NotEmpty(t, v.Endpoints)
					require.Equal(t, 1, q.Status().Committed, "it counts before it is reserved")
				}
				waiter.Committed()
				time.Sleep(2 * Tick)
				synctest.Wait()
				require.Equal(t, Status{}, q.Status())
			})
		})
	}
}

// A request may choose again instead of taking its choice, as after a failed KV load. Its first choice counts no more.
func TestChooseAgain(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Name: "p1", Addr: "p1:1", Role: kvstate.RolePrefill}, {Name: "d1", Addr: "d1:1", Role: kvstate.RoleDecode},
	})
	pool := state.Pool("chat")
	q := New(&Options{
		State: state, Guard: guard.New(slog.New(slog.DiscardHandler), func(string) {}), Observer: ends{},
		Started: time.Now(), Draining: make(chan struct{}), ShortOfMemory: func() bool { return false },
	}, "chat")
	q.Apply(&plan.Policy{Dialect: kvtransfer.Named("nixl"), Split: true, Place: picker.Policy{Late: true}}, Limits{})
	r := &plan.Request{Pool: pool, Tokens: 1000, Began: time.Now()}
	require.NoError(t, r.Client.Scan(openai.Chat, []byte(`{"model":"m","messages":[]}`), openai.Limits{}))
	var waiter Waiter
	var v kvstate.View
	state.View(pool, nil, &v)
	for range 3 {
		c, _, err := q.Choose(t.Context(), &waiter, r, &v, &picker.Request{PromptTokens: 1000, Split: true})
		require.NoError(t, err)
		require.Equal(t, 0, c.Prefill)
		require.Equal(t, 1, q.Status().Committed)
	}
	waiter.Committed()
	require.Zero(t, q.Status().Committed)
}

// oneDecode returns a pool of one decode endpoint whose requests wait for 10 s at most, and a request there.
func oneDecode(t *testing.T, a plan.Attempt) (*kvstate.State, *Queue, *plan.Request) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Name: "d1", Addr: "d1:1", Role: kvstate.RoleDecode},
	})
	q := New(&Options{
		State: state, Guard: guard.New(slog.New(slog.DiscardHandler), func(string) {}), Observer: ends{},
		Started: time.Now(), Draining: make(chan struct{}), ShortOfMemory: func() bool { return false },
	}, "chat")
	q.Apply(&plan.Policy{Dialect: kvtransfer.Named("nixl"), Place: picker.Policy{Late: true}}, Limits{MaxTime: 10 * time.Second})
	r := &plan.Request{Pool: state.Pool("chat"), Tokens: 10, Began: time.Now()}
	r.Attempt = a
	require.NoError(t, r.Client.Scan(openai.Chat, []byte(`{"model":"m","messages":[]}`), openai.Limits{}))
	return state, q, r
}

// A request that a full endpoint refused is placed again after a rest that grows; a new one, and one that failed
// otherwise, at once.
func TestARefusedRequestRests(t *testing.T) {
	for name, tt := range map[string]struct {
		redirects int
		full      bool
		want      time.Duration
	}{
		"new":     {0, true, 0},
		"failed":  {2, false, 0},
		"refused": {1, true, 250 * time.Millisecond},
		"again":   {3, true, time.Second},
		"often":   {4, true, 8 * time.Second},
		"lastly":  {7, true, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				state, q, r := oneDecode(t, plan.Attempt{Redirects: tt.redirects, Started: time.Now()})
				var waiter Waiter
				var v kvstate.View
				state.View(r.Pool, nil, &v)
				if tt.full {
					state.Health.MarkFull(r.Pool.Endpoint("d1:1"), 503, 0)
					time.Sleep(time.Second)
				}
				_, waited, err := q.Choose(t.Context(), &waiter, r, &v, &picker.Request{PromptTokens: 10})
				require.NoError(t, err)
				require.Equal(t, tt.want, waited)
				waiter.Committed()
			})
		})
	}
}

// Whatever happens to the endpoints for which a request waits, it goes where it can be served, or gets its error.
func TestNobodyWaitsForEndpointsThatAreOut(t *testing.T) {
	const p, d, both = kvstate.RolePrefill, kvstate.RoleDecode, kvstate.RoleBoth
	all := func(mark func(*kvstate.State, *kvstate.Endpoint)) func(*kvstate.State, *kvstate.Pool) {
		return func(s *kvstate.State, pool *kvstate.Pool) {
			for _, e := range pool.Endpoints() {
				if e.Role != d {
					mark(s, e)
				}
			}
		}
	}
	for name, out := range map[string]func(*kvstate.State, *kvstate.Pool){
		"failed": all(func(s *kvstate.State, e *kvstate.Endpoint) { s.Health.MarkFailed(e) }),
		"hung":   all(func(s *kvstate.State, e *kvstate.Endpoint) { s.Health.Mark(e, true, kvstate.CauseTimeLimit, "") }),
		"hung, as another replica says": all(func(s *kvstate.State, e *kvstate.Endpoint) {
			s.Health.ApplyFailed(e, true, false)
			s.Health.ApplyFailed(e, true, true)
		}),
		"gone": func(s *kvstate.State, pool *kvstate.Pool) {
			s.SetPool(pool.Spec, []kvstate.EndpointSpec{{Name: "new", Addr: "new:1", Role: d}})
		},
	} {
		for fleet, roles := range map[string][]kvstate.Role{"1+1": {p, d}, "1+2": {p, d, d}, "3 both": {both, both, both}} {
			t.Run(name+" "+fleet, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					state := kvstate.New(kvstate.Options{})
					var specs []kvstate.EndpointSpec
					for i, role := range roles {
						name := string(rune('a' + i))
						specs = append(specs, kvstate.EndpointSpec{Name: name, Addr: name + ":1", Role: role})
					}
					state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, specs)
					pool, counted := state.Pool("chat"), ends{}
					q := New(&Options{
						State: state, Guard: guard.New(slog.New(slog.DiscardHandler), func(string) {}), Observer: counted,
						Started: time.Now(), Draining: make(chan struct{}), ShortOfMemory: func() bool { return false },
					}, "chat")
					late := picker.Policy{Late: true}
					q.Apply(&plan.Policy{Dialect: kvtransfer.Named("nixl"), Split: true, Place: late}, Limits{})
					for _, e := range pool.Endpoints() {
						if e.Role != d {
							state.Bookings.Reserve(e, kvstate.Booking{For: p, PromptTokens: 9000, Uncached: 9000, Work: time.Hour})
						}
					}
					waits := func() (*Waiter, chan error) {
						r := &plan.Request{Pool: pool, Tokens: 1000, Began: time.Now()}
						require.NoError(t, r.Client.Scan(openai.Chat, []byte(`{"model":"m","messages":[]}`), openai.Limits{}))
						waiter, v, done := new(Waiter), new(kvstate.View), make(chan error, 1)
						state.View(pool, nil, v)
						go func() {
							_, _, err := q.Choose(t.Context(), waiter, r, v, &picker.Request{PromptTokens: 1000, Split: true})
							done <- err
						}()
						synctest.Wait()
						return waiter, done
					}
					one, first := waits()
					other, second := waits()
					require.Equal(t, 2, q.Status().Waiting)
					out(state, pool)
					began := time.Now()
					require.NoError(t, <-first)
					require.NoError(t, <-second)
					require.LessOrEqual(t, time.Since(began), 2*Tick)
					require.Equal(t, ends{bound: 2}, counted)
					one.Committed()
					other.Committed()
					time.Sleep(2 * Tick)
					synctest.Wait()
					require.Equal(t, Status{}, q.Status())
				})
			})
		}
	}
}

// A request that endpoints refuse again and again waits no longer than others, its rests included.
func TestARefusedRequestWaitsNoLonger(t *testing.T) {
	for spent, want := range map[time.Duration]time.Duration{
		0: 10 * time.Second, 7 * time.Second: 3 * time.Second, 9500 * time.Millisecond: 500 * time.Millisecond, time.Minute: 0,
	} {
		synctest.Test(t, func(t *testing.T) {
			state, q, r := oneDecode(t, plan.Attempt{Redirects: 4, Started: time.Now().Add(-spent)})
			state.Health.MarkFull(r.Pool.Endpoint("d1:1"), 503, 30*time.Second)
			var waiter Waiter
			var v kvstate.View
			state.View(r.Pool, nil, &v)
			_, waited, err := q.Choose(t.Context(), &waiter, r, &v, &picker.Request{PromptTokens: 10})
			require.ErrorIs(t, err, picker.ErrFull)
			require.Equal(t, want, waited)
			waiter.Committed()
			time.Sleep(2 * Tick)
			synctest.Wait()
		})
	}
}
