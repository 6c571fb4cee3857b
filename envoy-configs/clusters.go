package envoyconfigs

import (
	"slices"
	"strings"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	compositev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/clusters/composite/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	internalupstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/internal_upstream/v3"
	rawbufferv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/raw_buffer/v3"
	httpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// all are the clusters that requests, questions to Tandem, logs and spans go to.
func (m clusters) all() []*clusterv3.Cluster {
	out := append([]*clusterv3.Cluster{m.extProcCluster()}, m.accessLogClusters()...)
	out = append(out, m.replanCluster(), m.loopCluster(loop{"tandem-prefill-loop", "prefill-leg"}))
	if m.Tracing != nil {
		otlp := cluster(m.Tracing.Collector)
		otlp.TypedExtensionProtocolOptions = m.grpcOptions()
		out = append(out, otlp)
	}
	for _, l := range m.loops() {
		out = append(out, m.loopCluster(l))
	}
	var composites []*clusterv3.Cluster
	if m.Encodes {
		composites = append(composites, m.composite("tandem-encode", "tandem-encode-loop", m.replanTries()))
	}
	if m.Answers {
		composites = append(composites, m.composite("tandem-answer", "tandem-answer-loop", hedgedTries))
	}
	if m.Pairs {
		composites = append(composites, m.composite("tandem-pair", "tandem-decode-loop", hedgedTries))
	}
	for _, s := range m.Engines.Schemes {
		composites = append(composites, m.composite("tandem-prefill"+s.Suffix, "tandem-prefill-loop", m.replanTries()),
			m.composite("tandem-decode"+s.Suffix, "tandem-pod"+s.Suffix, hedgedTries),
			m.endpoints("tandem-pod", destination, s))
		if m.Pairs {
			composites = append(composites, m.endpoints("tandem-mirror-pod", "x-tandem-prefill-endpoint", s))
		}
	}
	m.note(composites[0],
		notes{"": "Composite clusters: the first try is the hop, those after it are tandem-replan's."})
	return append(out, composites...)
}

// cluster of servers that are configured by address or looked up by name.
func cluster(h hosts) *clusterv3.Cluster {
	c := &clusterv3.Cluster{
		Name: h.Cluster, ConnectTimeout: durationpb.New(time.Second), LoadAssignment: assignment(h),
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
	}
	if h.ByName() {
		c.ClusterDiscoveryType = &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STRICT_DNS}
		c.DnsLookupFamily = clusterv3.Cluster_V4_PREFERRED
	}
	return c
}

func assignment(h hosts) *endpointv3.ClusterLoadAssignment {
	var out []*endpointv3.LbEndpoint
	for _, a := range h.Hosts {
		out = append(out, lbEndpoint(socketAddress(a)))
	}
	return &endpointv3.ClusterLoadAssignment{ClusterName: h.Cluster,
		Endpoints: []*endpointv3.LocalityLbEndpoints{{LbEndpoints: out}}}
}

func lbEndpoint(a *corev3.Address) *endpointv3.LbEndpoint {
	return &endpointv3.LbEndpoint{HostIdentifier: &endpointv3.LbEndpoint_Endpoint{Endpoint: &endpointv3.Endpoint{Address: a}}}
}

// extProcCluster is all replicas.
func (m clusters) extProcCluster() *clusterv3.Cluster {
	c := noted(m, cluster(m.Servers.ExtProcs), notes{
		"lb_policy": "Not in turns: a client by itself would have all its first passes at one of two replicas. Nor " +
			"by least requests: a replica that just died has none, and would be asked first.",
		"per_connection_buffer_limit_bytes": "Not the default of 1 MiB: bodies wait here for the server, and " +
			"where the limit was hit they waited for each other.",
	})
	c.LbPolicy = clusterv3.Cluster_RANDOM
	c.PerConnectionBufferLimitBytes = wrapperspb.UInt32(1 << 30)
	c.CircuitBreakers = unlimited()
	c.TypedExtensionProtocolOptions = m.grpcOptions()
	if m.several() {
		m.watch(c, &corev3.HealthCheck{HealthChecker: &corev3.HealthCheck_GrpcHealthCheck_{
			GrpcHealthCheck: &corev3.HealthCheck_GrpcHealthCheck{ServiceName: "envoy.service.ext_proc.v3.ExternalProcessor"},
		}})
	}
	c.TransportSocket = m.tls(m.Servers.TLS, extProcTLS)
	m.apart(c, m.Servers.ExtProcs)
	return c
}

// accessLogClusters are one for each replica, since each gets every log.
func (m clusters) accessLogClusters() (out []*clusterv3.Cluster) {
	for _, replica := range m.Servers.AccessLogs {
		c := cluster(replica)
		c.CircuitBreakers = unlimited()
		c.TypedExtensionProtocolOptions = m.grpcOptions()
		c.TransportSocket = m.tls(m.Servers.TLS, extProcTLS)
		if m.Servers.Slots {
			m.apart(c, replica)
		}
		out = append(out, c)
	}
	return out
}

// replanCluster is the replan ports of all replicas.
func (m clusters) replanCluster() *clusterv3.Cluster {
	c := cluster(m.Servers.Replans)
	c.PerConnectionBufferLimitBytes = wrapperspb.UInt32(uint32(m.Bodies.Buffer))
	c.CircuitBreakers = unlimited()
	if m.several() {
		m.watch(c, &corev3.HealthCheck{HealthChecker: &corev3.HealthCheck_HttpHealthCheck_{
			HttpHealthCheck: &corev3.HealthCheck_HttpHealthCheck{Path: "/readyz",
				CodecClientType: typev3.CodecClientType_HTTP2},
		}})
	}
	m.apart(c, m.Servers.Replans)
	return c
}

// watch has Envoy leave out replicas that are gone, and those that hang.
func (m clusters) watch(c *clusterv3.Cluster, check *corev3.HealthCheck) {
	often := durationpb.New(300 * time.Millisecond)
	check.Timeout, check.Interval, check.NoTrafficInterval = durationpb.New(400*time.Millisecond), often, often
	check.UnhealthyThreshold, check.HealthyThreshold = wrapperspb.UInt32(1), wrapperspb.UInt32(1)
	c.HealthChecks = []*corev3.HealthCheck{check}
	c.CommonLbConfig = &clusterv3.Cluster_CommonLbConfig{HealthyPanicThreshold: &typev3.Percent{Value: 1}}
	no, yes := wrapperspb.UInt32(0), wrapperspb.UInt32(100)
	c.OutlierDetection = &clusterv3.OutlierDetection{
		Interval: durationpb.New(time.Second), BaseEjectionTime: durationpb.New(2 * time.Second),
		MaxEjectionTime:    durationpb.New(2 * time.Second),
		MaxEjectionPercent: yes, SplitExternalLocalOriginErrors: true,
		ConsecutiveLocalOriginFailure: wrapperspb.UInt32(1), EnforcingConsecutiveLocalOriginFailure: yes,
		EnforcingConsecutive_5Xx: no, EnforcingSuccessRate: no, EnforcingLocalOriginSuccessRate: no,
	}
	c.TypedExtensionProtocolOptions = m.http2Options(300*time.Millisecond, 400*time.Millisecond)
	m.note(c, notes{
		"common_lb_config": "A replica that refused a connection is left out at once, one that does not say " +
			"SERVING within 0.8 s; unless all are.",
		"typed_extension_protocol_options": "A replica that hangs takes connections and answers nothing: its " +
			"connections are given up, and what waits there goes to another.",
	})
}

// loopCluster leads to an internal listener.
func (m clusters) loopCluster(l loop) *clusterv3.Cluster {
	address := &corev3.Address{Address: &corev3.Address_EnvoyInternalAddress{EnvoyInternalAddress: &corev3.EnvoyInternalAddress{
		AddressNameSpecifier: &corev3.EnvoyInternalAddress_ServerListenerName{ServerListenerName: l.Listener},
	}}}
	return &clusterv3.Cluster{
		Name: l.Cluster, ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		PerConnectionBufferLimitBytes: wrapperspb.UInt32(uint32(m.Bodies.Buffer)), CircuitBreakers: unlimited(),
		TransportSocket: m.socket("envoy.transport_sockets.internal_upstream",
			m.pack(&internalupstreamv3.InternalUpstreamTransport{
				TransportSocket: m.socket("envoy.transport_sockets.raw_buffer", m.pack(&rawbufferv3.RawBuffer{})),
			})),
		LoadAssignment: &endpointv3.ClusterLoadAssignment{
			ClusterName: l.Cluster,
			Endpoints:   []*endpointv3.LocalityLbEndpoints{{LbEndpoints: []*endpointv3.LbEndpoint{lbEndpoint(address)}}},
		},
	}
}

func (b *notebook) socket(name string, config *anypb.Any) *corev3.TransportSocket {
	return &corev3.TransportSocket{Name: name, ConfigType: &corev3.TransportSocket_TypedConfig{TypedConfig: config}}
}

// composite sends the first try to the hop's cluster, and a number of further ones to tandem-replan.
func (m clusters) composite(name, hop string, tries int) *clusterv3.Cluster {
	entry := func(name string) *compositev3.ClusterConfig_ClusterEntry {
		return &compositev3.ClusterConfig_ClusterEntry{Name: name}
	}
	clusters := append([]*compositev3.ClusterConfig_ClusterEntry{entry(hop)},
		slices.Repeat([]*compositev3.ClusterConfig_ClusterEntry{entry("tandem-replan")}, tries)...)
	return &clusterv3.Cluster{
		Name: name, ConnectTimeout: durationpb.New(time.Second), LbPolicy: clusterv3.Cluster_CLUSTER_PROVIDED,
		CircuitBreakers: unlimited(),
		ClusterDiscoveryType: &clusterv3.Cluster_ClusterType{ClusterType: &clusterv3.Cluster_CustomClusterType{
			Name: "envoy.clusters.composite", TypedConfig: m.pack(&compositev3.ClusterConfig{Clusters: clusters}),
		}},
	}
}

// endpoints connects to the endpoint that a header names.
func (m clusters) endpoints(name, header string, s scheme, filters ...*hcmv3.HttpFilter) *clusterv3.Cluster {
	idle := &corev3.HttpProtocolOptions{IdleTimeout: durationpb.New(4 * time.Second)}
	options := &httpv3.HttpProtocolOptions{CommonHttpProtocolOptions: idle,
		UpstreamProtocolOptions: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_{
			ExplicitHttpConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig{
				ProtocolConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_HttpProtocolOptions{HttpProtocolOptions: &corev3.Http1ProtocolOptions{}},
			},
		}}
	if s.Name == "h2c" {
		options.GetExplicitHttpConfig().ProtocolConfig = &httpv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{
			Http2ProtocolOptions: &corev3.Http2ProtocolOptions{},
		}
	}
	if s.Name == "https-named" {
		options.UpstreamHttpProtocolOptions = &corev3.UpstreamHttpProtocolOptions{AutoSni: true,
			AutoSanValidation: m.Engines.TLS != nil && m.Engines.TLS.CAFile != ""}
	}
	options.HttpFilters = filters
	c := noted(m, &clusterv3.Cluster{
		Name: name + s.Suffix, ConnectTimeout: durationpb.New(time.Second),
		CleanupInterval:      durationpb.New(time.Minute),
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_ORIGINAL_DST},
		LbPolicy:             clusterv3.Cluster_CLUSTER_PROVIDED,
		LbConfig: &clusterv3.Cluster_OriginalDstLbConfig_{OriginalDstLbConfig: &clusterv3.Cluster_OriginalDstLbConfig{
			UseHttpHeader: true, HttpHeaderName: header,
		}},
		UpstreamConnectionOptions: &clusterv3.UpstreamConnectionOptions{TcpKeepalive: &corev3.TcpKeepalive{
			KeepaliveTime: wrapperspb.UInt32(15), KeepaliveInterval: wrapperspb.UInt32(5),
			KeepaliveProbes: wrapperspb.UInt32(3),
		}},
		TypedExtensionProtocolOptions: m.httpOptions(options), CircuitBreakers: unlimited(),
	}, notes{
		"":                            "The endpoint that ext_proc named, whichever it is.",
		"upstream_connection_options": "A machine that vanished.",
		"typed_extension_protocol_options": "Engines behind uvicorn close a connection 5 s after its last answer; " +
			"a request must not meet that.",
	})
	if strings.HasPrefix(s.Name, "https") {
		c.TransportSocket = m.tls(m.Engines.TLS, endpointTLS)
	}
	return c
}

func (m clusters) httpOptions(options *httpv3.HttpProtocolOptions) map[string]*anypb.Any {
	return map[string]*anypb.Any{"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": m.pack(options)}
}

// grpcOptions are HTTP/2 with pings that notice a peer which is gone.
func (m clusters) grpcOptions() map[string]*anypb.Any {
	return m.http2Options(10*time.Second, 5*time.Second)
}

func (m clusters) http2Options(ping, timeout time.Duration) map[string]*anypb.Any {
	h2 := &corev3.Http2ProtocolOptions{ConnectionKeepalive: &corev3.KeepaliveSettings{
		Interval: durationpb.New(ping), Timeout: durationpb.New(timeout),
	}}
	return m.httpOptions(&httpv3.HttpProtocolOptions{UpstreamProtocolOptions: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_{
		ExplicitHttpConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig{
			ProtocolConfig: &httpv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{Http2ProtocolOptions: h2},
		},
	}})
}

// unlimited replaces Envoy's defaults of 1,024 requests and 3 retries.
func unlimited() *clusterv3.CircuitBreakers {
	const limit = 1_000_000
	return &clusterv3.CircuitBreakers{Thresholds: []*clusterv3.CircuitBreakers_Thresholds{{
		MaxConnections: wrapperspb.UInt32(limit), MaxPendingRequests: wrapperspb.UInt32(limit),
		MaxRequests: wrapperspb.UInt32(limit), MaxRetries: wrapperspb.UInt32(limit),
	}}}
}
