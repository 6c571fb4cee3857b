package extproc

import (
	"bytes"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/picker"
)

// What the server would decide can be asked without a request, and books nothing.
func TestExplain(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Name: "p1", Addr: "10.0.1.1:8000", Role: kvstate.RolePrefill},
		{Name: "p2", Addr: "10.0.1.2:8000", Role: kvstate.RolePrefill},
		{Name: "d1", Addr: "10.0.2.1:8000", Role: kvstate.RoleDecode},
	})
	state.MarkFailed(state.Pool("chat").Endpoint("10.0.1.2:8000"))
	var log bytes.Buffer
	s := New(Options{State: state, Live: Live{Pools: map[string]Policy{"chat": {Split: true, Dialect: nil}}}, Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}, nil)

	e, err := s.Explain("", 4000)
	require.NoError(t, err)
	require.Empty(t, e.Prefill, "a pool without a dialect splits nothing")
	require.Equal(t, "10.0.2.1:8000", e.Decode)
	require.Len(t, e.Candidates, 3)
	require.Equal(t, "failed", e.Candidates[1].Out)
	require.InDelta(t, .266, e.Candidates[0].Prefill.Work, .01)
	require.Zero(t, state.Reservations())
	_, err = s.Explain("other", 1)
	require.EqualError(t, err, `there is no pool "other"`)

	x := &exchange{s: s, requestID: "r1"}
	x.picker.Policy = picker.DefaultPolicy()
	state.View(state.Pool("chat"), nil, &x.view)
	x.explain(state.Pool("chat"), &picker.Request{PromptTokens: 4000, Split: true})
	require.Contains(t, log.String(), "p1: prefill 265 = queue 0.0 + work 265")
	require.Contains(t, log.String(), "p2: out, failed")
}
