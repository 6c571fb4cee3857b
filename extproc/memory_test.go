package extproc

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/kvstate"
	"tandem/kvstate/residency"
)

// A server knows what engines' memory holds of conversations from the requests that it serves: P a copy, D all of it,
// while the answer is written and after that. The next turn continues it, also if its client only names it.
func TestServersKnowConversations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.pool("chat", splitting(), "p1", "d1")
		pool := s.state.Pool("chat")
		for _, e := range pool.Endpoints() {
			g := kvstate.UnknownSignals()
			g.At, g.ScrapedAt, g.KVTokens = time.Now(), time.Now(), 100_000
			s.state.Observe(e, g)
		}
		held := func() (prefill, decode *residency.Memory) {
			time.Sleep(time.Second)
			pool.SweepMemory(time.Now())
			var v kvstate.View
			s.state.View(pool, nil, &v)
			for i := range v.Endpoints {
				if v.Endpoints[i].Endpoint.Role == kvstate.RolePrefill {
					prefill = v.Endpoints[i].Memory
				} else {
					decode = v.Endpoints[i].Memory
				}
			}
			return prefill, decode
		}
		talk := strings.Repeat("word ", 2000)
		q := s.newRequest("/v1/chat/completions", "r1", `{"model":"m","messages":[{"role":"user","content":"`+talk+`"}]}`)
		require.Zero(t, q.pass().status())
		p, d := held()
		require.Less(t, p.Free, 99_000.)
		require.InDelta(t, 100_000, d.Free, 0, "D is not chosen yet")

		q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(3))})
		q.follow()
		require.Zero(t, q.pass().status())
		p, d = held()
		require.Less(t, d.Free, 99_000.)
		require.Zero(t, d.Old[0].Tokens, "its answer is being written")
		require.Positive(t, p.Old[0].Tokens)
		require.Zero(t, p.Old[0].Back, "a copy")

		s.log(q.entry(200, "via_upstream"))
		_, d = held()
		require.Positive(t, d.Old[0].Back)
		of := pool.Conversations()
		require.Equal(t, 1, of.Known)
		require.InDelta(t, 200_000, of.Memory, 0)

		q = s.newRequest("/v1/chat/completions", "r2",
			`{"model":"m","messages":[{"role":"user","content":"`+talk+talk+`"}]}`)
		require.Zero(t, q.pass().status())
		of = pool.Conversations()
		require.Equal(t, 1, of.Known, "the same conversation")
		require.Positive(t, of.All.Had)
		require.Zero(t, of.All.Evicted, "d holds it")
	})
}
