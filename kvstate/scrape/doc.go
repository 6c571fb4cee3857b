// Package scrape learns from engines' metrics how loaded they are: requests running and waiting, and the KV cache's size and
// use ([kvstate.Signals]).
//
// It is the slow truth beside the fast signals, our own bookings and the ORCA header of prefill answers: it knows of requests
// that did not come this way, of preemptions and of KV that is still held, but it is as old as the last look. What an engine
// does not say is unknown, not zero, and what it said some time ago is trusted less and less ([kvstate.Signals.Trust]).
//
// Nothing is configured: an engine is known by the prefix of what it exports. engines.go has the names, with the releases
// that they were read from; parse.go finds them in a page without reading the rest of it; scrape.go asks, each endpoint by
// one replica only.
package scrape
