// Package zmtp implements ZeroMQ over TCP, as far as Tandem needs it: it subscribes to engines' publications and asks
// for old batches (SUB and DEALER, package kvevents), and receives LMCache's notifications of transfers (PULL).
//
//   - frame.go: greeting and commands.
//   - conn.go: one connection, to read and send messages.
//   - server.go: connections that peers open.
//
// It replaces go-zeromq because strangers can reach it, and because of the engines' traffic: go-zeromq 0.17 makes its
// handshake in the accept loop without a deadline, so one silent connection keeps every other out; it allocates
// whatever length a frame claims, so ten bytes end the process; and it reconnects by itself without a notice to its
// user (docs/adr/0013). Here each connection has a deadline for its handshake, and bounds on frames and messages.
// Tests connect to it with go-zeromq's sockets.
//
// It implements ZMTP 3.0 and 3.1 (rfc.zeromq.org/spec/23 and /37) with the NULL mechanism, which those engines use:
// nothing here is encrypted or authenticated. Listen where only engines can connect.
package zmtp
