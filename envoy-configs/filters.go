package envoyconfigs

import (
	"slices"
	"time"

	xdscorev3 "github.com/cncf/xds/go/xds/core/v3"
	matcherv3 "github.com/cncf/xds/go/xds/type/matcher/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	matchingv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/matching/v3"
	actionv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/common/matcher/action/v3"
	bufferv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/buffer/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	headermutationv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"
	metadatav3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_to_metadata/v3"
	luav3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/lua/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	previoushostsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/retry/host/previous_hosts/v3"
	envoymatcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"tandem/envoy-configs/lua"
	"tandem/envoy-configs/match"
)

// Names of filters, by which routes configure them too.
const (
	extProcFilter = "envoy.filters.http.ext_proc"
	bufferFilter  = "envoy.filters.http.buffer"
	luaFilter     = "envoy.filters.http.lua"
	hygieneFilter = "envoy.filters.http.header_mutation/tandem"
)

// destination is the header that names the endpoint of a hop.
const destination = "x-gateway-destination-endpoint"

// main returns the filters of the main listener, in the order in which requests pass them; answers pass them in
// reverse.
func (m filters) main() []*hcmv3.HttpFilter {
	fs := slices.Concat(m.cors(), []*hcmv3.HttpFilter{m.hygiene(), m.switched(), noted(m, m.buffer(), notes{
		"": "The server needs the whole body anyway: waiting for it here makes one message of it.",
	}), m.mainExtProc(), m.unfollowed()}, m.names("x-tandem-server-name"))
	if m.Usage != nil {
		fs = append(fs, m.usage())
	}
	if m.Leases {
		keep := &metadatav3.Config{RequestRules: []*metadatav3.Config_Rule{{Header: "x-tandem-rule", Remove: true,
			OnHeaderPresent: &metadatav3.Config_KeyValuePair{MetadataNamespace: "tandem.answer", Key: "rule"}}}}
		fs = append(fs, m.filter("envoy.filters.http.header_to_metadata", noted(m, keep, notes{
			"": "Kept for the answer, and not for engines to see."})))
		fs = append(fs, m.lateScripts()...)
	}
	return append(fs,
		m.filter("envoy.filters.http.router", noted(m, &routerv3.Router{SuppressEnvoyHeaders: true,
			UpstreamLog: accessLogs(m).failedTries()}, notes{
			"upstream_log": "Tries that failed: a request that waits for one at tandem-replan goes on then. KV " +
				"parameters of a try without a connection were never sent: their blocks can be freed.",
		})))
}

// phase is what ext_proc is asked about of a request or of an answer.
type phase int

const (
	nothing    phase = iota
	headers          // headers alone
	bufferBody       // headers, then the whole body in one message
	streamBody       // headers, body and trailers in both directions, in pieces as they come
)

// processing is what ext_proc is asked about of the request and of the answer.
func processing(request, response phase) *extprocv3.ProcessingMode {
	head := func(p phase) extprocv3.ProcessingMode_HeaderSendMode {
		if p == nothing {
			return extprocv3.ProcessingMode_SKIP
		}
		return extprocv3.ProcessingMode_SEND
	}
	body := func(p phase) extprocv3.ProcessingMode_BodySendMode {
		switch p {
		case bufferBody:
			return extprocv3.ProcessingMode_BUFFERED
		case streamBody:
			return extprocv3.ProcessingMode_FULL_DUPLEX_STREAMED
		default:
			return extprocv3.ProcessingMode_NONE
		}
	}
	trailers := func(p phase) extprocv3.ProcessingMode_HeaderSendMode {
		if p == streamBody { // FULL_DUPLEX_STREAMED demands it
			return extprocv3.ProcessingMode_SEND
		}
		return extprocv3.ProcessingMode_SKIP
	}
	return &extprocv3.ProcessingMode{
		RequestHeaderMode: head(request), RequestBodyMode: body(request), RequestTrailerMode: trailers(request),
		ResponseHeaderMode: head(response), ResponseBodyMode: body(response), ResponseTrailerMode: trailers(response),
	}
}

// extProc asks Tandem in a role; "" is the main filter's. Additions to it must be made before it is packed.
func (m filters) extProc(role string, mode *extprocv3.ProcessingMode) *extprocv3.ExternalProcessor {
	ask := grpcTo("tandem-extproc")
	if role != "" {
		ask.InitialMetadata = []*corev3.HeaderValue{{Key: "x-tandem-role", Value: role}}
	}
	if m.several() {
		ask.RetryPolicy = m.otherReplica()
	}
	return &extprocv3.ExternalProcessor{
		GrpcService: ask, MessageTimeout: durationpb.New(30 * time.Second),
		StatusOnError: &typev3.HttpStatus{Code: typev3.StatusCode_ServiceUnavailable}, ProcessingMode: mode,
	}
}

// grpcTo is gRPC to a cluster.
func grpcTo(cluster string) *corev3.GrpcService {
	return &corev3.GrpcService{TargetSpecifier: &corev3.GrpcService_EnvoyGrpc_{
		EnvoyGrpc: &corev3.GrpcService_EnvoyGrpc{ClusterName: cluster},
	}}
}

// otherReplica is the retry policy for a replica that does not answer: others are asked, but not the same one again.
func (m filters) otherReplica() *corev3.RetryPolicy {
	return &corev3.RetryPolicy{
		RetryOn: "connect-failure,refused-stream,reset,unavailable", NumRetries: wrapperspb.UInt32(4),
		RetryBackOff: &corev3.BackoffStrategy{
			BaseInterval: durationpb.New(4 * time.Millisecond), MaxInterval: durationpb.New(100 * time.Millisecond),
		},
		HostSelectionRetryMaxAttempts: 20,
		RetryHostPredicate: []*corev3.RetryPolicy_RetryHostPredicate{{
			Name: "envoy.retry_host_predicates.previous_hosts",
			ConfigType: &corev3.RetryPolicy_RetryHostPredicate_TypedConfig{
				TypedConfig: m.pack(&previoushostsv3.PreviousHostsPredicate{}),
			},
		}},
	}
}

// filter is one filter of a listener.
func (m filters) filter(name string, config proto.Message) *hcmv3.HttpFilter {
	return &hcmv3.HttpFilter{Name: name, ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: m.pack(config)}}
}

// filterUnless is a filter that Envoy leaves out for requests or answers that the predicate holds for.
func (m filters) filterUnless(name, kind string, config proto.Message, p *match.Predicate) *hcmv3.HttpFilter {
	skip := &matcherv3.Matcher_OnMatch{OnMatch: &matcherv3.Matcher_OnMatch_Action{
		Action: &xdscorev3.TypedExtensionConfig{Name: "skip", TypedConfig: m.pack(&actionv3.SkipFilter{})},
	}}
	return m.filter(name, &matchingv3.ExtensionWithMatcher{
		XdsMatcher: &matcherv3.Matcher{MatcherType: &matcherv3.Matcher_MatcherList_{MatcherList: &matcherv3.Matcher_MatcherList{
			Matchers: []*matcherv3.Matcher_MatcherList_FieldMatcher{{Predicate: p, OnMatch: skip}},
		}}},
		ExtensionConfig: m.extension(kind, config),
	})
}

// input is a condition on one thing that Envoy knows of an answer.
func (m filters) input(name string, config proto.Message, value *matcherv3.StringMatcher) *match.Predicate {
	return &match.Predicate{MatchType: &matcherv3.Matcher_MatcherList_Predicate_SinglePredicate_{
		SinglePredicate: &matcherv3.Matcher_MatcherList_Predicate_SinglePredicate{
			Input:   &xdscorev3.TypedExtensionConfig{Name: name, TypedConfig: m.pack(config)},
			Matcher: &matcherv3.Matcher_MatcherList_Predicate_SinglePredicate_ValueMatch{ValueMatch: value},
		},
	}}
}

func (m filters) statusIs(status string) *match.Predicate {
	return m.input("status", &envoymatcherv3.HttpResponseStatusCodeMatchInput{}, match.Text(status))
}

func (m filters) answerHeader(name string, value *matcherv3.StringMatcher) *match.Predicate {
	return m.input("header", &envoymatcherv3.HttpResponseHeaderMatchInput{HeaderName: name}, value)
}

// buffer makes Envoy wait for the whole body.
func (m filters) buffer() *hcmv3.HttpFilter {
	return m.filter(bufferFilter, &bufferv3.Buffer{MaxRequestBytes: wrapperspb.UInt32(uint32(m.Bodies.Buffer))})
}

// measured makes Envoy count the bytes of a body that ext_proc has streamed back.
func (m filters) measured() *hcmv3.HttpFilter {
	f := m.filter(bufferFilter+"/measured",
		&bufferv3.Buffer{MaxRequestBytes: wrapperspb.UInt32(uint32(m.Bodies.Buffer))})
	return noted(m, f, notes{"": "ext_proc takes the length away. The endpoint gets it again, with the whole body."})
}

// keepCarry takes x-tandem-carry off the request, and keeps it for the answer.
func (m filters) keepCarry() *hcmv3.HttpFilter {
	rule := &metadatav3.Config_Rule{
		Header: "x-tandem-carry", Remove: true,
		OnHeaderPresent: &metadatav3.Config_KeyValuePair{MetadataNamespace: "tandem", Key: "carry"},
	}
	return noted(m, m.filter("envoy.filters.http.header_to_metadata",
		&metadatav3.Config{RequestRules: []*metadatav3.Config_Rule{rule}}), notes{
		"": "P need not see it. Its answer gets it again, above.",
	})
}

// router is the last filter of every listener. tries are logs of its tries.
func (m filters) router(tries ...*accesslogv3.AccessLog) *hcmv3.HttpFilter {
	return m.filter("envoy.filters.http.router", &routerv3.Router{SuppressEnvoyHeaders: true, UpstreamLog: tries})
}

// hygiene removes Tandem's and Envoy's own headers from answers.
func (m filters) hygiene() *hcmv3.HttpFilter {
	own := func() []*mutationv3.HeaderMutation {
		return []*mutationv3.HeaderMutation{removePrefix("x-tandem-"), removePrefix("x-envoy-"), remove(destination)}
	}
	response := own()
	if m.Explains != "" {
		explain := setHeader("x-tandem-explain", m.Explains, overwriteOrAdd)
		response = append(response, noted(m,
			&mutationv3.HeaderMutation{Action: &mutationv3.HeaderMutation_Append{Append: explain}}, notes{
				"": "For an operator who asked: the server sets it if tandem-explain bears the token, and no client can.",
			}))
	}
	f := m.filter(hygieneFilter, &headermutationv3.HeaderMutation{
		Mutations: &headermutationv3.Mutations{ResponseMutations: response, ResponseTrailersMutations: own()},
	})
	return noted(m, f, notes{
		"": "Nothing of Tandem's or of Envoy's own reaches a client, whoever set it: the legs' filters or an engine. " +
			"A redirect has got its ticket by then.",
	})
}

// switched answers an engine's 101.
func (m filters) switched() *hcmv3.HttpFilter {
	ask := m.extProc("switched", processing(nothing, headers))
	ask.MessageTimeout = durationpb.New(5 * time.Second)
	ask.StatusOnError = &typev3.HttpStatus{Code: typev3.StatusCode_BadGateway}
	unless := match.Not(m.statusIs("101"))
	return noted(m, m.filterUnless(extProcFilter+"/switched", extProcFilter, ask, unless), notes{
		"": "An engine's 101, which no client has asked for: the server makes it 502, or the client would wait " +
			"for what follows.",
	})
}

// mainExtProc is where a pass is decided.
func (m filters) mainExtProc() *hcmv3.HttpFilter {
	ask := noted(m, m.extProc("", processing(streamBody, nothing)), notes{
		"processing_mode": "All of the response is skipped, so the stream ends with the request: a replica that " +
			"dies cuts no answer.",
	})
	yes := wrapperspb.Bool(true)
	if m.numbered() {
		ask.GrpcService.InitialMetadata = []*corev3.HeaderValue{{Key: "x-tandem-fleet", Value: m.fleet()}}
	}
	ask.MutationRules = &mutationv3.HeaderMutationRules{AllowAllRouting: yes, AllowEnvoy: yes}
	if m.Metadata {
		ask.MetadataOptions = noted(m, &extprocv3.MetadataOptions{
			ReceivingNamespaces: &extprocv3.MetadataOptions_MetadataNamespaces{Untyped: []string{"tandem"}},
		}, notes{"": "Decisions, for access logs."})
	}
	return noted(m, m.filterUnless(extProcFilter, extProcFilter, ask, m.statusIs("200")), notes{
		"": "Once there is an answer the matcher keeps its pieces from the filter, which does nothing with them: " +
			"Envoy (1.40) would look up a runtime flag for each token, and touch memory that has grown cold.",
	})
}

// unfollowed ends redirects that Envoy could not follow, and engines' own, on routes that enable it.
func (m filters) unfollowed() *hcmv3.HttpFilter {
	script := &luav3.Lua{SourceCodes: map[string]*corev3.DataSource{"unfollowed": inline(lua.Unfollowed)}}
	redirect := m.input("status", &envoymatcherv3.HttpResponseStatusCodeClassMatchInput{}, match.Text("3xx"))
	return noted(m, m.filterUnless(luaFilter, luaFilter, script, match.Not(redirect)), notes{
		"": "A redirect that Envoy could not follow (too many of them, or a body over the buffer) ends here, as an " +
			"error, and the access log says so, from which the server works out why. So does an engine's own: where " +
			"it leads is no client's business. The matcher keeps all other answers from the script, which would cost " +
			"each a coroutine.",
	})
}

// ruled is a script for answers to requests with a rule (docs/adr/0050). The matcher keeps all others from it.
func (m filters) ruled(name, script string, of *match.Predicate, why string) *hcmv3.HttpFilter {
	lua := &luav3.Lua{DefaultSourceCode: inline(script)}
	skip := match.Not(match.All(m.statusIs("200"), of))
	return noted(m, m.filterUnless(luaFilter+"/"+name, luaFilter, lua, skip), notes{"": why})
}

// lateScripts ask Tandem about answers that begin late, and edit those that Tandem refuses (docs/adr/0050).
func (m filters) lateScripts() []*hcmv3.HttpFilter {
	rule := func(form string) *match.Predicate { return m.answerHeader("x-tandem-rule", match.Regex(form)) }
	stream := m.answerHeader("content-type", match.Regex("(?i).*event-stream.*"))
	// An answer with a content-length is computed already; this one came within a second.
	whole := match.All(m.answerHeader("content-length", match.Regex("[0-9]+")), rule("[0-9]{1,3} [0-9]+ [0-9]{4,} .*"))
	limit, cut := rule("[0-9-]+ [0-9]+ [0-9]+ .*"), rule("[0-9-]+ [0-9]+ cut .*") // legRoute writes them
	return []*hcmv3.HttpFilter{
		m.ruled("edit", lua.Edit, match.Any(cut, match.All(limit, stream)), "Cuts KV parameters, or a refused stream."),
		m.ruled("late", lua.Late, match.All(limit, match.Not(whole)),
			"An answer that begins late may be made from KV that was another prompt's by then: the server is asked, "+
				"and what it refuses ends as an error. Answers that are whole in time do not pass the script."),
	}
}

// inlineAnswer makes the redirect of a short prefill answer inside Envoy (docs/adr/0017).
func (m filters) inlineAnswer() *hcmv3.HttpFilter {
	short := match.All(m.statusIs("200"), m.answerHeader("x-tandem-carry", match.Prefix("http")),
		m.answerHeader("content-length", match.Regex("[1-9][0-9]{0,3}")))
	inlined := &luav3.Lua{DefaultSourceCode: inline(lua.Inline)}
	return noted(m, m.filterUnless(luaFilter, luaFilter, inlined, match.Not(short)), notes{
		"": "A short answer needs no stream of its own to Tandem: it goes to pass 2 as it is, in a header of the " +
			"redirect, if pass 1 said so. The matcher keeps all others from the script.",
	})
}

// usage reads the tokens of what clients get.
func (m filters) usage() *hcmv3.HttpFilter {
	of := func(kind string) *match.Predicate { return m.answerHeader("content-type", match.Prefix(kind)) }
	says := match.All(m.statusIs("200"), match.Any(of("text/event-stream"), of("application/json")))
	script := &luav3.Lua{DefaultSourceCode: inline(lua.Usage)}
	return noted(m, m.filterUnless(luaFilter+"/usage", luaFilter, script, match.Not(says)), notes{
		"": "Reads the tokens of answers as they pass, for the access log. Nothing waits for it."})
}

// cleanRefusal cuts KV parameters out of an engine's refusal.
func (m filters) cleanRefusal() *hcmv3.HttpFilter {
	refused := m.input("status", &envoymatcherv3.HttpResponseStatusCodeClassMatchInput{}, match.Text("4xx"))
	refusal := &luav3.Lua{DefaultSourceCode: inline(lua.Refusal)}
	return noted(m, m.filterUnless(luaFilter, luaFilter, refusal, match.Not(refused)), notes{
		"": "An engine that refuses a request may show what it was sent. The client's own members stay, those that " +
			"name internal hosts and rooms are cut. The matcher keeps all other answers from the script.",
	})
}

func inline(text string) *corev3.DataSource {
	return &corev3.DataSource{Specifier: &corev3.DataSource_InlineString{InlineString: text}}
}

// perFilter are a route's settings of filters, by their names.
type perFilter = map[string]*anypb.Any

// luaNamed enables one of the scripts of source_codes.
func (m filters) luaNamed(name string) *anypb.Any {
	return m.pack(&luav3.LuaPerRoute{Override: &luav3.LuaPerRoute_Name{Name: name}})
}

func (m filters) noBuffer() *anypb.Any {
	return m.pack(&bufferv3.BufferPerRoute{Override: &bufferv3.BufferPerRoute_Disabled{Disabled: true}})
}

// asked changes which parts of a request and its answer ext_proc gets on a route. With optional a request goes on where
// no replica answers.
func (m filters) asked(mode *extprocv3.ProcessingMode, optional bool) *anypb.Any {
	o := &extprocv3.ExtProcOverrides{ProcessingMode: mode}
	if optional {
		o.FailureModeAllow = wrapperspb.Bool(true)
	}
	return m.pack(&extprocv3.ExtProcPerRoute{Override: &extprocv3.ExtProcPerRoute_Overrides{Overrides: o}})
}

const (
	overwrite      = corev3.HeaderValueOption_OVERWRITE_IF_EXISTS
	overwriteOrAdd = corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD
)

func setHeader(name, value string, action corev3.HeaderValueOption_HeaderAppendAction) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{Header: &corev3.HeaderValue{Key: name, Value: value}, AppendAction: action}
}

func remove(header string) *mutationv3.HeaderMutation {
	return &mutationv3.HeaderMutation{Action: &mutationv3.HeaderMutation_Remove{Remove: header}}
}

func removePrefix(prefix string) *mutationv3.HeaderMutation {
	return &mutationv3.HeaderMutation{Action: &mutationv3.HeaderMutation_RemoveOnMatch_{
		RemoveOnMatch: &mutationv3.HeaderMutation_RemoveOnMatch{KeyMatcher: &envoymatcherv3.StringMatcher{
			MatchPattern: &envoymatcherv3.StringMatcher_Prefix{Prefix: prefix},
		}},
	}}
}
