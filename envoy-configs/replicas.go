package envoyconfigs

import (
	"strconv"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	runtimev3 "github.com/envoyproxy/go-control-plane/envoy/service/runtime/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// Replicas that come and go by themselves (envoy.replicas: redis) change no listener. A listener that is replaced lets
// its connections go on, with the access logs that it had: a replica that came later would not learn of the ends of
// requests on them. So every listener has a log for each of MaxReplicas slots, and Envoy's runtime (RTDS) names which
// slots are in use. A replica keeps its slot for as long as it lives, because Envoy keeps a log's stream open.

// MaxReplicas is the number of slots.
const MaxReplicas = 16

// Replica is a living replica.
type Replica struct {
	Slot            int // 0 to MaxReplicas - 1; no other replica has it
	ExtProc, Replan string
}

func addresses(living []Replica) (extProcs, replans []string) {
	for _, r := range living {
		extProcs, replans = append(extProcs, r.ExtProc), append(replans, r.Replan)
	}
	return extProcs, replans
}

// slots returns the servers of the slots; at are the replicas' addresses.
func slots(living []Replica, at []address) []hosts {
	out := make([]hosts, MaxReplicas)
	for i := range out {
		out[i].Cluster = "tandem-accesslog-slot-" + strconv.Itoa(i)
	}
	for i, r := range living {
		out[r.Slot].Hosts = []address{at[i]}
	}
	return out
}

func slotKey(i int) string { return "tandem.slots." + strconv.Itoa(i) }

// inUse holds where a slot is in use. An Envoy without the runtime layer sends to all slots, and the empty ones fail.
func inUse(slot int) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_RuntimeFilter{
		RuntimeFilter: &accesslogv3.RuntimeFilter{
			RuntimeKey: slotKey(slot), PercentSampled: &typev3.FractionalPercent{Numerator: 100},
			UseIndependentRandomness: true, // the percentages are 0 and 100: cheaper than the request's id
		},
	}}
}

// runtimeLayer is the name of the runtime that Envoys with slots get.
const runtimeLayer = "tandem"

// runtime names the slots in use.
func (s *settings) runtime() []*runtimev3.Runtime {
	if !s.Servers.Slots {
		return nil
	}
	layer := &structpb.Struct{Fields: map[string]*structpb.Value{}}
	for i, slot := range s.Servers.AccessLogs {
		layer.Fields[slotKey(i)] = structpb.NewNumberValue(float64(100 * len(slot.Hosts)))
	}
	return []*runtimev3.Runtime{{Name: runtimeLayer, Layer: layer}}
}

// layeredRuntime has an Envoy get its runtime from Tandem.
func layeredRuntime() *bootstrapv3.LayeredRuntime {
	return &bootstrapv3.LayeredRuntime{Layers: []*bootstrapv3.RuntimeLayer{{
		Name: runtimeLayer,
		LayerSpecifier: &bootstrapv3.RuntimeLayer_RtdsLayer_{RtdsLayer: &bootstrapv3.RuntimeLayer_RtdsLayer{
			Name: runtimeLayer, RtdsConfig: ads(),
		}},
	}}}
}
