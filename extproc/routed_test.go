package extproc

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// P holds a prompt from the moment when it is sent, and the D that pass 2 chooses from then on. The D that pass 1 planned
// does not count.
func TestRoutedToTheDecodeThatAnswers(t *testing.T) {
	s := newStand(t, core.Options{})
	s.pool("chat", splitting(), "p1", "d1", "d2")
	pool := s.state.Pool("chat")
	body := conversation("")
	hashes := textBlocks(t, body)
	holders := func() []string { return s.holders(hashes) }
	q := s.newRequest("/v1/chat/completions", "r-1", body)
	v := q.pass()
	require.Equal(t, plan.LegPrefill, v.set[names.HeaderLeg])
	require.Equal(t, []string{addressOf("p1")}, holders(), "who decodes is not settled")
	inMind := s.ticket(v.set[names.HeaderTicket], "r-1").Decode
	s.state.Health.MarkFailed(pool.Endpoint(inMind))
	q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(4))})
	q.follow()
	v = q.pass()
	require.Equal(t, plan.LegDecode, v.set[names.HeaderLeg])
	require.NotEqual(t, inMind, v.set[names.HeaderEndpoint])
	require.Equal(t, []string{addressOf("p1"), v.set[names.HeaderEndpoint]}, holders())
}

// A request counts once as a use of its prompt, however often it is planned.
func TestRequestsAreCountedOnce(t *testing.T) {
	s := newStand(t, core.Options{})
	s.pool("chat", splitting(), "p1", "p2", "d1")
	body := conversation("")
	hashes := textBlocks(t, body)
	uses := func() float32 {
		var v kvstate.View
		s.state.View(s.state.Pool("chat"), hashes, &v)
		if len(v.Uses) == 0 {
			return 0
		}
		return v.Uses[0].Uses
	}
	q := s.newRequest("/v1/chat/completions", "r-1", body)
	q.pass()
	q.prefillLeg(engineAnswer{status: 500})
	q.follow()
	q.pass()
	require.Zero(t, uses(), "one request shares nothing")
	s.newRequest("/v1/chat/completions", "r-2", body).pass()
	require.Greater(t, uses(), float32(1.5))
}

// conversation is a chat request whose prompt is eight blocks, and what more is given.
func conversation(more string) string {
	return `{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"` + filler(8*plan.BlockBytes) + more + `"}]}`
}

func textBlocks(t *testing.T, body string) []uint64 {
	t.Helper()
	var r openai.Request
	require.NoError(t, r.Scan(openai.Chat, []byte(body), openai.Limits{}))
	hashes := r.PromptHash(nil, plan.BlockBytes, plan.MaxBlocks)
	require.NotEmpty(t, hashes)
	return hashes
}

// holders are the endpoints of the pool chat that are taken to hold all of a prompt.
func (s *stand) holders(hashes []uint64) (addrs []string) {
	var v kvstate.View
	s.state.View(s.state.Pool("chat"), hashes, &v)
	for _, c := range v.Endpoints {
		if c.Hit == len(hashes) {
			addrs = append(addrs, c.Endpoint.Addr)
		}
	}
	return addrs
}

// The D of the turn before is chosen again in pass 2, since it has most of the KV, unless it has much more to do than others.
func TestPassTwoKnowsWhatDecodeHolds(t *testing.T) {
	s := newStand(t, core.Options{})
	s.pool("chat", splitting(), "p1", "d1", "d2", "d3", "d4")
	pool := s.state.Pool("chat")
	turn := func(id, body string) string {
		q := s.newRequest("/v1/chat/completions", id, body)
		require.Equal(t, plan.LegPrefill, q.pass().set[names.HeaderLeg])
		q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(4))})
		q.follow()
		v := q.pass()
		require.Equal(t, plan.LegDecode, v.set[names.HeaderLeg])
		s.server.passes.Release(s.server.passes.Held(id, 0))
		s.server.passes.Release(s.server.passes.Held(id, 1))
		return v.set[names.HeaderEndpoint]
	}
	first := turn("r-1", conversation(""))
	for i := range 8 { // by chance it would be one time in 65,536
		require.Equal(t, first, turn(fmt.Sprint("later-", i), conversation(filler((i+1)*plan.BlockBytes))))
	}
	for range 100 {
		s.state.Bookings.Reserve(pool.Endpoint(first), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 4000})
	}
	require.NotEqual(t, first, turn("crowded", conversation("")))
}

// An endpoint that comes between the passes and does not serve the model is not the D, idle as it is.
func TestPassTwoMindsTheModelOfWhoCame(t *testing.T) {
	s := newStand(t, core.Options{})
	s.pool("chat", splitting(), "p1", "d1")
	tell := func(name, model string) {
		s.state.SetModels(s.state.Pool("chat").Endpoint(addressOf(name)), []kvstate.Model{{ID: model}})
	}
	q := s.newRequest("/v1/chat/completions", "r", conversation(""))
	tell("p1", "m")
	tell("d1", "m")
	q.pass()
	q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(4))})
	s.pool("chat", splitting(), "p1", "d1", "d2")
	tell("d2", "another")
	for range 100 {
		s.state.Bookings.Reserve(s.state.Pool("chat").Endpoint(addressOf("d1")), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 4000})
	}
	q.follow()
	require.Equal(t, addressOf("d1"), q.pass().set[names.HeaderEndpoint])
}

// Where both legs run at once D has the prompt once P has done its part, and not where P has failed.
func TestPairsAreRoutedToBoth(t *testing.T) {
	for name, good := range map[string]bool{"goes well": true, "P fails": false} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, []string{"p1", "d1", "d2"}, func(t *testing.T, s *stand) {
				hashes := textBlocks(t, conversation(""))
				q := s.newRequest("/v1/chat/completions", "both", conversation(""))
				v := q.pass()
				require.Equal(t, plan.LegPair, v.set[names.HeaderLeg])
				d, _ := q.decode(s)
				require.Equal(t, []string{addressOf("p1")}, s.holders(hashes))
				if good {
					q.mirror(s).answer(200, goodPrefill)
					d.ended()
					require.Equal(t, []string{addressOf("p1"), v.set[names.HeaderEndpoint]}, s.holders(hashes))
					s.log(q.entry(200, "via_upstream"))
					return
				}
				q.mirror(s).answer(500, "oops")
				d.redirected(q)
				require.Equal(t, []string{addressOf("p1")}, s.holders(hashes))
				s.server.passes.Release(s.server.passes.Held("both", 0))
			})
		})
	}
}
