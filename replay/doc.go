// Package replay plays a trace of requests against a model of the engines, in virtual time, and reports how well a
// routing policy served them. It drives the real picker and the real kvstate, so it measures the decisions that a
// server would make; only the engines are a model. A run is deterministic: the same trace, fleet, policy and seed give
// the same numbers.
//
// A request takes these steps:
//
//  1. It arrives (replay/traces reads or generates a trace, shift.go joins several) and the policy binds it, at once or
//     later: tandem.go is Tandem's own, peers.go has those of other routers, from their published formulae.
//  2. Its prefill endpoint, an engine of replay/engine, serves first come, first served, in steps of a bounded number
//     of tokens, long prompts in several. It looks for the prompt's leading blocks in its cache, and holds the KV
//     until decode has fetched it.
//  3. Its decode endpoint makes room for the KV, fetches the blocks that it lacks, and adds the request to the batch.
//     Every step gives each answer of the batch one token.
//  4. Or one endpoint does both: it computes the prompt in chunks that share the steps of its other answers.
//
// Endpoints have a fixed role, or all serve both legs. Then words say which leg each has now (words.go, picker/roles).
//
// What a fleet was really asked comes from a recording (recorded.go, package recording): it is played as it was first,
// beside what was measured, and then on other fleets (whatif.go).
//
// The model leaves out: contention of the network, failures, tokens of an answer as prefix of the next turn,
// speculative decoding. Other routers are given their best case: an exact index of every cache, and loads that are
// never stale.
package replay
