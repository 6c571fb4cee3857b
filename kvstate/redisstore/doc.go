// Package redisstore connects the replicas of Tandem through a Redis: a single server, Sentinel or a Cluster.
//
// Replicas publish their changes through Redis. A request asks Redis for two things only: whether a ticket is
// consumed, and a hand-over that is too large for a header. A replica reads everything else from its own memory
// ([kvstate.State]), which this package keeps up to date:
//
//  1. Out (outbox.go, write.go). This replica's routing, reservations, learned tokens and observed failures are
//     collected for some milliseconds and added to the pool's stream as one entry, a statev1.Batch.
//  2. In (read.go, apply.go, package decode). One blocking XREAD, in a Cluster one for each pool, reads the
//     others' entries into the state. A routed prefix is known everywhere after some 10 ms with 4 replicas, 50 ms with
//     16.
//  3. Membership (members.go). Reservations are published as totals, not as changes, and are valid for a lease; each
//     replica publishes them in full three times a lease, all at the same moments of Redis's clock. So a killed
//     replica's reservations end with its lease, and lost messages are repaired by the next ones. From the list of
//     living replicas each derives, by rendezvous hashing, which endpoints it scrapes ([Store.Owns]). Requests that
//     wait for endpoints (waits.go) are published likewise.
//  4. Snapshots (snapshot.go, join.go). Blocks and sessions are published once. A replica that starts, or finds a gap
//     in another's numbers, requests a snapshot; the oldest replica writes and announces it. For a replica that starts
//     it contains the feeds of KV events too; and batches of engines that connect to one replica are forwarded
//     (feeds.go).
//  5. At once (once.go). Tickets are consumed by one SET NX with a deadline of 5 ms; hand-overs are keys with a time
//     to live.
//  6. Transfer notifications (notices.go) go from the replica that received them to all.
//  7. Keys of tickets (secrets.go), if no file has them: all use the first replica's. In any case, replicas compare
//     fingerprints of them (fingerprints.go).
//
// Without Redis (not reachable, frozen, refusing writes, at any time, also at start) every replica continues with its
// own knowledge and scrapes all endpoints by itself; [Store.Status] reports it. Its changes are kept meanwhile, within
// bounds, and published when Redis is back.
//
// Keys contain the version of this protocol and the pool's name as hash tag, so that a pool is stored on one node of a
// Cluster. All have a time to live. There is no SCAN, no KEYS, and no command whose cost grows with the number of
// blocks, except writing and reading snapshots. docs/adr/0008 has the reasons.
package redisstore
