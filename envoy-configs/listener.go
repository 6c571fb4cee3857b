package envoyconfigs

import (
	"time"

	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	tracev3 "github.com/envoyproxy/go-control-plane/envoy/config/trace/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	earlyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/http/early_header_mutation/header_mutation/v3"
	uuidv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/request_id/uuid/v3"
	samplersv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/tracers/opentelemetry/samplers/v3"
	tracingv3 "github.com/envoyproxy/go-control-plane/envoy/type/tracing/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Limits of request headers on every listener. Tickets with KV parameters come in headers.
const (
	maxHeaderKiB = 192
	maxHeaders   = 160
)

// main is the listener that receives clients' requests, and requests that a redirect starts again.
func (m listeners) main() *listenerv3.Listener {
	l := m.listener("openai", m.mainManager())
	l.Address = socketAddress(m.Listen)
	return noted(m, l, notes{
		"per_connection_buffer_limit_bytes": "A body has to be kept whole for the second hop. The server splits " +
			"none over envoy.maxBodyBytes; the margin is " +
			"what a body grows by on its way. A body over this limit could not be redirected.",
	})
}

// listener has one connection manager and room for a body.
func (m listeners) listener(name string, manager *hcmv3.HttpConnectionManager) *listenerv3.Listener {
	return &listenerv3.Listener{
		Name: name, PerConnectionBufferLimitBytes: wrapperspb.UInt32(uint32(m.Bodies.Buffer)),
		FilterChains: []*listenerv3.FilterChain{{Filters: []*listenerv3.Filter{{
			Name:       "envoy.filters.network.http_connection_manager",
			ConfigType: &listenerv3.Filter_TypedConfig{TypedConfig: m.pack(manager)},
		}}}},
	}
}

func (m listeners) mainManager() *hcmv3.HttpConnectionManager {
	yes := wrapperspb.Bool(true)
	h := &hcmv3.HttpConnectionManager{
		StatPrefix: "openai", CodecType: hcmv3.HttpConnectionManager_AUTO, UseRemoteAddress: yes,
		ServerHeaderTransformation: hcmv3.HttpConnectionManager_PASS_THROUGH,
		NormalizePath:              yes, MergeSlashes: true,
		PathWithEscapedSlashesAction: hcmv3.HttpConnectionManager_UNESCAPE_AND_FORWARD,
		RequestHeadersTimeout:        durationpb.New(30 * time.Second),
		StreamIdleTimeout:            durationpb.New(5 * time.Minute),
		MaxRequestHeadersKb:          wrapperspb.UInt32(maxHeaderKiB),
		CommonHttpProtocolOptions:    &corev3.HttpProtocolOptions{MaxHeadersCount: wrapperspb.UInt32(maxHeaders)},
		Http2ProtocolOptions:         &corev3.Http2ProtocolOptions{OverrideStreamErrorOnInvalidHttpMessage: yes},
		GenerateRequestId:            yes, PreserveExternalRequestId: true, AlwaysSetRequestIdInResponse: true,
		RequestIdExtension:            m.requestIDs(),
		EarlyHeaderMutationExtensions: []*corev3.TypedExtensionConfig{m.forgery()},
		AccessLog:                     accessLogs(m).endOfPass(),
		LocalReplyConfig:              replies(m).config(),
		HttpFilters:                   filters(m).main(),
	}
	m.note(h, notes{
		"normalize_path": "Engines decode a path before they look at it, so what they would decode is decoded here: " +
			"no other spelling of a path reaches an API past the router.",
		"stream_idle_timeout":    "Until a route says otherwise: an upload that stands still.",
		"max_request_headers_kb": "Tickets with KV parameters come back to this listener on a redirect.",
		"http2_protocol_options": "One bad request resets its own stream only.",
		"generate_request_id": "One id names a request on both hops, in every log and in the engines' own ids. " +
			"The client's own is kept.",
		"local_reply_config": "Envoy's own answers in OpenAI's error shape.",
		"access_log": "How each pass of a request ended: what it has booked lives in the replica " +
			"that booked it.",
		"early_header_mutation_extensions": "What steers is not the client's to set. This runs once, when the " +
			"request comes in, and not after a redirect: so a ticket that is here in pass 2 came with the 307.",
	})
	if m.Dynamic {
		h.RouteSpecifier = &hcmv3.HttpConnectionManager_Rds{Rds: &hcmv3.Rds{RouteConfigName: "openai",
			ConfigSource: ads()}}
	} else {
		h.RouteSpecifier = &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: routes(m).configuration()}
	}
	if m.Tracing != nil {
		h.Tracing = m.traced()
		h.Tracing.NoContextPropagation = true
		m.note(h, notes{"tracing": "Envoy's spans of the request, of the hops and of each question to the server, " +
			"which its own spans join. The header that the hops go on with is the server's: Envoy (1.40) forgets at " +
			"a redirect that it traces, and would say so to the second hop."})
	}
	return h
}

// forgery removes from requests the headers that steer Tandem, and gives each request a name for its reservations.
func (m listeners) forgery() *corev3.TypedExtensionConfig {
	mutations := []*mutationv3.HeaderMutation{
		removePrefix("x-tandem-"), removePrefix("x-envoy-"), remove(destination),
		noted(m, remove("x-data-parallel-rank"), notes{
			"": "What engines and other routers obey (vLLM and SGLang: data-parallel rank; Dynamo: workers; vLLM: " +
				"priority).",
		}),
		remove("x-worker-instance-id"), remove("x-prefill-instance-id"), remove("x-vllm-priority"),
		noted(m, remove("x-prefiller-host-port"),
			notes{"": "And llm-d's routing sidecar: it fetches from any address that these name."}),
		remove("x-encoder-hosts-ports"), remove("x-kv-cache-source-host-port"), remove("x-data-parallel-host-port"),
		removePrefix("x-override-"), m.reservation(),
	}
	return m.extension("envoy.http.early_header_mutation.header_mutation",
		&earlyv3.HeaderMutation{Mutations: mutations})
}

// reservation is Envoy's own name for a request.
func (m listeners) reservation() *mutationv3.HeaderMutation {
	id := setHeader("x-tandem-reservation", "%UNIQUE_ID%", overwriteOrAdd)
	return noted(m, &mutationv3.HeaderMutation{Action: &mutationv3.HeaderMutation_Append{Append: id}}, notes{
		"": "What Tandem books for a request goes by this name: clients may send one x-request-id many times.",
	})
}

// requestIDs leaves ids as they are: with spans, whether a request is traced is not read from its id.
func (m listeners) requestIDs() *hcmv3.RequestIDExtension {
	config := &uuidv3.UuidRequestIdConfig{PackTraceReason: wrapperspb.Bool(false)}
	if m.Tracing != nil {
		config.UseRequestIdForTraceSampling = wrapperspb.Bool(false)
	}
	return &hcmv3.RequestIDExtension{TypedConfig: m.pack(config)}
}

// traced sends spans to the collector. A client's traceparent decides whether a request is traced; without one, chance
// does.
func (m listeners) traced() *hcmv3.HttpConnectionManager_Tracing {
	collector := grpcTo("tandem-otlp")
	collector.Timeout = durationpb.New(time.Second)
	chance := &samplersv3.TraceIdRatioBasedSamplerConfig{SamplingPercentage: &typev3.FractionalPercent{
		Numerator: m.Tracing.PerMillion, Denominator: typev3.FractionalPercent_MILLION,
	}}
	const sampler = "envoy.tracers.opentelemetry.samplers."
	config := &tracev3.OpenTelemetryConfig{
		ServiceName: "envoy", GrpcService: collector,
		Sampler: m.extension(sampler+"parent_based", &samplersv3.ParentBasedSamplerConfig{
			WrappedSampler: m.extension(sampler+"trace_id_ratio_based", chance),
		}),
	}
	url := noted(m, &tracingv3.CustomTag{Tag: "http.url",
		Type: &tracingv3.CustomTag_Value{Value: "%REQ(:SCHEME)%://%REQ(:AUTHORITY)%%PATH(NQ)%"}}, notes{
		"": "In place of Envoy's own, which has the query: some clients send their key there.",
	})
	return &hcmv3.HttpConnectionManager_Tracing{SpawnUpstreamSpan: wrapperspb.Bool(true),
		CustomTags: []*tracingv3.CustomTag{url},
		Provider: &tracev3.Tracing_Http{
			Name:       "envoy.tracers.opentelemetry",
			ConfigType: &tracev3.Tracing_Http_TypedConfig{TypedConfig: m.pack(config)},
		}}
}
