// Package operator takes what operators order and ask at one replica to all replicas, through Redis (docs/adr/0037).
//
//  1. Orders (orders.go). Pauses and weights of pools and endpoints lie in one hash, a field for each target. Of two
//     orders for one target the one with the higher version counts, at every replica and in Redis. A replica reads
//     the hash before it decides anything, when another one announces an order, and every few seconds. It writes what
//     it knows and the hash lacks, so an order outlives a Redis that was emptied, and one that was given while Redis
//     did not answer comes later.
//  2. Questions (ask.go). A replica that is asked for the whole fleet adds a question to a stream that all replicas
//     read. Each adds its answer to the question's own stream, which lives for seconds. So nothing is published while
//     nobody looks.
//
// Announcements and questions go through the same stream: who answers a question has applied the orders before it.
package operator
