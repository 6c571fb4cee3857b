// Package kvstate is the fleet as this replica knows it: who exists ([Pool], [Endpoint]), who is usable, what is booked
// on whom ([State.Reserve]), and which endpoint holds the KV cache of which prompt prefixes.
//
// The request path does three things here: it takes a [View], which is a copy of the numbers a decision needs; it books
// what was decided; and it gives the booking back. All else (discovery, probes, other replicas) writes beside it. In
// memory the state is complete by itself; it is the default store, not a fake.
//
// The prefix index (package prefixindex) has two sources: what was routed where, a guess, and the KV events of
// engines ([Pool.Feed]), exact. Events speak of token blocks; what is known of a prompt's tokens ([Pool.KnownTokens]) joins
// the two ([Pool.TrustEngines], [Pool.TokenHits]).
//
// Everything has a bound or a time to live: reservations that nobody releases expire, the prefix index forgets by
// generations within its bytes, what is oldest of the known tokens goes first, spent tickets and hand-overs live as long as they can matter.
package kvstate
