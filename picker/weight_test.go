package picker

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// Under load an endpoint of weight 50 gets about half of the work of one of 100.
func TestWeightsShareTheWork(t *testing.T) {
	for _, role := range []kvstate.Role{kvstate.RolePrefill, kvstate.RoleDecode} {
		t.Run(role.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { weightsShare(t, role) }) // no time passes, so no booked work is done
		})
	}
}

func weightsShare(t *testing.T, role kvstate.Role) {
	s := kvstate.New(kvstate.Options{})
	other := kvstate.RoleBoth &^ role
	s.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{
		{Addr: "10.0.0.1:1", Role: role, Weight: 50}, {Addr: "10.0.0.2:1", Role: role}, {Addr: "10.0.0.3:1", Role: role, Weight: 200},
		{Addr: "10.0.0.4:1", Role: other},
	})
	var v kvstate.View
	k := &Picker{Policy: DefaultPolicy()}
	k.Split = SplitAlways
	given := map[string]int{}
	for i := range 700 {
		s.View(s.Pool("p"), nil, &v)
		c, err := k.Pick(&Request{PromptTokens: 100, Split: true, Rand: uint64(i) * 0x9e3779b97f4a7c15}, &v)
		require.NoError(t, err)
		at := c.Prefill
		if role == kvstate.RoleDecode {
			at = c.Decode
		}
		e := v.Endpoints[at].Endpoint
		given[e.Addr]++
		s.Bookings.Reserve(e, kvstate.Booking{For: role, PromptTokens: 100, Uncached: 100, Work: time.Duration(c.Work * float64(time.Second))})
	}
	require.InDelta(t, 100, given["10.0.0.1:1"], 10)
	require.InDelta(t, 200, given["10.0.0.2:1"], 10)
	require.InDelta(t, 400, given["10.0.0.3:1"], 10)
}
