package status

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
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
		of := map[string]Output{}
		for _, e := range p.Endpoints {
			of[e.Address] = Output{Rate: e.Rate, PerToken: e.PerToken}
		}
		require.Equal(t, map[string]Output{"p": {Rate: -1}, "d1": {100, 10, 0, 0}, "d2": {Rate: 20}, "silent": {Rate: -1}}, of)
		require.InDelta(t, 120, p.Rate, 1e-9)
		require.InDelta(t, 10, p.PerToken, 1e-9)
		kept := func() int {
			f.mu.Lock()
			defer f.mu.Unlock()
			return len(f.output[outputKey{"chat", "d1"}])
		}
		require.LessOrEqual(t, kept(), keptTotals)

		d1 = kvstate.AnswerCounters{} // a restart
		for range 4 {
			second(true)
		}
		require.InDelta(t, 100, pool().Endpoints[1].Rate, 1e-9)
		for range 22 {
			second(false)
		}
		require.InDelta(t, -1, pool().Rate, 0, "they have reported nothing lately")
		state.SetPool(kvstate.PoolSpec{Name: "chat"}, nil)
		second(false)
		require.Zero(t, kept())
	})
}
