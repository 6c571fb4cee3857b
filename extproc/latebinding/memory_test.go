package latebinding

import (
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

// agents lets conversations come back again and again, until the state has learned it, and leaves nine of 100,000
// tokens running at an engine with memory for ten. It returns what ends them.
func agents(s *kvstate.State, pool *kvstate.Pool) (end func()) {
	e := pool.Endpoint("e1:1")
	g := kvstate.UnknownSignals()
	g.At, g.ScrapedAt, g.KVTokens = time.Now(), time.Now(), 1_000_000
	s.Observe(e, g)
	var running []kvstate.ReservationID
	prompts := make([][]uint64, 9)
	for turn := range 40 {
		for i := range prompts {
			prompts[i] = append(prompts[i], uint64(i*1000+turn+1))
			var v kvstate.View
			s.View(pool, prompts[i], &v)
			of := s.Arrived(pool, prompts[i], 100_000, 0, &v)
			id := s.Bookings.Reserve(e, kvstate.Booking{For: kvstate.RoleBoth, PromptTokens: 100_000, Of: of})
			s.Routed(pool, e, prompts[i])
			if turn < 39 {
				s.Bookings.Release(id)
			} else {
				running = append(running, id)
			}
		}
		time.Sleep(time.Second)
		pool.SweepMemory(time.Now())
	}
	return func() {
		for _, id := range running {
			s.Bookings.Release(id)
		}
	}
}

// A cold prompt waits for the memory of engines for longer than others wait, and not for ever.
func TestColdPromptsWaitForMemory(t *testing.T) {
	for name, tt := range map[string]struct {
		limits Limits
		leave  time.Duration // when those that run end, and do not come back; 0: never
		waits  time.Duration // at least
		end    string
	}{
		"until there is room": {limits: Limits{MaxTime: time.Minute, Memory: time.Hour}, leave: 2 * time.Minute, waits: 2 * time.Minute, end: bound},
		"as long as it may":   {limits: Limits{MaxTime: time.Minute, Memory: 5 * time.Minute}, waits: 5 * time.Minute, end: expired},
		"Envoy buffers it":    {limits: Limits{MaxTime: 20 * time.Second}, waits: 20 * time.Second, end: expired},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				state := kvstate.New(kvstate.Options{ReservationTTL: time.Hour})
				state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
					{Name: "e1", Addr: "e1:1", Role: kvstate.RoleBoth},
				})
				pool, counted := state.Pool("chat"), ends{}
				q := New(&Options{
					State: state, Guard: guard.New(slog.New(slog.DiscardHandler), func(string) {}), Observer: counted,
					Started: time.Now(), Draining: make(chan struct{}), ShortOfMemory: func() bool { return false },
				}, "chat")
				place := picker.DefaultPolicy()
				place.Late = true
				q.Apply(&plan.Policy{Dialect: kvtransfer.Named("nixl"), Split: true, Place: place}, tt.limits)
				end := agents(state, pool)

				ctx := t.Context()
				r := &plan.Request{Pool: pool, Tokens: 100_000, Began: time.Now()}
				r.Hashes = []uint64{1 << 40}
				require.NoError(t, r.Client.Scan(openai.Chat, []byte(`{"model":"m","messages":[]}`), openai.Limits{}))
				var waiter Waiter
				var v kvstate.View
				state.View(pool, r.Hashes, &v)
				done := make(chan error)
				began := time.Now()
				go func() {
					_, _, err := q.Choose(ctx, &waiter, r, &v, &picker.Request{PromptTokens: 100_000, Blocks: 1, Split: true})
					done <- err
				}()
				time.Sleep(10 * time.Second)
				require.Equal(t, 1, q.Status().Memory)
				if tt.leave > 0 {
					time.Sleep(tt.leave - time.Since(began))
					end()
					go func() {
						for time.Since(began) < time.Hour && ctx.Err() == nil {
							time.Sleep(time.Second)
							pool.SweepMemory(time.Now())
							if q.Status().Waiting == 0 {
								return
							}
						}
					}()
				}
				require.NoError(t, <-done)
				require.GreaterOrEqual(t, time.Since(began), tt.waits)
				require.Less(t, time.Since(began), tt.waits+10*time.Minute)
				require.Equal(t, ends{tt.end: 1}, counted)
				require.Equal(t, BlockedOn{Endpoint: "e1:1", Memory: true}, waiter.BlockedOn)
				waiter.Committed()
				end()
				time.Sleep(2 * time.Second)
				synctest.Wait()
				require.Equal(t, Status{}, q.Status())
			})
		})
	}
}
