// Package filter is Tandem inside Envoy: an HTTP filter that makes both hops of a request. It is the second transport
// of packages pass and journey; package extproc is the first one. It knows no C: package carrier, the library that
// Envoy loads, translates Envoy's hooks into calls of [Filter], and implements [Envoy].
//
//   - filter.go: the hooks of one request, in the order in which Envoy calls them.
//   - request.go: what is read of the headers, and which requests are refused before their body is there.
//   - passes.go: the passes, in goroutines: decide, and what P's answer leads to.
//   - hops.go: P's leg is a call of Envoy's HTTP client, D's the request itself, which Envoy's router carries on.
//   - worker.go: which thread runs what.
//   - pair.go: both legs at once, as package journey has them. encode.go: a leg before all others.
//   - rewrite.go: D's answer, where the client gets another than D wrote.
//   - answer.go: D's answer until its first byte, which is when it can still be planned again, and the request's end.
//   - insured.go, insuring.go, continued.go: D's answer to a request whose stream shall outlive its engine.
//   - shared.go: what the requests of a replica share.
//
// No hook waits: what may wait runs in a goroutine and wakes the filter on its worker. A hook or goroutine that panics
// costs its request. In place of tickets that travel sealed, an attempt is a value in memory.
package filter
