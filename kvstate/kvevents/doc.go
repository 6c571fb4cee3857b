// Package kvevents follows the KV events of engines and applies them to the prefix index: vLLM and SGLang publish,
// over ZeroMQ, which blocks they store and which they evict. With them the index knows instead of guessing.
//
//	engine PUB --(topic, sequence number, MessagePack)--> subscription -> Decoder -> stream -> prefixindex.Feed
//	engine ROUTER <--(from which number)-- replay --(batches)--------------------^
//
// Duties, and where they are done:
//
//  1. decode.go and msgpack.go read a batch, of whichever release. It is a hot path: an engine at work stores and evicts
//     thousands of blocks a second.
//  2. stream.go keeps the order. A batch that is missing is asked for again (replay); a number that goes backwards is an engine
//     that has restarted. If a batch cannot be had any more the feed forgets all that it knows of the engine: to think that it
//     holds nothing costs some computing once, to think that it holds what is gone sends requests to the wrong place.
//     While the replica starts, batches are kept until another replica's feed is loaded, and then continue it.
//  3. subscription.go follows one publisher over any number of connections: to an engine that binds its socket, or from one
//     that connects (listen.go). replay.go asks for old batches.
//  4. collector.go has one publisher followed for each endpoint and data-parallel rank of a pool, for as long as it is there.
//  5. listen.go also forwards the batches of an engine that connects: it reaches one replica of several.
package kvevents
