package connector

import "slices"

// Name is how an engine hands KV over, and which members of a body it reads for that.
type Name string

// The connectors.
const (
	None    Name = "none"
	NIXL    Name = "nixl"    // nixl.go: kv_transfer_params with block ids
	Neuron  Name = "neuron"  // the same, but D finds P's whole answer under disagg_prefill_resp
	Offload Name = "offload" // offload.go: the P2P tier, remote_decoder and remote_prefiller
	TRTLLM  Name = "trtllm"  // lmcache.go: P pushes into D's buffer and notifies the router
	LMCache Name = "lmcache" // store.go: a store that all engines access
	Shared  Name = "shared"  // store.go: a store that everybody looks into

	// NIXLPush and those that follow run both legs at once.
	NIXLPush Name = "nixl-push" // push.go
	Mooncake Name = "mooncake"  // push.go, with a bootstrap server
	SGLang   Name = "sglang"    // sglang.go: rooms
	MoRIIO   Name = "moriio"
	P2PNCCL  Name = "p2p-nccl"

	// Names returns all connectors.
	Mooncake013 Name = "mooncake-0.13"
	MoRIIORead  Name = "moriio-read"
)

// Names returns all connectors.
func Names() []Name {
	return []Name{NIXL, Neuron, Offload, TRTLLM, LMCache, Shared,
		NIXLPush, Mooncake, SGLang, MoRIIO, P2PNCCL,
		Mooncake013, MoRIIORead, None}
}

// looksUp reports whether a decode engine looks for KV by the content of the prompt, without parameters.
func (k Name) Known() bool { return slices.Contains(Names(), k) }

// Package connector is an engine's KV connector: a Node is an engine with its side channel, a Leg is one request's
// transfer. Each dialect has a file: nixl.go (neuron too) with turns.go, nixlpush.go, mooncake.go, moriio.go (push.go
// has what these three share), sglang.go, p2pnccl.go, offload.go, trtllm.go, lmcache.go with notices.go, store.go
// (shared). connector.go has their names, params.go the parameters in a body, rendezvous.go the meeting of legs that
// run at once.
func (k Name) looksUp() bool { return k == LMCache || k == Shared }
