package plan

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/kvstate/inferencepolicy"
)

// The edits of a rewrite outlive what the patch is used for next: with handoff direct, P's body.
func TestRewriteOutlivesThePatch(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, nil)
	r := &Request{Pool: state.Pool("chat")}
	state.Policies.SetInferencePolicy("chat", &inferencepolicy.Policy{Rewrites: []inferencepolicy.Rewrite{
		{Model: "gold", Targets: []inferencepolicy.Target{{Model: "tiny", Weight: 1}}},
	}})
	body := []byte(`{"model":"gold","messages":[]}`)
	require.NoError(t, r.Client.Scan(openai.Chat, body, openai.Limits{}))
	g := &Gateway{}
	edits := g.Rewrite(r, Rewritten(r, state), &Policy{}, nil)
	require.Equal(t, Gateway{Model: "tiny", Asked: "gold"}, *g)
	r.Patch.Reset(&r.Client)
	r.Patch.Set("stream", openai.FieldStream, []byte("true"))
	_ = r.Patch.Edits()
	require.Equal(t, `{"model":"tiny","messages":[]}`, string(edits.Apply(nil, body)))
}

func TestSubsetNamesEndpoints(t *testing.T) {
	for _, entry := range []string{"[fd00::1]:8000", "fd00::1", "[fd00::1]"} {
		require.True(t, named([]string{"10.0.0.1", entry}, "[fd00::1]:8000"), entry)
	}
	for _, entry := range []string{"[fd00::1]:8001", "fd00::2", "10.0.0.1:8000", ""} {
		require.False(t, named([]string{entry}, "[fd00::1]:8000"), entry)
	}
}
