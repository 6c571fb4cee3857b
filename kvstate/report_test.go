package kvstate

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestReportsFit(t *testing.T) {
	for _, tt := range []struct {
		a, b Report
		fits bool
	}{
		{Report{}, Report{}, true},
		{Report{FactBlockSize: "32"}, Report{FactBlockSize: "32"}, true},
		{Report{FactBlockSize: "32"}, Report{FactBlockSize: "64"}, false},
		{Report{FactBlockSize: "32"}, Report{FactDtype: "float16"}, true}, // what is not known hinders nothing
		{Report{FactRanks: "2"}, Report{FactRanks: "4"}, false},
		{Report{FactRankMultiples: "2"}, Report{FactRankMultiples: "4"}, true},
		{Report{FactRankMultiples: "4"}, Report{FactRankMultiples: "2"}, true},
		{Report{FactRankMultiples: "4"}, Report{FactRankMultiples: "6"}, false},
		{Report{FactRankMultiples: "0"}, Report{FactRankMultiples: "many"}, false},
	} {
		require.Equal(t, tt.fits, tt.a.Fits(&tt.b), "%v %v", tt.a, tt.b)
		require.Equal(t, tt.fits, tt.b.Fits(&tt.a), "%v %v", tt.b, tt.a)
		require.True(t, tt.a.Fits(nil))
		require.True(t, (*Report)(nil).Fits(&tt.a))
	}
}

// A new endpoint, one that is back and one whose engine has started anew are not paired before the engine has said what
// it is, for some seconds at most.
func TestReportIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{})
		size := FactsOf(FactBlockSize)
		specs := []EndpointSpec{{Addr: "p:1", Role: RolePrefill}, {Addr: "d:1", Role: RoleDecode}}
		s.SetPool(PoolSpec{Name: "a", Facts: size, Alike: size}, specs)
		s.SetPool(PoolSpec{Name: "none"}, []EndpointSpec{{Addr: "x:1", Role: RoleBoth}})
		p, d := s.Pool("a").Endpoint("p:1"), s.Pool("a").Endpoint("d:1")
		require.False(t, s.AwaitsReport(s.Pool("none").Endpoint("x:1")), "nobody asks it")
		view := func() (v View) {
			s.View(s.Pool("a"), nil, &v)
			return v
		}
		require.True(t, view().Endpoints[0].Awaits)
		require.False(t, view().Uniform)
		s.SetReport(p, Report{FactBlockSize: "32", FactDtype: "half"}, false)
		require.True(t, s.AwaitsReport(p), "it has not said all")
		s.SetReport(p, Report{FactBlockSize: "32", FactDtype: "half"}, true)
		s.SetReport(d, Report{FactBlockSize: "32"}, true)
		require.False(t, s.AwaitsReports())
		require.Same(t, p.Report(), d.Report(), "the pool does not compare what sets them apart")
		require.True(t, view().Uniform)
		s.SetReport(d, Report{FactBlockSize: "64"}, true)
		require.False(t, view().Uniform)
		require.False(t, p.Report().Fits(d.Report()))

		s.Health.MarkFailed(d)
		require.False(t, s.AwaitsReports())
		s.Health.MarkHealthy(d)
		require.True(t, s.AwaitsReport(d))
		time.Sleep(ReportWait)
		require.False(t, s.AwaitsReport(d), "it goes on with what was known")
		require.False(t, p.Report().Fits(d.Report()))

		observe := func(tokens float64) {
			g := UnknownSignals()
			g.At, g.Running, g.Answers = time.Now(), 0, AnswerCounters{Tokens: int64(tokens)}
			s.Observe(p, g)
			time.Sleep(time.Second)
		}
		observe(100)
		observe(200)
		require.False(t, s.AwaitsReport(p))
		observe(10)
		require.True(t, s.AwaitsReport(p), "its counters went back: it was started anew")

		s.SetPool(PoolSpec{Name: "a", Facts: size}, specs) // the operator lets them differ
		require.True(t, s.Pool("a").Endpoint("p:1").Report().Fits(s.Pool("a").Endpoint("d:1").Report()))
		require.Equal(t, "64", s.Pool("a").Endpoint("d:1").Said()[FactBlockSize])
	})
}
