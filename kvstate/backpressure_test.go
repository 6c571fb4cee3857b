package kvstate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A full endpoint gets nothing for as long as it asks, and then at once.
func TestMarkFull(t *testing.T) {
	now := time.Unix(1000, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{
		{Name: "10.0.1.1", Addr: "p1", Role: RolePrefill}, {Name: "10.0.2.1", Addr: "d1", Role: RoleDecode},
	})
	p := s.Pool("p")
	d := p.Endpoint("d1")
	usable := func() bool {
		var v View
		s.View(p, nil, &v)
		require.NotEqual(t, v.Endpoints[1].Usable, v.Endpoints[1].Full)
		return v.Endpoints[1].Usable
	}
	require.True(t, usable())
	require.Empty(t, d.Refusing(now))
	for _, step := range []struct {
		wait  time.Duration // since the step before
		after time.Duration // Retry-After
		isNew bool
		pause time.Duration // from then on
		says  string
	}{
		{0, 0, true, 250 * time.Millisecond, "10.0.2.1 answers 503, tried again in 0.25 s"},
		{100 * time.Millisecond, 0, false, 250 * time.Millisecond, "10.0.2.1 answers 503, tried again in 0.25 s"},
		{time.Second, 0, true, 500 * time.Millisecond, "10.0.2.1 answers 503, tried again in 0.5 s"},
		{time.Second, 0, true, time.Second, "10.0.2.1 answers 503, tried again in 1 s"},
		{time.Second, 0, true, time.Second, "10.0.2.1 answers 503, tried again in 1 s"},
		{time.Minute, 0, true, 250 * time.Millisecond, "10.0.2.1 answers 503, tried again in 0.25 s"},
		{time.Second, 2 * time.Second, true, 2 * time.Second, "10.0.2.1 answers 503, tried again in 2 s"},
		{time.Second, 0, false, time.Second, "10.0.2.1 answers 503, tried again in 1 s"},
		{time.Minute, time.Hour, true, 30 * time.Second, "10.0.2.1 answers 503, tried again in 30 s"},
	} {
		now = now.Add(step.wait)
		require.Equal(t, step.isNew, s.Health.MarkFull(d, 503, step.after), "%+v", step)
		require.Equal(t, step.says, d.Refusing(now))
		left, status := d.FullFor(now)
		require.Equal(t, step.pause, left)
		require.Equal(t, 503, status)
		require.False(t, usable(), "%+v", step)
	}
	now = now.Add(30 * time.Second)
	require.True(t, usable())
	require.False(t, d.Failed(), "full is not failed")

	s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "d1", Role: RoleDecode}, {Addr: "d2", Role: RoleDecode}})
	p = s.Pool("p")
	s.Health.MarkFailed(p.Endpoint("d2"))
	s.Health.MarkFull(p.Endpoint("d1"), 429, 0)
	var v View
	s.View(p, nil, &v)
	require.False(t, v.Endpoints[1].Usable, "one that is full works: a failed one is not tried for that")
}
