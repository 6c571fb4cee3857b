package envoyconfigs

import (
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	allowlistedv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/internal_redirect/allow_listed_routes/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"tandem/replica/config"
)

// replanTries is how many tries tandem-replan gets after a failed hop. With several replicas there are four: one that
// was killed refuses its own.
func (s *settings) replanTries() int {
	if s.several() {
		return 4
	}
	return 1
}

// hedgedTries is how many tries tandem-replan gets on hops that answer the client: in addition to the four, up to six
// hedges, one for each 10 s in which decode shows nothing.
const hedgedTries = 10

// configuration has the routes of the main listener, in the order in which Envoy tries them.
func (m routes) configuration() *routev3.RouteConfiguration {
	var decided []*routev3.Route
	for _, s := range m.Engines.Schemes {
		decided = append(decided, m.schemeRoutes(s)...)
	}
	if m.Encodes {
		decided = append(decided, m.legRoute("encode", "encode", "tandem-encode", 0, m.retry(m.replanTries())))
	}
	if m.Answers {
		decided = append(decided, m.legRoute("answer", "answer", "tandem-answer", m.IdleTimeout, m.retryDecode()))
	}
	if m.Pairs {
		pair := m.legRoute("pair", "pair", "tandem-pair", m.IdleTimeout, m.retryDecode())
		pair.GetRoute().RequestMirrorPolicies = []*routev3.RouteAction_RequestMirrorPolicy{{
			Cluster: "tandem-mirror-loop", DisableShadowHostSuffixAppend: true,
		}}
		decided = append(decided, pair)
	}
	m.note(decided[0], notes{
		"": "Where a decided request goes. x-tandem-leg is set by ext_proc, and the route is chosen again after it.",
	})
	undecided := m.bodyRoutes()
	m.note(undecided[0], notes{
		"": "How a request's body comes to ext_proc. These are chosen before it is asked; a request that is still " +
			"here afterwards was not decided.",
	})
	return &routev3.RouteConfiguration{Name: "openai",
		VirtualHosts: []*routev3.VirtualHost{noted(m, &routev3.VirtualHost{
			Name: "all", Domains: []string{"*"},
			ResponseHeadersToRemove: []string{"x-envoy-upstream-service-time", "x-envoy-ratelimited"},
			RequestHeadersToRemove: []string{"x-tandem-leg", "x-tandem-other", "x-envoy-external-address",
				"x-envoy-internal", "x-envoy-original-url"},
			Routes: append(decided, undecided...),
		}, notes{
			"response_headers_to_remove": "Never to a client.",
			"request_headers_to_remove": "Removed once a route is decided. x-tandem-leg must go, or pass 2 would " +
				"begin on pass 1's route.",
		})}}
}

// schemeRoutes are the routes of decided requests to endpoints of a scheme.
func (m routes) schemeRoutes(s scheme) []*routev3.Route {
	of := absent("x-tandem-scheme")
	if s.Suffix != "" {
		of = exact("x-tandem-scheme", s.Name)
	}
	prefill := m.legRoute("prefill"+s.Suffix, "prefill", "tandem-prefill"+s.Suffix, 0, m.retry(m.replanTries()), of)
	m.note(prefill.GetRoute(), notes{
		"timeout": "The hop's limit is per try: ext_proc sets it from the prompt's length.",
	})
	decode := m.legRoute("decode"+s.Suffix, "decode", "tandem-decode"+s.Suffix, m.IdleTimeout, m.retryDecode(), of)
	m.note(decode.GetRoute(), notes{"timeout": "An answer takes as long as it takes, but not in silence."})
	other := m.legRoute("other"+s.Suffix, "pass", "tandem-decode"+s.Suffix, m.IdleTimeout, m.retryOther(), of,
		present("x-tandem-other"))
	m.note(other.GetRoute().RetryPolicy, notes{
		"": "What is never split: only where the endpoint has done nothing for it. A 404 says that it lacks the model.",
	})
	pass := m.legRoute("pass"+s.Suffix, "pass", "tandem-pod"+s.Suffix, m.IdleTimeout, nil, of)
	pass.GetRoute().InternalRedirectPolicy = nil
	if s.Name == "https" {
		for _, r := range []*routev3.Route{decode, other, pass} {
			r.RequestHeadersToRemove = append(r.RequestHeadersToRemove, "x-tandem-server-name")
		}
	}
	return []*routev3.Route{prefill, decode, other, pass}
}

// legRoute is where requests of a leg go: without a limit to the whole answer.
func (m routes) legRoute(name, leg, cluster string, idle time.Duration, retry *routev3.RetryPolicy,
	more ...*routev3.HeaderMatcher) *routev3.Route {
	r := &routev3.Route{
		Name: name, Match: anyPath(append([]*routev3.HeaderMatcher{exact("x-tandem-leg", leg)}, more...)...),
		TypedPerFilterConfig: perFilter{luaFilter: filters(m).luaNamed("unfollowed")},
		Action: &routev3.Route_Route{Route: &routev3.RouteAction{
			ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: cluster}, Timeout: durationpb.New(0),
			IdleTimeout:            durationpb.New(idle),
			InternalRedirectPolicy: m.redirects(), RetryPolicy: retry,
		}},
	}
	if idle > 0 && m.Leases { // it answers the client
		r.ResponseHeadersToAdd = []*corev3.HeaderValueOption{setHeader("x-tandem-rule",
			"%RESPONSE_DURATION% %START_TIME(%s%3f)% %DYNAMIC_METADATA(tandem.answer:rule)% %REQ(x-tandem-ticket)% "+
				"%REQ(x-request-id)%", overwriteOrAdd)}
	}
	if m.several() {
		r.RequestHeadersToRemove = []string{"x-tandem-restart"}
	}
	return r
}

// bodyRoutes say how bodies of requests that nobody has decided yet come to ext_proc.
func (m routes) bodyRoutes() (out []*routev3.Route) {
	f := filters(m)
	kinds := &matcherv3.StringMatcher{
		MatchPattern: &matcherv3.StringMatcher_Contains{Contains: "json"}, IgnoreCase: true,
	}
	if m.Forms { // their model decides about the pool
		kinds = &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_SafeRegex{
			SafeRegex: &matcherv3.RegexMatcher{Regex: "(?i).*(json|multipart/form-data).*"},
		}}
	}
	ticket, json := present("x-tandem-ticket"), &routev3.HeaderMatcher{Name: "content-type",
		HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{StringMatch: kinds}}
	const forever = 1_000_000_000_000
	unbuffered := perFilter{bufferFilter: f.noBuffer()}
	afterMax := m.Bodies.Max + 1 // Envoy's ranges exclude their end
	if m.Bodies.Mode != "duplex" {
		out = append(out, m.bufferedRoute("pass-2-buffered", ticket,
			within("content-length", m.Bodies.BufferedFrom, forever)))
	}
	out = append(out, undecided("pass-2", unbuffered, ticket))
	if m.Bodies.Mode != "duplex" {
		out = append(out, m.bufferedRoute("json-buffered", json,
			within("content-length", m.Bodies.BufferedFrom, afterMax)))
	}
	return append(out, undecided("json", nil, json, within("content-length", 0, afterMax)),
		undecided("json-of-unknown-or-great-length", unbuffered, json),
		undecided("other", perFilter{bufferFilter: f.noBuffer(),
			extProcFilter: f.asked(processing(headers, nothing), false)}),
	)
}

// undecided ends requests that ext_proc did not decide.
func undecided(name string, filters perFilter, headers ...*routev3.HeaderMatcher) *routev3.Route {
	return &routev3.Route{
		Name: name, Match: anyPath(headers...), TypedPerFilterConfig: filters,
		Action: &routev3.Route_DirectResponse{DirectResponse: &routev3.DirectResponseAction{Status: 503}},
	}
}

// bufferedRoute is the route of requests whose body comes to ext_proc whole.
func (m routes) bufferedRoute(name string, headers ...*routev3.HeaderMatcher) *routev3.Route {
	f := filters(m)
	whole := processing(bufferBody, nothing)
	if !m.several() {
		return undecided(name, perFilter{bufferFilter: f.noBuffer(), extProcFilter: f.asked(whole, false)}, headers...)
	}
	return noted(m, &routev3.Route{
		Name: name, Match: anyPath(headers...),
		RequestHeadersToAdd: []*corev3.HeaderValueOption{setHeader("x-tandem-restart", "true", overwriteOrAdd)},
		TypedPerFilterConfig: perFilter{
			bufferFilter: f.noBuffer(), luaFilter: f.luaNamed("unfollowed"), extProcFilter: f.asked(whole, true),
		},
		Action: &routev3.Route_Route{Route: &routev3.RouteAction{
			ClusterSpecifier:       &routev3.RouteAction_Cluster{Cluster: "tandem-replan"},
			Timeout:                durationpb.New(5 * time.Second),
			InternalRedirectPolicy: m.redirects(), RetryPolicy: m.retry(m.replanTries()),
		}},
	}, notes{
		"request_headers_to_add": "Envoy keeps a buffered body. Where the replica that has it fails, the request " +
			"goes on to tandem-replan undecided, and a redirect starts it again at another one.",
	})
}

// redirects are followed if they are Tandem's: an engine's has no ticket, so it leads to none of these routes.
func (m routes) redirects() *routev3.InternalRedirectPolicy {
	return &routev3.InternalRedirectPolicy{
		MaxInternalRedirects: wrapperspb.UInt32(config.MaxRedirects), RedirectResponseCodes: []uint32{307},
		AllowCrossSchemeRedirect: true,
		ResponseHeadersToCopy:    []string{"x-tandem-ticket", "x-tandem-prefilled", "endpoint-load-metrics"},
		Predicates: []*corev3.TypedExtensionConfig{m.extension("tandem", &allowlistedv3.AllowListedRoutesConfig{
			AllowedRouteNames: []string{"pass-2", "pass-2-buffered"},
		})},
	}
}

// retry is the policy of a hop in a composite cluster, whose tries after the first go to tandem-replan. So a try need
// not wait, but it must choose another replica.
func (m routes) retry(tries int) *routev3.RetryPolicy {
	backOff := &routev3.RetryPolicy_RetryBackOff{
		BaseInterval: durationpb.New(time.Millisecond), MaxInterval: durationpb.New(2 * time.Millisecond),
	}
	if m.several() {
		backOff.BaseInterval, backOff.MaxInterval = durationpb.New(4*time.Millisecond),
			durationpb.New(100*time.Millisecond)
	}
	return &routev3.RetryPolicy{
		RetryOn:              "connect-failure,refused-stream,reset,5xx,retriable-status-codes",
		RetriableStatusCodes: []uint32{101, 408, 425, 429},
		NumRetries:           wrapperspb.UInt32(uint32(tries)), RetryBackOff: backOff,
	}
}

// retryDecode is retry for a hop whose answer is the client's: another endpoint may serve the model that this one does
// not (404), or not answer with a redirect. The answers of prefill and encode legs have passed through Tandem before.
func (m routes) retryDecode() *routev3.RetryPolicy {
	return m.notRedirected(m.retry(hedgedTries), append(m.retry(0).RetriableStatusCodes, 404))
}

// retryOther is retry for the one hop of a request that is never split: an engine's redirect is not followed either.
func (m routes) retryOther() *routev3.RetryPolicy {
	p := m.retry(m.replanTries())
	p.RetryOn = "connect-failure,retriable-status-codes"
	return m.notRedirected(p, []uint32{404})
}

// notRedirected has a policy retry answers with one of the codes, and redirects of engines.
func (m routes) notRedirected(p *routev3.RetryPolicy, codes []uint32) *routev3.RetryPolicy {
	p.RetriableStatusCodes = codes
	p.RetryOn += ",retriable-headers"
	p.RetriableHeaders = []*routev3.HeaderMatcher{noted(m, &routev3.HeaderMatcher{Name: "location", InvertMatch: true,
		HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{StringMatch: &matcherv3.StringMatcher{
			MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: "http://tandem/"},
		}}}, notes{"": "An engine's redirect. Tandem's own lead there."})}
	return p
}

func anyPath(headers ...*routev3.HeaderMatcher) *routev3.RouteMatch {
	return &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: "/"}, Headers: headers}
}

func exact(header, value string) *routev3.HeaderMatcher {
	return &routev3.HeaderMatcher{Name: header, HeaderMatchSpecifier: &routev3.HeaderMatcher_StringMatch{
		StringMatch: &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: value}},
	}}
}

func present(header string) *routev3.HeaderMatcher {
	return &routev3.HeaderMatcher{Name: header,
		HeaderMatchSpecifier: &routev3.HeaderMatcher_PresentMatch{PresentMatch: true}}
}

func absent(header string) *routev3.HeaderMatcher {
	h := present(header)
	h.InvertMatch = true
	return h
}

// within holds for numbers from start on, and below end.
func within(header string, start, end int64) *routev3.HeaderMatcher {
	return &routev3.HeaderMatcher{Name: header, HeaderMatchSpecifier: &routev3.HeaderMatcher_RangeMatch{
		RangeMatch: &typev3.Int64Range{Start: start, End: end},
	}}
}
