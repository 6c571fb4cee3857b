//go:build vllm

package vllm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// lease is the time for which vLLM's prefill keeps unfetched blocks (kv_lease_duration), and a bit.
const lease = 35 * time.Second

// suite has the parts that the checks share. They run in order, on one set of engines.
type suite struct {
	*stack
	prompts prompts
	report  *report
	start   map[string]float64 // counters before the first request: the engines may have served other runs
}

// counters of the decode and prefill engines that reveal lost transfers.
var counters = []string{
	expiredPrefills, "vllm:nixl_num_failed_transfers_total",
	"vllm:nixl_num_failed_notifications_total", "vllm:nixl_num_notifications_after_expiry_total",
}

const expiredPrefills = "vllm:nixl_num_kv_expired_reqs_total"

// since returns how much a counter has grown since the start.
func (s *suite) since(t *testing.T, counter string) float64 {
	t.Helper()
	return total(t, s.engines(), counter) - s.start[counter]
}

func TestRealVLLM(t *testing.T) {
	if dialect() != "nixl" {
		t.Skip("engines of another dialect: TestRealPairs, TestRealStores")
	}
	if os.Getenv("TANDEM_VLLM_RANKS") != "" {
		t.Skip("engines with ranks: TestRealRanks")
	}
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("TANDEM_VLLM_SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("TANDEM_VLLM_SEED=%d", seed)
	s := newSuite(t, seed)
	defer s.report.print(t) // as far as it got
	s.run(t, "same text", s.sameText)
	s.run(t, "KV moved by NIXL", s.kvMoved)
	s.run(t, "latency", s.latency)
	s.run(t, "every prefill fetched", s.nothingExpired)
	s.run(t, "client's own KV parameters", s.hostile)
	s.run(t, "other doors", s.otherDoors)
	s.run(t, "tokens agree", s.tokensAgree)
	s.run(t, "mixed and aborted", s.mixed)
	s.run(t, "nothing left at the end", s.nothingLeft)
}

// newSuite returns a suite in front of the engines, with the engines' counters as they are now.
func newSuite(t *testing.T, seed uint64) *suite {
	s := &suite{
		stack: newStack(t), prompts: prompts{rand.New(rand.NewPCG(seed, 0))}, report: &report{}, start: map[string]float64{},
	}
	for _, counter := range counters {
		s.start[counter] = total(t, s.engines(), counter)
	}
	s.report.versions = s.versions(t)
	return s
}

// run is t.Run that stops everything at the first failure: after it the engines are in an unknown state.
func (s *suite) run(t *testing.T, name string, check func(t *testing.T)) {
	t.Helper()
	if !t.Run(name, check) {
		t.FailNow()
	}
}

// both sends a request to the reference and through Tandem, and requires the same choices with the same text.
func (s *suite) both(t *testing.T, r request) {
	t.Helper()
	want := s.fromReference(t, clean(r))
	got, err := send(t.Context(), s.front.addr, r, 0)
	require.NoError(t, err, "%s", r)
	require.Equal(t, 200, got.status, "%s: %s", r, got.raw)
	require.NotEmpty(t, got.text, "%s: %s", r, got.raw)
	require.Equal(t, want.text, got.text, "%s", r)
}

func (s *suite) fromReference(t *testing.T, r request) answer {
	t.Helper()
	a, err := send(t.Context(), s.reference.addr, r, 0)
	require.NoError(t, err, "reference, %s", r)
	require.Equal(t, 200, a.status, "reference, %s: %s", r, a.raw)
	return a
}

// clean returns the request for the reference: without members that a client must not send.
func clean(r request) request {
	r.header, r.sampling, r.extra = nil, "", hostileMembers.ReplaceAllString(r.extra, "")
	return r
}

// sameText: every API, streaming and not, from a prompt below one block to one of several prefill steps.
func (s *suite) sameText(t *testing.T) {
	count := 0
	for _, api := range []api{chat, completions, responses, messages, generate} {
		for _, stream := range []bool{false, true} {
			for _, words := range []int{1, 30, 200, 700} {
				s.both(t, request{api: api, prompt: s.prompts.words(words), tokens: 24, stream: stream})
				count++
			}
		}
	}
	s.report.row("Text equal to the aggregated run", count,
		"chat, completions, responses, messages and generate, streaming and not, prompts of 10 to 7,000 tokens, temperature 0")
}

// kvMoved: all prompt tokens are computed on prefill, once, and reach decode by NIXL. In the second turn of a conversation
// the first one's tokens come from caches.
func (s *suite) kvMoved(t *testing.T) {
	var bodies []request
	for i := range 20 {
		bodies = append(bodies, request{
			api: []api{chat, completions}[i%2], prompt: s.prompts.words(10 + 20*i), tokens: 8, stream: i%4 > 1,
		})
	}
	prefill, decode := promptTokens(t, s.prefill...), promptTokens(t, s.decode...)
	reference := promptTokens(t, s.reference)
	for _, r := range bodies {
		s.both(t, r)
	}
	require.Eventually(t, func() bool {
		return promptTokens(t, s.decode...).minus(decode).all() == promptTokens(t, s.reference).minus(reference).all()
	}, 30*time.Second, 100*time.Millisecond, "decode saw other prompts than the reference")
	want := promptTokens(t, s.reference).minus(reference).all()
	onPrefill, onDecode := promptTokens(t, s.prefill...).minus(prefill), promptTokens(t, s.decode...).minus(decode)
	require.Equal(t, tokens{computed: want}, onPrefill, "prefill")
	require.Equal(t, tokens{transferred: want}, onDecode, "decode")
	s.report.row("Prompt tokens moved by NIXL", len(bodies),
		fmt.Sprintf("fresh prompts: %.0f tokens computed on prefill; on decode %v", want, onDecode))

	prefill, decode = promptTokens(t, s.prefill...), promptTokens(t, s.decode...)
	const turns = 8
	prompt := s.prompts.words(150)
	for range turns {
		s.both(t, request{api: completions, prompt: prompt, tokens: 8})
		prompt += s.prompts.words(30)
	}
	require.Eventually(t, func() bool { return promptTokens(t, s.decode...).minus(decode).all() > 0 }, 30*time.Second, 100*time.Millisecond)
	time.Sleep(time.Second) // metrics follow the answer
	onPrefill, onDecode = promptTokens(t, s.prefill...).minus(prefill), promptTokens(t, s.decode...).minus(decode)
	require.LessOrEqual(t, onDecode.computed, float64(turns), "decode may compute the last token of a prompt, no more")
	s.report.row("A prompt that grows", turns, fmt.Sprintf("prefill %v; decode %v", onPrefill, onDecode))
}

// latency checks nothing, but shows the cost of the path with real engines, one request at a time.
func (s *suite) latency(t *testing.T) {
	const n = 30
	var through, byHand, aggregated []time.Duration
	for range n {
		timed := func(f func()) time.Duration {
			started := time.Now()
			f()
			return time.Since(started)
		}
		plain := func(addr string) func() {
			r := request{api: completions, prompt: s.prompts.words(40), tokens: 8}
			return func() {
				a, err := send(t.Context(), addr, r, 0)
				require.NoError(t, err)
				require.Equal(t, 200, a.status, "%s", a.raw)
			}
		}
		through = append(through, timed(plain(s.front.addr)))
		byHand = append(byHand, timed(func() { s.twoHops(t, s.prompts.words(40), 8) }))
		aggregated = append(aggregated, timed(plain(s.reference.addr)))
	}
	s.report.row("Latency p50 / p95, one client, 240-token prompts, 8 tokens out", n, fmt.Sprintf(
		"through Tandem %s; the client itself making both requests %s; aggregated %s",
		percentiles(through), percentiles(byHand), percentiles(aggregated)))
}

// kinds returns the kinds of mixed's requests. No seed: with one, a prompt longer than a step kills vLLM 0.32.0 on
// CPU.
func (s *suite) kinds(i int) request {
	r := request{
		api:    []api{chat, completions, chat, completions, responses, messages}[i%6],
		prompt: s.prompts.words([]int{1, 8, 40, 120, 400}[i%5]),
		tokens: 4 + i%37,
		stream: i%2 == 1,
	}
	switch {
	case (r.api == chat || r.api == completions) && i%7 == 3:
		r.two = true
	case r.api == chat && i%3 == 0:
		r.extra = `,"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],"tool_choice":"none"`
	case r.api == chat && r.stream:
		r.extra = `,"stream_options":{"include_usage":true}`
	case r.api == completions:
		r.extra = `,"unknown_field":{"a":[1e3,9223372036854775807]},"stop":["\u0000never"]`
	}
	return r
}

// mixed: 100 requests of all kinds, 8 at a time, every sixth of them left by its client.
func (s *suite) mixed(t *testing.T) {
	const n, clients = 100, 8
	requests := make([]request, n)
	want := make([]answer, n)
	for i := range requests {
		requests[i] = s.kinds(i)
	}
	// On the reference, unsplit requests come first: decode may compute their tokens.
	started, unsplit := promptTokens(t, s.reference), 0.0
	for _, two := range []bool{true, false} {
		for i, r := range requests {
			if r.two == two {
				want[i] = s.fromReference(t, r)
			}
		}
		if two {
			time.Sleep(time.Second) // metrics follow the answer
			unsplit = promptTokens(t, s.reference).minus(started).all()
		}
	}
	before := promptTokens(t, s.decode...)
	errs := make([]error, n)
	work := make(chan int)
	var group sync.WaitGroup
	for range clients {
		group.Go(func() {
			for i := range work {
				errs[i] = s.oneOfMany(t.Context(), i, requests[i], want[i])
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	group.Wait()
	require.NoError(t, errors.Join(errs...))
	requireAlive(t, append(s.engines(), s.reference))
	s.report.aborted = (n + 5) / 6
	onDecode := promptTokens(t, s.decode...).minus(before)
	require.LessOrEqual(t, onDecode.computed, unsplit+n, "decode computed prompts that were split")
	s.report.row("Mixed requests, 8 at a time", n, fmt.Sprintf(
		"all right: 10 to 2,400 tokens, n=2, tools, unknown fields; %d of them left by the client, before or during the answer; decode: %v "+
			"(%.0f tokens belong to requests with n=2, which are not split)", s.report.aborted, onDecode, unsplit))
}

// oneOfMany sends request i, leaves it early if it is a sixth one, and else compares the answer.
func (s *suite) oneOfMany(ctx context.Context, i int, r request, want answer) error {
	if i%6 == 5 {
		if r.stream && i%4 == 3 {
			if _, err := send(ctx, s.front.addr, r, 2); err != nil && !errors.Is(err, errLeft) {
				return fmt.Errorf("request %d, %s: %w", i, r, err)
			}
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, time.Duration(i)*time.Millisecond)
		defer cancel()
		_, err := send(ctx, s.front.addr, r, 0)
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("request %d, %s: %w", i, r, err)
		}
		return nil
	}
	got, err := send(ctx, s.front.addr, r, 0)
	if err != nil {
		return fmt.Errorf("request %d, %s: %w", i, r, err)
	}
	if got.status != 200 {
		return fmt.Errorf("request %d, %s: %d %s", i, r, got.status, got.raw)
	}
	if fmt.Sprint(got.text) != fmt.Sprint(want.text) {
		return fmt.Errorf("request %d, %s: text %q, the reference's is %q", i, r, got.text, want.text)
	}
	return nil
}

// nothingExpired: as long as no client left, every block that prefill kept was fetched.
func (s *suite) nothingExpired(t *testing.T) {
	time.Sleep(lease)
	require.Zero(t, s.since(t, expiredPrefills), "prefills whose KV nobody fetched")
	s.requireNoFailures(t)
}

// nothingLeft: blocks of clients that left between the hops expire on prefill, and nothing else does, but for the one
// prefill that hostile made by hand.
func (s *suite) nothingLeft(t *testing.T) {
	time.Sleep(lease)
	requireAlive(t, append(s.engines(), s.reference))
	s.requireNoFailures(t)
	expired := s.since(t, expiredPrefills)
	require.LessOrEqual(t, expired, float64(s.report.aborted+1), "more prefills expired than clients left")
	require.Zero(t, total(t, s.engines(), "vllm:kv_cache_usage_perc"), "KV blocks still held")
	m, err := scrape(s.admin)
	require.NoError(t, err)
	require.Zero(t, m.sum("tandem_reservations", ""), "reservations")
	s.report.row("Left at the end", 0, fmt.Sprintf(
		"running 0, waiting 0, KV blocks held 0, reservations 0, failed transfers 0; prefills that nobody fetched: %.0f (%d clients left, and one prefill was made by hand)",
		expired, s.report.aborted))
}

func (s *suite) requireNoFailures(t *testing.T) {
	t.Helper()
	for _, counter := range counters {
		if counter != expiredPrefills {
			require.Zero(t, s.since(t, counter), counter)
		}
	}
}
