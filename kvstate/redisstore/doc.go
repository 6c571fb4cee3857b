// Package redisstore connects the replicas of Tandem through a Redis: a single server, Sentinel or a Cluster.
//
// Redis carries what replicas tell each other; it is never asked on the way of a request, but for three things that only all
// replicas together can answer: whether a ticket is spent, what lies in a hand-over too large for a header, and what a conversation's
// last turn left (turns.go). Everything else a replica reads from its own memory ([kvstate.State]), which this package keeps up to date:
//
//  1. Out (outbox.go, write.go). What this replica routes, books, learns and sees fail is collected for some
//     milliseconds and added to the pool's stream as one entry, a statev1.Batch.
//  2. In (read.go, apply.go). One blocking XREAD for each pool takes the others' entries into the state. A routed prefix is
//     known everywhere after some 5 ms.
//  3. Who is there (members.go). Bookings are told as totals, not as changes, and hold for a lease; each replica says them
//     again in full three times in that. So a replica that was killed takes its bookings with it, and what was lost on the
//     way is repaired without being asked for. From the same list of living replicas each works out which endpoints it is
//     to collect signals from ([Store.Owns]): by rendezvous hashing, so that all come to the same answer without asking.
//     Who waits for endpoints (waits.go) is told likewise, as it changes and three times a lease in full.
//  4. Late comers (snapshot.go, join.go). Blocks and sessions are not said again. Who starts, or finds a gap in another's
//     numbering, says hello; the oldest replica writes what it knows as a snapshot, and tells where. For a replica that starts
//     it holds the feeds of KV events too; and batches of engines that connect to one replica are forwarded (feeds.go).
//  5. At once (once.go). Tickets are spent by one SET NX with a deadline of 5 ms; hand-overs are keys with a time to live.
//  6. Notices that KV has arrived (notices.go) go from the replica that engines tell to all of them.
//  7. Keys of tickets (secrets.go), where no file holds them: the first replica's is everybody's. Wherever they come from, replicas
//     compare fingerprints of them (fingerprints.go).
//
// Without Redis (not reachable, frozen, refusing writes, at any time, also at start) every replica goes on with what it
// knows and collects all signals by itself; [Store.Status] says so. What it routes meanwhile is kept, within bounds, and
// told when Redis is back.
//
// Keys carry the version of this protocol and the pool's name as hash tag, so that a pool lies on one node of a Cluster.
// All have a time to live. There is no SCAN, no KEYS, and no command whose cost grows with the number of blocks, but for
// writing and reading snapshots. docs/adr/0008 has the reasons.
package redisstore
