package engine

import "time"

// Config is the engine's own configuration.
type Config struct {
	Rank         int    // data-parallel
	Listen       string // HTTP, host:port; for the log and KV events
	Role         Role
	Models       []string // served names, all of the same model
	BlockSize    int      // tokens
	KVDtype      string   // --kv-cache-dtype
	Revision     string   // of the model
	Blocks       int
	HostBlocks   int     // of CPU memory behind them; 0: none
	LoadRate     float64 // bytes/s at which KV comes from there; 0 is instantaneous
	MaxModelLen  int     // prompt and answer together, tokens
	PrefillSpeed float64 // tokens/s; 0 is instantaneous
	Chunk        int     // tokens of a prompt in one step, for whose end answers wait; 0: prompts disturb no answer
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

// The roles.
const (
	RolePrefill Role = "prefill"
	RoleDecode  Role = "decode"
	RoleBoth    Role = "both"
	RoleEncode  Role = "encode"
)

// name returns the engine's name in the log.
func (c *Config) name() string { return string(c.Role) + "@" + c.Listen }
