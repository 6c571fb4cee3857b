package kvstate

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A prefill endpoint of another group is none: "no_prefill" and not "cheaper" is why a request is not split then.
func TestViewPrefills(t *testing.T) {
	for name, c := range map[string]struct {
		prefill, decode string
		want            bool
	}{"no groups": {"", "", true}, "one group": {"a", "a", true}, "prefill in a group": {"a", "", false}, "two groups": {"a", "b", false}} {
		t.Run(name, func(t *testing.T) {
			s := New(Options{})
			s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{
				{Addr: "p1", Role: RolePrefill, Group: c.prefill}, {Addr: "d1", Role: RoleDecode, Group: c.decode},
			})
			var v View
			s.View(s.Pool("p"), nil, &v)
			require.Equal(t, c.want, v.Prefills())
		})
	}
}
