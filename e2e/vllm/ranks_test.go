//go:build vllm

package vllm

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRealRanks runs engines with data-parallel ranks behind one port, which vLLM balances by itself unless a request
// names one:
//
//	RANKS=2 ENGINES=1 e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealRanks -v ./e2e/vllm
func TestRealRanks(t *testing.T) {
	ranks, err := strconv.Atoi(os.Getenv("TANDEM_VLLM_RANKS"))
	if err != nil {
		t.Skip("engines without ranks")
	}
	s := newSuite(t, uint64(time.Now().UnixNano()))
	defer s.report.print(t)
	var replans float64 // on a busy machine a prefill may take longer than Tandem waits, and another rank computes it again
	s.run(t, "conversations stay on a rank", func(t *testing.T) { replans = s.conversationsStay(t, ranks) })
	s.run(t, "KV events count by rank", func(t *testing.T) { s.eventsByRank(t, ranks) })
	s.run(t, "nothing left at the end", func(t *testing.T) {
		requireAlive(t, s.engines())
		for _, counter := range counters { // a leg that was given up is fetched late, or by nobody
			require.LessOrEqual(t, s.since(t, counter), replans, counter)
		}
	})
}

// conversationsStay: each turn has the reference's text, and a later turn goes to the prefill rank that has the KV of
// the earlier ones. Both ranks of both engines work, so KV was fetched from each prefill rank by its own port.
func (s *suite) conversationsStay(t *testing.T, ranks int) (replans float64) {
	const conversations, turns = 8, 3
	at, pairs, hit := map[string]int{}, map[string]int{}, int64(0)
	for i := range conversations {
		prompt, rank := s.prompts.words(100+10*i), ""
		for turn := range turns {
			r := request{api: completions, prompt: prompt, tokens: 16, header: http.Header{"X-Data-Parallel-Rank": {"7"}}}
			s.both(t, r)
			trace := s.lastRequest(t)
			require.Equal(t, "split", trace.Route)
			replans += trace.Replans
			if turn > 0 && trace.Replans == 0 {
				require.Equal(t, rank, trace.Prefill, "turn %d of conversation %d", turn, i)
				require.Positive(t, trace.Cached, "vLLM found it there")
				hit += trace.Cached
			}
			rank = trace.Prefill
			at[trace.Prefill]++
			at[trace.Decode]++
			pairs[trace.Prefill+" "+trace.Decode]++
			prompt += " " + s.prompts.words(20)
		}
	}
	require.Len(t, at, 2*ranks, "every rank works: %v", at)
	for _, e := range s.decode {
		for rank := range ranks {
			bytes := e.metrics(t).sum("vllm:nixl_bytes_transferred_sum", fmt.Sprintf("engine=%q", strconv.Itoa(rank)))
			require.Positive(t, bytes, "rank %d of %s fetched KV", rank, e.addr)
		}
	}
	s.report.row("Data-parallel ranks", conversations*turns, fmt.Sprintf("text as aggregated; later turns on the rank "+
		"of the first, %d tokens from its cache; %v replans; pairs of ranks: %v", hit, replans, pairs))
	return replans
}

// eventsByRank: each rank's KV events arrive from a port of its own, and count for it alone.
func (s *suite) eventsByRank(t *testing.T, ranks int) {
	for _, e := range s.engines() {
		for rank := range ranks {
			label := fmt.Sprintf("endpoint=%q", e.addr+"#"+strconv.Itoa(rank))
			require.Eventually(t, func() bool {
				m, err := scrape(s.admin)
				return err == nil && m.sum("tandem_kv_events_blocks", label) > 0
			}, 10*time.Second, 100*time.Millisecond, label)
		}
	}
}

// rankTrace is where a request went, by /debug/requests.
type rankTrace struct {
	Route, Prefill, Decode string
	Cached                 int64   `json:"cached_tokens"`
	Replans                float64 `json:"replans"`
}

func (s *suite) lastRequest(t *testing.T) rankTrace {
	t.Helper()
	res, err := http.Get("http://" + s.admin + "/debug/requests?n=1")
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	var traces []rankTrace
	require.NoError(t, json.NewDecoder(res.Body).Decode(&traces))
	require.Len(t, traces, 1)
	require.True(t, strings.Contains(traces[0].Prefill, "#"), "a rank prefilled: %+v", traces[0])
	return traces[0]
}
