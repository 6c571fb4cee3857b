// Package zmtp is the receiving end of ZeroMQ over TCP: what engines push at a router (LMCache's notices on a PULL
// socket, heartbeats of P2P-NCCL and MoRIIO on a ROUTER) arrives here as messages.
//
// It is ours, and not go-zeromq's, for what happens to a server that strangers can reach: go-zeromq 0.17 makes its
// handshake in the accept loop without a deadline, so one silent connection keeps every other out, and allocates whatever
// length a frame claims to have, so ten bytes end the process. Here each connection has a goroutine, a deadline for its
// greeting, and bounds on frames and messages. Tests talk to it with go-zeromq's own PUSH and DEALER.
//
// Spoken: ZMTP 3.0 and 3.1 (rfc.zeromq.org/spec/23 and /37) with the NULL mechanism, which is what those engines use:
// nothing here is encrypted or authenticated. Listen where only engines reach it.
package zmtp
