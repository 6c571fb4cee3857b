package kvstate

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/standstill"
)

// An engine that has requests and whose counters stand still is out, although it answers its health checks and the
// other replicas say that it is good; it is back when its counters move.
func TestStandingEngineIsOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var causes []HealthCause
		s := New(Options{HealthChanged: func(_ *Endpoint, _ bool, c HealthCause, _ string) { causes = append(causes, c) }})
		s.SetPool(PoolSpec{Name: "p", Models: []string{"*"}}, []EndpointSpec{{Addr: "10.0.0.1:1", Role: RoleDecode}})
		e := s.Pool("p").Endpoints()[0]
		scrape := func(work int64) {
			time.Sleep(2 * time.Second)
			s.Observe(e, Signals{Running: 0, Waiting: 0, Work: work, At: time.Now()})
		}
		scrape(7)
		s.Bookings.Reserve(e, Booking{For: RoleDecode, PromptTokens: 10})
		for range 5 {
			scrape(7)
		}
		require.True(t, e.Failed())
		require.Equal(t, CauseStill, s.Health.FailedBy(e))
		require.True(t, s.Health.StandsStill(e))
		require.False(t, s.Health.MarkHealthy(e), "/health says nothing of the core")
		require.False(t, s.Health.MarkGood(e), "nor does the 200 of a stream")
		s.Health.ApplyFailed(e, false, false)
		require.True(t, e.Failed())
		time.Sleep(time.Minute)
		require.True(t, e.Failed())
		require.False(t, s.Health.StandsStill(e), "its metrics do not answer either")
		scrape(8)
		require.False(t, e.Failed())
		require.Equal(t, []HealthCause{CauseStill, CauseStill}, causes)
	})
}

// KV is outdated where the engine that was to fetch it stood for half of the lease, or for a few seconds in which the
// engine that held it freed some.
func TestOutdated(t *testing.T) {
	for name, tt := range map[string]struct {
		stands  time.Duration // the decode engine
		expired int64         // KV that the prefill engine freed meanwhile
		lease   time.Duration
		want    standstill.Reason
	}{
		"nothing happened":         {2 * time.Second, 0, 0, ""},
		"a client left":            {2 * time.Second, 1, 0, ""},
		"stood for a moment":       {10 * time.Second, 0, 0, ""},
		"stood while leases ended": {10 * time.Second, 1, 0, standstill.Expired},
		"stood for too long":       {36 * time.Second, 0, 0, standstill.StoodStill},
		"with a longer lease":      {36 * time.Second, 0, 2 * time.Minute, ""},
		"with a shorter one":       {5 * time.Second, 0, 6 * time.Second, standstill.StoodStill},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := New(Options{})
				var told int64
				s.OnExpired(func(_ *Endpoint, n int64) { told += n })
				s.SetPool(PoolSpec{Name: "p", Models: []string{"*"}, HandOver: standstill.HandOver{Lease: tt.lease}}, []EndpointSpec{
					{Addr: "10.0.0.1:1", Role: RolePrefill}, {Addr: "10.0.0.2:1", Role: RoleDecode}})
				p, d := s.Pool("p").Endpoints()[0], s.Pool("p").Endpoints()[1]
				scrape := func(work, expired int64) {
					s.Observe(p, Signals{Running: 0, Work: work, Expired: expired, At: time.Now()})
					s.Observe(d, Signals{Running: 1, Work: work, At: time.Now()})
				}
				scrape(1, 5)
				time.Sleep(2 * time.Second)
				scrape(2, 5)
				since := time.Now()
				require.Empty(t, s.Outdated(p, d, since))
				time.Sleep(tt.stands)
				scrape(2, 5+tt.expired)
				time.Sleep(time.Second)
				require.Equal(t, tt.want, s.Outdated(p, d, since))
				require.Equal(t, tt.expired, told)
				time.Sleep(time.Second)
				scrape(3, 5+tt.expired)
				require.Equal(t, tt.want, s.Outdated(p, d, since), "it has gone on, and others ask later")
				require.Empty(t, s.Outdated(p, d, time.Now()), "a later request")
			})
		})
	}
}
