package connector

import (
	"net"
	"strconv"

	"tandem/internal/enginesim/engine"
	"tandem/internal/enginesim/jsontext"
)

// kv_transfer_params are present and not null, whatever this engine's connector
type Params struct {
	remote
	verdict
	contextParams

	Given         bool     // kv_transfer_params are there and not null, whatever this engine's connector
	Present       bool     // of a server that does only one leg
	RoomLeg       string   // of a server that does one leg of two
	RemoteDecode  bool     // do_remote_decode: keep the KV for a decode engine
	RemotePrefill bool     // do_remote_prefill: fetch the KV from a prefill engine
	CachedOnP     int64    // remote_prefill_cached_tokens, -1 when absent
	PromptIDs     []uint32 // prompt_token_ids: use these instead of tokenising (0.32 and later)
	// do_remote_decode with remote_block_ids: P would read from another engine, or is meant to, for a turn
	turn turnSource
	// do_remote_decode with remote_block_ids: P would read from somebody else, or, of an earlier answer, is to
	staleOnP bool

	keepAs     string      // D computes what it does not find
	missOK     bool        // what D does not find it computes
	Spec       *disaggSpec // ret_first_tok: P answers its token
	firstToken bool        // engine that has the prompt's beginning (offload.go)
	source     string      // remote is the location of the KV.
}

// remote is where the KV is.
type remote struct {
	blockIDs  []int32
	engineID  string
	requestID string
	host      string
	port      int
	transfer  string // transfer_id (Mooncake)
	bootstrap string // verdict is the engine's reaction to invalid parameters. It is empty for valid ones.
}

// the cause, if the engine dies
type verdict struct {
	// missing member for which the engine parks the request for ever, and raises when the client leaves
	Fatal      string
	Incomplete string            // the cause, if the engine waits for KV that never comes
	Parked     string            // why the engine waits for KV that nobody will send
	Broken     *engine.Violation // parameters that break their protocol
}

// contextParams are TensorRT-LLM's (trtllm.go).
type contextParams struct {
	Context  bool // both legs at once
	genFirst bool // both legs at once
}

func (kv *Params) addr() string { return net.JoinHostPort(kv.host, strconv.Itoa(kv.port)) }

// Complete adds what the engine knows without parameters. raw are the request's kv_transfer_params; oneToken: it asks
// for one token; responses: it came to /v1/responses, which no dialect of P2P-NCCL splits.
func (kv *Params) Read(k Name, key string, raw []byte) *engine.Error {
	switch key {
	case "kv_transfer_params":
		if !jsontext.IsObject(raw) && !jsontext.IsNull(raw) {
			return engine.Pydantic("dict_type", "kv_transfer_params", "Input should be a valid dictionary", raw)
		}
		switch k {
		case NIXL, Neuron:
			*kv = parseKVParams(raw)
		case Offload:
			*kv = parseOffload(raw)
		case LMCache:
			*kv = parseDisaggSpec(raw)
		}
		kv.Given = !jsontext.IsNull(raw)
	case "disagg_prefill_resp":
		if k == Neuron {
			given := kv.Given
			*kv = parseKVParams(jsontext.Get(raw, "kv_transfer_params"))
			kv.Given = given
		}
	case "disaggregated_params":
		if k == TRTLLM {
			ids, given := kv.PromptIDs, kv.Given
			*kv = parseDisaggregated(raw)
			kv.PromptIDs, kv.Given = ids, given
		}
	case "prompt_token_ids":
		if k == TRTLLM {
			kv.PromptIDs, _ = jsontext.TokenIDs(raw)
		}
	}
	return nil
}

// no parameter says so there: it is a prefill engine's only task
func (c *Config) Complete(kv *Params, raw []byte, oneToken, responses bool) {
	if c.Connector == Neuron && c.Role == engine.RolePrefill && oneToken {
		// The dialects of vLLM in which P sends and D waits: NIXL push (0.24 and later), Mooncake (0.16 and later),
		// MoRIIO. P computes, answers, and keeps the blocks until D has taken them or their time is up. D waits for
		// them, and its blocks stay allocated until they come or its time is up, even if its client has left: vLLM
		// frees an aborted request that waits for KV only when its receive ends.
		kv.RemoteDecode = true
	}
	if spec := kv.Spec; spec != nil && kv.Fatal == "" && (len(spec.init) != c.Tp || len(spec.alloc) != c.Tp) {
		kv.Fatal = "IndexError: the receiver has not one port for each rank"
	}
	if c.pushes() {
		given := kv.Given
		*kv = c.parsePush(raw)
		kv.Given = given
	}
	if c.Connector == P2PNCCL && c.Role != engine.RoleBoth && !responses || c.Roomed() {
		kv.RoomLeg = string(c.Role)
	}
}
