package faults

import (
	"log/slog"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
)

// A stream that is shorter than any complete one is a KV load that failed, unless Tandem itself has refused it (kv_outdated):
// its short error is not D's, whose pair goes on.
func TestARefusalOfTandemsIsNoFailedLoad(t *testing.T) {
	for outdated, fails := range map[bool]bool{false: true, true: false} {
		state := kvstate.New(kvstate.Options{})
		state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
			{Addr: "p1", Role: kvstate.RolePrefill}, {Addr: "d1", Role: kvstate.RoleDecode},
		})
		log := slog.New(slog.DiscardHandler)
		s := Faults{State: state, Log: log,
			Observer: telemetry.NewObserver(telemetry.NewMetrics(prometheus.NewRegistry(), state), log)}
		leg := &kvtransfer.Ticket{Stage: kvtransfer.DecodeLeg, Pool: "chat", Prefill: "p1", Decode: "d1", Loads: true, LeastBytes: 200}
		s.DecodeEnded(leg, &ended.Pass{Status: 200, Outdated: outdated, Answered: ended.Answered{Body: 100}})
		var v kvstate.View
		state.View(state.Pool("chat"), nil, &v)
		failed := false
		for i := range v.Endpoints {
			failed = failed || v.Endpoints[i].Faults != nil
		}
		require.Equal(t, fails, failed, "outdated: %t", outdated)
	}
}
