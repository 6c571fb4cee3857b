// Package extproc is the Envoy edge of Tandem. Only this package and envoywire, which encodes Envoy's messages,
// know Envoy.
//
// Envoy carries every byte of every request; this server makes decisions. A request over two hops meets it three
// times, on three gRPC streams of one service. The initial metadata x-tandem-role tells them apart:
//
//  1. Pass 1 (main role). The client's headers and body arrive. The server scans the body once, picks and reserves a pair of
//     prefill and decode endpoints, splices the body into the prefill leg's, and adds a small ticket that says how to undo
//     that. Envoy routes by the headers that the server sets.
//  2. Prefill leg (role prefill-leg, a filter of an internal listener). The prefill endpoint's answer arrives. Its KV
//     transfer parameters move into a second ticket, and the answer becomes a 307, which Envoy follows by itself. A short
//     answer does not come here: Envoy makes the 307 from it by itself, and pass 2 reads it from a header (nextpass.go).
//  3. Pass 2 (main role again; the ticket tells it apart). The body that arrives is the prefill leg's. The server undoes the
//     edits, which restores the client's body, and inserts the parameters. Envoy streams the decode endpoint's answer to the
//     client without asking again.
//
// Envoy tries a hop that fails outright a second time at [Server.Replan], a small HTTP handler. It answers 307 with
// a ticket that says what failed, and pass 2 plans again. Envoy's gRPC access log reports how each hop ended.
// Between these meetings the server stores nothing about a request except its reservations, so any replica can
// serve any of them.
//
// Engines that need both legs at once take another way, in one pass: Envoy sends the request to the decode endpoint
// and a copy of it to the prefill endpoint, each through an internal listener whose filter has its own role
// (decode-leg, prefill-mirror); see bothlegs.go. A chat with media may have a leg before all these (encode-leg);
// see encodeleg.go.
//
// Each filter role has a handler type, with a [stream] (I/O only) and a telemetry.Meter, to which it reports; [scratch]
// holds the memory of all:
//
//   - mainRole (route.go): firstPass (firstpass.go, bothlegs.go, passthrough.go) is about a request with its body alone,
//     nextPass (nextpass.go) about one with the ticket of a leg. Both read the body and the state into a planning
//     (planning.go), have the picker choose, let package plan decide ([plan.First], [plan.Resume]), and return its
//     [plan.Decision]; commit.go reserves what it needs and seals its ticket.
//   - prefillLeg (prefillleg.go): prefillAnswer settles P's answer, which pass 2 does as well for inline ones.
//   - decodeLeg, mirroredLeg: concurrent legs; package concurrent is where they meet.
//   - answerLeg, encodeLeg, and endpointPicker (pickerprotocol.go).
//
// The rest: replan.go and accesslog.go; choose.go, which may have a request wait (package latebinding); settings.go,
// the settings that may change.
package extproc
