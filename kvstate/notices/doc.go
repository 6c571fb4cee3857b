// Package notices receives the notifications of LMCache's prefill engines that a prompt's KV has arrived at decode.
//
// With LMCache's PD backend (enable_pd) P pushes KV into D's buffer while it computes. When the last chunk has
// arrived it sends a notification to a PULL socket of the router: one for each tensor-parallel rank, over a
// persistent ZeroMQ connection. The notification has no address, no reply and no authentication; it contains only
// the req_id that the router put into disagg_spec (lmcache/v1/storage_backend/pd_backend.py, LMCache 0.3.5 to
// 0.5.6).
//
//  1. notice.go parses a message. Anything that is not a notification is ignored: engines send other messages too.
//  2. waiters.go stores what has arrived until its waiter comes, or the other way round. The number of ids is bounded
//     and each expires, so forged ids take no memory for long; and they wake no waiter, since ids are random.
//  3. server.go receives on a TCP address.
//
// A lost or late notification only costs computing: D finds what has arrived by the hashes of its tokens.
package notices
