package kvstate

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// An operator's order keeps requests away whatever else is known of an endpoint, and survives its leaving and coming
// back.
func TestOrders(t *testing.T) {
	s := New(Options{})
	spec := PoolSpec{Name: "p", Models: []string{"*"}}
	a := EndpointSpec{Name: "pods:80", Addr: "10.0.0.1:80", Role: RoleDecode}
	b := EndpointSpec{Name: "pods:80", Addr: "10.0.0.2:80", Role: RoleDecode}
	s.SetPool(spec, []EndpointSpec{a, b})
	usable := func() (out []string) {
		var v View
		s.View(s.Pool("p"), nil, &v)
		for _, c := range v.Endpoints {
			if c.Usable {
				out = append(out, c.Endpoint.Addr)
			}
		}
		return out
	}
	pause, resume := func(o *Override) { o.Paused = true }, func(o *Override) { o.Paused = false }
	order := func(endpoint string, change func(*Override)) int {
		t.Helper()
		found, err := s.SetOverride("p", endpoint, change)
		require.NoError(t, err)
		return len(found)
	}

	require.Equal(t, 1, order(a.Addr, pause))
	require.Equal(t, []string{b.Addr}, usable())
	s.Health.MarkFailed(s.Pool("p").Endpoint(b.Addr))
	require.Equal(t, []string{b.Addr}, usable(), "one that failed is a last resort, one that is paused is none")
	s.Health.MarkGood(s.Pool("p").Endpoint(b.Addr))
	s.SetPool(spec, []EndpointSpec{b})
	s.SetPool(spec, []EndpointSpec{b, a})
	require.Equal(t, []string{b.Addr}, usable(), "it left and came back")

	require.Equal(t, 2, order("pods:80", pause), "a name is all its addresses")
	require.Empty(t, usable())
	c := EndpointSpec{Name: "pods:80", Addr: "10.0.0.3:80", Role: RoleDecode}
	s.SetPool(spec, []EndpointSpec{a, b, c})
	require.Empty(t, usable(), "and those it will have")
	order(c.Addr, resume)
	require.Equal(t, []string{c.Addr}, usable(), "but for what was said of one address since")
	order("pods:80", resume)
	require.Len(t, usable(), 3, "the order about the address is over too")

	order(a.Addr, func(o *Override) { o.Weight = 50 })
	require.Equal(t, 50, s.Pool("p").Endpoint(a.Addr).Weight())
	order(a.Addr, func(o *Override) { o.Weight = 0 })
	require.Equal(t, 100, s.Pool("p").Endpoint(a.Addr).Weight())

	require.NoError(t, s.PausePool("p", true))
	s.SetPool(spec, []EndpointSpec{a})
	require.True(t, s.Pool("p").Paused())

	_, err := s.SetOverride("p", "10.9.9.9:1", pause)
	require.ErrorIs(t, err, ErrUnknown)
	_, err = s.SetOverride("q", a.Addr, pause)
	require.ErrorIs(t, err, ErrUnknown)
	require.ErrorIs(t, s.PausePool("q", true), ErrUnknown)

	s.RetainPools(nil)
	s.SetPool(spec, []EndpointSpec{a})
	require.False(t, s.Pool("p").Paused(), "a pool that was gone is another one")
	require.Len(t, usable(), 1)
}

// An endpoint that the configuration drains is excluded by its spec; no order is needed to bring it back.
func TestDrainedBySpec(t *testing.T) {
	s := New(Options{})
	spec := PoolSpec{Name: "p"}
	e := EndpointSpec{Name: "a", Addr: "10.0.0.1:80", Role: RoleBoth, Drained: true}
	s.SetPool(spec, []EndpointSpec{e})
	booked := s.Bookings.Reserve(s.Pool("p").Endpoints()[0], Booking{For: RoleDecode, PromptTokens: 10})
	require.True(t, s.Pool("p").Endpoints()[0].Paused())
	e.Drained, e.Weight = false, 200
	s.SetPool(spec, []EndpointSpec{e})
	require.False(t, s.Pool("p").Endpoints()[0].Paused())
	require.Equal(t, 200, s.Pool("p").Endpoints()[0].Weight())
	requests, _ := s.Pool("p").Endpoints()[0].Load()
	require.EqualValues(t, 1, requests)
	require.True(t, s.Bookings.Release(booked))
}

// The others keep their order, which determines the pool of requests without a model.
func TestKeepPools(t *testing.T) {
	s := New(Options{})
	for _, name := range []string{"a", "b", "c"} {
		s.SetPool(PoolSpec{Name: name, Models: []string{name}}, nil)
	}
	s.RetainPools([]string{"c", "never was", "a", "c"})
	require.Len(t, s.Pools(), 2)
	require.Equal(t, "c", s.PoolFor("").Spec.Name)
	require.Nil(t, s.Pool("b"))
}

// Orders of another replica apply as if they had been given here, also to later endpoints; of two for one target the
// newer counts.
func TestOrdersOfOtherReplicas(t *testing.T) {
	spec := PoolSpec{Name: "p", Models: []string{"*"}}
	a := EndpointSpec{Name: "pods:80", Addr: "10.0.0.1:80", Role: RoleDecode}
	there, here := New(Options{}), New(Options{})
	there.SetPool(spec, []EndpointSpec{a})
	_, err := there.SetOverride("p", a.Addr, func(o *Override) { o.Paused, o.Weight = true, 50 })
	require.NoError(t, err)
	require.NoError(t, there.PausePool("p", true))
	require.Equal(t, 2, here.ApplyOrders(there.Orders()), "before the pool is there")
	here.SetPool(spec, []EndpointSpec{a})
	require.True(t, here.Pool("p").Paused())
	require.True(t, here.Pool("p").Endpoints()[0].Paused())
	require.Equal(t, 50, here.Pool("p").Endpoints()[0].Weight())

	old := there.Orders()
	_, err = here.SetOverride("p", "pods:80", func(o *Override) { o.Paused = false })
	require.NoError(t, err)
	require.NoError(t, here.PausePool("p", false))
	require.Zero(t, here.ApplyOrders(old), "it is taken back since")
	require.Equal(t, 2, there.ApplyOrders(here.Orders()))
	for _, s := range []*State{here, there} {
		require.False(t, s.Pool("p").Paused())
		require.False(t, s.Pool("p").Endpoints()[0].Paused())
		require.Equal(t, 50, s.Pool("p").Endpoints()[0].Weight(), "the order about the weight holds")
	}

	many := make([]Order, maxOverrides+10)
	for i := range many {
		many[i] = Order{Pool: "p", Endpoint: strconv.Itoa(i), Version: 1}
	}
	here.ApplyOrders(many)
	require.Len(t, here.Orders(), maxOverrides)
}
