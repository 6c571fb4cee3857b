package latebinding

import (
	"context"
	"io"
	"log/slog"
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
func (e ends) WaitEnded(_, end string, _ time.Duration) { e[end]++ }

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
				busy := state.Reserve(pool.Endpoint("p1:1"), kvstate.Booking{
					For: kvstate.RolePrefill, PromptTokens: 1000, Uncached: 1000, Work: time.Minute,
				})
				ctx, leave := context.WithCancel(t.Context())
				defer leave()

				r := &plan.Request{Pool: pool, Tokens: 1000, Began: time.Now()}
				require.NoError(t, r.Client.Scan(openai.Chat, []byte(`{"model":"m","messages":[]}`), openai.Limits{}))
				var waiter Waiter
				var v kvstate.View
				state.View(pool, nil, &v)
				done := make(chan struct{})
				var c picker.Choice
				var err error
				go func() {
					c, _, err = q.Choose(ctx, &waiter, r, &v, &picker.Request{PromptTokens: 1000, Split: true})
					close(done)
				}()
				synctest.Wait()
				require.Equal(t, Status{Waiting: 1, Running: true}, q.Status())
				tt.do(func() { state.Release(busy) }, leave, func() { close(draining) })
				<-done
				require.Equal(t, ends{tt.end: 1}, counted)
				require.ErrorIs(t, err, tt.err)
				require.Equal(t, "p1:1", waiter.BlockedOn.Endpoint)
				require.GreaterOrEqual(t, waiter.Took, tt.after)
				if tt.err == nil {
					require.Equal(t, 0, c.Prefill)
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

// A request that an endpoint refused is placed again after a rest that grows; a new one at once.
func TestARefusedRequestRests(t *testing.T) {
	for name, tt := range map[string]struct {
		redirects int
		want      time.Duration
	}{
		"new":     {0, 0},
		"refused": {1, 250 * time.Millisecond},
		"again":   {3, time.Second},
		"often":   {7, 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				state := kvstate.New(kvstate.Options{})
				state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
					{Name: "d1", Addr: "d1:1", Role: kvstate.RoleDecode},
				})
				q := New(&Options{
					State: state, Guard: guard.New(slog.New(slog.DiscardHandler), func(string) {}), Observer: ends{},
					Started: time.Now(), Draining: make(chan struct{}), ShortOfMemory: func() bool { return false },
				}, "chat")
				q.Apply(&plan.Policy{Dialect: kvtransfer.Named("nixl"), Place: picker.Policy{Late: true}},
					Limits{MaxTime: 10 * time.Second})
				r := &plan.Request{Pool: state.Pool("chat"), Tokens: 10, Began: time.Now()}
				r.Attempt = plan.Attempt{Redirects: tt.redirects, Started: time.Now()}
				require.NoError(t, r.Client.Scan(openai.Chat, []byte(`{"model":"m","messages":[]}`), openai.Limits{}))
				var waiter Waiter
				var v kvstate.View
				state.View(r.Pool, nil, &v)
				_, waited, err := q.Choose(t.Context(), &waiter, r, &v, &picker.Request{PromptTokens: 10})
				require.NoError(t, err)
				require.Equal(t, tt.want, waited)
				waiter.Committed()
			})
		})
	}
}
