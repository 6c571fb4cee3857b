// Package kvstate holds a replica's knowledge of the fleet: the pools and endpoints ([Pool], [Endpoint]), their
// health, the reservations on them ([Bookings.Reserve]), and which endpoint holds the KV cache of which prompt
// prefixes.
//
// A decision takes a [View], a copy of the numbers that it needs ([State.View]), and reserves the endpoints that it
// chooses ([Bookings.Reserve]). The end of a request releases what is reserved. Discovery, probes and other replicas
// update the state concurrently. The in-memory state is complete: it is the default store, not a test double.
//
// The prefix index (package prefixindex) has two sources: the prompts that were routed to an endpoint, which is a
// guess, and the engines' KV events ([Pool.Feed]), which are exact. Events name token blocks; the known tokens of a
// prompt ([Pool.KnownTokens]) connect them to its text ([Pool.DropGuesses], [Pool.TokenHits]).
//
// Everything has a bound or a time to live. Reservations expire, the prefix index drops its oldest generation when it
// exceeds its bytes, the oldest known tokens are dropped first, and consumed tickets and hand-overs are kept only
// while they can be used.
//
// A [State] has parts with one job each, which are named fields: [Health], [Bookings] (reservations), [HandOvers]
// (tickets, KV parameters), [Sessions], [KVLoads] (pairs whose transfers fail) and
// [inferencepolicy.Policies]. Its own methods are about pools, views, the prefix index and signals.
package kvstate
