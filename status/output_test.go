package status

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/status/written"
)

// Rates are of the last minute: of what engines count, from a restart anew, and none where an engine reports nothing lately.
func TestOutput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state := kvstate.New(kvstate.Options{})
		state.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{
			{Addr: "p", Role: kvstate.RolePrefill}, {Addr: "d1", Role: kvstate.RoleDecode}, {Addr: "d2", Role: kvstate.RoleDecode}, {Addr: "silent", Role: kvstate.RoleDecode}})
		f := NewFeed(Source{State: state, Totals: func() telemetry.Totals { return telemetry.Totals{} }})
		pool := func() Pool { return f.pool(state.Pool("chat")) }
		go f.Run(t.Context())
		time.Sleep(500 * time.Millisecond) // engines report between two samples
		var d1, d2 kvstate.AnswerCounters
		second := func(observe bool) {
			time.Sleep(time.Second)
			d1.Generated, d1.Gaps, d1.GapTime = d1.Generated+100, d1.Gaps+90, d1.GapTime+900*time.Millisecond
			d2.Tokens, d2.Answers = d2.Tokens+20, d2.Answers+1 // one that counts finished answers alone
			for addr, w := range map[string]kvstate.AnswerCounters{"p": d1, "d1": d1, "d2": d2, "silent": {}} {
				if observe {
					state.Observe(state.Pool("chat").Endpoint(addr), kvstate.Signals{Running: 1, Answers: w, At: time.Now()})
				}
			}
			synctest.Wait()
		}
		second(true)
		require.InDelta(t, -1, pool().Rate, 0, "nothing to compare with")
		for range 300 {
			second(true)
		}
		p := pool()
		of := map[string]written.Output{}
		for _, e := range p.Endpoints {
			of[e.Address] = written.Output{Rate: e.Rate, PerToken: e.PerToken}
		}
		require.Equal(t, map[string]written.Output{"p": {Rate: -1}, "d1": {Rate: 100, PerToken: 10}, "d2": {Rate: 20}, "silent": {Rate: -1}}, of)
		require.InDelta(t, 120, p.Rate, 1e-9)
		require.InDelta(t, 10, p.PerToken, 1e-9)

		d1 = kvstate.AnswerCounters{} // a restart
		for range 4 {
			second(true)
		}
		require.InDelta(t, 100, pool().Endpoints[1].Rate, 1e-9)
		for range 22 {
			second(false)
		}
		require.InDelta(t, -1, pool().Rate, 0, "they have reported nothing lately")
	})
}

// An engine that restarts counts from 0, whether Tandem sees the 0 or not; what the former process wrote is not shown
// then, and that it writes nothing is stated after a minute only.
func TestOutputAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state := kvstate.New(kvstate.Options{})
		state.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "d", Role: kvstate.RoleDecode}})
		f := NewFeed(Source{State: state, Totals: func() telemetry.Totals { return telemetry.Totals{} }})
		engine := state.Pool("chat").Endpoint("d")
		go f.Run(t.Context())
		time.Sleep(500 * time.Millisecond)
		after := func(seconds int, tokens int64) float64 { // it reports so much each 2 s
			for range seconds / 2 {
				time.Sleep(2 * time.Second)
				g := kvstate.UnknownSignals()
				g.Running, g.Waiting, g.At = 0, 0, time.Now()
				took := time.Duration(tokens) * 5 * time.Millisecond
				g.Answers = kvstate.AnswerCounters{Generated: tokens, Gaps: tokens, GapTime: took}
				state.Observe(engine, g)
			}
			time.Sleep(time.Second)
			synctest.Wait()
			e := f.pool(state.Pool("chat")).Endpoints[0]
			require.Equal(t, e.Rate > 0, e.PerToken > 0)
			return e.Rate
		}
		require.InDelta(t, -1, after(10, 0), 0, "it may report none")
		require.InDelta(t, 150./10, after(2, 150), 5, "its first answers count")
		require.Positive(t, after(50, 9000))
		require.InDelta(t, -1, after(2, 0), 0, "a new process, which has written nothing")
		require.InDelta(t, 150./5, after(2, 150), 15)
		require.Positive(t, after(40, 9000))
		require.InDelta(t, 150./3, after(2, 150), 15, "one whose 0 was not seen")
		require.InDelta(t, 0, after(90, 150), 0, "a minute without a token")
		require.Positive(t, after(2, 9000))
		require.True(t, state.Health.Mark(engine, false, kvstate.CauseCheck, ""))
		require.InDelta(t, -1, after(10, 9000), 0, "it is out, and what it wrote is of the past")
	})
}

// A replica that has just started knows less of the last minute than another one, whose figures are shown.
func TestOutputOfTheReplicaThatKnowsMore(t *testing.T) {
	all := []written.Output{{Rate: -1}, {Rate: 3, PerToken: 9, Seconds: 4}, {Rate: 12, PerToken: 5, Seconds: 60}, {Rate: -1}}
	e, s := Endpoint{Output: all[0]}, Status{}
	for _, o := range all {
		e.add(&Endpoint{Output: o})
		s.addPool(&Pool{Name: "chat", Output: o, Endpoints: []Endpoint{{Address: "d", Output: o}}})
	}
	for _, o := range []written.Output{e.Output, s.Pools[0].Output, s.Pools[0].Endpoints[0].Output} {
		require.Equal(t, all[2], o)
	}
}
