// Package picker decides which endpoints serve a request. It is pure: no I/O, no clock, no locks, no allocation.
// Its input is the request, the view and a random number, so every decision can be replayed, and written as a
// transcript (testdata/*.txt).
//
// The algorithm has three steps:
//
//  1. Filter (filter.go): role, health, the model it serves, what already failed this request; and for a pair the
//     group, the engine's release and the layout of its KV.
//  2. Price (price.go, with the constants of model.go): the cost of an endpoint, in seconds. For P its queue, the
//     tokens it has to compute, and the delay of other requests; for D the delay of its running answers; for both
//     the transfer between them; and for decode alone what its answers lose while it computes the prompt.
//  3. Pick (pick.go): the cheapest pair, or the cheapest endpoint alone if that is cheaper still. Among prices that
//     are equal to a millisecond it prefers the longer cached prefix, and then draws, so that replicas with the same
//     view do not all choose alike.
//
// docs/decision.md has the formula, its origin, and where it does not win. Explain (explain.go) shows all of it for
// one request. Tests compare the fast search with a brute-force twin that prices every pair. Package admission,
// below, holds requests until an endpoint has capacity.
package picker
