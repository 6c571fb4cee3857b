package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// kind is a dialect of KV transfer with the settings of its pool and engines.
type kind struct {
	name   string // of the test
	engine string // enginesim's -connector
	kv     string // kvTransfer
	pool   string // more lines of the pool
	more   []string
}

func kinds() []kind {
	return []kind{
		{name: "lmcache", engine: "lmcache", kv: "lmcache"},
		{name: "lmcache, two ranks", engine: "lmcache", kv: "lmcache", more: []string{"--tp", "2", "--notices", "noisy", "--kv-delay", "20ms"}},
		{name: "lmcache, early notices, twice", engine: "lmcache", kv: "lmcache", more: []string{"--notices", "twice", "--kv-delay", "-1ms"}},
		{name: "lmcache 0.3.5", engine: "lmcache", kv: "lmcache", more: []string{"--notices", "old"}},
		{name: "lmcache, first token", engine: "lmcache", kv: "lmcache", pool: "  lmcache: {retFirstToken: true}\n"},
		{name: "nixl, token ids reused", engine: "nixl", kv: "nixl", pool: "  nixl: {reuseTokenIds: true}\n"},
		{name: "shared", engine: "shared", kv: "shared"},
		{name: "offload", engine: "offload", kv: "offload"},
		{name: "multi", engine: "nixl", kv: "multi", pool: "  members: [nixl, offload]\n"},
		{name: "orchestrated, whole answer", engine: "neuron", kv: "orchestrated"},
		{name: "orchestrated, parameters", engine: "nixl", kv: "orchestrated", pool: "  orchestrated: {handOver: params}\n"},
		{name: "trtllm", engine: "trtllm", kv: "trtllm"},
		{name: "trtllm, generation first", engine: "trtllm", kv: "trtllm-generation-first", more: []string{"--transfer-timeout", "8s"}},
	}
}

// lease is long enough for a decode leg on a machine that stalls for seconds, and short enough for a test that waits
// for its end.
const lease = "10s"

// setUp completes options for a kind. LMCache's engines push to notices.
func (k kind) setUp(o options, notices, model string) options {
	o.dialect, o.pool = k.kv, o.pool+k.pool
	tp := "1"
	for i, a := range k.more {
		if a == "--tp" {
			tp = k.more[i+1]
		}
	}
	store := ""
	o.engine = func(role string, _ int, free func() string) (args []string, fields string) {
		args = append([]string{"--connector", k.engine, "--lease", lease, "--load-timeout", "10s", "--model", model}, k.more...)
		port := func() string { _, port, _ := net.SplitHostPort(free()); return port }
		switch side := free(); k.engine {
		case "lmcache":
			args = append(args, "--proxy", notices)
			fields = ", transfer: {tensorParallelSize: " + tp + "}"
			if role != "prefill" {
				init, alloc := port(), port()
				if tp == "2" {
					init, alloc = twoInARow(free), twoInARow(free)
				}
				args = append(args, "--lmcache-init-port", init, "--lmcache-alloc-port", alloc)
				fields += fmt.Sprintf(", lmcache: {initPort: %s, allocPort: %s}", init, alloc)
			}
		case "shared":
			args = append(args, "--side-channel", side)
			if store == "" {
				store = side // the first engine has the store
			} else {
				args = append(args, "--store", store)
			}
		default:
			args = append(args, "--side-channel", side)
			if role == "prefill" && (k.kv == "offload" || k.kv == "multi") {
				_, p, _ := net.SplitHostPort(side)
				fields = ", transfer: {p2pPort: " + p + "}"
			}
		}
		return args, fields
	}
	return o
}

// startKind starts a fleet of one kind.
func startKind(t *testing.T, k kind, prefills, decodes int) *fleet {
	notices := ports(t, 1)[0]
	o := k.setUp(options{prefills: prefills, decodes: decodes}, notices, "tiny")
	if k.engine == "lmcache" {
		o.top = fmt.Sprintf("notices: {listen: %q}\n", notices)
	}
	return start(t, o)
}

// asked is one request of a dialect's test.
type asked struct{ path, body, id string }

// ask returns request i: chats and completions, streaming and not, each with its own prompt.
func ask(model string, i int) asked {
	prompt := strings.Repeat(fmt.Sprintf("Request %d says that the sky is blue. ", i), 20+i%7)
	a := asked{path: "/v1/chat/completions", id: fmt.Sprintf("%s-%d", model, i)}
	member := `"messages":[{"role":"user","content":"` + prompt + `"}]`
	if i%2 == 1 {
		a.path, member = "/v1/completions", `"prompt":"`+prompt+`"`
	}
	stream := ""
	if i/2%2 == 1 {
		stream = `,"stream":true,"stream_options":{"include_usage":true}`
	}
	a.body = fmt.Sprintf(`{"model":%q,%s,"max_tokens":%d%s}`, model, member, 5+i%9, stream)
	return a
}

// text returns the text of an answer, streamed or not.
func (a answer) text(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	add := func(data string) {
		var v struct {
			Choices []struct {
				Text           string
				Message, Delta struct{ Content string }
			}
		}
		require.NoError(t, json.Unmarshal([]byte(data), &v), data)
		for _, c := range v.Choices {
			b.WriteString(c.Text + c.Message.Content + c.Delta.Content)
		}
	}
	if !strings.HasPrefix(a.header.Get("content-type"), "text/event-stream") {
		add(a.body)
		return b.String()
	}
	events := a.events()
	require.NotEmpty(t, events)
	require.Equal(t, "[DONE]", events[len(events)-1])
	for _, e := range events[:len(events)-1] {
		add(e)
	}
	return b.String()
}

// want returns the request's answer without any transfer: from an engine directly, without its caches.
func (f *fleet) want(a asked, e *engine) string {
	f.t.Helper()
	body := strings.Replace(a.body, `,"max_tokens"`, `,"cache_salt":"reference","max_tokens"`, 1)
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, "http://"+e.addr+a.path, strings.NewReader(body))
	require.NoError(f.t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	require.NoError(f.t, err)
	got, err := readAnswer(resp)
	require.NoError(f.t, err)
	require.Equal(f.t, 200, got.status, got.body)
	return got.text(f.t.(*testing.T))
}

// Every dialect at 2P+2D and 3P+1D, any pairing: the answer is the one without transfer, and the KV came from the
// other engine. Then a prefill engine fails, a decode engine fails, and clients leave; at the end no ledger has an
// entry.
func TestDialects(t *testing.T) {
	t.Parallel()
	for _, k := range kinds() {
		for _, shape := range [][2]int{{2, 2}, {3, 1}} {
			t.Run(fmt.Sprintf("%s %dP%dD", k.name, shape[0], shape[1]), func(t *testing.T) {
				t.Parallel() // mostly waits
				f := startKind(t, k, shape[0], shape[1])
				f.transfers(t, strings.Contains(k.pool, "retFirstToken"))
				f.survivesFailures(t)
				f.survivesLeaving()
			})
		}
	}
}

// transfers sends requests and checks their two hops; continued: D continues after P's first token.
func (f *fleet) transfers(t *testing.T, continued bool) {
	pairs := map[string]bool{}
	for i := range 24 {
		a := ask("tiny", i)
		got := f.post(a.path, a.body, "x-request-id", a.id)
		require.Equal(t, 200, got.status, got.body)
		require.Equal(t, f.want(a, f.decodes[0]), got.text(t), "request %d", i)
		p, d := f.hops(a.id)
		require.Positive(t, d.ExternalTokens, "request %d: its KV was not taken from P", i)
		if continued {
			require.Equal(t, "/v1/completions", d.Path)
			require.Equal(t, p.PromptTokens+1, d.PromptTokens, "the prompt, and P's token")
			require.Equal(t, 5+i%9-1, d.CompletionTokens)
		} else {
			require.Equal(t, p.Path, d.Path)
		}
		require.NotContains(t, got.body, "disaggregated_params")
		require.NotContains(t, got.body, `"do_remote_`)
		pairs[p.Engine+" "+d.Engine] = true
	}
	require.Greater(t, len(pairs), 1, "one pair had all of it")
}

// survivesFailures makes P fail, then D, then all of the prefill engines.
func (f *fleet) survivesFailures(t *testing.T) {
	try := func(i int) {
		t.Helper()
		a := ask("tiny", i)
		got := f.post(a.path, a.body, "x-request-id", a.id)
		require.Equal(t, 200, got.status, got.body)
		require.Equal(t, f.want(a, f.decodes[0]), got.text(t))
	}
	for _, p := range f.prefills {
		f.inject(p, `{"mode":"status","status":500,"leg":"any","count":1,"path":"/v1/chat/completions"}`)
	}
	for i := 100; i < 108; i += 2 { // chats
		try(i)
	}
	for _, d := range f.decodes {
		f.inject(d, `{"mode":"reset-before-headers","leg":"any","count":1,"path":"/v1/completions"}`)
	}
	for i := 109; i < 116; i += 2 { // completions
		a := ask("tiny", i)
		got := f.post(a.path, a.body, "x-request-id", a.id)
		require.Equal(t, 200, got.status, got.body)
	}
	for _, e := range f.engines() {
		f.inject(e, `{"mode":"slow","delay":"1ms","leg":"any","count":1}`) // the earlier failures are over
	}
	for i := 120; i < 124; i++ {
		try(i)
	}
}

// survivesLeaving lets clients go in the middle of each hop.
func (f *fleet) survivesLeaving() {
	var clients sync.WaitGroup
	for i := range 24 {
		clients.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+i*2)*time.Millisecond)
			defer cancel()
			a := ask("tiny", 200+i)
			_, _ = f.try(ctx, http.MethodPost, a.path, a.body, "x-request-id", a.id)
		})
	}
	clients.Wait()
}

// The P2P tier: an endpoint that computes alone gets the name of one that has the prompt's beginning.
func TestOffloadPullsPrefixes(t *testing.T) {
	t.Parallel()
	f := startKind(t, kind{engine: "offload", kv: "offload"}, 2, 2)
	beginning := strings.Repeat("A beginning that many prompts share. ", 400)
	ask := func(id, end, more string) answer {
		t.Helper()
		got := f.post("/v1/completions", fmt.Sprintf(`{"model":"tiny","prompt":"%s%s","max_tokens":5%s}`, beginning, end, more), "x-request-id", id)
		require.Equal(t, 200, got.status, got.body)
		return got
	}
	ask("first", "one", "")
	require.NotContains(t, f.requests("first", f.prefills...)[0].Body, "remote_kv_source")
	// A decode endpoint that is assumed to have the beginning too is asked; it disappears. (It need not be the first
	// request's: that is chosen again when prefill is done.)
	ask("asked", "nil", `,"n":2`)
	for _, d := range f.decodes {
		if len(f.requests("asked", d)) > 0 {
			f.inject(d, `{"mode":"status","status":503,"leg":"any","count":1}`)
		}
	}
	ask("alone", "two", `,"n":2`)
	var d []seen
	for _, s := range f.requests("alone", f.decodes...) {
		if s.Status == 200 {
			d = append(d, s)
		}
	}
	require.Len(t, d, 1)
	require.Empty(t, f.requests("alone", f.prefills...))
	first := f.requests("first", f.prefills...)[0].Engine
	_, tier, ok := strings.Cut(d[0].Body[:200], `"remote_port":`)
	require.True(t, ok, "%s", d[0].Body[:200])
	for _, p := range f.prefills {
		_, port, _ := strings.Cut(strings.TrimSuffix(p.fields, "}"), "p2pPort: ")
		require.Equal(t, p.addr == first, strings.HasPrefix(tier, port+"}"), "%s of %s", tier, p.fields)
	}
}

// TensorRT-LLM: if the first token ends the text, P's answer is the client's, and D is not involved.
func TestTRTLLMEarlyFinish(t *testing.T) {
	t.Parallel()
	f := startKind(t, kind{engine: "trtllm", kv: "trtllm"}, 1, 1)
	for i := range 4 {
		a := ask("tiny", i)
		first := f.want(a, f.decodes[0])[:4]
		quoted, err := json.Marshal(first)
		require.NoError(t, err)
		a.body = strings.TrimSuffix(a.body, "}") + `,"stop":[` + string(quoted) + `],"include_stop_str_in_output":true}`
		got := f.post(a.path, a.body, "x-request-id", a.id)
		require.Equal(t, 200, got.status, got.body)
		require.Equal(t, first, got.text(t))
		require.Contains(t, got.body, `"finish_reason":"stop"`)
		require.NotContains(t, got.body, "prompt_token_ids\":[")
		require.Equal(t, strings.Contains(a.body, `"stream":true`), strings.HasPrefix(got.header.Get("content-type"), "text/event-stream"))
		require.Len(t, f.requests(a.id, f.prefills...), 1)
		require.Empty(t, f.requests(a.id, f.decodes...))
	}
}

// Pools of different dialects in one Tandem behind one Envoy, with sequential and concurrent legs, a thousand
// requests, streamed and not: all are answered, with KV from the other engine, and the fleet's account finds every
// ledger and reservation at zero.
func TestMixedPools(t *testing.T) {
	t.Parallel()
	notices := ports(t, 1)[0]
	all := []kind{
		{name: "nixl", engine: "nixl", kv: "nixl"}, {name: "lmcache", engine: "lmcache", kv: "lmcache"},
		{name: "first-token", engine: "lmcache", kv: "lmcache", pool: ", lmcache: {retFirstToken: true}"},
		{name: "offload", engine: "offload", kv: "offload"}, {name: "trtllm", engine: "trtllm", kv: "trtllm"},
		{name: "sglang", engine: "sglang", kv: "sglang"}, {name: "mooncake", engine: "mooncake", kv: "mooncake"},
		{name: "generation-first", engine: "trtllm", kv: "trtllm-generation-first"},
	}
	n := len(all)
	o := options{prefills: n, decodes: n, top: fmt.Sprintf("notices: {listen: %q}\n", notices), concurrency: 2, pools: "pools:\n"}
	var engines []func(string, int, func() string) ([]string, string)
	for _, k := range all {
		engines = append(engines, k.setUp(options{}, notices, k.name).engine)
		o.pools += fmt.Sprintf("- {name: %s, models: [%s], kvTransfer: %s, split: always, decodeAlone: fallback%s, endpoints: [{role: prefill, address: %%P}, {role: decode, address: %%D}]}\n", k.name, k.name, k.kv, k.pool)
	}
	o.engine = func(role string, i int, free func() string) ([]string, string) {
		args, fields := engines[i%n](role, i, free)
		switch k := all[i%n]; {
		case k.name == "nixl":
			args = append(args, "--model", "reference") // any engine can give the reference; SGLang's cannot work alone
		case (k.kv == "sglang" || k.kv == "mooncake") && role == "prefill":
			bootstrap := free()
			args, fields = append(args, "--bootstrap", bootstrap), ", transfer: {bootstrapPort: "+portOf(bootstrap)+"}"
		}
		return args, fields
	}
	f := start(t, o)
	type result struct {
		a   asked
		got answer
		err error
	}
	const requests = 1000
	results := make([]result, requests)
	var clients sync.WaitGroup
	turn := make(chan struct{}, 24)
	for i := range requests {
		turn <- struct{}{}
		clients.Go(func() {
			defer func() { <-turn }()
			r := &results[i]
			r.a = ask(all[i%n].name, i/n)
			r.got, r.err = f.try(context.Background(), http.MethodPost, r.a.path, r.a.body, "x-request-id", r.a.id)
		})
	}
	clients.Wait()
	for i, r := range results {
		require.NoError(t, r.err)
		require.Equal(t, 200, r.got.status, r.got.body)
		if i < 20*n {
			reference := r.a
			reference.body = strings.Replace(r.a.body, fmt.Sprintf("%q", all[i%n].name), `"reference"`, 1)
			require.Equal(t, f.want(reference, f.decodes[0]), r.got.text(t), "%s", r.a.id)
		}
		_, d := f.hops(r.a.id)
		require.Positive(t, d.ExternalTokens, "%s: its KV did not come from P", r.a.id)
	}
}

// cachedTokens: prefill reports prefill's cached tokens in usage. Decode's own count includes the KV from prefill.
func TestCachedTokensOfPrefill(t *testing.T) {
	t.Parallel()
	f := startKind(t, kind{engine: "shared", kv: "shared", pool: "  cachedTokens: prefill\n"}, 1, 1)
	cached := func(text string) int {
		var d struct {
			Usage struct {
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		require.NoError(t, json.Unmarshal([]byte(text), &d), text)
		return d.Usage.Details.Cached
	}
	beginning := strings.Repeat("What all of them begin with. ", 20)
	for i := range 6 {
		body := fmt.Sprintf(`{"model":"tiny","max_tokens":5,"messages":[{"role":"user","content":"%s%d"}]}`, beginning, i)
		id := fmt.Sprint("cached-", i)
		if i%2 == 1 {
			body = strings.Replace(body, "{", `{"stream":true,"stream_options":{"include_usage":true},`, 1)
		}
		got := f.post("/v1/chat/completions", body, "x-request-id", id)
		require.Equal(t, 200, got.status, got.body)
		p, _ := f.hops(id)
		text := got.body
		if i%2 == 1 {
			events := got.events()
			text = events[len(events)-2]
		}
		require.Equal(t, p.CachedTokens, cached(text))
		require.Equal(t, i > 0, p.CachedTokens > 0)
	}
	if runsInside() {
		return // the rest counts ext_proc's streams
	}
	const counted = "tandem_ext_proc_duration_seconds_count"
	soon(t, "six answers passed by Tandem", func() bool { return metric(t, f.admins[0], counted, `role="answer-leg"`) == 6 })
	before := 6.
	got := f.post("/v1/chat/completions", streamed(`{"model":"tiny","max_tokens":5,"messages":[{"role":"user","content":"no usage"}]}`))
	require.Equal(t, 200, got.status)
	require.InDelta(t, before, metric(t, f.admins[0], counted, `role="answer-leg"`), 0, "an answer without usage passes by")
}

// Tokens written to prefill's cache are reported too, and /v1/messages, whose input_tokens are the rest of the prompt,
// add up: inside Envoy by default.
func TestUsageOfPrefill(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"shared", "nixl"} { // whose D counts what it fetched, and what P had cached
		t.Run(dialect, func(t *testing.T) { t.Parallel(); usageOfPrefill(t, dialect) })
	}
}

func usageOfPrefill(t *testing.T, dialect string) {
	pool := "  cachedTokens: prefill\n"
	if runsInside() {
		pool = "" // it is the default there
	}
	f := startKind(t, kind{engine: dialect, kv: dialect, pool: pool}, 1, 1)
	alone := start(t, options{dialect: "none", decodes: 1})
	usage := func(got answer) (all string) {
		require.Equal(t, 200, got.status, got.body)
		for _, u := range regexp.MustCompile(`"usage":(\{[^{}]*(\{[^{}]*\}[^{}]*)*\})`).FindAllString(got.body, -1) {
			all += u + "\n"
		}
		return all
	}
	beginning := strings.Repeat("What all of them begin with. ", 20)
	for i := range 4 {
		for path, body := range map[string]string{
			"/v1/chat/completions": `{"model":"tiny","max_tokens":5,"messages":[{"role":"user","content":"chat %s%d"}]}`,
			"/v1/messages":         `{"model":"tiny","max_tokens":5,"stream":%t,"messages":[{"role":"user","content":"message %s%d"}]}`,
			"/v1/responses":        `{"model":"tiny","max_output_tokens":5,"store":false,"input":"response %s%d"}`,
		} {
			if path == "/v1/messages" {
				body = fmt.Sprintf(body, i%2 == 1, beginning, i)
			} else {
				body = fmt.Sprintf(body, beginning, i)
			}
			want, got := usage(alone.post(path, body)), usage(f.post(path, body))
			require.NotEmpty(t, want)
			require.Equal(t, want, got, "%s %d", path, i)
		}
	}
}

// TensorRT-LLM, generation first: both legs carry one id and run at once; P waits for D, so neither may wait for the
// other's answer. If a client leaves or D fails, P's leg is cancelled.
func TestTRTLLMGenerationFirst(t *testing.T) {
	t.Parallel()
	f := startKind(t, kind{engine: "trtllm", kv: "trtllm-generation-first", more: []string{"--prefill-speed", "20000"}}, 2, 2)
	for i := range 8 {
		a := ask("tiny", i)
		got := f.post(a.path, a.body, "x-request-id", a.id)
		require.Equal(t, 200, got.status, got.body)
		p, d := f.hops(a.id)
		require.Contains(t, p.Body, `"schedule_style":1`)
		require.Contains(t, d.Body, `"ctx_info_endpoint":"tcp://`)
		require.Positive(t, d.ExternalTokens)
	}
	require.InDelta(t, 8, metric(t, f.admins[0], "tandem_decisions_total", `route="pair"`), 0)
	f.inject(f.decodes[0], `{"mode":"status","status":500,"leg":"any","count":2}`)
	f.inject(f.prefills[0], `{"mode":"reset-before-headers","leg":"any","count":2}`)
	for i := 20; i < 28; i++ {
		a := ask("tiny", i)
		got := f.post(a.path, a.body, "x-request-id", a.id)
		require.Equal(t, 200, got.status, got.body)
	}
	f.survivesLeaving()
	got := f.post("/v1/chat/completions", `{"model":"tiny","n":2,"max_tokens":4,"messages":[{"role":"user","content":"Two, please."}]}`, "x-request-id", "two")
	require.Equal(t, 200, got.status, got.body)
	require.Empty(t, f.requests("two", f.prefills...), "two choices go to one engine")
}
