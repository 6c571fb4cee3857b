package api

import (
	"time"

	"tandem/e2e/enginesim/connector"
	"tandem/e2e/enginesim/fault"
	"tandem/e2e/enginesim/front"
	"tandem/e2e/enginesim/request"
)

// Config is the configuration of a simulator.
type Config struct {
	connector.Config

	Hosts int // engines of the process, each on the next host

	BeginsAnew    bool          // it ignores prompt_token_ids in kv_transfer_params, as releases before 0.32 do
	FirstLogprobs time.Duration // the first request with log probabilities has the core compile for so long

	ToolParser  bool
	Reasoning   bool // the first tokens of chats and messages are reasoning, as a reasoning parser finds it
	OldForced   bool // see request.Limits.OldForcedTools
	DevMode     bool // vLLM's VLLM_SERVER_DEV_MODE
	Record      bool
	RecordCount int
	RecordBody  int // bytes
	KeepAlive   time.Duration
	MaxBody     int64 // bytes
	Fail        []fault.Rule
	Warmup      time.Duration // how long the open port answers 503
	Front       front.Config
}

// limits returns this engine's limits.
func (c *Config) limits() *request.Limits {
	return &request.Limits{Models: c.Models, MaxModelLen: c.MaxModelLen, ToolParser: c.ToolParser,
		OldForcedTools: c.OldForced}
}
