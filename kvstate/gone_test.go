package kvstate

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Reservations for an Envoy that is gone are released within a second; those for others are not.
func TestSourceGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{})
		s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "a:1", Role: RoleDecode}})
		go s.Run(t.Context())
		e := s.Pool("p").Endpoints()[0]
		var gone, stays Source
		first := s.Bookings.ReserveAs(0, e, answer(10), &gone)
		s.Bookings.ReserveAs(0, e, answer(20), &stays)
		s.Bookings.Reserve(e, answer(30))
		time.Sleep(2 * time.Second)
		require.Equal(t, 3, s.Bookings.Reservations())
		gone.Gone()
		time.Sleep(2 * time.Second)
		require.Equal(t, 2, s.Bookings.Reservations())
		require.False(t, s.Bookings.Release(first))
		requests, tokens := e.Load()
		require.EqualValues(t, 2, requests)
		require.EqualValues(t, 50, tokens)
	})
}

// If all prefill endpoints have failed, those that hang stay excluded; if all decode endpoints have, none does.
func TestHungPrefillsStayOut(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "a:1", Role: RolePrefill}, {Addr: "b:1", Role: RolePrefill}, {Addr: "c:1", Role: RoleDecode}})
	p := s.Pool("p")
	s.Health.Mark(p.Endpoint("a:1"), true, CauseTimeLimit, "")
	s.Health.MarkFailed(p.Endpoint("b:1"))
	s.Health.Mark(p.Endpoint("c:1"), true, CauseTimeLimit, "")
	var v View
	s.View(p, nil, &v)
	for _, c := range v.Endpoints {
		require.Equal(t, c.Endpoint.Addr != "a:1", c.Usable, c.Endpoint.Addr)
	}
}
