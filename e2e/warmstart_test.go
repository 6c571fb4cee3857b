package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// After any kill a replica is ready with the state in Redis, and finds as many prefixes as before: one of two that
// returns at once, as a kubelet restarts a container; all at once; with a snapshot and, in the first minute, before
// there is one. The lease is longer than the test takes, so each replica's former self seems to live.
func TestWarmStartAfterKills(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		replicas, killed int
		snapshot         bool
	}{
		"the only one, first minute": {1, 1, false},
		"the only one":               {1, 1, true},
		"one of two":                 {2, 1, true},
		"both, first minute":         {2, 2, false},
		"both":                       {2, 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRedis(t)
			f := start(t, options{prefills: 4, decodes: 2, replicas: c.replicas, top: r.yaml(), madeKeys: true,
				engineArgs: []string{"--record=false", "--prefill-speed", "200000"}})
			f.allReplicas(c.replicas)
			f.oneKey()
			const conversations = 24
			say := func(turn int) (hitShare float64) { // of a turn's common part with the previous one
				hits, tokens := f.cached()
				inTurn(conversations, 3, func(i int) {
					text := fmt.Sprintf("conversation %d begins. ", i)
					for n := range turn + 1 {
						text += fmt.Sprintf("turn %d: ", n) + strings.Repeat("what was said in it ", 60)
					}
					a := f.post("/v1/chat/completions", chat(text))
					require.Equal(t, 200, a.status, a.body)
				})
				nowHits, nowTokens := f.cached()
				return (nowHits - hits) / (nowTokens - tokens) * float64(turn+1) / max(float64(turn), 1)
			}
			say(0)
			say(1)
			if c.snapshot { // as the oldest writes each minute: a replica that stops leaves it for later ones
				f.tandems[0].stop(syscall.SIGTERM)
				f.startTandem(0, f.fileOf(0), f.admins[0])
				f.serves()
				require.Equal(t, ":1", r.do("EXISTS", "tandem:1:{chat}:snapshot"))
			} else if c.replicas == 1 { // otherwise the first wrote one for the second
				require.Equal(t, ":0", r.do("EXISTS", "tandem:1:{chat}:snapshot"))
			}
			before := say(2)
			known := f.known(0).Pools[0].Blocks
			time.Sleep(100 * time.Millisecond) // a replica alone publishes every 50 ms; unpublished state dies with it
			var killing sync.WaitGroup
			for i := range c.killed {
				killing.Go(func() { f.tandems[i].stop(syscall.SIGKILL) })
			}
			killing.Wait()
			began := time.Now()
			for i := range c.killed {
				f.startTandem(i, f.fileOf(i), f.admins[i])
				require.InDelta(t, known, f.known(i).Pools[0].Blocks, .02*float64(known), "it is ready with what Redis holds")
			}
			t.Logf("ready after %v", time.Since(began))
			f.serves()
			after := say(3)
			t.Logf("hit share %.3f before, %.3f after", before, after)
			require.GreaterOrEqual(t, after, before-.05)
		})
	}
}

// cached returns the number of prompt tokens that prefill engines found in their caches, and of all.
func (f *fleet) cached() (hits, tokens float64) {
	for _, e := range f.prefills {
		hits += metric(f.t, "http://"+e.addr, "vllm:prefix_cache_hits_total")
		tokens += metric(f.t, "http://"+e.addr, "vllm:prefix_cache_queries_total")
	}
	return hits, tokens
}

func (f *fleet) fileOf(replica int) string {
	return filepath.Join(f.dir, fmt.Sprintf("tandem-%d.yaml", replica))
}

// serves waits until Envoy uses all replicas again.
func (f *fleet) serves() {
	f.t.Helper()
	if len(f.admins) > 1 {
		f.envoyFinds()
		return
	}
	soon(f.t, "Envoy reaches the replica", func() bool { return answers(f.url + "/v1/models") })
}
