package pass

import (
	"bytes"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/picker"
)

// All prices of a decision are in the debug log.
func TestDecisionsAreLogged(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Name: "p1", Addr: "10.0.1.1:8000", Role: kvstate.RolePrefill},
		{Name: "p2", Addr: "10.0.1.2:8000", Role: kvstate.RolePrefill},
		{Name: "d1", Addr: "10.0.2.1:8000", Role: kvstate.RoleDecode},
	})
	state.Health.MarkFailed(state.Pool("chat").Endpoint("10.0.1.2:8000"))
	var log bytes.Buffer
	x := Pass{ID: "r1", shared: &Shared{Options: Options{
		State: state, Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}}}
	x.Req.Pool, x.picker.Policy = state.Pool("chat"), picker.DefaultPolicy()
	state.View(x.Req.Pool, nil, &x.view)
	x.explain(&picker.Request{PromptTokens: 4000, Split: true})
	require.Contains(t, log.String(), "p1: prefill 265 = queue 0.0 + work 265")
	require.Contains(t, log.String(), "p2: out, failed")
}
