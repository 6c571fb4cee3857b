package redisstore

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// remembered is what a replica says of an engine's KV memory; free is 0 where it says nothing.
func (r *replica) remembered(i int) (free, tokens float64) {
	r.pool.SweepMemory(time.Now())
	var v kvstate.View
	r.state.View(r.pool, nil, &v)
	if m := v.Endpoints[i].Memory; m != nil {
		return m.Free, m.Tokens
	}
	return 0, 0
}

// What replicas publish anyway lets each know the conversations that engines hold: the engines' KV memory, and the blocks
// of routed prompts. While Redis is away each knows its own, and what it missed it hears when that is back.
func TestConversationsAreKnownEverywhere(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	a, b := join(t, briefly(r), 2), join(t, briefly(r), 2)
	g := kvstate.UnknownSignals()
	g.At, g.ScrapedAt, g.KVTokens, g.Running, g.Waiting = time.Now(), time.Now(), 100_000, 0, 0
	a.state.Observe(a.e(1), g)
	eventually(t, "b knows how much the engine keeps", func() bool { _, tokens := b.remembered(1); return tokens == 100_000 })

	ask := func(at *replica, blocks []uint64) kvstate.ReservationID {
		var v kvstate.View
		at.state.View(at.pool, blocks, &v)
		of := at.state.Arrived(at.pool, blocks, 10_000, 0, &v)
		id := at.state.Bookings.Reserve(at.e(1), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10_000, Of: of})
		at.state.Routed(at.pool, at.e(1), blocks)
		return id
	}
	ask(a, prompt(1, 80))
	free, _ := a.remembered(1)
	require.InDelta(t, 90_000, free, 0)
	eventually(t, "b knows the conversation", func() bool { free, _ := b.remembered(1); return free < 95_000 && free > 80_000 })

	require.NotNil(t, b.pool.Conversation(prompt(1, 80)))
	ask(b, prompt(1, 90))
	eventually(t, "its next turn is no other one", func() bool { return a.pool.Conversation(prompt(1, 90)) != nil })
	require.Nil(t, a.pool.Conversation(prompt(1, 80)))

	r.Kill()
	ask(a, prompt(2, 80))
	require.NotNil(t, a.pool.Conversation(prompt(2, 80)), "it knows its own")
	ask(b, prompt(1, 95))
	require.NotNil(t, b.pool.Conversation(prompt(1, 95)))
	r.Start()
	eventually(t, "what was routed meanwhile is heard", func() bool { return b.pool.Conversation(prompt(2, 80)) != nil })
}
