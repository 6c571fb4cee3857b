package e2e

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Large bodies from many clients, through two internal listeners and a mirrored copy of each: the load that kills an
// Envoy with ext_proc in a cluster. Then the cost of a pair at one client, compared with two sequential hops, for
// docs/adr/0010.
func TestPairsUnderLoad(t *testing.T) {
	long(t)
	for _, dialect := range []string{"sglang", "mooncake"} {
		t.Run(dialect, func(t *testing.T) {
			f := start(t, options{dialect: dialect, pool: "  prefillTimeout: {base: 60s}\n", engineArgs: []string{"--record=false"}})
			for _, load := range []struct{ size, clients, requests int }{{4_000_000, 8, 24}, {1_000_000, 16, 64}, {220_000, 64, 256}, {8_000_000, 1, 2}} {
				body := fmt.Sprintf(`{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":%q}]}`, strings.Repeat("0123456789", load.size/10))
				var all sync.WaitGroup
				for c := range load.clients {
					all.Go(func() {
						for i := range load.requests / load.clients {
							got, err := f.try(t.Context(), http.MethodPost, "/v1/chat/completions", body)
							if err != nil || got.status != 200 {
								t.Errorf("%d bytes, client %d request %d: %v, status %d: %.200s", load.size, c, i, err, got.status, got.body)
							}
						}
					})
				}
				all.Wait()
				require.True(t, f.envoy.running(), "Envoy has died at %d bytes", load.size)
			}
		})
	}
}

// TestCostOfPairs logs the time of a request at one client: both legs at once, and one after the other.
func TestCostOfPairs(t *testing.T) {
	if os.Getenv("TANDEM_FAILURES") == "" {
		t.Skip("measures: make e2e-failures, or set TANDEM_FAILURES=1")
	}
	for _, dialect := range []string{"nixl", "sglang", "mooncake", "nixl-push"} {
		f := start(t, options{dialect: dialect, engineArgs: []string{"--record=false"}})
		for name, body := range map[string]string{"1 KB": strings.Replace(pairBody, "A prompt", strings.Repeat("word ", 180), 1), "1 KB streamed": streamed(strings.Replace(pairBody, "A prompt", strings.Repeat("word ", 180), 1)),
			"220 KB": strings.Replace(pairBody, "A prompt", strings.Repeat("word ", 44_000), 1)} {
			var took []time.Duration
			for i := range 260 {
				got := f.post("/v1/chat/completions", body)
				require.Equal(t, 200, got.status, got.body)
				if i >= 60 {
					took = append(took, got.took)
				}
			}
			slices.Sort(took)
			t.Logf("%-10s %-14s p50 %v p95 %v", dialect, name, took[len(took)/2].Round(10*time.Microsecond), took[len(took)*95/100].Round(10*time.Microsecond))
		}
	}
}

// One Tandem before four pools of different dialects: a thousand requests, streamed and not, mixed. All are answered,
// and the fleet's account finds every ledger at zero.
func TestMixedDialects(t *testing.T) {
	t.Parallel()
	dialects := []string{"sglang", "mooncake", "nixl-push", "moriio", "nixl"}
	f := start(t, options{mix: dialects, prefills: 2 * len(dialects), decodes: 2 * len(dialects), replicas: 2, engineArgs: []string{"--record=false", "--lease", "10s"}})
	var all sync.WaitGroup
	for c := range 20 {
		all.Go(func() {
			for i := range 50 {
				body := strings.Replace(pairBody, "A prompt", fmt.Sprintf("Client %d request %d", c, i), 1)
				body = strings.Replace(body, `"tiny"`, fmt.Sprintf("%q", dialects[(c+i)%len(dialects)]), 1)
				if (c+i)%2 == 0 {
					body = streamed(body)
				}
				got, err := f.try(t.Context(), http.MethodPost, "/v1/chat/completions", body)
				if err != nil || got.status != 200 || strings.Contains(got.body, `"error"`) {
					t.Errorf("client %d request %d: %v, status %d: %.300s", c, i, err, got.status, got.body)
				}
			}
		})
	}
	all.Wait()
}
