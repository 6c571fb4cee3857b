package kvstate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/kvloads"
)

// loadFleet returns a state with two endpoints of each role, whose clock the test moves.
func loadFleet(t *testing.T) (s *State, p *Pool, pass func(time.Duration), faults func(addr string) *LoadFaults) {
	now := time.Unix(1_700_000_000, 0)
	s = New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "m"}, []EndpointSpec{
		{Addr: "p1", Role: RolePrefill}, {Addr: "p2", Role: RolePrefill}, {Addr: "d1", Role: RoleDecode}, {Addr: "d2", Role: RoleDecode},
	})
	p = s.Pool("m")
	pass = func(d time.Duration) {
		now = now.Add(d)
		p.sweepLoads(now)
	}
	var v View
	faults = func(addr string) *LoadFaults {
		s.View(p, nil, &v)
		for _, c := range v.Endpoints {
			if c.Endpoint.Addr == addr {
				return c.Faults
			}
		}
		t.Fatal(addr)
		return nil
	}
	return s, p, pass, faults
}

func TestLoadFailureIsThePairsFirst(t *testing.T) {
	s, p, _, faults := loadFleet(t)
	require.True(t, s.KVLoads.LoadFailed(p, "p1", "d1"))
	require.False(t, s.KVLoads.LoadFailed(p, "p1", "d1"), "one that was under way")
	require.True(t, faults("p1").Avoids("d1"))
	require.False(t, faults("p1").Avoids("d2"))
	require.False(t, faults("p1").Excludes(RolePrefill))
	require.Nil(t, faults("d1"))

	require.True(t, s.KVLoads.LoadFailed(p, "p1", "d2"))
	require.True(t, faults("p1").Excludes(RolePrefill), "a second decode endpoint failed with it")
	require.True(t, s.KVLoads.LoadFailed(p, "p2", "d1"))
	require.False(t, faults("d1").Excludes(RoleDecode), "of its two failures one is p1's")
}

func TestLoadFailureOfADecodeEndpoint(t *testing.T) {
	s, p, _, faults := loadFleet(t)
	s.KVLoads.LoadFailed(p, "p1", "d1")
	s.KVLoads.LoadFailed(p, "p2", "d1")
	require.True(t, faults("d1").Excludes(RoleDecode))
	require.False(t, faults("p1").Excludes(RolePrefill))
	require.Nil(t, faults("d2"))
}

// TestLoadTrial: one request makes a pair eligible again, at first one that is not streamed.
func TestLoadTrial(t *testing.T) {
	s, p, pass, faults := loadFleet(t)
	trials := func(addr string) *LoadFaults {
		v := View{}
		s.View(p, nil, &v)
		for _, c := range v.Endpoints {
			if c.Endpoint.Addr == addr && c.Faults != nil {
				return c.Faults.Trial
			}
		}
		return nil
	}
	one, two := [16]byte{1}, [16]byte{2}
	s.KVLoads.LoadFailed(p, "p1", "d1")
	s.KVLoads.ClaimTrial(p, "p1", "d1", one)
	require.False(t, p.LoadTrial("p1", "d1", one), "too soon")
	require.True(t, trials("p1").Avoids("d1"))
	pass(kvloads.Pause)
	require.True(t, faults("p1").Avoids("d1"), "for a streamed request")
	require.False(t, trials("p1").Avoids("d1"))
	s.KVLoads.ClaimTrial(p, "p1", "d1", one)
	require.True(t, p.LoadTrial("p1", "d1", one))
	require.False(t, p.LoadTrial("p1", "d1", two))
	require.True(t, trials("p1").Avoids("d1"), "one at a time")
	require.True(t, s.KVLoads.LoadFailed(p, "p1", "d1"), "it still fails")
	pass(kvloads.Pause)
	require.True(t, trials("p1").Avoids("d1"), "for twice as long")
	pass(kvloads.Pause)
	require.False(t, trials("p1").Avoids("d1"))
	pass(2 * kvloads.Pause)
	require.False(t, faults("p1").Avoids("d1"), "nobody else came: a streamed one may")
	s.KVLoads.ClaimTrial(p, "p1", "d1", two)
	require.True(t, p.LoadTrial("p1", "d1", two), "and is alone")
	s.KVLoads.LoadSucceeded(p, "p1", "d1")
	require.Nil(t, faults("p1"))
}

func TestLoadFailuresAreForgotten(t *testing.T) {
	s, p, pass, faults := loadFleet(t)
	s.KVLoads.LoadFailed(p, "p1", "d1")
	s.KVLoads.LoadFailed(p, "p1", "d2")
	s.KVLoads.LoadSucceeded(p, "p1", "d2")
	require.False(t, faults("p1").Excludes(RolePrefill))
	pass(0)
	v := View{}
	s.View(p, nil, &v)
	require.Nil(t, v.Endpoints[0].Faults.Trial, "what others can load may be tried at once")

	e := p.Endpoint("p1")
	s.Health.MarkFailed(e)
	s.Health.MarkGood(e)
	require.Nil(t, faults("p1"), "it is back: it may be another process")

	s.KVLoads.LoadFailed(p, "p1", "d1")
	pass(kvloads.Forgotten + time.Second)
	require.Nil(t, faults("p1"))

	s.KVLoads.LoadFailed(p, "p1", "d1")
	s.SetPool(PoolSpec{Name: "m"}, []EndpointSpec{{Addr: "p1", Role: RolePrefill}})
	s.SetPool(PoolSpec{Name: "m"}, []EndpointSpec{{Addr: "p1", Role: RolePrefill}, {Addr: "d1", Role: RoleDecode}})
	pass(0)
	p = s.Pool("m")
	require.Nil(t, p.Endpoint("p1").LoadFaults(), "d1 was another endpoint then")
}

// TestOneRequestsErrorIsItsOwn: an error of which the engine does not say that it concerns the KV counts against a pair
// only if another request meets it too, with no success between.
func TestOneRequestsErrorIsItsOwn(t *testing.T) {
	s, p, pass, faults := loadFleet(t)
	require.False(t, s.KVLoads.LoadSuspected(p, "p1", "d1", 1))
	require.False(t, s.KVLoads.LoadSuspected(p, "p1", "d1", 1), "the same request, tried again")
	require.Nil(t, faults("p1"))
	s.KVLoads.LoadSucceeded(p, "p1", "d1")
	require.False(t, s.KVLoads.LoadSuspected(p, "p1", "d1", 2), "there was a success")
	pass(kvloads.SuspectTime)
	require.False(t, s.KVLoads.LoadSuspected(p, "p1", "d1", 3), "long ago")
	require.False(t, s.KVLoads.LoadSuspected(p, "p1", "d2", 4), "another pair")
	require.Nil(t, faults("p1"))
	require.True(t, s.KVLoads.LoadSuspected(p, "p1", "d1", 5))
	require.True(t, faults("p1").Avoids("d1"))
	require.False(t, s.KVLoads.LoadSuspected(p, "p1", "d1", 6), "known")
}
