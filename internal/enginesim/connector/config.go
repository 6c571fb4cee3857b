package connector

import (
	"time"

	"tandem/internal/enginesim/engine"
)

// Config is what the connector is told, beside what the engine is.
type Config struct {
	engine.Config
	lmcacheConfig

	Connector       Name
	EngineID        string        // "" is a random UUID
	SideChannel     string        // host:port; "" is the HTTP port + 1000
	AdvertiseHost   string        // remote_host; "" is the side channel's host
	Bootstrap       string        // host:port of the bootstrap server, of a prefill engine that has one
	TransferRate    float64       // bytes/s of KV fetched; 0: as fast as it comes
	TransferTimeout time.Duration // how long legs that run at once wait for each other
	Lease           time.Duration
	LoadTimeout     time.Duration // what a dead side channel costs
	Recompute       bool          // kv_load_failure_policy
	DpSize          int
	Proxy           string // where notices go (lmcache) or the engine registers (p2p-nccl), host:port; "": nowhere
	Heartbeat       time.Duration
	Store           string // side channel of the engine that has the store
	Bidirectional   bool   // nixl: answers are kept for their conversation's next turn
	DecoderTTL      time.Duration
}

// lmcacheConfig is what LMCache's PD backend is told.
type lmcacheConfig struct {
	Tp        int // tensor-parallel ranks
	InitPort  int // of the receiver, rank 0
	AllocPort int
	Notices   string
	KvDelay   time.Duration
	PdBuffer  int // tokens
	PdTimeout time.Duration
}
