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
//     answer does not come here: Envoy makes the 307 from it by itself, and pass 2 reads it from a header.
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
// (decode-leg, prefill-mirror); see decodeleg.go. A chat with media may have a leg before all these (encode-leg);
// see encodeleg.go.
//
// Each filter role has a handler type, with a [stream] (I/O only) and a telemetry.Meter, to which it reports; [scratch]
// holds the memory of all:
//
//   - mainRole (route.go) receives both passes, has a [pass.Pass] read, choose, decide and commit, and renders the
//     decision for Envoy. endpointPicker (pickerprotocol.go) does the same for gateways.
//   - prefillLeg (prefillleg.go) has [journey.Legs] settle P's answer.
//   - decodeLeg, mirroredLeg: concurrent legs; package concurrent is where they meet.
//   - answerLeg, encodeLeg.
//
// The rest: replan.go, the second try of a hop, and accesslog.go, the end of each.
package extproc
