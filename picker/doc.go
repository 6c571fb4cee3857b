// Package picker decides which endpoints serve a request. It is pure: no I/O, no clock, no locks, no allocation;
// what it knows is the request and the view it is given, and chance comes in as a number. So every decision can be
// replayed, and written down as a transcript (testdata/*.txt).
//
// The algorithm, in four duties:
//
//  1. Filter (filter.go): role, health, the model it serves, what already failed this request; and for a pair the group,
//     the engine's release and the layout of its KV.
//  2. Price (price.go, with the constants of model.go): what taking an endpoint costs, in seconds. For P its queue, the
//     tokens it has to compute, and what that keeps others waiting; for D the pressure on its running answers; for both
//     the transfer between them; and for D alone what its answers lose while it computes the prompt.
//  3. Pick (pick.go): the cheapest pair, or the cheapest endpoint alone where that is cheaper still. What is equal to a
//     millisecond goes to the one that holds more of the prompt, and then by chance, so that replicas which see the same do
//     not all choose alike.
//  4. Bind late (queue.go): a request waits until an endpoint has less than one step of work ahead, shortest first.
//
// The formula, where it comes from and where it does not win is in docs/decision.md. Explain (explain.go) shows all
// of it for one request. The tests hold the fast search to a brute-force twin that prices every pair.
package picker
