// Package admission holds the requests of a pool back until an endpoint has capacity for them (late binding,
// docs/adr/0009). A request that is bound on arrival stays in one endpoint's queue, first come, first served. A request
// that waits here goes to the first endpoint that is free, and short requests need not wait behind long ones.
//
// The package is pure: no clock, no locks, no goroutines. Times are seconds since any moment, and the [Host] is all
// that a queue knows of the world. Package extproc is one host, with real time and streams; package replay is another
// one, with virtual time.
//
//   - queue.go: the order of the requests that wait.
//   - dispatch.go: arrival, dispatch, and what happens when space, memory or time is over.
//   - shares.go: fair shares for flows.
//   - remote.go: requests that wait at other replicas.
package admission
