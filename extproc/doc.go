// Package extproc is the Envoy edge of Tandem. With envoywire, which encodes Envoy's messages, it is the only package that
// knows Envoy.
//
// Envoy carries every byte of every request; this server speaks when a decision is due. One request over two hops
// meets it three times, on three gRPC streams of one service, told apart by the initial metadata x-tandem-role:
//
//  1. Pass 1 (main role). The client's headers and body arrive. The body is scanned once, a pair of prefill and decode
//     endpoints is picked and booked, the body becomes the prefill leg's by splicing, and a small ticket goes along
//     that says how to undo it. Envoy routes by the headers that are set here.
//  2. Prefill leg (role prefill-leg, a filter of an internal listener). The prefill endpoint's answer arrives. Its KV
//     transfer parameters move into a second ticket, and the answer becomes a 307, which Envoy follows by itself. A short answer
//     does not come here: Envoy makes the 307 of it by itself, and pass 2 reads it from a header (inline.go).
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
// Each filter role has a handler type, with a [stream] (I/O only) and a telemetry.Meter; [scratch] holds the memory of all:
//
//   - mainRole (route.go): firstPass (plan.go, concurrent.go, encodeleg.go, passthrough.go) decides for a request from its
//     body, nextPass (pass2.go, continue.go) from the ticket of a leg. Both read the state into a planning (planning.go) and
//     return a [plan.Decision]; commit.go reserves what it needs and seals its ticket.
//   - prefillLeg (leg.go): prefillAnswer settles P's answer, which pass 2 does as well for inline ones (inline.go).
//   - decodeLeg, mirroredLeg: both legs at once; pairs.go is where they meet.
//   - answerLeg, encodeLeg, and endpointPicker (pickerprotocol.go).
//
// Beside the streams: replan.go and accesslog.go; latebinding.go and waitingroom.go, in which requests wait for endpoints;
// live.go, the settings that may change.
package extproc
