package connector

import (
	"time"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/handover"
)

// Config is the connector's configuration, in addition to the engine's.
type Config struct {
	engine.Config
	lmcacheConfig

	Connector       Name
	EngineID        string        // "": a random UUID
	SideChannel     string        // host:port; "": the HTTP port + 1000
	AdvertiseHost   string        // remote_host; "": the side channel's host
	Bootstrap       string        // host:port of the bootstrap server, of a prefill engine that has one
	TransferRate    float64       // bytes/s of KV fetched; 0: as fast as it comes
	TransferTimeout time.Duration // maximum wait of legs that run at once for each other
	Lease           time.Duration
	LoadTimeout     time.Duration // time until a dead side channel fails
	Recompute       bool          // kv_load_failure_policy
	DpSize          int
	Proxy           string          // address for notifications (lmcache), host:port; "": none
	Store           string          // side channel of the engine that has the store
	Peers           *handover.Peers // shared with other engines of the process; nil: its own
	Bidirectional   bool            // nixl: answers are kept for their conversation's next turn
	DecoderTTL      time.Duration
}

// lmcacheConfig is the configuration of LMCache's PD backend.
type lmcacheConfig struct {
	Tp      int // tensor-parallel ranks
	Notices string
	KvDelay time.Duration
	Pd      struct {
		InitPort, AllocPort int           // of the receiver, rank 0
		Buffer, Chunk       int           // tokens: of the receive buffer, and of a chunk (chunk_size)
		Timeout             time.Duration // of an allocation
	}
}
