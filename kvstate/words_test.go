package kvstate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// fleetOfBoth returns a pool of endpoints that serve both legs.
func fleetOfBoth(t *testing.T, now *time.Time, addrs ...string) (*State, *Pool) {
	t.Helper()
	s := New(Options{Now: func() time.Time { return *now }})
	var eps []EndpointSpec
	for _, a := range addrs {
		eps = append(eps, EndpointSpec{Addr: a, Role: RoleBoth})
	}
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, eps)
	return s, s.Pool("chat")
}

// Words decide what endpoints are used for, and so how many there are of each role. Without a usable endpoint of one
// word the others serve both legs.
func TestWords(t *testing.T) {
	now := time.Unix(1e9, 0)
	s, p := fleetOfBoth(t, &now, "a", "b", "c")
	var v View
	used := func() (out []Role) {
		s.View(p, nil, &v)
		for i := range v.Endpoints {
			out = append(out, v.Endpoints[i].Used())
		}
		return out
	}
	require.Equal(t, []Role{RoleBoth, RoleBoth, RoleBoth}, used())
	require.Equal(t, [2]int{3, 3}, [2]int{v.Load.Prefills, v.Load.Decodes})

	require.True(t, s.SetWord(p.Endpoint("a"), RolePrefill))
	require.False(t, s.SetWord(p.Endpoint("a"), RolePrefill), "it has that word")
	require.True(t, s.SetWord(p.Endpoint("b"), RoleDecode))
	require.True(t, s.SetWord(p.Endpoint("c"), RoleDecode))
	require.Equal(t, []Role{RolePrefill, RoleDecode, RoleDecode}, used())
	require.Equal(t, [2]int{1, 2}, [2]int{v.Load.Prefills, v.Load.Decodes})

	s.Health.MarkFailed(p.Endpoint("a"))
	require.Equal(t, []Role{RoleBoth, RoleBoth, RoleBoth}, used(), "the others compute prompts, too")
	require.Equal(t, [2]int{2, 2}, [2]int{v.Load.Prefills, v.Load.Decodes})
	require.Equal(t, RolePrefill, p.Endpoint("a").Word(), "the words are kept")

	s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, []EndpointSpec{{Addr: "a", Role: RoleBoth, Zone: "z"}, {Addr: "b", Role: RolePrefill}})
	require.Equal(t, RolePrefill, s.Pool("chat").Endpoint("a").Word(), "with a new spec, too")
	require.False(t, s.SetWord(s.Pool("chat").Endpoint("b"), RoleDecode), "its role is fixed")
	require.Zero(t, s.Pool("chat").Endpoint("b").Word())
}

// What may come to an endpoint in pass 2 does not count while its word is prefill: pass 2 sends it elsewhere. What it
// answers already counts, whatever its word, at other replicas as well.
func TestNeedOfWords(t *testing.T) {
	now := time.Unix(1e9, 0)
	s, p := fleetOfBoth(t, &now, "a", "b")
	a, b := p.Endpoint("a"), p.Endpoint("b")
	need := func() int64 {
		var v View
		s.View(p, nil, &v)
		require.Equal(t, v.Endpoints[0].Room, a.Booked(now).Room)
		return v.Endpoints[0].Room.Need
	}
	s.Bookings.Reserve(a, Booking{For: RoleDecode, PromptTokens: 640, Need: 1280, From: b, Tentative: true})
	require.EqualValues(t, 1280, need())
	s.SetWord(a, RolePrefill)
	require.Zero(t, need())
	answer := s.Bookings.Reserve(a, Booking{For: RoleDecode, PromptTokens: 64, Need: 128, From: b})
	require.EqualValues(t, 128, need())
	s.Bookings.Release(answer)
	require.Zero(t, need())
	s.SetWord(a, RoleDecode)
	require.EqualValues(t, 1280, need())
}

// Prompts that an endpoint computes for others count in the share of its time that prompts take, and those that run
// beside answers teach no speed.
func TestPromptsBesideAnswers(t *testing.T) {
	now := time.Unix(1e9, 0)
	s, p := fleetOfBoth(t, &now, "a", "b")
	prompt := func(addr string, took time.Duration) {
		id := s.Bookings.Reserve(p.Endpoint(addr), Booking{For: RolePrefill, PromptTokens: 8000, Uncached: 8000, Work: time.Second})
		now = now.Add(took)
		s.Bookings.Complete(id)
	}
	var v View
	for range 30 {
		prompt("a", time.Second)
	}
	s.View(p, nil, &v)
	require.InDelta(t, .9, v.Endpoints[0].Share, .1)
	require.Zero(t, v.Endpoints[1].Share)
	require.InDelta(t, 1, v.Load.Speed, .01)

	s.Bookings.Reserve(p.Endpoint("a"), Booking{For: RoleDecode, PromptTokens: 100})
	for range 30 {
		prompt("a", 3*time.Second)
	}
	s.View(p, nil, &v)
	require.InDelta(t, 1, v.Load.Speed, .01, "its steps were longer")
}

// Where endpoints serve both legs, all prompts are work of all of them.
func TestUtilisationOfBoth(t *testing.T) {
	now := time.Unix(1e9, 0)
	s, p := fleetOfBoth(t, &now, "a", "b")
	s.Bookings.Reserve(p.Endpoint("a"), Booking{For: RolePrefill, Work: 4 * time.Second})
	s.Bookings.Reserve(p.Endpoint("b"), Booking{For: RoleBoth, Work: 2 * time.Second})
	var v View
	s.View(p, nil, &v)
	all := v.Load.Prefill
	require.Positive(t, all)
	require.InDelta(t, all, v.Load.Local, 1e-9)
	s.SetWord(p.Endpoint("a"), RolePrefill)
	s.SetWord(p.Endpoint("b"), RoleDecode)
	s.View(p, nil, &v)
	require.InDelta(t, 4./6*2*all, v.Load.Prefill, 1e-9)
	require.InDelta(t, 2./6*2*all, v.Load.Local, 1e-9)
}
