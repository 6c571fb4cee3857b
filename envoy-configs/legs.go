package envoyconfigs

import (
	"cmp"
	"slices"
	"time"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"tandem/envoy-configs/match"
	"tandem/extproc/names"
)

// all are listeners without a port: each puts an ordinary ext_proc filter between the main listener and an endpoint.
func (m legs) all() []*listenerv3.Listener {
	out := []*listenerv3.Listener{m.prefillLeg()}
	if m.Encodes {
		out = append(out, m.encodeLeg())
	}
	if m.Answers {
		out = append(out, m.answerLeg())
	}
	if m.Pairs {
		out = append(out, m.decodeLeg(), m.prefillMirror())
	}
	return out
}

// leg has the properties in which the legs' listeners differ.
type leg struct {
	name       string
	why        string
	remove     []string                 // request headers that are no engine's business
	host       *routev3.VirtualHost     // the routes, and other changes of headers
	filters    []*hcmv3.HttpFilter      // before the router
	log        []*accesslogv3.AccessLog // to Tandem
	tries      []*accesslogv3.AccessLog // likewise, of tries at the endpoint
	untraced   bool                     // no spans of its own
	replies    *hcmv3.LocalReplyConfig  // Envoy's own answers
	optional   bool                     // its clusters need not exist
	serverName string                   // the header with the name of the engine; "": x-tandem-server-name
	read       bool                     // Tandem reads the answer, so it must be plain and whole
	json       bool                     // and JSON: it is not the client's
}

func (m legs) listener(l leg) *listenerv3.Listener {
	base := listeners(m)
	l.host.Name, l.host.Domains = "all", []string{"*"}
	var plain []*corev3.HeaderValueOption
	if l.read {
		l.remove = append(l.remove, names.FormHeaders...)
		plain = append(plain, setHeader("accept-encoding", "identity", overwriteOrAdd))
	}
	if l.json {
		plain = append(plain, setHeader("accept", "application/json", overwriteOrAdd))
	}
	h := &hcmv3.HttpConnectionManager{
		StatPrefix: l.name, ServerHeaderTransformation: hcmv3.HttpConnectionManager_PASS_THROUGH,
		DelayedCloseTimeout: durationpb.New(20 * time.Millisecond), StreamIdleTimeout: durationpb.New(0),
		GenerateRequestId: wrapperspb.Bool(false), MaxRequestHeadersKb: wrapperspb.UInt32(maxHeaderKiB),
		CommonHttpProtocolOptions: &corev3.HttpProtocolOptions{MaxHeadersCount: wrapperspb.UInt32(maxHeaders)},
		AccessLog:                 l.log,
		RouteSpecifier: &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: noted(m, &routev3.RouteConfiguration{
			Name: l.name, VirtualHosts: []*routev3.VirtualHost{l.host},
			RequestHeadersToRemove: append(l.remove, "x-envoy-expected-rq-timeout-ms"), RequestHeadersToAdd: plain,
		}, notes{
			"request_headers_to_remove": "After the virtual host, which reads some of them. The ticket stays: the " +
				"filter reads it from the request when the answer is there.",
		})},
		HttpFilters: slices.Concat(l.filters, filters(m).names(cmp.Or(l.serverName, "x-tandem-server-name")),
			[]*hcmv3.HttpFilter{filters(m).router(l.tries...)}),
	}
	if m.secure() {
		h.GetRouteConfig().RequestHeadersToRemove = append(h.GetRouteConfig().GetRequestHeadersToRemove(),
			"x-tandem-server-name", "x-tandem-prefill-server-name")
	}
	h.LocalReplyConfig = cmp.Or(l.replies, ownReplies())
	if l.optional || m.Late { // a cluster may come a moment later
		h.GetRouteConfig().ValidateClusters = wrapperspb.Bool(false)
	}
	if m.Tracing != nil && !l.untraced {
		h.Tracing, h.RequestIdExtension = base.traced(), base.requestIDs()
	}
	out := base.listener(l.name, h)
	out.ListenerSpecifier = internalListener()
	return noted(m, out, notes{"": l.why})
}

// internalListener stands in place of an address: other listeners alone lead here, by a cluster.
func internalListener() *listenerv3.Listener_InternalListener {
	return &listenerv3.Listener_InternalListener{InternalListener: &listenerv3.Listener_InternalListenerConfig{}}
}

// podRoutes lead to the clusters of each scheme.
func (m legs) podRoutes() (out []*routev3.Route) {
	for _, s := range m.legSchemes() {
		out = append(out, toCluster("tandem-pod"+s.Suffix, ofScheme("x-tandem-scheme", s)...))
	}
	return out
}

// ofScheme matches requests to endpoints of a scheme, where no route before took them.
func ofScheme(header string, s scheme) []*routev3.HeaderMatcher {
	if s.Suffix == "" {
		return nil
	}
	return []*routev3.HeaderMatcher{exact(header, s.Name)}
}

// toCluster sets no time limit: the routes of the main listener have one.
func toCluster(cluster string, headers ...*routev3.HeaderMatcher) *routev3.Route {
	return &routev3.Route{Match: anyPath(headers...), Action: &routev3.Route_Route{Route: &routev3.RouteAction{
		ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: cluster}, Timeout: durationpb.New(0),
		IdleTimeout: durationpb.New(0),
	}}}
}

var howAnswered = []string{"response.code_details", "response.headers['retry-after']"} // an engine, or Envoy itself

// prefillLeg turns P's answer into a redirect to pass 2.
func (m legs) prefillLeg() *listenerv3.Listener {
	f := filters(m)
	ask := f.extProc("prefill-leg", processing(nothing, streamBody))
	ask.ResponseAttributes = append([]string{"request.headers['x-tandem-ticket']", "request.headers['x-request-id']",
		"request.path"}, howAnswered...)
	ask.MutationRules = &mutationv3.HeaderMutationRules{AllowAllRouting: wrapperspb.Bool(true)}
	host := noted(m, &routev3.VirtualHost{
		RequestHeadersToAdd:     []*corev3.HeaderValueOption{asksLoad()},
		ResponseHeadersToRemove: []string{"x-tandem-carry", "x-tandem-prefilled"},
		ResponseHeadersToAdd: []*corev3.HeaderValueOption{
			setHeader("x-tandem-carry", "%DYNAMIC_METADATA(tandem:carry)%", overwriteOrAdd),
			setHeader("x-tandem-ticket", "%REQ(x-tandem-ticket)%", overwriteOrAdd),
		},
		Routes: m.podRoutes(),
	}, notes{
		"request_headers_to_add": "P reports its load along with its answer, if it can (vLLM, ORCA).",
		"response_headers_to_remove": "For a short answer: where the redirect leads, and the ticket, which is " +
			"pass 1's own. Not P's to set.",
	})
	return m.listener(leg{
		name: "prefill-leg", why: "The prefill leg: a listener without a port, so that P's answer passes an " +
			"ordinary ext_proc filter.",
		remove: []string{"x-tandem-scheme"}, host: host, read: true, json: true,
		tries: accessLogs(m).prefillCut(),
		filters: []*hcmv3.HttpFilter{
			f.keepCarry(),
			noted(m, f.buffer(), notes{
				"": "P is not asked before the whole body is here. Else its failure, which is sooner there than the " +
					"rest of a long body, would make a redirect of a request that has not gone out in full, and " +
					"Envoy follows none of those.",
			}),
			f.filterUnless(extProcFilter, extProcFilter, ask,
				f.answerHeader("x-tandem-carry", match.Text("carried"))),
			f.inlineAnswer(),
		},
	})
}

// encodeLeg has an endpoint encode a prompt's media, before both other legs.
func (m legs) encodeLeg() *listenerv3.Listener {
	f := filters(m)
	ask := f.extProc("encode-leg", processing(streamBody, streamBody))
	ask.ResponseAttributes = howAnswered
	ask.MutationRules = &mutationv3.HeaderMutationRules{AllowAllRouting: wrapperspb.Bool(true)}
	return m.listener(leg{
		name: "encode-leg", why: "The encode leg, before all others: its filter makes the encode engine's body of " +
			"the client's, which the main listener keeps as it is, and of the answer a redirect.",
		remove: []string{"tandem-explain", "x-tandem-scheme"}, read: true, json: true,
		host:    &routev3.VirtualHost{Routes: m.podRoutes()},
		filters: []*hcmv3.HttpFilter{f.buffer(), f.filter(extProcFilter, ask)},
	})
}

// answerLeg rewrites answers.
func (m legs) answerLeg() *listenerv3.Listener {
	f := filters(m)
	ask := noted(m, f.extProc("answer-leg", processing(nothing, streamBody)), notes{
		"mutation_rules": "x-envoy-ratelimited: an answer that no other endpoint is to be asked for.",
	})
	ask.ResponseAttributes = []string{"request.headers['x-tandem-ticket']", "request.headers['x-request-id']",
		"request.headers['x-tandem-request-id']"}
	ask.MutationRules = &mutationv3.HeaderMutationRules{AllowEnvoy: wrapperspb.Bool(true)}
	return m.listener(leg{
		name: "answer-leg", why: "A decode leg whose answer is not the client's as it is: its ext_proc stream lives " +
			"as long as the answer, so only such requests come this way.",
		remove:  []string{"x-tandem-scheme"},
		host:    &routev3.VirtualHost{Routes: m.podRoutes()},
		filters: []*hcmv3.HttpFilter{f.filter(extProcFilter, ask)}, untraced: true, read: true,
	})
}

// decodeLeg is D's leg of a pair, whose answer the client gets.
func (m legs) decodeLeg() *listenerv3.Listener {
	f := filters(m)
	ask := noted(m, f.extProc("decode-leg", processing(streamBody, headers)), notes{
		"max_message_timeout": "The server asks for it while it holds an answer's headers until prefill is done.",
	})
	ask.MaxMessageTimeout, ask.ResponseAttributes = durationpb.New(time.Hour), howAnswered
	ask.MutationRules = &mutationv3.HeaderMutationRules{AllowAllRouting: wrapperspb.Bool(true)}
	routes := m.podRoutes()
	for _, r := range routes {
		r.RequestHeadersToRemove = []string{"x-tandem-scheme"}
	}
	if m.Answers {
		rewritten := noted(m, toCluster("tandem-answer-loop", present("x-tandem-answer")), notes{
			"": "What prefill answered belongs into the client's answer too.",
		})
		rewritten.RequestHeadersToRemove = []string{"x-tandem-answer"}
		routes = slices.Insert(routes, 0, rewritten)
	}
	return m.listener(leg{
		name: "decode-leg", why: "The decode leg of a pair. Its ext_proc stream ends when prefill is done, before " +
			"or with the first byte of the answer.",
		remove: []string{"x-tandem-prefill-endpoint", "x-tandem-prefill-scheme",
			"x-tandem-prefill-rank", "x-tandem-decode-rank", "x-tandem-mirror", "x-tandem-leg-id"},
		host:    &routev3.VirtualHost{RequestHeadersToAdd: ownHeaders("decode"), Routes: routes},
		filters: []*hcmv3.HttpFilter{f.buffer(), f.cleanRefusal(), f.filter(extProcFilter, ask), f.measured()},
	})
}

// ownHeaders give a leg of a pair its own request id and data-parallel rank.
func ownHeaders(leg string) []*corev3.HeaderValueOption {
	return []*corev3.HeaderValueOption{
		setHeader("x-request-id", "%REQ(x-tandem-leg-id)%", overwrite),
		setHeader("x-data-parallel-rank", "%REQ(x-tandem-"+leg+"-rank)%", overwriteOrAdd),
	}
}

// asksLoad has P report its load along with its answer, if it can (vLLM, ORCA).
func asksLoad() *corev3.HeaderValueOption {
	return setHeader("endpoint-load-metrics-format", "JSON", overwriteOrAdd)
}

// prefillMirror is P's leg of a pair, a mirrored request.
func (m legs) prefillMirror() *listenerv3.Listener {
	f := filters(m)
	ask := f.extProc("prefill-mirror", processing(headers, streamBody))
	ask.ResponseAttributes = append([]string{"request.headers['x-tandem-ticket']",
		"request.headers['x-tandem-request-id']"}, howAnswered...)
	var routes []*routev3.Route
	for _, s := range m.legSchemes() {
		routes = append(routes, m.mirrorRoutes(s)...)
	}
	return m.listener(leg{
		name: "prefill-mirror",
		why: "The prefill leg of a pair: a copy that Envoy forgets once it is sent. Its log reports to every " +
			"replica how it ends.",
		remove: []string{destination, "x-tandem-scheme", "x-tandem-prefill-scheme",
			"x-tandem-prefill-rank", "x-tandem-decode-rank", "x-tandem-answer", "x-tandem-mirror",
			"x-tandem-leg-id"},
		host:       &routev3.VirtualHost{RequestHeadersToAdd: append(ownHeaders("prefill"), asksLoad()), Routes: routes},
		serverName: mirroredName,
		log:        accessLogs(m).endOfMirror(),
		filters:    []*hcmv3.HttpFilter{f.filter(extProcFilter, ask)}, read: true, json: true,
	})
}

// mirrorRoutes are those of a scheme, by what becomes of a prefill that nobody waits for.
func (m legs) mirrorRoutes(s scheme) []*routev3.Route {
	const header = "x-tandem-prefill-scheme"
	to := func(headers ...*routev3.HeaderMatcher) *routev3.Route {
		r := toCluster("tandem-mirror-pod"+s.Suffix, headers...)
		r.GetRoute().Timeout = durationpb.New(m.TicketTTL)
		return r
	}
	cancelled := noted(m, to(append([]*routev3.HeaderMatcher{exact("x-tandem-mirror", "cancel")}, ofScheme(header,
		s)...)...), notes{
		"": "Cut by Tandem when nobody waits for it, so its stream is open from the start.",
	})
	finished := noted(m, to(ofScheme("x-tandem-scheme", s)...), notes{
		"": "Runs to its end, and is sent again if it failed: decode waits for these very blocks.",
	})
	finished.TypedPerFilterConfig = perFilter{extProcFilter: filters(m).asked(processing(nothing, streamBody), true)}
	finished.GetRoute().RetryPolicy = &routev3.RetryPolicy{
		RetryOn: "connect-failure,refused-stream,reset,5xx", NumRetries: wrapperspb.UInt32(2),
		RetryBackOff: &routev3.RetryPolicy_RetryBackOff{
			BaseInterval: durationpb.New(25 * time.Millisecond), MaxInterval: durationpb.New(250 * time.Millisecond),
		},
	}
	return []*routev3.Route{cancelled, finished}
}
