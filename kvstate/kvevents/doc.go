// Package kvevents follows the KV events of engines and applies them to the prefix index: vLLM and SGLang publish,
// over ZeroMQ, which blocks they store and which they evict. With them the index is exact instead of a guess.
//
//	engine PUB --(topic, sequence number, MessagePack)--> subscription -> Decoder -> stream -> prefixindex.Feed
//	engine ROUTER <--(first number)-- replay --(batches)-------------------------^
//
// Duties, and their files:
//
//  1. decode.go and msgpack.go read a batch, of any release. It is a hot path: a busy engine stores and evicts
//     thousands of blocks per second.
//  2. stream.go keeps the order. A missing batch is requested again (replay); a number that goes backwards means that
//     the engine has restarted. If a batch is no longer available, the feed forgets all that it knows of the engine: a
//     missed hit costs some computing once, but a false hit sends requests to the wrong place. While the replica
//     starts, batches are kept until another replica's feed is loaded, and then continue it.
//  3. subscription.go follows one publisher over any number of connections: to an engine that binds its socket, or
//     from one that connects (listen.go). replay.go requests old batches.
//  4. collector.go keeps one subscription for each endpoint and data-parallel rank of a pool, as long as it exists.
//  5. listen.go also forwards the batches of an engine that connects: it reaches one replica of several.
package kvevents
