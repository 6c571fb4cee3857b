package prefixindex

import (
	"os"
	"runtime"
	"testing"
)

// TestFleetMemory prints what the index takes of a fleet with full caches: TANDEM_SCALING=1 go test
// ./kvstate/prefixindex -run FleetMemory -v
func TestFleetMemory(t *testing.T) {
	if os.Getenv("TANDEM_SCALING") == "" {
		t.Skip("takes a minute: set TANDEM_SCALING")
	}
	const engines, prompt, cache = 100, 6250, 62_500
	before := heap()
	x := New(Limits{MaxBytes: 512 << 20, RoutedBlocks: 1 << 14, FeedBlocks: 1 << 20})
	var feeds []*Feed
	for _, o := range joined(x, engines) {
		feeds = append(feeds, o.NewFeed())
	}
	began := cpu()
	for n := range cache / prompt * engines {
		blocks := randomPrompt(prompt, uint64(n)<<20)
		if n%2 == 0 { // one of 200 documents of 80k tokens, and something of its own
			blocks = append(randomPrompt(prompt*4/5, uint64(n/2%200)<<20|1<<50), blocks[:prompt/5]...)
		}
		keys := make([]uint64, prompt) // each engine has its own
		for i, b := range blocks {
			keys[i] = (b ^ uint64(n%engines)) * 0xff51afd7ed558ccd
		}
		feeds[n%engines].Apply([]BlockEvent{{Kind: BlocksStored, Keys: keys, Blocks: blocks, BlockSize: 16}})
	}
	took := cpu() - began
	s := x.Stats()
	bytes := float64(heap() - before)
	t.Logf("%d entries of %d blocks, %.1f bytes an entry, %.0f MiB, %.2f us of CPU a block stored",
		s.Entries, s.Blocks, bytes/float64(s.Entries), bytes/(1<<20), took*1e6/float64(s.Entries))
	runtime.KeepAlive(feeds)
}
