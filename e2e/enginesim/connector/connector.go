package connector

import "slices"

// Name is an engine's way to hand KV over, which determines the members of a body that it reads.
type Name string

// The connectors.
const (
	None    Name = "none"
	NIXL    Name = "nixl"    // nixl.go: kv_transfer_params with block ids
	Neuron  Name = "neuron"  // the same, but D finds P's whole answer under disagg_prefill_resp
	Offload Name = "offload" // offload.go: the P2P tier, remote_decoder and remote_prefiller
	TRTLLM  Name = "trtllm"  // trtllm.go: disaggregated_params
	LMCache Name = "lmcache" // lmcache.go: P pushes into D's buffer and notifies the router
	Shared  Name = "shared"  // store.go: a store that all engines access

	// NIXLPush and those that follow run both legs at once.
	NIXLPush Name = "nixl-push" // push.go
	Mooncake Name = "mooncake"  // push.go, with a bootstrap server
	SGLang   Name = "sglang"    // sglang.go: rooms
	MoRIIO   Name = "moriio"

	// MoRIIORead runs one leg after the other, as NIXL.
	MoRIIORead Name = "moriio-read"
)

// Names returns all connectors.
func Names() []Name {
	return []Name{NIXL, Neuron, Offload, TRTLLM, LMCache, Shared,
		NIXLPush, Mooncake, SGLang, MoRIIO,
		MoRIIORead, None}
}

// VLLM returns the name of the connector in vLLM's --kv-transfer-config; "": it has none, or several.
func (k Name) VLLM() string {
	return map[Name]string{
		NIXL: "NixlConnector", NIXLPush: "NixlPushConnector", Offload: "OffloadingConnector",
		LMCache: "LMCacheConnectorV1", Mooncake: "MooncakeConnector",
		MoRIIO: "MoRIIOConnector", MoRIIORead: "MoRIIOConnector",
	}[k]
}

// Owner returns the name that the connector's engine calls the owner of its models: its own.
func (k Name) Owner() string {
	switch k {
	case SGLang:
		return "sglang"
	case TRTLLM:
		return "tensorrt_llm"
	}
	return "vllm"
}

// Known reports whether there is such a connector.
func (k Name) Known() bool { return slices.Contains(Names(), k) }

// looksUp reports whether a decode engine looks for KV by the content of the prompt, without parameters.
func (k Name) looksUp() bool { return k == LMCache || k == Shared }
