package extproc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
)

// A panic while a request is decided is that request's 500. The replica goes on, and the panic is counted.
func TestAPanicCostsOneRequest(t *testing.T) {
	s := newStand(t, Options{})
	s.pool("chat", splitting(), "p1", "d1")
	policy := s.server.Settings().Pools["chat"]
	good := policy.Dialect
	policy.Dialect.Prefill = func(*openai.Request, *openai.Patch, *kvtransfer.Pair) { panic("broken") }
	s.policy("chat", policy)
	for range 3 {
		q := s.newRequest("/v1/chat/completions", "r1", chatBody)
		v := q.pass()
		require.Equal(t, 500, v.status())
		require.Contains(t, string(v.immediate.GetBody()), `"code":"internal_error"`)
	}
	require.Zero(t, s.server.Memory.Load())
	require.InDelta(t, 3, s.count("tandem_panics_total", "ext_proc main"), 0)

	policy.Dialect = good
	s.policy("chat", policy)
	q := s.newRequest("/v1/chat/completions", "r2", chatBody)
	q.pass()
	require.Equal(t, "prefill", q.headers[names.HeaderLeg])
}
