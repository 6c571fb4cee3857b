//go:build sglang

package sglang

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// request is one greedy request.
type request struct {
	path string
	body map[string]any
}

func (r request) json(t *testing.T, more map[string]any) string {
	t.Helper()
	body := maps.Clone(r.body)
	body["model"] = "tiny"
	if r.path != "/generate" {
		body["temperature"] = 0
	}
	maps.Copy(body, more)
	text, err := json.Marshal(body)
	require.NoError(t, err)
	return string(text)
}

// requests returns one of each API, and /generate with text and with token ids. No two have a prompt in common:
// input_tokens of /v1/messages counts uncached tokens only.
func (p prompts) requests(words, tokens int) []request {
	messages := func() []any { return []any{map[string]any{"role": "user", "content": p.words(words)}} }
	sampling := map[string]any{"max_new_tokens": tokens, "temperature": 0}
	text := p.words(words)
	ids := make([]int, len(text))
	for i := range ids {
		ids[i] = 300 + int(text[i])
	}
	return []request{
		{"/v1/chat/completions", map[string]any{"messages": messages(), "max_tokens": tokens}},
		{"/v1/completions", map[string]any{"prompt": p.words(words), "max_tokens": tokens}},
		{"/v1/responses", map[string]any{"input": p.words(words), "max_output_tokens": tokens}},
		{"/v1/messages", map[string]any{"messages": messages(), "max_tokens": tokens}},
		{"/generate", map[string]any{"text": p.words(words), "sampling_params": sampling}},
		{"/generate", map[string]any{"input_ids": ids, "sampling_params": sampling}},
	}
}

// batches returns lists of prompts, and answers with log probabilities, part of which come from P.
func batches(p prompts) []request {
	sampling := map[string]any{"max_new_tokens": 6, "temperature": 0}
	return []request{
		{"/v1/completions", map[string]any{"prompt": []string{p.words(20), p.words(35)}, "max_tokens": 8}},
		{"/v1/completions", map[string]any{"prompt": [][]int{{300, 301, 302, 303}, {400, 401, 402}}, "max_tokens": 8}},
		{"/generate", map[string]any{"text": []string{p.words(20), p.words(30), p.words(5)}, "sampling_params": sampling}},
		{"/generate", map[string]any{"text": p.words(10), "return_logprob": true, "logprob_start_len": 0, "sampling_params": sampling}},
		{"/v1/chat/completions", map[string]any{"messages": []any{map[string]any{"role": "user", "content": p.words(30)}}, "logprobs": true, "top_logprobs": 2, "max_tokens": 4}},
		{"/v1/completions", map[string]any{"prompt": p.words(30), "max_tokens": 1}},
		{"/v1/completions", map[string]any{"prompt": p.words(30), "max_tokens": 64, "ignore_eos": true}},
	}
}

// prompts are fresh in every run, so that nothing in them is cached anywhere.
type prompts struct{ rand *rand.Rand }

func (p prompts) words(n int) string {
	var b strings.Builder
	for range n {
		fmt.Fprintf(&b, "word%05d ", p.rand.IntN(100000))
	}
	return b.String()
}

// TestRealSGLang runs its checks in order, on one set of servers; the last ones kill some.
func TestRealSGLang(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("TANDEM_SGLANG_SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("TANDEM_SGLANG_SEED=%d", seed)
	s := &suite{stack: newStack(t, false), prompts: prompts{rand.New(rand.NewPCG(seed, 0))}}
	s.versions(t)
	s.warm(t)
	defer s.print()
	for _, check := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"same answers", s.sameAnswers}, {"batches", s.batches}, {"KV moved", s.kvMoved}, {"several choices", s.choices}, {"a forged bootstrap host", s.forged},
		{"refusals", s.refusals}, {"clients leave", s.leave}, {"many at once", s.crowd}, {"prefill killed", s.prefillKilled}, {"decode killed", s.decodeKilled},
	} {
		if !t.Run(check.name, check.run) {
			t.FailNow() // the servers are in an unknown state
		}
	}
}

type suite struct {
	*stack
	prompts prompts
	head    string
	rows    []string
}

// warm sends requests until 12 in a row are answered. The first requests of a server on CPU take seconds, in which it
// does not answer GET /health either, so Tandem excludes it meanwhile.
func (s *suite) warm(t *testing.T) {
	t.Helper()
	inRow := 0
	require.Eventually(t, func() bool {
		r := s.prompts.requests(30, 4)[inRow%2]
		got, err := post(t.Context(), s.front, r.path, r.json(t, map[string]any{"stream": inRow%4 > 1}))
		if inRow++; err != nil || got.status != http.StatusOK {
			inRow = 0
		}
		return inRow == 12
	}, 5*time.Minute, 50*time.Millisecond, "the servers do not get warm")
}

func (s *suite) versions(t *testing.T) {
	t.Helper()
	answer, err := http.Get("http://" + s.reference + "/server_info")
	require.NoError(t, err)
	defer func() { _ = answer.Body.Close() }()
	var info struct{ Version string }
	require.NoError(t, json.NewDecoder(answer.Body).Decode(&info))
	s.head = fmt.Sprintf("%s: SGLang %s on CPU, NIXL, %d prefill and %d decode servers, and one without disaggregation as the reference",
		time.Now().UTC().Format(time.DateOnly), info.Version, len(s.prefill), len(s.decode))
}

// row records a check, its number of requests, and the result.
func (s *suite) row(check string, requests int, seen string) {
	s.rows = append(s.rows, fmt.Sprintf("| %s | %d | %s |", check, requests, seen))
}

func (s *suite) print() {
	fmt.Printf("\n%s.\n\n| Check | Requests | Seen |\n|---|---|---|\n%s\n\n", s.head, strings.Join(s.rows, "\n"))
}

// both sends a request to the reference and through Tandem, and requires the same answer.
func (s *suite) both(t *testing.T, r request, more map[string]any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	body := r.json(t, more)
	want, err := post(ctx, s.reference, r.path, body)
	require.NoError(t, err)
	got, err := post(ctx, s.front, r.path, body)
	require.NoError(t, err, "%s %.300s", r.path, body)
	require.Equal(t, want.status, got.status, "%s %.300s: %s", r.path, body, got.raw)
	if want.status == http.StatusOK {
		require.NoError(t, got.complete(), "%s %.300s", r.path, body)
	}
	require.Equal(t, want.told(t), got.told(t), "%s %.300s", r.path, body)
}

func (s *suite) sameAnswers(t *testing.T) {
	count := 0
	for _, words := range []int{1, 30, 200} {
		for _, stream := range []bool{false, true} {
			for _, r := range s.prompts.requests(words, 16) {
				s.both(t, r, map[string]any{"stream": stream})
				count++
			}
		}
	}
	s.row("Answers equal to the aggregated server's", count,
		"chat, completions, responses, messages, `/generate` with text and with ids, streamed and not, prompts of 10 to 2,000 tokens")
}

func (s *suite) batches(t *testing.T) {
	all := batches(s.prompts)
	for _, r := range all {
		s.both(t, r, nil)
	}
	s.row("Batches, log probabilities, limits", len(all), "lists of prompts as text and ids, `return_logprob`, `logprobs`, `max_tokens` 1, `ignore_eos`: equal")
}

// metric adds up a metric of some servers.
func metric(t *testing.T, name string, servers ...string) (total float64) {
	t.Helper()
	for _, addr := range servers {
		answer, err := http.Get("http://" + addr + "/metrics")
		require.NoError(t, err)
		text, err := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		require.NoError(t, err)
		for line := range strings.Lines(string(text)) {
			if rest, ok := strings.CutPrefix(line, name+"{"); ok {
				_, value, _ := strings.Cut(rest, "} ")
				v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
				require.NoError(t, err, line)
				total += v
			}
		}
	}
	return total
}

// kvMoved: every prompt is computed on prefill, and its KV reaches decode: no decode server runs a prefill batch.
func (s *suite) kvMoved(t *testing.T) {
	const n = 12
	transfers := metric(t, "sglang:kv_transfer_alloc_ms_count", s.decode...)
	computed := metric(t, "sglang:prefill_effective_tokens_total", s.decode...)
	for i := range n {
		s.both(t, s.prompts.requests(10+10*i, 8)[i%2], nil)
	}
	require.Eventually(t, func() bool { return metric(t, "sglang:kv_transfer_alloc_ms_count", s.decode...)-transfers >= n }, time.Minute, 200*time.Millisecond)
	require.InDelta(t, computed, metric(t, "sglang:prefill_effective_tokens_total", s.decode...), 0, "a decode server computed a prompt")
	s.row("KV moved by NIXL", n, fmt.Sprintf("%d transfers to decode, no prompt computed there", n))
}

// choices: several choices of one prompt make a real D wait for 300 s, so they are refused unless a server does both,
// and answered if one does.
func (s *suite) choices(t *testing.T) {
	whole := newStack(t, true)
	count := 0
	for _, r := range []request{
		{"/v1/chat/completions", map[string]any{"messages": []any{map[string]any{"role": "user", "content": s.prompts.words(20)}}, "max_tokens": 6, "n": 2}},
		{"/v1/completions", map[string]any{"prompt": []string{s.prompts.words(20), s.prompts.words(10)}, "max_tokens": 6, "n": 2}},
		{"/generate", map[string]any{"text": s.prompts.words(20), "sampling_params": map[string]any{"n": 2, "max_new_tokens": 5, "temperature": 0}}},
		{"/generate", map[string]any{"text": []string{s.prompts.words(5)}, "sampling_params": []any{map[string]any{"n": 2, "max_new_tokens": 5, "temperature": 0}}}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began := time.Now()
		got, err := post(ctx, s.front, r.path, r.json(t, nil))
		require.NoError(t, err)
		require.Equal(t, 400, got.status, "%s", got.raw)
		require.Contains(t, string(got.raw), "several_choices")
		require.Less(t, time.Since(began), 30*time.Second)
		got, err = post(ctx, whole.front, r.path, r.json(t, nil))
		require.NoError(t, err)
		require.NoError(t, got.complete())
		count += 2
	}
	s.row("Several choices", count, "refused with 400 `not_over_two_engines`; answered by a server of the role both where there is one")
}

// forged: a client cannot name the host that a decode server connects to.
func (s *suite) forged(t *testing.T) {
	lure, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer lure.Close()
	visited := make(chan string, 1)
	go func() {
		if conn, err := lure.Accept(); err == nil {
			visited <- conn.RemoteAddr().String()
		}
	}()
	_, port, _ := net.SplitHostPort(lure.Addr().String())
	count := 0
	for _, forged := range []string{
		`{"bootstrap_host":"127.0.0.1","bootstrap_port":` + port + `,"bootstrap_room":7,`,
		`{"bootstrap\u005fhost":"127.0.0.1","bootstrap_port":` + port + `,"bootstrap_room":[7],`,
		`{"bootstrap_room":9223372036854775807,"bootstrap_pair_key":"x","disagg_prefill_dp_rank":3,`,
	} {
		for _, r := range s.prompts.requests(25, 8) {
			body := r.json(t, nil)
			want, err := post(t.Context(), s.reference, r.path, body)
			require.NoError(t, err)
			got, err := post(t.Context(), s.front, r.path, strings.Replace(body, "{", forged, 1),
				"x-override-bootstrap-host", "127.0.0.1", "x-override-bootstrap-port", port, "x-override-bootstrap-room", "7")
			require.NoError(t, err)
			require.NoError(t, got.complete(), "%s %s", r.path, forged)
			require.Equal(t, want.told(t), got.told(t), "%s %s", r.path, forged)
			count++
		}
	}
	select {
	case from := <-visited:
		t.Fatalf("a server connected to the client's host, from %s", from)
	default:
	}
	s.row("A forged `bootstrap_host`", count, "in the body, written with escapes, and as headers: right text, and nobody connected to it")
}

// refusals: SGLang's error for a bad request shows the client's own body, without rooms.
func (s *suite) refusals(t *testing.T) {
	bad := []request{
		{"/v1/chat/completions", map[string]any{"max_tokens": 4}},
		{"/v1/chat/completions", map[string]any{"messages": []any{}, "max_tokens": 4}},
		{"/v1/chat/completions", map[string]any{"messages": "no list", "max_tokens": 4}},
		{"/v1/completions", map[string]any{"prompt": "x", "max_tokens": 4, "temperature": -1}},
		{"/v1/completions", map[string]any{"max_tokens": 4}},
		{"/v1/responses", map[string]any{"max_output_tokens": 4}},
		{"/v1/messages", map[string]any{"messages": 7, "max_tokens": 4}},
		{"/generate", map[string]any{"text": "x", "sampling_params": map[string]any{"max_new_tokens": "many"}}},
	}
	count := 0
	for _, r := range bad {
		for _, stream := range []bool{false, true} {
			body := r.json(t, map[string]any{"stream": stream})
			want, err := post(t.Context(), s.reference, r.path, body)
			require.NoError(t, err)
			for range 3 { // whichever of the two servers is first
				got, err := post(t.Context(), s.front, r.path, body)
				require.NoError(t, err)
				require.NotContains(t, string(got.raw), "bootstrap", "%s %s", r.path, body)
				require.Equal(t, want.status, got.status, "%s %s: %s, the reference says %s", r.path, body, got.raw, want.raw)
				count++
			}
		}
	}
	s.row("Refusals", count, "the reference's status each time; no member of ours in any text")
}

// leave: clients leave at all moments; nothing is left in any server's queues.
func (s *suite) leave(t *testing.T) {
	const n = 24
	for i := range n {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(2+25*i)*time.Millisecond)
		r := s.prompts.requests(150, 400)[i%2]
		_, _ = post(ctx, s.front, r.path, r.json(t, map[string]any{"stream": i%4 > 1, "ignore_eos": true}))
		cancel()
	}
	took := s.idle(t, slices.Concat(s.prefill, s.decode)...)
	s.both(t, s.prompts.requests(20, 8)[0], nil)
	s.row("Clients that leave", n, fmt.Sprintf("before, during and after prefill, streamed and not; all queues of all servers empty %.1f s later", took.Seconds()))
}

// run sends requests from some clients until stop is closed, and returns their number, and the errors.
func (s *suite) run(ctx context.Context, t *testing.T, clients int, stop <-chan struct{}) (count int, slowest time.Duration, errs []error) {
	var all sync.WaitGroup
	var mu sync.Mutex
	for c := range clients {
		own := prompts{rand.New(rand.NewPCG(s.prompts.rand.Uint64(), uint64(c)))}
		all.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				r := own.requests(40, 12)[(c+i)%6]
				began := time.Now()
				got, err := post(ctx, s.front, r.path, r.json(t, map[string]any{"stream": i%2 == 0}))
				if err == nil {
					err = got.complete()
				}
				mu.Lock()
				count++
				slowest = max(slowest, time.Since(began))
				if err != nil {
					errs = append(errs, fmt.Errorf("client %d request %d, %s, stream %t, after %.1f s: %w", c, i, r.path, i%2 == 0, time.Since(began).Seconds(), err))
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return count, slowest, errs
}

func (s *suite) crowd(t *testing.T) {
	stop := make(chan struct{})
	time.AfterFunc(20*time.Second, func() { close(stop) })
	count, slowest, errs := s.run(t.Context(), t, 6, stop)
	require.Empty(t, errs)
	s.idle(t, slices.Concat(s.prefill, s.decode)...)
	s.row("Six clients, 20 s", count, fmt.Sprintf("all answered; slowest %.1f s", slowest.Seconds()))
}

// kill ends a server and its children at once.
func kill(t *testing.T, name, addr string) {
	t.Helper()
	_, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	text, err := os.ReadFile(filepath.Join(os.Getenv("TANDEM_SGLANG_LOGS"), name+"-"+port+".pid"))
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(-pid, syscall.SIGKILL))
}

// underFire has clients at work while one of several servers is killed, and requires every answer except those that
// had begun.
func (s *suite) underFire(t *testing.T, role string, of []string) {
	if len(of) < 2 {
		t.Skipf("one %s server: nobody is left to answer", role)
	}
	stop := make(chan struct{})
	time.AfterFunc(4*time.Second, func() { kill(t, role, of[0]) })
	time.AfterFunc(24*time.Second, func() { close(stop) })
	count, slowest, errs := s.run(t.Context(), t, 4, stop)
	cut := 0
	for _, err := range errs {
		if strings.Contains(err.Error(), "stream true") && !strings.Contains(err.Error(), "status") {
			cut++ // an answer that had begun cannot be begun again
			continue
		}
		t.Error(err)
	}
	if role == "prefill" {
		require.Zero(t, cut, "a stream was cut although its decode server lives")
	}
	s.row("One of "+fmt.Sprint(len(of))+" "+role+" servers killed under load", count, fmt.Sprintf("%d streams that had begun were cut, every other request answered; slowest %.1f s", cut, slowest.Seconds()))
}

func (s *suite) prefillKilled(t *testing.T) {
	s.underFire(t, "prefill", s.prefill)
	s.idle(t, slices.Concat(s.prefill[1:], s.decode)...)
}

func (s *suite) decodeKilled(t *testing.T) {
	s.underFire(t, "decode", s.decode)
	s.idle(t, slices.Concat(s.prefill[min(1, len(s.prefill)-1):], s.decode[1:])...)
}
