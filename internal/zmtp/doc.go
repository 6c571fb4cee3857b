// Package zmtp speaks ZeroMQ over TCP, as far as Tandem needs it: it subscribes to what engines publish and asks
// for old batches (SUB and DEALER, package kvevents), and receives what engines push (PULL and ROUTER: LMCache's
// notices, the registrations of P2P-NCCL and MoRIIO).
//
//   - frame.go: greeting and commands.
//   - conn.go: one connection, to read and send messages.
//   - server.go: connections that peers open.
//
// It is ours, and not go-zeromq's, because strangers can reach it, and because of what engines send: go-zeromq 0.17
// makes its handshake in the accept loop without a deadline, so one silent connection keeps every other out,
// allocates whatever length a frame claims to have, so ten bytes end the process, and connects again by itself,
// unseen, when that moment matters (docs/adr/0013). Here each connection has a deadline for its handshake, and
// bounds on frames and messages. Tests talk to it with go-zeromq's sockets.
//
// Spoken: ZMTP 3.0 and 3.1 (rfc.zeromq.org/spec/23 and /37) with the NULL mechanism, which is what those engines
// use: nothing here is encrypted or authenticated. Listen where only engines reach it.
package zmtp
