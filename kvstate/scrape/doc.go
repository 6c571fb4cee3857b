// Package scrape reads engines' load from their metrics: running and waiting requests, and the size and use of the
// KV cache ([kvstate.Signals]).
//
// Reservations and the ORCA header of prefill answers are newer, but incomplete: metrics include requests that did
// not come through Tandem, preemptions, and KV that is still held. They are as old as the last scrape. What an
// engine does not report is unknown, not zero, and old figures are trusted less and less ([kvstate.Signals.Trust]).
//
// Nothing is configured: the prefix of the metrics' names identifies the engine. engines.go has the names, with the
// releases that they were read from; parse.go finds them in a page without parsing the rest; scrape.go asks, each
// endpoint from one replica only.
package scrape
