// Package names has the names on which Tandem and Envoy's configuration agree: headers, metadata, roles of filters, and
// the keys of what Envoy reports. Package envoyconfigs writes the other side. Names that only one side needs are not
// here.
package names

// Header names that Tandem and Envoy's configuration agree on. Package envoyconfigs writes the other side.
const (
	HeaderEndpoint = "x-gateway-destination-endpoint" // ip:port; ORIGINAL_DST clusters connect there
	HeaderLeg      = "x-tandem-leg"                   // the route: one of package plan's legs
	HeaderTicket   = "x-tandem-ticket"                // sealed state of the request
	// HeaderOther is set on the leg pass if Envoy is to ask again where another endpoint should be tried. With a
	// bootstrap that does not know it, the request passes all the same.
	HeaderOther  = "x-tandem-other"
	HeaderScheme = "x-tandem-scheme" // https or h2c; absent: http
	// HeaderServerName is SNI and Host of an https engine; absent: none of its own.
	HeaderServerName = "x-tandem-server-name"
	HeaderPerTry     = "x-envoy-upstream-rq-per-try-timeout-ms" // maximum time of a hop without progress
	// HeaderHedge is "true" for a hop that continues after that time, together with a try at the replan port.
	HeaderHedge = "x-envoy-hedge-on-per-try-timeout"
	// HeaderRule says what Envoy does to a decode leg's answer: the time in ms after which it asks the replan port
	// whether the answer may begin, or "cut", which takes kv_transfer_params away.
	HeaderRule        = "x-tandem-rule"
	HeaderCarry       = "x-tandem-carry"     // prefill leg: the redirect target of an inline answer
	HeaderPrefilled   = "x-tandem-prefilled" // of pass 2: prefill's answer, base64
	HeaderRequestID   = "x-request-id"
	HeaderReservation = "x-tandem-reservation" // Envoy's own id of the request, under which it is reserved
	// HeaderReplica is the number of the replica that decided: the end of the pass is logged to it alone.
	HeaderReplica    = "x-tandem-replica"
	HeaderRetryAfter = "retry-after"
	HeaderDetails    = "x-tandem-details"    // of an answer that Envoy gave on a leg's listener: its cause
	HeaderRestart    = "x-tandem-restart"    // on the way to the replan port: no replica decided this pass
	HeaderFinal      = "x-envoy-ratelimited" // of an answer: Envoy must not retry, whatever the status

	// HeaderObjective and the headers below it are a request's objectives, named as in llm-d (llm-d-router,
	// docs/metrics and headers). Used if the pool allows it.
	HeaderObjective        = "x-llm-d-inference-objective"
	HeaderFairness         = "x-llm-d-inference-fairness-id" // the flow: flows share a pool's queue evenly
	HeaderGatewayObjective = "x-gateway-inference-objective" // the Inference Extension's names of the two
	HeaderGatewayFairness  = "x-gateway-inference-fairness-id"
	HeaderTTFT             = "x-llm-d-slo-ttft-ms"
	HeaderTPOT             = "x-llm-d-slo-tpot-ms"

	// HeaderExplain is a request's: an operator's token that asks for an explanation of the decision.
	HeaderExplain     = "tandem-explain"
	HeaderExplanation = "x-tandem-explain" // of the request from then on, and of its answer: the explanation

	HeaderRank = "x-data-parallel-rank" // vLLM and SGLang: one of the engines behind one port

	// HeaderPrefillEndpoint and the headers below it belong to requests whose legs run at once. They are set and
	// removed together.
	HeaderPrefillEndpoint = "x-tandem-prefill-endpoint"    // ip:port of the mirrored leg
	HeaderPrefillScheme   = "x-tandem-prefill-scheme"      // as HeaderScheme
	HeaderPrefillName     = "x-tandem-prefill-server-name" // as HeaderServerName
	// HeaderMirror is MirrorCancel or MirrorKeep: whether Tandem may cancel the mirrored leg.
	HeaderMirror      = "x-tandem-mirror"
	HeaderClientID    = "x-tandem-request-id"   // the client's request id, if the legs have another
	HeaderLegID       = "x-tandem-leg-id"       // the x-request-id of both legs, if it is not the client's
	HeaderPrefillRank = "x-tandem-prefill-rank" // x-data-parallel-rank of the leg
	HeaderDecodeRank  = "x-tandem-decode-rank"
	HeaderAnswer      = "x-tandem-answer" // the decode leg goes through answer-leg, which joins its answer with P's

	// HeaderForwarded is x-forwarded-for as a call inside Envoy should have it: Envoy's client adds to that itself.
	HeaderForwarded = "x-tandem-forwarded-for"

	MirrorCancel = "cancel" // Tandem cancels the leg when nobody needs its blocks any more
	MirrorKeep   = "keep"   // the leg runs to its end, and is sent again if it fails

	MetadataFleet   = "x-tandem-fleet"   // of ext_proc streams: fingerprint of Envoy's list of replicas
	MetadataReplica = "x-tandem-replica" // of access log streams: that fingerprint, "/", the replica's number
	MetadataRole    = "x-tandem-role"
	RoleMain        = "main" // in metrics; its filter sends no role
	RolePrefillLeg  = "prefill-leg"
	RoleDecodeLeg   = "decode-leg"
	RoleMirror      = "prefill-mirror"
	RoleAnswerLeg   = "answer-leg"
	RoleEncodeLeg   = "encode-leg"
	RoleSwitched    = "switched"        // an engine answered 101
	RolePicker      = "endpoint-picker" // only in metrics: the endpoint picker serves all streams of a server
	DetailsPrefix   = "tandem"
	ContentTypeJSON = "application/json"
)

// The headers of the W3C trace context.
const (
	HeaderTraceparent = "traceparent"
	HeaderTracestate  = "tracestate"
)

// HeaderLoad is an engine's load report in an answer (ORCA).
const HeaderLoad = "endpoint-load-metrics"

// OneValue reports whether a client's header must have one value: those that Tandem reads, and more, which settings
// name. If one comes twice with different values, the request is refused: what stands behind Tandem (an engine, Envoy's
// log and rate limit) may read the other one. So it is with the two names of an objective and of a flow.
func OneValue(name []byte, more []string) bool {
	for _, n := range more {
		if n == string(name) {
			return n != "cookie" // HTTP/2 splits it
		}
	}
	switch string(name) { // does not allocate
	case "content-type", "content-encoding", "authorization", HeaderObjective, HeaderGatewayObjective, HeaderFairness,
		HeaderGatewayFairness, HeaderTTFT, HeaderTPOT, HeaderExplain:
		return true
	}
	return false
}

// FormHeaders are request headers that change the form of an answer (RFC 9110, 3229, 7240, 9530). A leg whose answer
// Tandem reads goes without them.
var FormHeaders = []string{"a-im", "accept-charset", "expect", "if-match", "if-modified-since", "if-none-match",
	"if-range", "if-unmodified-since", "prefer", "range", "te",
	"want-content-digest", "want-digest", "want-repr-digest"}

// CodeTicketRefused is the code of the error for a request whose ticket a replica cannot read.
const CodeTicketRefused = "ticket_refused"

// CodeNoRoute is the code of the error if Envoy has no route for a request's next hop, because its configuration is an
// older one.
const CodeNoRoute = "router_undecided"

// TagUnfollowed tags the access log entry of a redirect that Envoy did not follow. Its value is UnfollowedLocation if
// the redirect had no usable location.
const (
	TagUnfollowed      = "unfollowed"
	UnfollowedLocation = "location"
)

// The namespace of dynamic metadata in which Envoy leaves what it has read of an answer's usage, and its keys. They are
// those of envoy-configs/usage.
const (
	UsageNamespace    = "tandem.usage"
	UsageIn           = "in"          // tokens of the prompt
	UsageOut          = "out"         // of the answer
	UsageCached       = "cached"      // of the prompt, found in a cache
	UsageCacheRead    = "cache_read"  // of these, tokens that "in" does not count (Anthropic's form)
	UsageCacheWritten = "cache_write" // of the prompt, written to a cache, which "in" does not count
	UsageTotal        = "total"       // all of them, for limits
)

// UsageKeys are the keys of the counts, in the order of ended.Usage.Counts.
var UsageKeys = [...]string{UsageIn, UsageOut, UsageCached, UsageCacheRead, UsageCacheWritten}

// TagFirstBody tags an entry with the time from its start to the first byte of the answer's body, in microseconds.
const TagFirstBody = "first_body"
