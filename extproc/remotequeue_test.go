package extproc

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/latebinding"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// silentReplicas are other replicas that publish nothing.
type silentReplicas struct{}

func (silentReplicas) Changed()                                                                  {}
func (silentReplicas) Routed(*kvstate.Pool, *kvstate.Endpoint, []uint64)                         {}
func (silentReplicas) Released(*kvstate.Pool, kvstate.ReservationID)                             {}
func (silentReplicas) Learned(*kvstate.Pool, prefixindex.LearnedTokens)                          {}
func (silentReplicas) SessionServed(*kvstate.Pool, uint64, *kvstate.Endpoint, *kvstate.Endpoint) {}
func (silentReplicas) KVLoaded(*kvstate.Pool, string, string, bool)                              {}
func (silentReplicas) Reachable() bool                                                           { return true }
func (silentReplicas) Consume([16]byte, bool) (first, known bool)                                { return true, false }
func (silentReplicas) PutHandOver([16]byte, []byte)                                              {}
func (silentReplicas) TakeHandOver([16]byte) (params []byte, ok bool)                            { return nil, false }

// Waiting requests are published to other replicas, with the endpoints' hits, until they are reserved.
func TestOthersAreToldWhoWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.state.Connect(silentReplicas{})
		s.pool("chat", late(latebinding.Limits{}), "p1", "p2", "d1")
		pool := s.state.Pool("chat")
		end1, end2 := s.busy("p1", time.Minute), s.busy("p2", time.Minute)
		c := newCrowd(s)
		c.send("a", 2000)
		c.send("b", 4000)
		told := pool.Queued()
		require.Len(t, told, 2)
		for _, w := range told {
			require.InDelta(t, w.PromptTokens/16, w.Work.Milliseconds(), 30)
			require.Empty(t, w.Held)
			require.NotZero(t, w.ID)
		}
		time.Sleep(time.Second)
		var r openai.Request
		require.NoError(t, r.Scan(openai.Chat, []byte(strings.Replace(chatBody, "hi", "a"+filler(8000), 1)), openai.Limits{}))
		s.state.Routed(pool, pool.Endpoint(addressOf("p2")), r.PromptHash(nil, plan.BlockBytes, plan.MaxBlocks))
		time.Sleep(2 * latebinding.HitsTTL)
		synctest.Wait()
		held := 0
		for _, w := range pool.Queued() {
			for _, h := range w.Held {
				require.Equal(t, addressOf("p2"), h.Addr)
				require.Greater(t, h.Tokens, int64(1000))
				held++
			}
		}
		require.Equal(t, 1, held, "endpoints hold more of it by now, and others are told")
		end1()
		end2()
		c.group.Wait()
		require.Empty(t, pool.Queued())
		c.done("a")
		c.done("b")
		time.Sleep(2 * latebinding.Tick)
	})
}

// A request that only some endpoints serve is not published: at other replicas it would block requests for all the
// others.
func TestOthersAreNotToldWhoIsChoosy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.state.Connect(silentReplicas{})
		policy := late(latebinding.Limits{})
		policy.LabelHeader = "x-engine-labels"
		s.pool("chat", policy, "p1", "p2", "d1")
		pool := s.state.Pool("chat")
		var eps []kvstate.EndpointSpec
		for _, e := range pool.Endpoints() {
			spec := e.EndpointSpec
			spec.Labels = "tier=gold"
			eps = append(eps, spec)
		}
		s.state.SetPool(pool.Spec, eps)
		pool = s.state.Pool("chat")
		end1, end2 := s.busy("p1", time.Minute), s.busy("p2", time.Minute)
		c := newCrowd(s)
		c.send("any", 2000)
		require.Len(t, pool.Queued(), 1)
		c.send("gold", 3000, "x-engine-labels", "tier=gold")
		require.Equal(t, 2, c.waiting())
		require.Len(t, pool.Queued(), 1, "labels")
		var r openai.Request
		require.NoError(t, r.Scan(openai.Chat, []byte(chatBody), openai.Limits{}))
		for _, e := range pool.Endpoints() {
			if e.Addr != addressOf("p2") {
				s.state.SetModels(e, []kvstate.Model{{ID: r.Model()}})
			}
		}
		s.state.SetModels(pool.Endpoint(addressOf("p2")), []kvstate.Model{{ID: "another"}})
		c.send("adapter", 4000)
		require.Equal(t, 3, c.waiting())
		require.Len(t, pool.Queued(), 1, "a model that p2 does not serve")
		end1()
		end2()
		c.group.Wait()
		for _, id := range []string{"any", "gold", "adapter"} {
			c.done(id)
		}
		time.Sleep(2 * latebinding.Tick)
	})
}

// A request stands behind those that wait at other replicas and are shorter, and shows it; one that could go and does not is
// not waited for.
func TestRequestsStandBehindThoseOfOtherReplicas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.state.Connect(silentReplicas{})
		s.pool("chat", late(latebinding.Limits{}), "p1", "d1")
		pool := s.state.Pool("chat")
		end := s.busy("p1", time.Minute)
		short := kvstate.Queued{ID: 77, Arrived: time.Now(), Work: 510 * time.Millisecond, PromptTokens: 8000}
		pool.ApplyQueued(9, []kvstate.Queued{short}, nil, nil, false)
		c := newCrowd(s)
		c.send("a", 16_000)
		e, err := s.core.Explain("chat", 100)
		require.NoError(t, err)
		require.Equal(t, []int{1, 1}, []int{e.Waiting, e.Remote})
		end()
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		require.Empty(t, c.order, "the other is next, and with it the endpoint has enough")
		pool.ApplyQueued(9, nil, []uint64{77}, nil, false)
		time.Sleep(2 * latebinding.Pause)
		synctest.Wait()
		require.Equal(t, []string{"a"}, c.order, "the other has been sent, to somewhere else")
		trace := s.core.Recent(1)[0]
		require.Equal(t, addressOf("p1"), trace.WaitedFor)
		require.Equal(t, []int{0, 1}, []int{trace.Behind, trace.BehindRemote})
		c.done("a")

		pool.ApplyQueued(9, []kvstate.Queued{{ID: 78, Arrived: time.Now(), Work: 510 * time.Millisecond, PromptTokens: 8000}}, nil, nil, false)
		c.send("b", 16_000)
		require.Equal(t, 1, c.waiting(), "nobody waits here, but there")
		require.Equal(t, 1, waitRemotely(t, s.state))
		time.Sleep(time.Second)
		c.group.Wait()
		require.InDelta(t, .15, c.after["b"].Seconds(), .05, "a replica that is gone, or knows better")
		c.done("b")
		time.Sleep(2 * latebinding.Tick)
		synctest.Wait()
		require.False(t, queueOf(s).Status().Running, "nobody waits here")
		require.Equal(t, 1, waitRemotely(t, s.state))
		pool.ApplyQueued(9, nil, nil, nil, true)
		require.Zero(t, waitRemotely(t, s.state), "shown though nobody waits here")
	})
}

// waitRemotely is tandem_queue_requests_remote.
func waitRemotely(t *testing.T, state *kvstate.State) int {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	telemetry.NewMetrics(r, state)
	all, err := r.Gather()
	require.NoError(t, err)
	for _, f := range all {
		if f.GetName() == "tandem_queue_requests_remote" {
			return int(f.GetMetric()[0].GetGauge().GetValue())
		}
	}
	t.Fatal("not shown")
	return 0
}
