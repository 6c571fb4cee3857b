package extproc

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/structpb"

	"tandem/extproc/core"
	"tandem/extproc/envoywire"
	"tandem/extproc/latebinding"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// late is the policy of a pool whose requests wait.
func late(w latebinding.Limits) pass.Policy {
	p := splitting()
	p.Place.Late, p.Waiting = true, w
	return p
}

// crowd are requests of one test that run at the same time.
type crowd struct {
	*stand
	group sync.WaitGroup
	mu    sync.Mutex
	order []string // in which they were bound
	ended map[string]*verdict
	after map[string]time.Duration
	leave map[string]context.CancelFunc
}

func newCrowd(s *stand) *crowd {
	return &crowd{stand: s, ended: map[string]*verdict{}, after: map[string]time.Duration{}, leave: map[string]context.CancelFunc{}}
}

// send begins a request with a prompt of about so many tokens, and returns when it is bound or waits.
func (c *crowd) send(id string, tokens int, headers ...string) {
	q := c.newRequest("/v1/chat/completions", id, strings.Replace(chatBody, "hi", id+filler(4*tokens), 1))
	for i := 0; i < len(headers); i += 2 {
		q.headers[headers[i]] = headers[i+1]
	}
	began := time.Now()
	c.group.Go(func() {
		v := q.pass()
		c.mu.Lock()
		defer c.mu.Unlock()
		if v.immediate == nil {
			c.order = append(c.order, id)
		}
		c.ended[id], c.after[id] = v, time.Since(began)
	})
	synctest.Wait()
}

// sendAndLeave begins a request whose client leaves when the function returned is called.
func (c *crowd) sendAndLeave(id string, tokens int) (leave func()) {
	q := c.newRequest("/v1/chat/completions", id, strings.Replace(chatBody, "hi", id+filler(4*tokens), 1))
	ctx, cancel := context.WithCancel(c.t.Context())
	stream, err := c.ext.Process(ctx)
	require.NoError(c.t, err)
	headers, body := q.messages()
	require.NoError(c.t, stream.Send(headers))
	for _, m := range body {
		require.NoError(c.t, stream.Send(m))
	}
	synctest.Wait()
	return func() { cancel(); synctest.Wait() }
}

// done ends both hops of a request that was bound, a moment later.
func (c *crowd) done(id string) {
	time.Sleep(2 * latebinding.Pause)
	c.server.passes.Release(c.server.passes.Held(id, 0))
	synctest.Wait()
}

func (c *crowd) waiting() int {
	return int(c.count("tandem_queue_requests", "chat"))
}

// timed is what a histogram shows, by its labels' values: how many, and how long in all.
func (s *stand) timed(name string) map[string]string {
	s.t.Helper()
	families, err := s.registry.Gather()
	require.NoError(s.t, err)
	out := map[string]string{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			if n := m.GetHistogram().GetSampleCount(); f.GetName() == name && n > 0 {
				out[strings.Join(labels, " ")] = fmt.Sprintf("%d, %v", n, kvstate.Seconds(m.GetHistogram().GetSampleSum()).Round(time.Millisecond))
			}
		}
	}
	return out
}

// busy books work on an endpoint that ends with the function returned.
func (s *stand) busy(name string, work time.Duration) (end func()) {
	e := s.state.Pool("chat").Endpoint(addressOf(name))
	id := s.state.Bookings.Reserve(e, kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 1000, Uncached: 1000, Work: work})
	return func() { s.state.Bookings.Release(id); synctest.Wait() }
}

// A request waits while every prefill endpoint has a step of work ahead, with its body counted and nothing booked. When one
// is free, the shortest is bound, and counts before it has booked.
func TestRequestsAreBoundLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.pool("chat", late(latebinding.Limits{}), "p1", "d1")
		c := newCrowd(s)
		c.send("first", 16_000)
		require.Equal(t, []string{"first"}, c.order, "nothing is ahead of it")
		require.Zero(t, c.after["first"])
		booked := s.state.Bookings.Reservations()
		c.send("long", 16_000)
		c.send("short", 2000)
		c.send("middling", 9000)
		require.Equal(t, []string{"first"}, c.order)
		require.Equal(t, 3, c.waiting())
		require.Equal(t, booked, s.state.Bookings.Reservations())
		require.InDelta(t, 4*27_000, s.server.Memory.Load(), 1000)

		c.done("first")
		require.ElementsMatch(t, []string{"first", "short", "middling"}, c.order, "less than half a second of work, and one more on top")
		require.Less(t, c.after["short"], latebinding.Tick, "woken by the end of the first, and not by the tick")
		c.done("short")
		c.done("middling")
		require.Len(t, c.order, 4)
		c.done("long")
		c.group.Wait()
		time.Sleep(2 * latebinding.Tick)
		require.Zero(t, c.waiting())
		require.Zero(t, s.server.Memory.Load())
		require.Zero(t, s.state.Bookings.Reservations())
	})
}

// A request that waited is bound as any other: pass 2 follows, and both hops end.
func TestARequestThatWaitedGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.pool("chat", late(latebinding.Limits{}), "p1", "d1")
		end := s.busy("p1", time.Minute)
		q := s.newRequest("/v1/chat/completions", "r1", chatBody)
		time.AfterFunc(3*time.Second, end)
		began := time.Now()
		require.Zero(t, q.pass().status())
		require.Equal(t, 3*time.Second, time.Since(began).Truncate(latebinding.Tick))
		require.Equal(t, addressOf("p1"), q.headers[names.HeaderEndpoint])
		q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(3))})
		q.follow()
		require.Zero(t, q.pass().status())
		require.Equal(t, addressOf("d1"), q.headers[names.HeaderEndpoint])
		s.log(q.entry(200, "via_upstream"))
		require.Zero(t, s.state.Bookings.Reservations())
		trace := s.core.Recent(1)[0]
		require.Equal(t, 3*time.Second, trace.Waited.Truncate(latebinding.Tick))
		waited := trace.Waited.Round(time.Millisecond).String()
		require.Equal(t, map[string]string{"bound chat": "1, " + waited}, s.timed("tandem_queue_wait_seconds"))
		require.Equal(t, map[string]string{"main": "2, " + waited, "prefill-leg": "1, 0s"}, s.timed("tandem_ext_proc_duration_seconds"), "it was open while it waited")
		for work, took := range s.timed("tandem_ext_proc_phase_seconds") {
			require.Regexp(t, ", 0s$", took, "%s: to wait is no work", work)
		}
		time.Sleep(2 * latebinding.Tick)
	})
}

// Nobody waits for ever, nor for a client that has left, nor where there is no room for it, nor when the server ends.
func TestWaitingEnds(t *testing.T) {
	ends := map[string]map[string]string{ // what tandem_queue_wait_seconds shows then
		"when its time is over":     {"expired chat": "1, 5s"},
		"when the client leaves":    {"client_gone chat": "1, 0s"},
		"when there is no room":     {"expired chat": "2, 10s", "pushed chat": "1, 0s"},
		"when there is no memory":   {"pushed chat": "1, 20ms"},
		"when the server ends":      {"pushed chat": "1, 0s"},
		"when the pool is gone":     {"expired chat": "1, 5s"},
		"when binding is immediate": {"expired chat": "1, 5s"},
	}
	for name, tt := range map[string]func(t *testing.T, c *crowd){
		"when its time is over": func(t *testing.T, c *crowd) {
			c.send("a", 1000)
			time.Sleep(5 * time.Second)
			synctest.Wait()
			require.Equal(t, 5*time.Second, c.after["a"], "bound to an endpoint that is busy")
		},
		"when the client leaves": func(t *testing.T, c *crowd) {
			leave := c.sendAndLeave("a", 1000)
			require.Equal(t, 1, c.waiting())
			leave()
			require.Empty(t, c.order)
		},
		"when there is no room": func(t *testing.T, c *crowd) {
			c.send("a", 3000)
			c.send("b", 2000)
			require.Equal(t, 2, c.waiting())
			c.send("c", 1000)
			require.Equal(t, []string{"b"}, c.order, "the first in the queue is bound, not who came last")
			c.done("b")
			time.Sleep(5 * time.Second)
		},
		"when there is no memory": func(t *testing.T, c *crowd) {
			c.send("a", 1000)
			require.Equal(t, 1, c.waiting())
			c.server.Memory.Add(900_000)
			time.Sleep(latebinding.Tick)
			synctest.Wait()
			require.Equal(t, []string{"a"}, c.order)
			c.send("b", 1000)
			require.Equal(t, []string{"a", "b"}, c.order)
			c.server.Memory.Add(-900_000)
		},
		"when the server ends": func(t *testing.T, c *crowd) {
			c.send("a", 1000)
			c.core.Drain()
			synctest.Wait()
			require.Equal(t, []string{"a"}, c.order)
		},
		"when the pool is gone": func(t *testing.T, c *crowd) {
			c.send("a", 1000)
			c.state.RetainPools(nil)
			time.Sleep(5 * time.Second)
			synctest.Wait()
			require.Equal(t, []string{"a"}, c.order, "as what was let in is")
		},
		"when binding is immediate": func(t *testing.T, c *crowd) {
			c.send("a", 1000)
			live := c.core.Settings()
			policy := live.Pools["chat"]
			policy.Place.Late = false
			c.policy("chat", policy)
			c.send("b", 1000)
			require.Equal(t, []string{"b"}, c.order)
			time.Sleep(5 * time.Second)
			synctest.Wait()
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t, core.Options{HeldBytes: 1_000_000})
				s.pool("chat", late(latebinding.Limits{MaxTime: 5 * time.Second, Max: 2}), "p1", "d1")
				end := s.busy("p1", time.Hour)
				c := newCrowd(s)
				tt(t, c)
				end()
				c.group.Wait()
				for id := range c.ended {
					require.Nil(t, c.ended[id].immediate, id)
					c.server.passes.Release(c.server.passes.Held(id, 0))
				}
				time.Sleep(2 * latebinding.Tick) // for the queue's goroutine to see that nobody waits
				synctest.Wait()
				require.Zero(t, c.waiting())
				require.Zero(t, s.server.Memory.Load())
				require.Zero(t, s.state.Bookings.Reservations())
				require.Equal(t, ends[name], s.timed("tandem_queue_wait_seconds"))
			})
		})
	}
}

// Other endpoints may come while requests wait, and theirs may go.
func TestWaitingSeesTheFleetAsItIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.pool("chat", late(latebinding.Limits{}), "p1", "d1")
		s.busy("p1", time.Hour)
		c := newCrowd(s)
		c.send("a", 1000)
		require.Empty(t, c.order)
		var eps []kvstate.EndpointSpec
		for _, e := range []string{"p0", "p2", "d0", "d1"} {
			eps = append(eps, kvstate.EndpointSpec{Name: e, Addr: addressOf(e), Role: roleOf(e)})
		}
		s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, eps)
		time.Sleep(latebinding.Tick)
		synctest.Wait()
		require.Equal(t, []string{"a"}, c.order)
		require.Contains(t, []string{addressOf("p0"), addressOf("p2")}, c.ended["a"].set[names.HeaderEndpoint])
		time.Sleep(2 * latebinding.Tick)
	})
}

// What other replicas have booked counts, and what they have no more is seen with the next tick.
func TestWaitingSeesOtherReplicas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.pool("chat", late(latebinding.Limits{}), "p1", "d1")
		p := s.state.Pool("chat").Endpoint(addressOf("p1"))
		p.SetRemoteLoad(kvstate.RemoteLoad{Requests: 1, PromptTokens: 50_000, Jobs: 1, Queue: 4 * time.Second, At: time.Now()})
		c := newCrowd(s)
		c.send("a", 1000)
		require.Equal(t, 1, c.waiting())
		time.Sleep(time.Second)
		p.SetRemoteLoad(kvstate.RemoteLoad{Requests: 1, PromptTokens: 100, Jobs: 1, Queue: 5 * time.Millisecond, At: time.Now()})
		time.Sleep(latebinding.Tick)
		synctest.Wait()
		require.Equal(t, []string{"a"}, c.order)
		decisions := s.server.observer.Totals().Decisions
		require.Less(t, decisions.Quantile(1), 100*time.Millisecond, "waiting is no part of deciding")
		time.Sleep(2 * latebinding.Tick)
	})
}

// Whatever comes and leaves: every request that stays is bound once, and nothing is left behind.
func TestWaitingAtRandom(t *testing.T) {
	for seed := range uint64(5) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 3))
			s := newStand(t, core.Options{HeldBytes: 3_000_000})
			s.pool("chat", late(latebinding.Limits{MaxTime: 3 * time.Second, Max: 30}), "p1", "p2", "d1", "d2")
			var all sync.WaitGroup
			for i := range 150 {
				id := fmt.Sprint("r", i)
				q := s.newRequest("/v1/chat/completions", id, strings.Replace(chatBody, "hi", id+filler(random.IntN(30_000)), 1))
				leaves, work := time.Duration(-1), time.Duration(random.IntN(300))*time.Millisecond
				if random.IntN(4) == 0 {
					leaves = time.Duration(random.IntN(2000)) * time.Millisecond
				}
				all.Go(func() {
					if leaves >= 0 {
						q.leave(99, func() { time.Sleep(leaves) })
						s.server.passes.Release(s.server.passes.Held(id, 0))
						return
					}
					v := q.pass()
					if v.immediate != nil {
						require.Contains(t, string(v.immediate.GetBody()), "server_busy")
						return
					}
					time.Sleep(work)
					s.server.passes.Release(s.server.passes.Held(id, 0))
				})
				time.Sleep(time.Duration(random.IntN(30)) * time.Millisecond)
			}
			all.Wait()
			time.Sleep(time.Second)
			synctest.Wait()
			require.Zero(t, s.count("tandem_queue_requests", "chat"))
			require.Zero(t, s.server.Memory.Load())
			require.Zero(t, s.state.Bookings.Reservations())
			require.Zero(t, queueOf(s).Status().Committed)
		})
	}
}

// Both legs at once, and the Endpoint Picker protocol, wait alike; a gateway's subset is not waited for.
func TestOtherWaysAreBoundLateToo(t *testing.T) {
	t.Run("both legs at once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := pairStand(t, "sglang", "p1", "d1", "b1")
			policy := s.core.Settings().Pools["chat"]
			policy.Place.Late = true
			s.policy("chat", policy)
			end := s.busy("p1", time.Hour)
			c := newCrowd(s)
			c.send("a", 1000)
			require.Equal(t, 1, c.waiting(), "the one that does both is no P here, though it is idle")
			time.Sleep(time.Second)
			end()
			c.group.Wait()
			require.Equal(t, addressOf("p1"), c.ended["a"].set[names.HeaderPrefillEndpoint])
			require.Equal(t, addressOf("d1"), c.ended["a"].set[names.HeaderEndpoint])
			c.done("a")
			time.Sleep(2 * latebinding.Tick)
			require.Zero(t, s.state.Bookings.Reservations())
		})
	})
	t.Run("endpoint picker", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newStand(t, core.Options{Picker: &plan.GatewayOptions{}})
			policy := late(latebinding.Limits{})
			policy.Handoff = plan.HandoffSidecar
			s.pool("chat", policy, "p1", "d1", "d2")
			end := s.busy("p1", time.Hour)
			time.AfterFunc(time.Second, end)
			began := time.Now()
			require.Equal(t, addressOf("d2"), s.ask(hello, map[string]*structpb.Struct{envoywire.NamespaceSubset: object(t, `{"x-gateway-destination-endpoint-subset":["10.0.2.2:8000"]}`)}).destination())
			require.Zero(t, time.Since(began))
			require.NotEmpty(t, s.ask(hello, nil).destination())
			require.Equal(t, time.Second, time.Since(began).Truncate(latebinding.Tick))
			time.Sleep(2 * latebinding.Tick)
		})
	})
}

func queueOf(s *stand) *latebinding.Queue {
	policy, _ := s.server.passes.Policy("chat")
	return policy.Queue()
}
