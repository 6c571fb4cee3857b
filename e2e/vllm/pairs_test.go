//go:build vllm

package vllm

import (
	"context"
	"fmt"
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
	if dialect() != "nixl-push" && dialect() != "mooncake" {
		t.Skip("engines of another dialect")
	}
	s := &suite{stack: newStackBehindDoors(t), prompts: prompts{rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))}, report: &report{}, start: map[string]float64{}}
	s.report.versions = s.versions(t)
	defer s.report.print(t)
	for range 12 { // until every P's identity is known
		s.both(t, request{api: chat, prompt: s.prompts.words(20), tokens: 4})
	}
	s.run(t, "one at a time", s.pairsAlone)
	s.run(t, "who comes first", s.pairsInOrder)
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
	require.Eventually(t, func() bool { return promptTokens(t, s.decode...).minus(decode).transferred > 0 }, 30*time.Second, 100*time.Millisecond)
	got := promptTokens(t, s.decode...).minus(decode)
	require.Zero(t, got.computed, "decode computed tokens that P had sent")
	s.report.row("Pairs, one at a time", 50, "text as aggregated, nothing computed on decode")
}

// pairsInOrder: either leg may reach its engine first, by as much as a second.
func (s *suite) pairsInOrder(t *testing.T) {
	const requests, apart = 12, time.Second
	for _, order := range []struct {
		name            string
		prefill, decode time.Duration
	}{{"at once", 0, 0}, {"decode first", apart, 0}, {"prefill first", 0, apart}} {
		s.prefillDoors.delay(order.prefill)
		s.decodeDoors.delay(order.decode)
		s.prefillDoors.forget()
		s.decodeDoors.forget()
		before := promptTokens(t, s.decode...)
		for i := range requests {
			s.both(t, request{api: []api{chat, completions}[i%2], prompt: s.prompts.words(30 + 20*i), tokens: 12, stream: i%4 > 1})
		}
		got := promptTokens(t, s.decode...).minus(before)
		require.Zero(t, got.computed, "%s: decode computed tokens that P had sent", order.name)
		require.Positive(t, got.transferred, order.name)
		least, most := apartBy(t, s.prefillDoors.letIn(), s.decodeDoors.letIn(), requests)
		switch order.name {
		case "decode first":
			require.Greater(t, least, apart/2, "P was let in before D")
		case "prefill first":
			require.Less(t, most, -apart/2, "D was let in before P")
		}
		s.report.row("Pairs, "+order.name, requests, fmt.Sprintf("text as aggregated; prefill reached its engine %d to %d ms after decode did; decode: %s",
			least.Milliseconds(), most.Milliseconds(), got))
	}
	s.prefillDoors.delay(0)
	s.decodeDoors.delay(0)
}

// apartBy returns how much later prefill legs were admitted than their decode legs: the least and the most of all.
func apartBy(t *testing.T, prefill, decode map[string]time.Time, legs int) (least, most time.Duration) {
	t.Helper()
	require.Len(t, decode, legs, "each request went over two legs, once")
	least, most = time.Hour, -time.Hour
	for id, at := range decode {
		p, ok := prefill[id]
		require.True(t, ok, "no prefill leg of %s", id)
		least, most = min(least, p.Sub(at)), max(most, p.Sub(at))
	}
	return least, most
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

// pairsLeft: clients that leave at all moments occupy no block for long: P's leg runs to its end.
func (s *suite) pairsLeft(t *testing.T) {
	for i := range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(2+4*i)*time.Millisecond)
		_, _ = send(ctx, s.front.addr, request{api: chat, prompt: s.prompts.words(100), tokens: 200, stream: i%2 == 0}, 0)
		cancel()
	}
	left := time.Now()
	decode, prefill := s.freed(t, s.decode), s.freed(t, s.prefill)
	s.both(t, request{api: chat, prompt: s.prompts.words(40), tokens: 12})
	s.report.row("Pairs, clients that leave", 20, fmt.Sprintf("no block left on any decode engine after %.0f s, on any prefill engine after %.0f s",
		decode.Sub(left).Seconds(), prefill.Sub(left).Seconds()))
}

// freed waits until engines hold no block, and returns the time. A prefill engine keeps unfetched blocks until their
// time is over: vLLM's lease, or the setting of mooncake.sh.
func (s *suite) freed(t *testing.T, engines []engine) time.Time {
	t.Helper()
	require.Eventually(t, func() bool {
		return total(t, engines, "vllm:kv_cache_usage_perc") == 0 && total(t, engines, "vllm:num_requests_running") == 0
	}, lease+10*time.Second, 500*time.Millisecond, "blocks are still taken")
	return time.Now()
}
