// Package connector is an engine's KV connector: a Node is an engine with its side channel, a Leg is one request's
// transfer. Each dialect has a file: nixl.go (neuron too) with turns.go, nixlpush.go, mooncake.go, moriio.go (push.go
// has what these three share), sglang.go, offload.go, trtllm.go, lmcache.go, store.go
// (shared). connector.go has their names, params.go the parameters in a body, rendezvous.go the meeting of legs that
// run at once.
package connector
