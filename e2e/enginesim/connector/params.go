package connector

import (
	"net"
	"strconv"
	"time"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// Params are a request's parameters for the connector: mostly kv_transfer_params as vLLM 0.32's NixlConnector (pull)
// reads them.
type Params struct {
	remote
	verdict
	contextParams

	Given         bool       // kv_transfer_params are present and not null, whatever this engine's connector
	Present       bool       // an object, and this engine has a connector
	RoomLeg       string     // of a server that does only one leg
	RemoteDecode  bool       // do_remote_decode: keep the KV for a decode engine
	RemotePrefill bool       // do_remote_prefill: fetch the KV from a prefill engine
	CachedOnP     int64      // remote_prefill_cached_tokens, -1 when absent
	PromptIDs     []uint32   // prompt_token_ids: use these instead of tokenising (0.32 and later)
	turn          turnSource // of do_remote_decode with remote_block_ids (turns.go)
	// do_remote_decode with remote_block_ids: P would read from another engine, or is meant to, for a turn
	staleOnP bool
	telling  bool // an object with members: a bidirectional engine answers where it keeps the blocks

	keepAs     string      // the name under which P keeps the KV; "": one of its own
	missOK     bool        // D computes what it does not find
	Spec       *disaggSpec // lmcache.go
	firstToken bool        // ret_first_tok: P answers its token
	source     string      // engine that has the prompt's beginning (offload.go)
}

// remote is the location of the KV.
type remote struct {
	blockIDs  []int32
	engineID  string
	requestID string
	host      string
	port      int
	expires   time.Duration // remote_blocks_expiry_time, by the clock of the engine that keeps them; 0: unknown
	transfer  string        // transfer_id (Mooncake)
	bootstrap string        // remote_bootstrap_addr (Mooncake)
}

// verdict is the engine's reaction to invalid parameters. It is empty for valid ones.
type verdict struct {
	Fatal string // the cause, if the engine dies
	// missing member for which the engine parks the request for ever, and raises when the client leaves
	Incomplete string
	Parked     string            // the cause, if the engine waits for KV that never comes
	Broken     *engine.Violation // parameters that break their protocol
}

// contextParams are TensorRT-LLM's (trtllm.go).
type contextParams struct {
	Context  bool // of a context server
	genFirst bool // both legs at once
}

func (kv *Params) addr() string { return net.JoinHostPort(kv.host, strconv.Itoa(kv.port)) }

// Read reads one member of a body, if it is one of the connector's.
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
		return readIDs(kv, k, jsontext.Get(raw, "prompt_token_ids"))
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

// readIDs reads the ids that vLLM takes instead of rendering a chat's messages, whatever its connector is (0.32.0,
// renderers/online_renderer.py:105).
func readIDs(kv *Params, k Name, ids []byte) *engine.Error {
	if jsontext.IsNull(ids) || k == TRTLLM || k == SGLang {
		return nil
	}
	var ok bool
	if kv.PromptIDs, ok = jsontext.TokenIDs(ids); !ok || len(kv.PromptIDs) == 0 {
		return engine.BadRequest("`kv_transfer_params['prompt_token_ids']` must be a non-empty list of " +
			"non-negative integers.")
	}
	return nil
}

// Complete adds what the engine knows without parameters. raw are the request's kv_transfer_params; oneToken: it asks
// for one token.
func (c *Config) Complete(kv *Params, raw []byte, oneToken bool) {
	if c.Connector == Neuron && c.Role == engine.RolePrefill && oneToken {
		kv.RemoteDecode = true // Neuron has no parameter for it: a prefill engine does nothing else
	}
	if spec := kv.Spec; spec != nil && kv.Fatal == "" && (len(spec.init) != c.Tp || len(spec.alloc) != c.Tp) {
		kv.Fatal = "IndexError: the receiver has not one port for each rank"
	}
	if c.pushes() {
		given := kv.Given
		*kv = c.parsePush(raw)
		kv.Given = given
	}
	if c.Roomed() {
		kv.RoomLeg = string(c.Role)
	}
}
