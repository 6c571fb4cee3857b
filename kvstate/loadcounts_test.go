package kvstate

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// vLLM counts failed transfers on the fetching side. With kv_load_failure_policy "recompute" nothing else shows them.
func TestCountsOfFailedTransfersBlameAPair(t *testing.T) {
	start := time.Now()
	for name, tt := range map[string]struct {
		asks   map[string]time.Duration // time at which D was asked to load, by prefill endpoint
		failed []int64                  // D's count at each scrape, 2 s apart from 10 s on
		want   []string                 // prefill endpoints with which the pair is avoided
	}{
		"one prefill endpoint had KV for it":   {map[string]time.Duration{"p1:1": 9 * time.Second}, []int64{0, 3}, []string{"p1:1"}},
		"it counted before anybody looked":     {map[string]time.Duration{"p1:1": 9 * time.Second}, []int64{3, 3}, nil},
		"two had: either may be to blame":      {map[string]time.Duration{"p1:1": 9 * time.Second, "p2:1": 11 * time.Second}, []int64{0, 1}, nil},
		"the other one had long before":        {map[string]time.Duration{"p1:1": 11 * time.Second, "p2:1": -20 * time.Second}, []int64{0, 1}, []string{"p1:1"}},
		"the engine began anew":                {map[string]time.Duration{"p1:1": 9 * time.Second}, []int64{5, 0}, nil},
		"it began anew, and fails again later": {map[string]time.Duration{"p1:1": 11 * time.Second}, []int64{5, 0, 1}, []string{"p1:1"}},
		"nobody had KV for it":                 {nil, []int64{0, 1}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			now := start
			s := New(Options{Now: func() time.Time { return now }})
			s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "p1:1", Role: RolePrefill}, {Addr: "p2:1", Role: RolePrefill}, {Addr: "d1:1", Role: RoleDecode}})
			pool := s.Pool("p")
			for p, at := range tt.asks {
				now = start.Add(at)
				s.KVLoads.LoadStarted(pool, p, "d1:1")
			}
			for i, n := range tt.failed {
				now = start.Add(10*time.Second + time.Duration(i)*2*time.Second)
				s.Observe(pool.Endpoint("d1:1"), Signals{Running: 1, KVTokens: -1, Transfers: TransferCounters{Transfers: 9, Bytes: 9, Time: 9, Failed: n}, At: now, ScrapedAt: now})
			}
			var avoided []string
			for _, p := range []string{"p1:1", "p2:1"} {
				if pool.Endpoint(p).LoadFaults().Avoids("d1:1") {
					avoided = append(avoided, p)
				}
			}
			require.Equal(t, tt.want, avoided)
		})
	}
}
