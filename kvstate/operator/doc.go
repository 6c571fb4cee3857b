// Package operator shares operators' orders and questions between all replicas, through Redis (docs/adr/0037).
//
//  1. Orders (orders.go). Pauses and weights of pools and endpoints are stored in one hash, a field for each target.
//     Of two orders for one target the one with the higher version counts, at every replica and in Redis. A replica
//     reads the hash before it decides anything, when another one announces an order, and every few seconds. It writes
//     orders that the hash lacks, so an order survives a Redis that was emptied, and an order that was given while
//     Redis did not answer is stored later.
//  2. Questions (ask.go). A replica that is asked about the whole fleet adds a question to a stream that all replicas
//     read. Each adds its answer to the question's own stream, which lives for seconds. So nothing is published
//     without a question.
//  3. Names (members.go). The roster of package redisstore names replicas that hang or are gone.
//
// Announcements and questions go through the same stream: a replica that answers a question has applied the orders
// before it.
package operator
