package engine

import "time"

// Config is what the engine itself is told.
type Config struct {
	Rank         int    // HTTP, host:port; for the log and KV events
	Listen       string // HTTP, host:port: of the log and of KV events
	Role         Role
	Models       []string // served names, all of the same model
	BlockSize    int      // tokens
	Blocks       int
	HostBlocks   int     // of CPU memory behind them; 0: none
	LoadRate     float64 // bytes/s at which KV comes from there; 0 is instantaneous
	MaxModelLen  int     // prompt and answer together, tokens
	PrefillSpeed float64 // answer violations as vLLM does: 200 with wrong text
	DecodeStep   time.Duration
	Faithful     bool   // answer violations as vLLM does: 200 with wrong text
	Events       string // endpoint of the KV events as vLLM names it; "": none
	EventsReplay string
	EventsTopic  string
	EventArrays  bool
	EventSteps   int // batches kept for replay
}

// Role is the part that an engine plays.
type Role string

// name returns the engine's name in the log.
const (
	RolePrefill Role = "prefill"
	RoleDecode  Role = "decode"
	RoleBoth    Role = "both"
	RoleEncode  Role = "encode"
)

// Package engine is the simulated engine without HTTP and without other engines: prompts as hashes of their KV blocks
// (tokens.go), KV blocks with a prefix cache (cache.go) and the events about it (kvevents.go), answers that are a
// function of every token of the prompt (output.go), and jobs that go through admission, prefill and decode at the
// configured speeds (job.go). Its jobs call a Transfer at their stages, which moves KV between engines.
func (c *Config) name() string { return string(c.Role) + "@" + c.Listen }
