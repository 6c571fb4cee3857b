// Package notices is where LMCache's prefill engines say that a prompt's KV has arrived at decode.
//
// With LMCache's PD backend (enable_pd) P pushes KV into D's buffer while it computes, and sends a notice to a PULL socket
// of the router when the last chunk is there: one for each tensor-parallel rank, over a ZeroMQ connection that stays. The
// notice has no address, no answer and no authentication; all it holds is the req_id that the router put into
// disagg_spec (lmcache/v1/storage_backend/pd_backend.py, LMCache 0.3.5 to 0.5.6).
//
//  1. notice.go reads a message. Anything that is not a notice is ignored: engines send each other more than that.
//  2. board.go keeps what has arrived, until whoever waits for it comes, or the other way round. The number of ids is
//     bounded and each is forgotten after a time, so strangers who make ids up take no memory for long; and they wake
//     nobody, since ids are random.
//  3. server.go receives on a TCP address.
//
// A lost or late notice costs computing and nothing else: D finds what has arrived by the hashes of its tokens.
package notices
