package kvstate

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A session is remembered while it is in use, and not long after; of many, the oldest are forgotten.
func TestSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{SessionTTL: time.Minute, MaxSessions: 8})
		s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "a", Role: RoleBoth}, {Addr: "b", Role: RoleBoth}})
		p := s.Pool("p")
		a, b := p.Endpoint("a"), p.Endpoint("b")
		at := func(name uint64) [2]Role {
			var v View
			s.View(p, nil, &v)
			s.Sessions.MarkSession(p, name, &v)
			return [2]Role{v.Endpoints[0].Session, v.Endpoints[1].Session}
		}
		require.Equal(t, [2]Role{}, at(1))
		s.Sessions.SetAffinity(p, 1, a, nil)
		require.Equal(t, [2]Role{RolePrefill, 0}, at(1))
		s.Sessions.SetAffinity(p, 1, nil, b)
		require.Equal(t, [2]Role{RolePrefill, RoleDecode}, at(1), "prefill stays when decode is told")
		s.Sessions.SetAffinity(p, 1, b, b)
		require.Equal(t, [2]Role{0, RoleBoth}, at(1))
		require.Equal(t, [2]Role{}, at(2))

		for range 10 { // in use
			time.Sleep(40 * time.Second)
			s.sweep(time.Now())
			require.Equal(t, [2]Role{0, RoleBoth}, at(1))
			s.Sessions.SetAffinity(p, 1, b, b)
		}
		time.Sleep(3 * time.Minute)
		s.sweep(time.Now())
		s.sweep(time.Now().Add(2 * time.Minute))
		require.Equal(t, [2]Role{}, at(1), "not in use any more")

		for name := range uint64(100) {
			s.Sessions.SetAffinity(p, name+10, a, a)
		}
		require.Equal(t, [2]Role{RoleBoth, 0}, at(109))
		require.Equal(t, [2]Role{}, at(10))
		require.LessOrEqual(t, len(s.Sessions.sessions.served.now)+len(s.Sessions.sessions.served.old), 8)

		s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "b", Role: RoleBoth}})
		p = s.Pool("p")
		require.Equal(t, [2]Role{}, func() [2]Role {
			var v View
			s.View(p, nil, &v)
			s.Sessions.MarkSession(p, 109, &v)
			return [2]Role{v.Endpoints[0].Session}
		}(), "its endpoint has left")
	})
}
