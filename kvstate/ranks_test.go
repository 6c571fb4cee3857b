package kvstate

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Ranks behind one port are separate endpoints at the same address.
func TestByRank(t *testing.T) {
	alone := EndpointSpec{Addr: "10.0.0.1:8000"}
	require.Equal(t, []EndpointSpec{alone}, alone.ByRank())
	require.Empty(t, alone.RankName())
	require.Equal(t, "10.0.0.1:8000", alone.HostPort())

	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, EndpointSpec{Name: "engine:8000", Addr: "[fd00::1]:8000", Ranks: 2, Role: RoleBoth}.ByRank())
	p := s.Pools()[0]
	require.Len(t, p.Endpoints(), 2)
	for i, e := range p.Endpoints() {
		require.Equal(t, []string{"0", "1"}[i], e.RankName())
		require.Equal(t, "[fd00::1]:8000", e.HostPort())
		require.Equal(t, "[fd00::1]:8000#"+e.RankName(), e.Addr)
		require.Equal(t, e, p.Endpoint(e.Addr))
		require.Equal(t, []*Endpoint{e}, p.Find(e.Addr), "an operator's order for one rank")
		require.Equal(t, "engine:8000#"+e.RankName(), e.DisplayName())
		require.Equal(t, []*Endpoint{e}, p.Find(e.DisplayName()), "by the name that is shown")
	}
	require.Len(t, p.Find("[fd00::1]:8000"), 2, "and for the engine")
	require.Len(t, p.Find("engine:8000"), 2)

	_, err := s.SetOverride("p", "engine:8000#1", func(o *Override) { o.Paused = true })
	require.NoError(t, err)
	require.False(t, p.Endpoints()[0].Paused())
	require.True(t, p.Endpoints()[1].Paused())
}
