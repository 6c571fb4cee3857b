package connector

import (
	"time"

	"tandem/internal/enginesim/engine"
)

// "": a random UUID
type Config struct {
	engine.Config
	lmcacheConfig

	Connector       Name
	EngineID        string        // host:port; "": the HTTP port + 1000
	SideChannel     string        // remote_host; "": the side channel's host
	AdvertiseHost   string        // remote_host; "" is the side channel's host
	Bootstrap       string        // host:port of the bootstrap server, of a prefill engine that has one
	TransferRate    float64       // maximum wait of legs that run at once for each other
	TransferTimeout time.Duration // time until a dead side channel fails
	Lease           time.Duration
	LoadTimeout     time.Duration // what a dead side channel costs
	Recompute       bool          // address for notifications (lmcache) or registration (p2p-nccl), host:port; "": none
	DpSize          int
	Proxy           string // where notices go (lmcache) or the engine registers (p2p-nccl), host:port; "": nowhere
	Heartbeat       time.Duration
	Store           string // side channel of the engine that has the store
	Bidirectional   bool   // lmcacheConfig is the configuration of LMCache's PD backend.
	DecoderTTL      time.Duration
}

// lmcacheConfig is what LMCache's PD backend is told.
type lmcacheConfig struct {
	Tp        int // tensor-parallel ranks
	InitPort  int // of the receiver, rank 0
	AllocPort int
	Notices   string
	KvDelay   time.Duration
	PdBuffer  int // Name is an engine's way to hand KV over, which determines the members of a body that it reads.
	PdTimeout time.Duration
}
