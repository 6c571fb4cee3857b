// Package kvevents follows what engines say about their KV caches and tells the prefix index: vLLM and SGLang publish, over
// ZeroMQ, which blocks they store and which they evict. With that the index knows instead of guessing.
//
//	engine PUB --(topic, sequence number, MessagePack)--> subscription -> Decoder -> stream -> prefixindex.Feed
//	engine ROUTER <--(from which number)-- replay --(batches)--------------------^
//
// Duties, and where they are done:
//
//  1. decode.go and msgpack.go read a batch, of whichever release. It is a hot path: an engine at work stores and evicts
//     thousands of blocks a second.
//  2. stream.go keeps the order. A number that is missing is asked for again (replay); one that goes backwards is an engine
//     that has restarted. What cannot be had any more makes the feed forget all it knows of the engine: to think that it
//     holds nothing costs some computing once, to think that it holds what is gone sends requests to the wrong place.
//  3. conn.go speaks ZeroMQ, with deadlines and bounds: one connection for each publisher, to an engine that binds its
//     socket, or accepted from one that connects (listen.go).
//  4. collector.go has one publisher followed for each endpoint and data-parallel rank of a pool, for as long as it is there.
//  5. follow.go shares that work with other replicas, where there are some: one listens and tells the others.
//  6. enginehash.go computes the engines' own hashes. The index needs none of it, since events carry token ids; the tests
//     hold it against the engines, and with it a shared store can be asked by the engine's own name of a block.
package kvevents
