// Package extproc is the Envoy edge of Tandem, and the only package that knows Envoy's messages.
//
// Envoy carries every byte of every request; this server speaks when a decision is due. One request over two hops
// meets it three times, on three gRPC streams of one service, told apart by the initial metadata x-tandem-role:
//
//  1. Pass 1 (main role). The client's headers and body arrive. The body is scanned once, a pair of prefill and decode
//     endpoints is picked and booked, the body becomes the prefill leg's by splicing, and a small ticket goes along
//     that says how to undo it. Envoy routes by the headers that are set here.
//  2. Prefill leg (role prefill-leg, a filter of an internal listener). The prefill endpoint's answer arrives. Its KV
//     transfer parameters move into a second ticket, and the answer becomes a 307, which Envoy follows by itself.
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
// prefill-mirror). concurrent.go tells it.
//
// Files: message.go, reply.go, wire.go and codec.go are the messages; server.go is the service; route.go and plan.go
// are passes 1 and 2; leg.go is the prefill leg, pair.go what some dialects want of both; concurrent.go, decodeleg.go,
// mirroredleg.go and pairs.go are both legs at once; replan.go and accesslog.go are the other two doors.
package extproc

// Header names that Tandem and Envoy's configuration agree on (package envoyconfigs writes the other side).
const (
	headerEndpoint   = "x-gateway-destination-endpoint"         // ip:port; ORIGINAL_DST clusters connect there
	headerLeg        = "x-tandem-leg"                           // which route: one of the leg constants
	headerTicket     = "x-tandem-ticket"                        // sealed state of the request
	headerScheme     = "x-tandem-scheme"                        // https or h2c; absent: http
	headerBodyBytes  = "x-tandem-body-bytes"                    // length of the body as rewritten
	headerPerTry     = "x-envoy-upstream-rq-per-try-timeout-ms" // time limit of the prefill hop
	headerRequestID  = "x-request-id"
	headerRetryAfter = "retry-after"

	// Of requests whose legs run at once. They are set together, and removed together.
	headerPrefillEndpoint = "x-tandem-prefill-endpoint" // ip:port of the mirrored leg
	headerPrefillScheme   = "x-tandem-prefill-scheme"   // as headerScheme
	headerMirror          = "x-tandem-mirror"           // what becomes of the mirrored leg: mirrorCancel or mirrorKeep
	headerClientID        = "x-tandem-request-id"       // the client's request id: the legs' own may be another
	headerLegID           = "x-tandem-leg-id"           // the x-request-id of both legs, where it is not the client's
	headerPrefillRank     = "x-tandem-prefill-rank"     // x-data-parallel-rank of the leg
	headerDecodeRank      = "x-tandem-decode-rank"

	mirrorCancel = "cancel" // Tandem cuts the leg when nobody waits for its blocks any more
	mirrorKeep   = "keep"   // the leg runs to its end, and is sent again where it failed

	legPrefill = "prefill" // prefill-leg listener first, replan port second; redirects are followed
	legDecode  = "decode"  // the endpoint first, replan port second; redirects are followed
	legPass    = "pass"    // the endpoint, and what it says is what the client gets
	legPair    = "pair"    // both legs at once: decode-leg listener, and a copy to the prefill-mirror listener

	metadataRole    = "x-tandem-role"
	rolePrefillLeg  = "prefill-leg"
	roleDecodeLeg   = "decode-leg"
	roleMirror      = "prefill-mirror"
	detailsPrefix   = "tandem"
	contentTypeJSON = "application/json"
)
