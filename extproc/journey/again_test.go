package journey

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// A decode endpoint that stood still until its KV may have been outdated has not failed a request which no other
// endpoint can serve.
func TestStandingIsNoFailureWithoutAnother(t *testing.T) {
	for name, tt := range map[string]struct {
		stands  time.Duration
		other   bool // works
		loads   bool
		failure faults.Failure
		dies    bool
		want    bool
	}{
		"it is the only one":       {stands: 16 * time.Second, loads: true, want: true},
		"another one works":        {stands: 16 * time.Second, loads: true, other: true},
		"its KV is good":           {stands: 10 * time.Second, loads: true},
		"it fetches nothing":       {stands: 16 * time.Second},
		"it answered with a 500":   {stands: 16 * time.Second, loads: true, failure: faults.Failure{Status: 500}},
		"there is no connection":   {stands: 16 * time.Second, loads: true, failure: faults.Failure{Unreached: true}},
		"it exceeded a time limit": {stands: 16 * time.Second, loads: true, failure: faults.Failure{Overdue: true}},
		"it failed before":         {stands: 16 * time.Second, loads: true, dies: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				state := kvstate.New(kvstate.Options{})
				state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
					{Addr: "p1:1", Role: kvstate.RolePrefill}, {Addr: "d1:1", Role: kvstate.RoleDecode},
					{Addr: "d2:1", Role: kvstate.RoleDecode},
				})
				s := &Shared{Passes: pass.New(pass.Options{State: state})}
				s.Passes.Apply(pass.Settings{Pools: map[string]pass.Policy{
					"chat": {Policy: plan.Policy{Dialect: kvtransfer.Named("nixl")}},
				}})
				d := state.Pool("chat").Endpoint("d1:1")
				scrape := func(work int64) {
					state.Observe(d, kvstate.Signals{Running: 1, Work: work, At: time.Now()})
				}
				scrape(2)
				time.Sleep(2 * time.Second)
				scrape(3)
				if !tt.other {
					state.Health.MarkFailed(state.Pool("chat").Endpoint("d2:1"))
				}
				if tt.dies {
					state.Health.MarkFailed(d)
				}
				leg := &kvtransfer.Ticket{Stage: kvtransfer.DecodeLeg, Pool: "chat", Prefill: "p1:1", Decode: "d1:1", Loads: tt.loads}
				leg.Expires = time.Now().Add(s.Passes.Limits.TicketTTL)
				for range tt.stands / (2 * time.Second) {
					time.Sleep(2 * time.Second)
					scrape(3)
				}
				require.Equal(t, tt.want, s.waitsFor(leg, &tt.failure))
			})
		})
	}
}
