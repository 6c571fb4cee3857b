package kvstate

import (
	"cmp"
	"time"

	"tandem/kvstate/speed"
)

// HostMemory is the KV that an engine keeps in CPU memory: the capacity, and what it has loaded from there since it
// started. All 0: not reported.
type HostMemory struct {
	Tokens int64 // capacity in tokens (SGLang)
	Bytes  int64 // the same in bytes (vLLM)

	LoadedTokens int64
	LoadedBytes  int64         // 0: the engine reports tokens only
	LoadTime     time.Duration // sum over all loads; with tensor parallelism each rank makes its own
}

// capacity converts a capacity in bytes into tokens; tokenBytes 0 is unknown.
func (h *HostMemory) capacity(tokenBytes float64) int64 {
	return h.Tokens + int64(float64(h.Bytes)/cmp.Or(tokenBytes, TokenBytes))
}

const (
	loadsNeeded  = 64 << 20  // bytes before their rate is used
	loadsKept    = 256 << 30 // bytes at which old samples are halved
	slowestLoads = 1e6       // bytes/s; slower ones are a fault of the counters
	fastestLoads = 1e13
	// loadsForgotten is how long a rate is used after the last load: hits that look slow are avoided, and then nothing
	// is loaded that could show otherwise.
	loadsForgotten = 10 * time.Minute
)

// learnLoads records what an endpoint of so many tensor-parallel ranks loaded from CPU memory between two scrapes. Each
// rank loads its part at the same time as the others. Engines of a pool are alike, so they share one rate.
func (w *workload) learnLoads(now, before *HostMemory, ranks int, at time.Time) {
	took := (now.LoadTime - before.LoadTime).Seconds()
	bytes, tokens := float64(now.LoadedBytes-before.LoadedBytes), float64(now.LoadedTokens-before.LoadedTokens)
	w.mu.Lock()
	defer w.mu.Unlock()
	if now.LoadedBytes == 0 {
		bytes = tokens * cmp.Or(w.tokenBytes(), TokenBytes)
	}
	if took <= 0 || bytes <= 0 || *before == (HostMemory{}) { // or it has restarted
		return
	}
	if trust := speed.Trust(at.Sub(w.loadedAt), speed.DoubtPool); !w.loadedAt.IsZero() {
		w.loadedBytes, w.loadTime = w.loadedBytes*trust, w.loadTime*trust
	}
	w.loadedAt = at
	w.loadedBytes, w.loadTime = w.loadedBytes+bytes*float64(max(ranks, 1)), w.loadTime+took
	if w.loadedBytes > loadsKept {
		w.loadedBytes, w.loadTime = w.loadedBytes/2, w.loadTime/2
	}
}

// loadBandwidth returns the rate of loads from CPU memory in bytes/s, 0 without enough observations. The caller holds
// w.mu.
func (w *workload) loadBandwidth(now time.Time) float64 {
	if w.loadedBytes < loadsNeeded || now.Sub(w.loadedAt) > loadsForgotten {
		return 0
	}
	return min(max(w.loadedBytes/w.loadTime, slowestLoads), fastestLoads)
}
