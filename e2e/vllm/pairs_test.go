//go:build vllm

package vllm

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRealPairs runs vLLM's push dialects, whose legs run at once, through Envoy's mirrored leg:
//
//	CONNECTOR=NixlPushConnector e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealPairs -v ./e2e/vllm
func TestRealPairs(t *testing.T) {
	if dialect() == "nixl" {
		t.Skip("engines of another dialect: TestRealVLLM")
	}
	s := &suite{stack: newStack(t), prompts: prompts{rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))}, report: &report{}, start: map[string]float64{}}
	s.report.versions = s.versions(t)
	defer s.report.print(t)
	for range 12 { // until every P has told who it is
		s.both(t, request{api: chat, prompt: s.prompts.words(20), tokens: 4})
	}
	s.run(t, "one at a time", s.pairsAlone)
	s.run(t, "six clients", s.pairsTogether)
	s.run(t, "every API", s.pairAPIs)
	s.run(t, "clients leave", s.pairsLeft)
}

// pairsAlone: text as the aggregated run, every prompt token from P.
func (s *suite) pairsAlone(t *testing.T) {
	decode := promptTokens(t, s.decode...)
	for i := range 50 {
		s.both(t, request{api: []api{chat, completions}[i%2], prompt: s.prompts.words(10 + 5*i), tokens: 12, stream: i%4 > 1})
	}
	require.Eventually(t, func() bool { return promptTokens(t, s.decode...).minus(decode).transferred > 0 }, 5*time.Second, 100*time.Millisecond)
	got := promptTokens(t, s.decode...).minus(decode)
	require.Zero(t, got.computed, "decode computed tokens that P had sent")
	s.report.row("Pairs, one at a time", 50, "text as aggregated, nothing computed on decode")
}

func (s *suite) pairsTogether(t *testing.T) {
	var requests []request
	for i := range 48 {
		requests = append(requests, request{api: chat, prompt: s.prompts.words(20 + 3*i), tokens: 12, stream: i%2 == 0})
	}
	var clients sync.WaitGroup
	for c := range 6 {
		clients.Go(func() {
			for i := c; i < len(requests); i += 6 {
				got, err := send(t.Context(), s.front.addr, requests[i], 0)
				if err != nil || got.status != 200 || len(got.text) == 0 {
					t.Errorf("request %d: %v, %d %s", i, err, got.status, got.raw)
				}
			}
		})
	}
	clients.Wait()
	s.report.row("Pairs, six clients", len(requests), "all answered")
}

func (s *suite) pairAPIs(t *testing.T) {
	count := 0
	for _, api := range []api{chat, completions, responses, messages} {
		for _, stream := range []bool{false, true} {
			s.both(t, request{api: api, prompt: s.prompts.words(60), tokens: 16, stream: stream})
			count++
		}
	}
	s.report.row("Pairs, every API", count, "text as aggregated")
}

// pairsLeft: clients that leave at all moments cost D no block: P's leg runs to its end.
func (s *suite) pairsLeft(t *testing.T) {
	for i := range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(2+4*i)*time.Millisecond)
		_, _ = send(ctx, s.front.addr, request{api: chat, prompt: s.prompts.words(100), tokens: 200, stream: i%2 == 0}, 0)
		cancel()
	}
	require.Eventually(t, func() bool {
		return total(t, s.engines(), "vllm:kv_cache_usage_perc") == 0 && total(t, s.engines(), "vllm:num_requests_running") == 0
	}, lease+10*time.Second, 500*time.Millisecond, "blocks are still taken")
	s.both(t, request{api: chat, prompt: s.prompts.words(40), tokens: 12})
	s.report.row("Pairs, clients that leave", 20, "no block left on any engine")
}
