package written

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// What is kept is bounded, and goes with the endpoint. The rates are tested with the feed (package status).
func TestMeterIsBounded(t *testing.T) {
	now := time.Unix(1e9, 0)
	state := kvstate.New(kvstate.Options{Now: func() time.Time { return now }})
	state.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "d", Role: kvstate.RoleDecode}})
	var m Meter
	for i := range int64(300) {
		now = now.Add(time.Second)
		state.Observe(state.Pool("chat").Endpoint("d"), kvstate.Signals{Answers: kvstate.AnswerCounters{Generated: 9 * i}, At: now})
		m.Sample(state, now)
	}
	require.InDelta(t, 9, m.Of("chat", "d", now).Rate, 1e-9)
	require.LessOrEqual(t, len(m.of[key{"chat", "d"}]), kept)
	state.SetPool(kvstate.PoolSpec{Name: "chat"}, nil)
	m.Sample(state, now)
	require.Empty(t, m.of)
}
