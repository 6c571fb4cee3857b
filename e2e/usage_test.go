package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// used are the tokens of one request, as someone counts them; nil: not said.
type used struct {
	Prompt, Answer int
	Said           bool
}

func (u *used) add(o used) { u.Prompt, u.Answer = u.Prompt+o.Prompt, u.Answer+o.Answer }

// usageOf returns the tokens that an answer tells its client.
func usageOf(a answer) (u used) {
	type tokens struct {
		Prompt     *int `json:"prompt_tokens"`
		Completion *int `json:"completion_tokens"`
		Input      *int `json:"input_tokens"`
		Output     *int `json:"output_tokens"`
		CacheRead  int  `json:"cache_read_input_tokens"`
		CacheWrite int  `json:"cache_creation_input_tokens"`
	}
	texts := a.events()
	if len(texts) == 0 {
		texts = []string{a.body}
	}
	for _, text := range texts {
		var body struct {
			Usage    *tokens
			Message  struct{ Usage *tokens }
			Response struct{ Usage *tokens }
		}
		if json.Unmarshal([]byte(text), &body) != nil {
			continue
		}
		for _, t := range []*tokens{body.Message.Usage, body.Response.Usage, body.Usage} {
			switch {
			case t == nil:
			case t.Completion != nil:
				u = used{*t.Prompt, *t.Completion, true}
			case t.Output != nil && t.Input != nil:
				u = used{*t.Input + t.CacheRead + t.CacheWrite, *t.Output, true}
			}
		}
	}
	return u
}

// ledgerLine is a line of the ledger, as docs/howto/count-tokens.md has it.
type ledgerLine struct {
	ID, Key, Model, Tenant, Ended, Decode, Promise string
	Status                                         int
	Streamed                                       bool
	Prompt                                         *int    `json:"prompt_tokens"`
	Answer                                         *int    `json:"completion_tokens"`
	First                                          float64 `json:"first_token_ms"`
	PerToken                                       float64 `json:"per_token_ms"`
	Took                                           float64 `json:"took_ms"`
}

func (l ledgerLine) used() used {
	if l.Prompt == nil || l.Answer == nil {
		return used{}
	}
	return used{*l.Prompt, *l.Answer, true}
}

// readLedgers returns the lines of all replicas' ledgers by request id; several lines of one id fail the test.
func readLedgers(t *testing.T, dir string) map[string]ledgerLine {
	t.Helper()
	out := map[string]ledgerLine{}
	files, err := filepath.Glob(filepath.Join(dir, "ledger-*"))
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for line := range strings.Lines(string(text)) {
			if !strings.HasSuffix(line, "\n") {
				continue // it is being written
			}
			var l ledgerLine
			require.NoError(t, json.Unmarshal([]byte(line), &l), line)
			require.NotContains(t, out, l.ID, "counted twice")
			out[l.ID] = l
		}
	}
	return out
}

// Of a thousand requests (streamed and not, with usage and without, cut by engines and by clients, refused, over one hop
// and two, through two replicas) the tokens that clients, rows, metrics, ledgers and engines count are the same.
func TestTokensAgree(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	f := start(t, options{replicas: severalReplicas(2), engineArgs: []string{"--record-count", "5000", "--lease", "120s"}, top: fmt.Sprintf(
		"usage: {tenantHeader: x-Tenant, tenants: 2, ledger: %q}\n", filepath.Join(dir, "ledger-%i"))})
	f.lenient = true // the blocks of those who leave between the hops
	for _, e := range f.decodes {
		f.inject(e, `{"mode":"stream-reset-after","events":3,"contains":"cut me"}`)
	}
	const requests, batch = 1000, 200 // a replica keeps the rows of 256
	kinds := []string{"plain", "stream", "stream", "usage", "usage", "usage", "one hop", "cut", "leave", "refused"}
	var mu sync.Mutex
	clients, rows := map[string]used{}, map[string]used{}
	ids := map[string]string{} // kinds
	ask := func(i int) {
		kind, api := kinds[i%len(kinds)], apis[i/len(kinds)%len(apis)]
		id := fmt.Sprintf("tokens-%d", i)
		var body map[string]any
		_ = json.Unmarshal([]byte(strings.ReplaceAll(api.body, "Two hops", fmt.Sprintf("Request %d", i))), &body)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		switch kind {
		case "stream":
			body["stream"] = true
		case "usage":
			if body["stream"] = true; api.name == "chat" || api.name == "completions" {
				body["stream_options"] = map[string]any{"include_usage": true}
			}
		case "one hop":
			body, api = map[string]any{"model": "tiny", "prompt": id, "n": 2, "max_tokens": 3}, apis[1]
		case "cut":
			body, api = map[string]any{"model": "tiny", "prompt": "cut me " + id, "stream": true, "max_tokens": 30}, apis[1]
		case "leave":
			body, api = map[string]any{"model": "tiny", "prompt": id, "stream": true, "max_tokens": 20}, apis[1]
			time.AfterFunc(time.Duration(i%30)*time.Millisecond, cancel)
		case "refused":
			body, api = map[string]any{"model": "tiny", "prompt": id, "max_tokens": 99_000_000}, apis[1]
		}
		text, _ := json.Marshal(body)
		got, err := f.try(ctx, http.MethodPost, api.path, string(text), "x-request-id", id, "x-tenant",
			fmt.Sprintf("team-%d", i%4))
		mu.Lock()
		defer mu.Unlock()
		if ids[id] = kind; err == nil && got.status == 200 {
			clients[id] = usageOf(got)
		}
	}
	var lines map[string]ledgerLine
	for from := 0; from < requests; from += batch {
		next := make(chan int)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for i := range next {
					ask(i)
				}
			})
		}
		for i := from; i < from+batch; i++ {
			next <- i
		}
		close(next)
		wg.Wait()
		soon(t, "every request that was not left is in a ledger", func() bool {
			lines = readLedgers(t, dir)
			for id, kind := range ids {
				if _, there := lines[id]; !there && kind != "leave" {
					return false
				}
			}
			return true
		})
		for _, admin := range f.admins { // without Redis each shows its own
			var recent []struct {
				RequestID string `json:"request_id"`
				Usage     *struct {
					Prompt *int `json:"prompt_tokens"`
					Answer *int `json:"completion_tokens"`
				}
			}
			require.NoError(t, getJSON(admin+"/debug/requests?n=256", &recent))
			for _, r := range recent {
				if r.Usage != nil && r.Usage.Prompt != nil && r.Usage.Answer != nil {
					rows[r.RequestID] = used{*r.Usage.Prompt, *r.Usage.Answer, true}
				}
			}
		}
	}
	engines := map[string]used{}
	for _, r := range f.requests("", f.decodes...) {
		if r.Status == 200 {
			engines[r.RequestID] = used{r.PromptTokens, r.CompletionTokens, true}
		}
	}
	var byClient, byRow, byLedger, byEngine used
	counted := map[string]int{}
	for id, kind := range ids {
		l, got := lines[id], lines[id].used()
		if kind == "leave" && !clients[id].Said {
			continue // it may have left before or after the tokens were said
		}
		require.Equal(t, clients[id], got, "%s, %s: what the client got, and the ledger", id, kind)
		require.Equal(t, fmt.Sprintf("team-%s", string(id[len(id)-1]))[:5], l.Tenant[:5], "%s", id)
		require.Equal(t, "tiny", l.Model)
		require.NotEmpty(t, l.Key)
		if kind == "refused" {
			require.Equal(t, []any{400, "refused"}, []any{l.Status, l.Ended})
		}
		if kind == "cut" {
			require.Equal(t, "failed", l.Ended)
		}
		if !got.Said {
			continue
		}
		counted[kind]++
		require.Equal(t, engines[id], got, "%s, %s: what the engine counted, and the ledger", id, kind)
		byClient.add(clients[id])
		byRow.add(rows[id])
		byLedger.add(got)
		byEngine.add(engines[id])
		if l.Streamed {
			require.Positive(t, l.First, "%s, %s", id, kind)
			require.LessOrEqual(t, l.First, l.Took+1)
		}
	}
	t.Logf("requests with tokens: %v, tokens: %+v", counted, byLedger)
	for _, kind := range []string{"plain", "usage", "one hop"} {
		require.Positive(t, counted[kind], kind)
	}
	require.Zero(t, counted["refused"]+counted["cut"])
	require.Equal(t, []used{byLedger, byLedger, byLedger}, []used{byClient, byRow, byEngine}, "clients, rows, engines")

	for _, l := range lines { // those who left when the tokens were said
		if ids[l.ID] == "leave" && !clients[l.ID].Said {
			byLedger.add(l.used())
		}
	}
	sum := func(name string, labels ...string) (n int) {
		for _, admin := range f.admins {
			n += int(metric(t, admin, name, labels...))
		}
		return n
	}
	for _, name := range []string{"tandem_tokens_total", "tandem_endpoint_tokens_total"} {
		require.Equal(t, []int{byLedger.Prompt, byLedger.Answer},
			[]int{sum(name, `kind="prompt"`), sum(name, `kind="generation"`)}, name)
	}
	require.Positive(t, sum("tandem_tokens_total", `tenant="hash-`), "four tenants, two of them by name")
	require.Equal(t, len(lines), sum("tandem_ledger_lines_total", `result="written"`))
	require.Zero(t, sum("tandem_ledger_lines_total", `result="dropped"`))
	require.Positive(t, sum("tandem_answers_without_usage_total", `reason="absent"`))
	require.Zero(t, sum("tandem_answers_without_usage_total", `reason="absurd"`))
	require.Positive(t, sum("tandem_time_to_first_token_seconds_count"))
	require.Positive(t, sum("tandem_promises_total", `result="kept"`))
	require.Positive(t, sum("tandem_time_to_first_token_ratio_count"), "first tokens as expected, and as they came")
}

// Over xDS Envoy gets what counts tokens, too (inside it, by its bootstrap), and both legs at once are counted as one request.
func TestTokensOverXDS(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "sglang"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			f := start(t, options{dialect: dialect, xds: severalReplicas(2) > 1, prefills: 1, decodes: 1, top: "usage: {}\n"})
			got := f.post("/v1/chat/completions", `{"model":"tiny","stream":true,"stream_options":{"include_usage":true},`+
				`"max_tokens":12,"messages":[{"role":"user","content":"Two hops, please."}]}`)
			require.Equal(t, 200, got.status, got.body)
			want := usageOf(got)
			require.Equal(t, 12, want.Answer)
			soon(t, "its tokens are counted", func() bool {
				return metric(t, f.admins[0], "tandem_tokens_total", `kind="generation"`) > 0
			})
			require.InDelta(t, want.Answer, metric(t, f.admins[0], "tandem_tokens_total", `kind="generation"`), 0)
			require.InDelta(t, want.Prompt, metric(t, f.admins[0], "tandem_tokens_total", `kind="prompt"`, `model="tiny"`), 0)
			require.InDelta(t, 1, metric(t, f.admins[0], "tandem_time_to_first_token_seconds_count"), 0)
		})
	}
}

// severalReplicas is n, where an Envoy can ask several: inside it there is one.
func severalReplicas(n int) int {
	if runsInside() {
		return 1
	}
	return n
}

// Replicas that die while answers stream cut none of them: Envoy counts, and nobody waits for it.
func TestTokensWithoutTandem(t *testing.T) {
	t.Parallel()
	f := start(t, options{replicas: 2, top: "usage: {}\n", engineArgs: []string{"--decode-step", "20ms"}})
	const streams, tokens = 24, 400 // 8 s
	done := make(chan used, streams)
	for i := range streams {
		api, limit := apis[i%2], fmt.Sprintf(`"max_tokens":%d,"min_tokens":%[1]d,"ignore_eos":true`, tokens)
		body := strings.Replace(strings.Replace(api.body, `"max_tokens":12`, limit, 1), "Two hops", fmt.Sprint("Stream ", i), 1)
		body = strings.Replace(body, "{", `{"stream":true,"stream_options":{"include_usage":true},`, 1)
		go func() {
			got, err := f.try(context.Background(), http.MethodPost, api.path, body)
			if err != nil || got.status != 200 || !strings.HasSuffix(got.body, "data: [DONE]\n\n") {
				t.Logf("%v, %d: %.300s", err, got.status, got.body[max(0, len(got.body)-300):])
				done <- used{}
				return
			}
			done <- usageOf(got)
		}()
	}
	running := func() (n float64) {
		for _, d := range f.decodes {
			n += metric(t, "http://"+d.addr, "vllm:num_requests_running")
		}
		return n
	}
	soon(t, "all answers stream", func() bool { return running() == streams })
	for _, p := range f.tandems {
		p.stop(syscall.SIGKILL)
	}
	require.InDelta(t, streams, running(), 0, "an answer was cut, or had ended already")
	for range streams {
		require.Equal(t, tokens, (<-done).Answer)
	}
}

// Engines that count nothing themselves, as TensorRT-LLM's, are learned of what Envoy counts: their pace, and how long
// each model's answers are.
func TestEnvoyTeaches(t *testing.T) {
	t.Parallel()
	const step = 60 * time.Millisecond // the model's is 12
	for name, o := range map[string]options{
		"trtllm": {dialect: "trtllm", prefills: 1, decodes: 1},
		"both":   {decodes: 2, decodeRole: "both"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			token := filepath.Join(t.TempDir(), "token")
			require.NoError(t, os.WriteFile(token, []byte("0123456789abcdef\n"), 0o600))
			o.top, o.adminFields = "usage: {}\n", fmt.Sprintf(", tokenFile: %q", token)
			o.engineArgs = []string{"--decode-step", step.String(), "--uncounted", "--model", "long", "--model", "short"}
			f := start(t, o)
			lengths := map[string]int{"long": 24, "short": 6}
			var wg sync.WaitGroup
			for model, tokens := range lengths {
				for i := range 24 {
					wg.Go(func() {
						got := f.post("/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":"%d %s","max_tokens":%d,"min_tokens":%[4]d,`+
							`"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}`, model, i, model, tokens))
						require.Equal(t, 200, got.status, got.body)
						require.Equal(t, tokens, usageOf(got).Answer)
					})
				}
			}
			wg.Wait()
			var explained struct {
				Answer     float64  `json:"answer_tokens"`
				Defaults   []string `json:"defaults"`
				Candidates []struct {
					Role   string  `json:"role"`
					Decode float64 `json:"decode_learned"`
				} `json:"candidates"`
			}
			soon(t, "all have been counted", func() bool {
				require.NoError(t, getJSON(f.admins[0]+"/debug/explain?tokens=1000", &explained))
				return metric(t, f.admins[0], "tandem_tokens_total", `kind="generation"`) == 24*(24+6)
			})
			require.NotContains(t, explained.Defaults, "length of answers")
			require.NotContains(t, explained.Defaults, "speed of decode")
			require.InDelta(t, 15, explained.Answer, 5, "of both models, the recent ones a bit more")
			for _, c := range explained.Candidates {
				if c.Role == "prefill" {
					continue
				}
				require.Greater(t, c.Decode, 2.5, "a step takes five times as long as modelled")
				speed(t, c.Decode > 4 && c.Decode < 6, "the pace: %v", c.Decode)
			}
			for model, tokens := range lengths {
				got := f.post("/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":"One more","max_tokens":%d}`,
					model, tokens+8), "tandem-explain", "0123456789abcdef")
				require.NoError(t, json.Unmarshal([]byte(got.header.Get("x-tandem-explain")), &explained), got.header)
				require.InDelta(t, tokens, explained.Answer, .01, model)
			}
		})
	}
}
