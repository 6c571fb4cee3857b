package status

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
)

// An hour is kept in steps of ten seconds, and no more; what is new comes after the last step that the reader has.
func TestHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var totals telemetry.Totals
		s := kvstate.New(kvstate.Options{})
		s.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "p1:1", Role: kvstate.RolePrefill}, {Addr: "d1:1", Role: kvstate.RoleDecode}})
		p1, d1 := s.Pool("chat").Endpoint("p1:1"), s.Pool("chat").Endpoint("d1:1")
		f := NewFeed(Source{State: s, Totals: func() telemetry.Totals { return totals }, Recent: func(int) []telemetry.Trace { return nil },
			Ready: func() bool { return true }, Sharing: func() Sharing { return Sharing{} }})
		seconds := func(n int, each func(i int)) {
			for i := range n {
				each(i)
				time.Sleep(time.Second)
				f.sample()
			}
		}
		hour := func(after int64) Status { return f.Status(context.Background(), View{Hour: &after}) }
		s.Bookings.Reserve(p1, kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 100})
		seconds(25, func(i int) {
			totals.OK += 2
			totals.Usage.FirstToken[40]++
			waiting := int64(0)
			if i == 13 { // for a second only
				waiting = 7
			}
			s.Observe(d1, kvstate.Signals{Running: 3, Waiting: waiting, KVUsage: .5, KVTokens: -1, At: time.Now()})
		})
		now := hour(0)
		require.Len(t, now.Hour, 2)
		require.Zero(t, now.Hour[0].N%stepSeconds)
		require.Equal(t, now.Hour[0].N+stepSeconds, now.Hour[1].N)
		require.InDelta(t, 2, now.Hour[1].OK, 1e-9)
		require.Positive(t, now.Hour[1].FirstToken99)
		require.Equal(t, []float64{0, 7}, []float64{now.Hour[0].Waiting, now.Hour[1].Waiting}, "the most of ten seconds")
		require.Len(t, now.Hours, 2)
		of := map[string][][3]float64{}
		for _, h := range now.Hours {
			of[h.Address] = h.Steps
		}
		require.Equal(t, [3]float64{float64(now.Hour[1].N), 1, 0}, of["p1:1"][1], "what is booked, for its engine reports nothing")
		require.InDelta(t, 3, of["d1:1"][1][1], 0)
		require.Empty(t, f.Status(context.Background(), View{}).Hour, "nobody asked for it")

		s.Health.MarkFailed(p1)
		s.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "p1:1", Role: kvstate.RolePrefill}})
		seconds(10, func(int) {})
		later := hour(now.Hour[1].N)
		require.Len(t, later.Hour, 1, "only what is new")
		require.Equal(t, []Hour{{"chat", "p1:1", [][3]float64{{float64(later.Hour[0].N), -1, 0}}}}, later.Hours, "out, and the one that left is forgotten")

		seconds(2*keptSteps*stepSeconds, func(int) {})
		require.Len(t, hour(0).Hour, keptSteps)
		require.Len(t, f.hour.of[endpointKey{"chat", "p1:1"}], keptSteps)
		require.LessOrEqual(t, cap(f.hour.steps), 2*keptSteps)
	})
}

// Of replicas' steps rates are summed; what engines report is the same for all.
func TestHoursOfReplicas(t *testing.T) {
	of := func(last int64, queued float64) report {
		r := report{LastStep: last, Seconds: 60, Hours: []Hour{{Pool: "chat"}}}
		for n := last - 20; n <= last; n += stepSeconds {
			r.Hour = append(r.Hour, Point{N: n, OK: 2, Queued: queued, EnginePoint: EnginePoint{Waiting: 5}})
		}
		return r
	}
	s := merge(answers{reports: []report{of(1000, 1), of(990, 2)}}, time.Now(), &Wanted{})
	require.Equal(t, []int64{970, 980, 990}, []int64{s.Hour[0].N, s.Hour[1].N, s.Hour[2].N}, "up to the last that all have")
	require.Equal(t, Point{N: 990, OK: 4, Queued: 3, EnginePoint: EnginePoint{Waiting: 5}}, s.Hour[2])
	require.Len(t, s.Hours, 1, "the asked replica's")
}

// Requests are searched for by whatever their row shows.
func TestSearch(t *testing.T) {
	f := NewFeed(fleet(func() telemetry.Totals { return telemetry.Totals{} }))
	for search, want := range map[string][]string{
		"": {"req-2", "req-1", "req-0\x1b]0;"}, "REQ-1": {"req-1"}, "10.0.1.1": {"req-2", "req-0\x1b]0;"}, "p1 d1": {"req-2", "req-0\x1b]0;"},
		"decode alone": {"req-1"}, "no_prefill": {"req-1"}, "chat d1 req-2": {"req-2"}, "nobody": nil,
	} {
		var ids []string
		for _, t := range f.Status(context.Background(), View{Requests: Wanted{Search: search}}).Recent {
			ids = append(ids, t.RequestID)
		}
		require.Equal(t, want, ids, search)
		traces, _ := f.Requests(context.Background(), Wanted{N: 20, Search: search})
		require.Len(t, traces, len(want), search)
	}
	failed := f.Status(context.Background(), View{Requests: Wanted{Failed: true}})
	require.Len(t, failed.Recent, 1)
	require.NotEmpty(t, failed.Flow, "of all, whatever is searched for")
}
