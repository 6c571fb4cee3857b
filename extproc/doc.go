// Package extproc is the Envoy edge of Tandem, and the only package that knows Envoy's messages.
//
// Envoy carries every byte of every request; this server speaks when a decision is due. One request over two hops
// meets it three times, on three gRPC streams of one service, told apart by the initial metadata x-tandem-role:
//
//  1. Pass 1 (main role). The client's headers and body arrive. The body is scanned once, a pair of prefill and decode
//     endpoints is picked and booked, the body becomes the prefill leg's by splicing, and a small ticket goes along
//     that says how to undo it. Envoy routes by the headers that are set here.
//  2. Prefill leg (role prefill-leg, a filter of an internal listener). The prefill endpoint's answer arrives. Its KV
//     transfer parameters move into a second ticket, and the answer becomes a 307, which Envoy follows by itself. A short answer
//     does not come here: Envoy makes the 307 of it by itself, and pass 2 reads it from a header (carried.go).
//  3. Pass 2 (main role again; the ticket tells it apart). The body that arrives is the prefill leg's. Undo gives the
//     client's body back, the parameters are put in, and Envoy streams the decode endpoint's answer to the client
//     without asking again.
//
// A hop that fails outright is tried a second time by Envoy, and the second try goes to [Server.Replan], a small HTTP
// handler that answers 307 with a ticket that says what failed; pass 2 then plans anew. How a hop ended is learnt from
// Envoy's gRPC access log. Nothing about a request is kept here between those meetings but its reservations, so any
// replica serves any of them.
//
// Engines that need both legs at once go another way, in one pass: Envoy sends the request to the decode endpoint and a copy
// of it to the prefill endpoint, each through an internal listener whose filter is a role of its own here (decode-leg,
// prefill-mirror). concurrent.go tells it. A chat with media may have a leg before all these (encode-leg): encodeleg.go.
//
// Files: message.go, reply.go, wire.go and codec.go are the messages; server.go is the service, live.go what of it may
// change while it runs; route.go and plan.go are pass 1, pass2.go is pass 2; objectives.go is what a request wants, latebinding.go and
// waitingroom.go how it waits for its endpoints; continue.go and answerleg.go are what becomes of an answer that two engines
// give; turn.go is what D keeps of an answer for the conversation's next turn; encodeleg.go is the leg before the others, of chats
// with media; leg.go is the prefill leg, carried.go what comes without it, pair.go what some dialects want of both; concurrent.go, decodeleg.go, mirroredleg.go and
// pairs.go are both legs at once; replan.go and accesslog.go are the other two doors, unfollowed.go what the second tells of redirects that came to nothing, handed.go and
// stranded.go what of KV that nobody got; explain.go says why a request went
// where it went.
package extproc

// Header names that Tandem and Envoy's configuration agree on (package envoyconfigs writes the other side).
const (
	headerEndpoint   = "x-gateway-destination-endpoint"         // ip:port; ORIGINAL_DST clusters connect there
	headerLeg        = "x-tandem-leg"                           // which route: one of the leg constants
	headerTicket     = "x-tandem-ticket"                        // sealed state of the request
	headerScheme     = "x-tandem-scheme"                        // https or h2c; absent: http
	headerBodyBytes  = "x-tandem-body-bytes"                    // length of the body as rewritten
	headerPerTry     = "x-envoy-upstream-rq-per-try-timeout-ms" // time limit of the prefill hop
	headerCarry      = "x-tandem-carry"                         // of a prefill leg: where a short answer is to go by itself
	headerPrefilled  = "x-tandem-prefilled"                     // of pass 2: prefill's answer, base64
	headerRequestID  = "x-request-id"
	headerRetryAfter = "retry-after"
	headerFinal      = "x-envoy-ratelimited" // of an answer: Envoy does not try again, whatever the status

	// What a request wants, under the names of llm-d (llm-d-router, docs/metrics and headers); counted where a pool takes them.
	headerFairness = "x-llm-d-inference-fairness-id" // whose it is: flows share a pool's queue evenly
	headerTTFT     = "x-llm-d-slo-ttft-ms"
	headerTPOT     = "x-llm-d-slo-tpot-ms"

	headerExplain     = "tandem-explain"   // of a request: an operator's token, who wants the decision explained
	headerExplanation = "x-tandem-explain" // of the request from then on, and of its answer: the explanation

	// Of requests whose legs run at once. They are set together, and removed together.
	headerPrefillEndpoint = "x-tandem-prefill-endpoint" // ip:port of the mirrored leg
	headerPrefillScheme   = "x-tandem-prefill-scheme"   // as headerScheme
	headerMirror          = "x-tandem-mirror"           // what becomes of the mirrored leg: mirrorCancel or mirrorKeep
	headerClientID        = "x-tandem-request-id"       // the client's request id: the legs' own may be another
	headerLegID           = "x-tandem-leg-id"           // the x-request-id of both legs, where it is not the client's
	headerPrefillRank     = "x-tandem-prefill-rank"     // x-data-parallel-rank of the leg
	headerDecodeRank      = "x-tandem-decode-rank"
	headerAnswer          = "x-tandem-answer" // the decode leg goes through answer-leg: its answer is joined with prefill's

	mirrorCancel = "cancel" // Tandem cuts the leg when nobody waits for its blocks any more
	mirrorKeep   = "keep"   // the leg runs to its end, and is sent again where it failed

	legPrefill = "prefill" // prefill-leg listener first, replan port second; redirects are followed
	legDecode  = "decode"  // the endpoint first, replan port second; redirects are followed
	legPass    = "pass"    // the endpoint, and what it says is what the client gets
	legAnswer  = "answer"  // as decode, through the answer-leg listener, where the answer is rewritten
	legEncode  = "encode"  // encode-leg listener first, replan port second; redirects are followed
	legPair    = "pair"    // both legs at once: decode-leg listener, and a copy to the prefill-mirror listener

	metadataRole    = "x-tandem-role"
	rolePrefillLeg  = "prefill-leg"
	roleDecodeLeg   = "decode-leg"
	roleMirror      = "prefill-mirror"
	roleAnswerLeg   = "answer-leg"
	roleEncodeLeg   = "encode-leg"
	rolePicker      = "endpoint-picker" // of metrics alone: the server is one for all streams, or for none
	detailsPrefix   = "tandem"
	contentTypeJSON = "application/json"
)
