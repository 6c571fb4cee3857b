// Command carrier is the library that has Envoy make both hops of a request by itself: `make carrier` builds
// bin/libtandem.so of it, an HTTP filter for Envoy's dynamic modules (docs/howto/inside-envoy.md). It is no program.
//
// Everything here is translation: between Envoy's C functions (abi.h: those that are used, of Envoy 1.40) and package
// filter, which knows no C. hooks.go has what Envoy calls, and hooks.c the part of that which needs no Go; envoy.go has
// what Envoy is asked, calls.go the calls that outlive their requests, replicas.go the replica of each configuration
// file. Without cgo there is nothing here.
package main

func main() {}
