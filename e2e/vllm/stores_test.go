//go:build vllm

package vllm

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRealStores runs engines that hand KV over by files in a folder (ExampleConnector, kvTransfer shared), or by NIXL
// and such files at once (MultiConnector, kvTransfer multi):
//
//	CONNECTOR=ExampleConnector ENGINES=1 REFERENCE=prefill e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealStores -v ./e2e/vllm
func TestRealStores(t *testing.T) {
	if dialect() != "shared" && dialect() != "multi" {
		t.Skip("engines of another dialect")
	}
	s := newSuite(t, uint64(time.Now().UnixNano()))
	defer s.report.print(t)
	s.run(t, "every API", s.storedAPIs)
	s.run(t, "several clients, some leave", s.storedTogether)
	s.run(t, "nothing left at the end", s.storesAtRest)
}

// storedAPIs: every API, streaming and not. P is the reference, so Tandem goes first: what reaches D then can only have
// come from Tandem's own prefill leg.
func (s *suite) storedAPIs(t *testing.T) {
	const block = 32
	count := 0
	var onPrefill, onDecode tokens
	for _, api := range []api{chat, completions, responses, messages, generate} {
		for _, stream := range []bool{false, true} {
			for _, words := range []int{10, 60, 200} {
				r := request{api: api, prompt: s.prompts.words(words), tokens: 16, stream: stream}
				prefill, decode := promptTokens(t, s.prefill...), promptTokens(t, s.decode...)
				got, err := send(t.Context(), s.front.addr, r, 0)
				require.NoError(t, err, "%s", r)
				require.Equal(t, 200, got.status, "%s: %s", r, got.raw)
				var p, d tokens
				require.Eventually(t, func() bool { // metrics follow the answer
					p, d = promptTokens(t, s.prefill...).minus(prefill), promptTokens(t, s.decode...).minus(decode)
					return p.all() > 0 && p.all() == d.all()
				}, 30*time.Second, 20*time.Millisecond, "%s", r)
				require.Zero(t, p.transferred, "%s: P fetched", r)
				if dialect() == "multi" {
					require.Equal(t, tokens{transferred: p.all()}, d, "%s: NIXL, the first member, has the whole prompt", r)
				}
				if dialect() == "shared" && int(p.all())%block == 1 {
					// Of n blocks and a token it stores n blocks and looks for n-1 (0.32.0: align_to_block_size is applied once
					// by ReqMeta.make_meta, twice by _found_match_for_prompt).
					require.Equal(t, tokens{computed: p.all()}, d, "%s: ExampleConnector does not find what it stored", r)
				} else {
					require.LessOrEqual(t, d.computed, float64(block), "%s: decode computes what is no whole block: %v", r, d)
				}
				require.Equal(t, s.fromReference(t, r).text, got.text, "%s", r)
				onPrefill, onDecode = onPrefill.plus(p), onDecode.plus(d)
				count++
			}
		}
	}
	require.Positive(t, onDecode.transferred)
	folders, err := os.ReadDir(os.Getenv("TANDEM_VLLM_STORE"))
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(folders), count, "P stores every prompt")
	s.report.row("Every API", count, fmt.Sprintf("text as aggregated; prefill: %v; decode: %v", onPrefill, onDecode))
}

// storedTogether: four clients at once, and some that leave.
func (s *suite) storedTogether(t *testing.T) {
	const requests, clients = 40, 4
	sent := make([]request, requests)
	for i := range sent {
		sent[i] = request{api: []api{chat, completions}[i%2], prompt: s.prompts.words(20 + 5*i), tokens: 16, stream: i%4 > 1}
	}
	got, errs := make([]answer, requests), make([]error, requests)
	work, done := make(chan int), make(chan struct{}, clients)
	for range clients {
		go func() {
			for i := range work {
				ctx, cancel := t.Context(), context.CancelFunc(func() {})
				if i%5 == 4 {
					ctx, cancel = context.WithTimeout(ctx, time.Duration(10*i)*time.Millisecond)
				}
				got[i], errs[i] = send(ctx, s.front.addr, sent[i], 0)
				cancel()
			}
			done <- struct{}{}
		}()
	}
	for i := range requests {
		work <- i
	}
	close(work)
	for range clients {
		<-done
	}
	left := 0
	for i, r := range sent {
		if errs[i] != nil && i%5 == 4 {
			left++
			continue
		}
		require.NoError(t, errs[i], "%s", r)
		require.Equal(t, 200, got[i].status, "%s: %s", r, got[i].raw)
		require.Equal(t, s.fromReference(t, r).text, got[i].text, "%s", r)
	}
	s.report.aborted = left
	s.report.row("Four clients", requests, fmt.Sprintf("text as aggregated; %d left by the client", left))
}

// storesAtRest: no engine holds a block or works, and Tandem has nothing reserved.
func (s *suite) storesAtRest(t *testing.T) {
	s.freed(t, s.engines())
	requireAlive(t, s.engines())
	// For a client that left while D fetched, P may be notified of a request that it no longer knows. Only such clients do that.
	for _, counter := range counters {
		require.LessOrEqual(t, s.since(t, counter), float64(s.report.aborted), "%s: more than clients left", counter)
	}
	require.Eventually(t, func() bool { // a client that left is logged a little later
		m, err := scrape(s.admin)
		return err == nil && m.sum("tandem_reservations", "") == 0
	}, 30*time.Second, 100*time.Millisecond, "reservations")
	s.report.row("Left at the end", 0, "running 0, waiting 0, KV blocks held 0, reservations 0")
}
