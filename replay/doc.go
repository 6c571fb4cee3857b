// Package replay plays a trace of requests against a model of the engines, in a time of its own, and says how well
// a routing policy served them. It drives the real picker and the real kvstate, so what it measures is what would
// have been decided; only the engines are a model. A run is deterministic: the same trace, fleet, policy and seed
// give the same numbers.
//
// What happens to a request:
//
//  1. It arrives (trace.go reads a trace in Mooncake's format, generate.go makes one up) and the policy binds it, at once
//     or later: tandem.go is Tandem's own, peers.go has those of other routers, from their published formulae.
//  2. Its prefill endpoint (prefill.go) serves first come, first served, in steps of a bounded number of tokens, long prompts
//     in several. It finds the prompt's leading blocks in its cache, an LRU (cache.go), or does not.
//  3. Its decode endpoint (decode.go) makes room for the KV, fetches what it does not hold, and takes the request into the
//     batch, every step of which gives each of its answers a token.
//  4. Or one endpoint does both: the prompt is then computed in chunks between the steps of the answers that run there.
//
// What the model leaves out: the network's contention, preemption (KV that grows beyond the capacity stays),
// failures, tokens of an answer as prefix of the next turn, speculative decoding. Peers are given their best case:
// an exact index of every cache, and loads that are never stale.
package replay
