// Package journey is the life of a request between its passes, the same for both transports. It knows neither gRPC nor
// Envoy's messages: a transport tells it what has happened, and carries out what follows.
//
//   - state.go: where a request is on its way ([State]).
//   - prefill.go: P's answer ([Legs.Settle]): another pass, or the client's answer. encode.go: that of an encode leg.
//   - pair.go: both legs at once, a machine of events and actions ([Pair]). pairlegs.go: how each of them ends.
//   - insured.go: a stream that outlives its engine, likewise ([Insured]). Only the filter inside Envoy has these.
//   - again.go: the request is planned again after a leg has failed. What that means is a table, [faults.Means].
//   - silence.go: whether an answer that does not come will come.
//   - answer.go: D's answer on its way to the client: checked, rewritten or cut.
//   - end.go: the end of a request, and all that follows from it ([Shared.End]).
//
// What happens within a pass is package pass's. testdata has scripts of journeys, which both transports play (package
// script). To add a reaction to a new kind of failure, begin in [faults.Means]; to add a journey, write a script.
package journey
