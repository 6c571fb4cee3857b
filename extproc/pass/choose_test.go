package pass

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/latebinding"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/internal/budget"
	"tandem/kvstate"
	"tandem/picker"
)

// Where nothing is to wait for, late binding costs no memory; where it is off, it is not noticed at all.
func TestChoosingAlloc(t *testing.T) {
	for name, late := range map[string]bool{"off": false, "on": true} {
		t.Run(name, func(t *testing.T) {
			state := kvstate.New(kvstate.Options{})
			state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
				{Addr: "10.0.1.1:8000", Role: kvstate.RolePrefill}, {Addr: "10.0.1.2:8000", Role: kvstate.RolePrefill},
				{Addr: "10.0.2.1:8000", Role: kvstate.RoleDecode}, {Addr: "10.0.2.2:8000", Role: kvstate.RoleDecode},
			})
			policy := Policy{Policy: plan.Policy{Split: true}}
			policy.Place.Late = late
			s := New(Options{State: state, Waiting: latebinding.Options{State: state, ShortOfMemory: func() bool { return false }}})
			s.Apply(Settings{Pools: map[string]Policy{"chat": policy}})
			x := Pass{shared: s, Meter: &telemetry.Meter{}}
			require.True(t, x.begin(state.Pool("chat"), plan.Attempt{}))
			require.Equal(t, late, x.policy.Queue() != nil)
			r := picker.Request{PromptTokens: 4000, Split: true}
			budget.Allocs(t, 100, 0, func() {
				x.look()
				c, err := x.pick(t.Context(), &r)
				if err != nil || c.Prefill < 0 {
					t.Fatal(c, err)
				}
				x.waiter.Committed()
			})
		})
	}
}
