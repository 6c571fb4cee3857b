// Package redisstore connects the replicas of Tandem through a Redis: a single server, Sentinel or a Cluster.
//
// Replicas publish their changes through Redis. A request asks Redis for three things only: whether a ticket is
// spent, a hand-over that is too large for a header, and what a conversation's last turn left (turns.go).
// Everything else a replica reads from its own memory ([kvstate.State]), which this package keeps up to date:
//
//  1. Out (outbox.go, write.go). What this replica routes, books, learns and sees fail is collected for some
//     milliseconds and added to the pool's stream as one entry, a statev1.Batch.
//  2. In (read.go, apply.go). One blocking XREAD for each pool takes the others' entries into the state. A routed prefix is
//     known everywhere after some 5 ms.
//  3. Membership (members.go). Bookings are published as totals, not as changes, and hold for a lease; each replica publishes
//     them in full three times a lease. So the bookings of a killed replica end with its lease, and what is lost is repaired
//     by itself. From the list of living replicas each derives, by rendezvous hashing, which endpoints it scrapes
//     ([Store.Owns]). Requests that wait for endpoints (waits.go) are published likewise.
//  4. Snapshots (snapshot.go, join.go). Blocks and sessions are published once. A replica that starts, or finds a gap in
//     another's numbers, requests a snapshot; the oldest replica writes and announces it. For a replica that starts it holds
//     the feeds of KV events too; and batches of engines that connect to one replica are forwarded (feeds.go).
//  5. At once (once.go). Tickets are spent by one SET NX with a deadline of 5 ms; hand-overs are keys with a time to live.
//  6. Notices that KV has arrived (notices.go) go from the replica that received them to all.
//  7. Keys of tickets (secrets.go), where no file holds them: the first replica's is everybody's. Wherever they come from, replicas
//     compare fingerprints of them (fingerprints.go).
//
// Without Redis (not reachable, frozen, refusing writes, at any time, also at start) every replica goes on with
// what it knows and scrapes all endpoints by itself; [Store.Status] says so. What it routes meanwhile is kept,
// within bounds, and published when Redis is back.
//
// Keys carry the version of this protocol and the pool's name as hash tag, so that a pool lies on one node of a
// Cluster. All have a time to live. There is no SCAN, no KEYS, and no command whose cost grows with the number of
// blocks, but for writing and reading snapshots. docs/adr/0008 has the reasons.
package redisstore
