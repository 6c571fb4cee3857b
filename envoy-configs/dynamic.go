package envoyconfigs

import (
	"iter"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	runtimev3 "github.com/envoyproxy/go-control-plane/envoy/service/runtime/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// Resources are what Envoys get over xDS (docs/adr/0035): the model in pieces that can change one by one.
//
// They have every scheme and every leg, whether a pool needs it or not: so a change of pools changes nothing here,
// and a replica that decides for a new pool finds what it needs in every Envoy. The clusters of Tandem are those for
// several replicas, whose endpoints come apart: replacing such a cluster would cut the streams of requests that are
// being decided.
type Resources struct {
	Clusters  []*clusterv3.Cluster
	Endpoints []*endpointv3.ClusterLoadAssignment
	Listeners []*listenerv3.Listener
	Routes    []*routev3.RouteConfiguration
	Secrets   []*tlsv3.Secret
	Runtimes  []*runtimev3.Runtime
}

// All are the resources with the URLs of their types.
func (r *Resources) All() iter.Seq2[string, proto.Message] {
	return func(yield func(string, proto.Message) bool) {
		_ = each(r.Clusters, yield) && each(r.Endpoints, yield) && each(r.Listeners, yield) && each(r.Routes,
			yield) && each(r.Secrets, yield) && each(r.Runtimes, yield)
	}
}

func each[M proto.Message](of []M, yield func(string, proto.Message) bool) bool {
	for _, m := range of {
		if !yield("type.googleapis.com/"+string(m.ProtoReflect().Descriptor().FullName()), m) {
			return false
		}
	}
	return true
}

// Dynamic makes the resources for a configuration that was loaded by configv1. living are the replicas if they are not
// those of the configuration.
func Dynamic(c *configv1.Config, living ...Replica) (*Resources, error) {
	m, err := newModel(c, true, living...)
	if err != nil {
		return nil, err
	}
	out := &Resources{
		Clusters:  clusters(m).all(),
		Endpoints: m.assignments(),
		Listeners: append([]*listenerv3.Listener{listeners(m).main()}, legs(m).all()...),
		Routes:    []*routev3.RouteConfiguration{routes(m).configuration()},
		Secrets:   append(m.Servers.TLS.secrets(extProcTLS), m.Engines.TLS.secrets(endpointTLS)...),
		Runtimes:  m.runtime(),
	}
	return out, m.err
}

// DynamicBootstrap prints the bootstrap of an Envoy that gets everything else from Tandem.
func DynamicBootstrap(c *configv1.Config) ([]byte, error) {
	m, err := newModel(c, true)
	if err != nil {
		return nil, err
	}
	b := m.frame()
	b.StaticResources = &bootstrapv3.Bootstrap_StaticResources{Clusters: []*clusterv3.Cluster{clusters(m).xdsCluster()}}
	m.showStats(b.StaticResources)
	b.DynamicResources = noted(m, &bootstrapv3.Bootstrap_DynamicResources{
		AdsConfig: &corev3.ApiConfigSource{
			ApiType: corev3.ApiConfigSource_DELTA_GRPC, TransportApiVersion: corev3.ApiVersion_V3,
			SetNodeOnFirstMessageOnly: true,
			GrpcServices:              []*corev3.GrpcService{grpcTo("tandem-xds")},
		},
		CdsConfig: waiting(), LdsConfig: waiting(),
	}, notes{"cds_config": "Envoy waits until a replica is up, and is not ready before."})
	if config.ReplicasFromRedis(c) {
		b.LayeredRuntime = noted(m, layeredRuntime(), notes{"": "Which replicas are sent the access log."})
	}
	m.note(b, notes{"node": "Give each Envoy an id of its own (envoy --service-node NAME): logs and `tandem status` name it."})
	const overview = `Envoy for Tandem, which gets all else from Tandem (xDS). Written by ` + "`tandem envoy --xds`" + `; needs Envoy 1.37.5, 1.38.3, 1.39 or newer.`
	return m.print(overview, b)
}

// ads is the source of resources that other resources name.
func ads() *corev3.ConfigSource {
	return &corev3.ConfigSource{
		ResourceApiVersion:    corev3.ApiVersion_V3,
		ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
	}
}

// waiting is ads, but Envoy waits for the first of the resources without a limit.
func waiting() *corev3.ConfigSource {
	source := ads()
	source.InitialFetchTimeout = durationpb.New(0)
	return source
}

// xdsCluster is all replicas, as the bootstrap knows them.
func (m clusters) xdsCluster() *clusterv3.Cluster {
	h := m.Servers.ExtProcs
	h.Cluster = "tandem-xds"
	c := noted(m, cluster(h), notes{
		"": "Replicas to ask for the configuration: one that answers is enough. A name that stands for all of " +
			"them outlives their addresses.",
	})
	c.TypedExtensionProtocolOptions = m.http2Options(10*time.Second, 5*time.Second)
	c.TransportSocket = m.tls(m.Servers.TLS, "")
	return c
}

// apart makes the endpoints of a cluster a resource of their own, if they are addresses.
func (m clusters) apart(c *clusterv3.Cluster, h hosts) {
	if !m.Dynamic || h.ByName() {
		return
	}
	c.ClusterDiscoveryType = &clusterv3.Cluster_Type{Type: clusterv3.Cluster_EDS}
	c.EdsClusterConfig = &clusterv3.Cluster_EdsClusterConfig{EdsConfig: ads()}
	c.IgnoreHealthOnHostRemoval = true
	c.LoadAssignment = nil
}

// assignments returns those resources.
func (s *settings) assignments() (out []*endpointv3.ClusterLoadAssignment) {
	for _, h := range []hosts{s.Servers.ExtProcs, s.Servers.Replans} {
		if !h.ByName() {
			out = append(out, assignment(h))
		}
	}
	if s.Servers.Slots {
		for _, h := range s.Servers.AccessLogs {
			out = append(out, assignment(h))
		}
	}
	return out
}
