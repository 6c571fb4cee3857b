package endpointpicker

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/kvstate/inferencepolicy"
)

// The edits of a rewrite outlive what the patch is used for next: with handoff direct, P's body.
func TestRewriteOutlivesThePatch(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, nil)
	r := &plan.Request{Pool: state.Pool("chat")}
	state.SetInferencePolicy("chat", &inferencepolicy.Policy{Rewrites: []inferencepolicy.Rewrite{
		{Model: "gold", Targets: []inferencepolicy.Target{{Model: "tiny", Weight: 1}}},
	}})
	body := []byte(`{"model":"gold","messages":[]}`)
	require.NoError(t, r.Scan(openai.Chat, body, openai.Limits{}))
	to, edits := Rewrite(r, state)
	require.Equal(t, "tiny", to)
	r.Patch.Reset(&r.Request)
	r.Patch.Set("stream", openai.FieldStream, []byte("true"))
	_ = r.Patch.Edits()
	require.Equal(t, `{"model":"tiny","messages":[]}`, string(edits.Apply(nil, body)))
}
