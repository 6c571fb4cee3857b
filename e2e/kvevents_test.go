package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// sample returns the value of one of Tandem's metrics of an endpoint.
func (f *fleet) sample(name, endpoint string) float64 {
	return metric(f.t, f.admins[0], name, strconv.Quote(endpoint))
}

func (f *fleet) eventually(name string, e *engine, ok func(float64) bool) {
	f.t.Helper()
	require.Eventually(f.t, func() bool { return ok(f.sample(name, e.addr)) }, patience, 20*time.Millisecond, "%s of %s", name, e.addr)
}

func (f *fleet) publishersConnect() {
	f.t.Helper()
	for _, e := range f.engines() {
		f.eventually("tandem_kv_events_connected", e, func(v float64) bool { return v == 1 })
	}
}

// conversation returns a chat request of that many turns. Every turn is some 2,000 characters.
func conversation(name string, turns int) string {
	var b strings.Builder
	b.WriteString(`{"model":"tiny","max_tokens":4,"messages":[{"role":"system","content":"You are ` + name + `."}`)
	for i := range turns {
		fmt.Fprintf(&b, `,{"role":"user","content":"%s"}`, strings.Repeat(fmt.Sprintf("%s says %d. ", name, i), 2000/(9+len(name))))
	}
	return b.String() + "]}"
}

func (f *fleet) engineAt(addr string) *engine {
	for _, e := range f.engines() {
		if e.addr == addr {
			return e
		}
	}
	f.t.Fatalf("no engine at %s", addr)
	return nil
}

// requestOf returns a request to an API with that many turns, as long as those of conversation.
func requestOf(path, name string, turns int) string {
	chat := conversation(name, turns)
	switch path {
	case "/v1/messages":
		return strings.Replace(chat, `{"role":"system","content":"You are `+name+`."}`, `{"role":"user","content":"I am `+name+`."}`, 1)
	case "/v1/responses":
		chat = strings.Replace(chat, `"max_tokens":4`, `"max_output_tokens":4,"store":false`, 1)
		return strings.Replace(chat, `"messages":`, `"input":`, 1)
	}
	return chat
}

// A restarted Tandem has routed nothing yet. The engines report their blocks, and tokenize for it: conversations
// continue on their endpoints.
func TestKVEventsWarmANewReplica(t *testing.T) {
	t.Parallel()
	warmANewReplica(t, "tokenize", "/v1/chat/completions")
}

// Engines that render do so for every API whose requests they can render.
func TestRenderWarmsANewReplica(t *testing.T) {
	t.Parallel()
	warmANewReplica(t, "render", "/v1/chat/completions", "/v1/messages", "/v1/responses")
}

func warmANewReplica(t *testing.T, tokens string, paths ...string) {
	f := start(t, options{prefills: 3, decodes: 1, kvEvents: "{tokens: " + tokens + ", tokenBudget: 5s}"})
	f.publishersConnect()
	const each = 6
	type asked struct{ path, engine string }
	where := map[string]asked{}
	for i := range each * len(paths) {
		path, name := paths[i/each], fmt.Sprint("warm-", i)
		require.Equal(t, 200, f.post(path, requestOf(path, name, 3), "x-request-id", name).status)
		p, _ := f.hops(name)
		where[name] = asked{path, p.Engine}
		f.eventually("tandem_kv_events_blocks", f.engineAt(p.Engine), func(v float64) bool { return v >= 90 })
	}
	held := map[*engine]float64{}
	for _, e := range f.prefills {
		held[e] = f.sample("tandem_kv_events_blocks", e.addr)
	}
	f.tandems[0].stop(syscall.SIGKILL)
	f.startTandem(0, f.config, f.admins[0])
	f.publishersConnect()
	for e, n := range held {
		f.eventually("tandem_kv_events_blocks", e, atLeast(n))
	}
	require.Eventually(t, func() bool { return f.post("/v1/models", "").status != 503 }, patience, 50*time.Millisecond)
	tokenized := func() float64 {
		return metric(t, f.admins[0], "tandem_prompt_tokens_learned_total", `source="tokenizer"`)
	}
	known := map[string]int{}
	for name, was := range where {
		before := tokenized()
		require.Equal(t, 200, f.post(was.path, requestOf(was.path, name, 4), "x-request-id", name+"-again").status)
		if tokenized() == before {
			continue // the engine did not tokenize within its 2 s
		}
		known[was.path]++
		p, _ := f.hops(name + "-again")
		require.Equal(t, was.engine, p.Engine, "%s %s", was.path, name)
		require.Greater(t, p.CachedTokens, p.PromptTokens/2, "%s %s", was.path, name)
	}
	for _, path := range paths {
		require.Positive(t, known[path], path)
	}
}

// Lost batches are requested again, and a restarted engine holds nothing.
func TestKVEventsLostAndRestarted(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 1, decodes: 1, kvEvents: "{}"})
	f.lenient = true // an engine is killed
	f.publishersConnect()
	p := f.prefills[0]
	ask := func(name string) {
		require.Equal(t, 200, f.post("/v1/chat/completions", conversation(name, 2), "x-request-id", name).status)
	}
	ask("first")
	prefill, decode := f.hops("first")
	require.Contains(t, prefill.Body, `"return_token_ids":true`, "the next turn is to be known by its tokens")
	require.NotContains(t, decode.Body, "return_token_ids")
	f.eventually("tandem_kv_events_blocks", p, func(v float64) bool { return v >= 60 })
	before := f.sample("tandem_kv_events_blocks", p.addr)

	resp, err := http.Post("http://"+p.addr+"/sim/kv-events", "application/json", bytes.NewReader([]byte(`{"lose":1}`)))
	require.NoError(t, err)
	resp.Body.Close()
	require.Equal(t, http.StatusNoContent, resp.StatusCode)
	ask("second")
	require.Less(t, f.sample("tandem_kv_events_blocks", p.addr), before+50, "what it stored was lost, but for what of the first came late")
	ask("third")
	f.eventually("tandem_kv_events_blocks", p, func(v float64) bool { return v >= before+120 })
	require.InDelta(t, 1, f.sample("tandem_kv_events_gaps_total", p.addr), 0)
	require.Zero(t, f.sample("tandem_kv_events_lost_total", p.addr))
	require.Zero(t, f.sample("tandem_kv_events_orphan_blocks", p.addr))

	p.stop(syscall.SIGKILL)
	f.eventually("tandem_kv_events_connected", p, func(v float64) bool { return v == 0 })
	f.restart(p)
	f.eventually("tandem_kv_events_connected", p, func(v float64) bool { return v == 1 })
	f.eventually("tandem_kv_events_blocks", p, func(v float64) bool { return v == 0 })
	f.eventually("tandem_kv_events_restarts_total", p, func(v float64) bool { return v == 1 })
}

// onAll waits until a metric of every running replica satisfies ok.
func (f *fleet) onAll(what string, ok func(float64) bool, name string, labels ...string) {
	f.t.Helper()
	for i, admin := range f.admins {
		if f.tandems[i].running() {
			require.Eventually(f.t, func() bool { return ok(metric(f.t, admin, name, labels...)) }, patience, 20*time.Millisecond,
				"%s: %s %v of replica %d", what, name, labels, i)
		}
	}
}

func atLeast(n float64) func(float64) bool { return func(v float64) bool { return v >= n } }

// Every replica knows the engines' blocks, and the prompt tokens in prefill's answers, whichever replica planned the
// request and whichever saw the answer: none asks prefill again.
func TestTokensAreKnownToEveryReplica(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	f := start(t, options{prefills: 2, decodes: 1, replicas: 3, top: r.yaml(), kvEvents: "{}"})
	f.allReplicas(3)
	for _, e := range f.engines() {
		f.onAll("its events come", atLeast(1), "tandem_kv_events_connected", strconv.Quote(e.addr))
	}
	// Replicas store learned tokens in blocks of the engines' size: one engine has to report it first.
	resp, err := client.Post("http://"+f.decodes[0].addr+"/v1/chat/completions", "application/json", strings.NewReader(conversation("nobody", 1)))
	require.NoError(t, err)
	resp.Body.Close()
	require.Equal(t, 200, resp.StatusCode)
	f.onAll("its blocks are known", atLeast(1), "tandem_kv_events_blocks", strconv.Quote(f.decodes[0].addr))
	for i := range 4 {
		name := fmt.Sprint("shared-", i)
		before := map[string]float64{}
		for _, e := range f.prefills {
			for _, admin := range f.admins {
				before[e.addr] = max(before[e.addr], metric(t, admin, "tandem_kv_events_blocks", strconv.Quote(e.addr)))
			}
		}
		require.Equal(t, 200, f.post("/v1/chat/completions", conversation(name, 3), "x-request-id", name).status)
		first, _ := f.hops(name)
		require.Contains(t, first.Body, `"return_token_ids":true`)
		f.onAll("its blocks are known", atLeast(before[first.Engine]+90), "tandem_kv_events_blocks", strconv.Quote(first.Engine))
		// An answer that overtakes another replica's publication of its prompt is not learned from; the next one is.
		for tries := 0; !f.knownPrompts(i+1, time.Second); tries++ {
			require.Less(t, tries, 100, "its tokens are not known to all")
			require.Equal(t, 200, f.post("/v1/chat/completions", conversation(name, 3)).status)
		}
		for again := range 9 {
			id := fmt.Sprint(name, "-", again)
			require.Equal(t, 200, f.post("/v1/chat/completions", conversation(name, 3), "x-request-id", id).status)
			p, _ := f.hops(id)
			require.NotContains(t, p.Body, "return_token_ids", "asked again by one of the replicas")
			require.Greater(t, p.CachedTokens, p.PromptTokens/2)
		}
	}
}

// knownPrompts reports whether every replica learns the tokens of that many prompts in time.
func (f *fleet) knownPrompts(n int, within time.Duration) bool {
	for until := time.Now().Add(within); ; time.Sleep(10 * time.Millisecond) {
		known := true
		for _, admin := range f.admins {
			known = known && metric(f.t, admin, "tandem_index_prompts") >= float64(n)
		}
		if known || time.Now().After(until) {
			return known
		}
	}
}

// subscribers returns the number of replicas that follow each engine's KV events.
func (f *fleet) subscribers() (out []int) {
	for _, e := range f.engines() {
		out = append(out, int(metric(f.t, "http://"+e.addr, "enginesim_kv_events_subscribers")))
	}
	return out
}

// eachHas waits until n replicas follow each engine.
func (f *fleet) eachHas(n int, what string) {
	f.t.Helper()
	began := time.Now()
	require.Eventually(f.t, func() bool {
		for _, have := range f.subscribers() {
			if have != n {
				return false
			}
		}
		return true
	}, patience, 20*time.Millisecond, "%s: each engine has %d", what, n)
	f.t.Logf("%s: each engine has %d replicas after %v", what, n, time.Since(began))
}

// Every replica follows every engine by itself. One that starts gets the others' knowledge; killing another one, or
// Redis, changes nothing.
func TestEveryReplicaFollowsEveryEngine(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	f := start(t, options{prefills: 3, decodes: 1, replicas: 3, top: r.briefly(), kvEvents: "{}"})
	f.allReplicas(3)
	asked := 0
	learned := func(what string) {
		t.Helper()
		name := fmt.Sprint("told-", asked)
		asked++
		before := map[string]float64{}
		for i, admin := range f.admins {
			if f.tandems[i].running() {
				before[admin] = metric(t, admin, "tandem_kv_events_blocks")
			}
		}
		require.Equal(t, 200, f.post("/v1/chat/completions", conversation(name, 3)).status)
		for admin, n := range before { // P stores it, and D
			require.Eventually(t, func() bool { return metric(t, admin, "tandem_kv_events_blocks") >= n+180 }, patience, 20*time.Millisecond, what)
		}
	}
	f.eachHas(3, "at the start")
	learned("at the start")
	learned("and again")
	f.tandems[0].stop(syscall.SIGKILL)
	f.eachHas(2, "one is killed")
	learned("one is killed")
	all := metric(t, f.admins[1], "tandem_kv_events_blocks")
	f.startTandem(0, filepath.Join(f.dir, "tandem-0.yaml"), f.admins[0])
	f.allReplicas(3)
	f.eachHas(3, "another one starts")
	f.onAll("it knows what the others know", atLeast(all), "tandem_kv_events_blocks")
	learned("another one starts")

	r.stop(syscall.SIGKILL)
	learned("without redis")
	r.process = r.start()
	f.allReplicas(3)
	require.Equal(t, "+OK", r.do("FLUSHALL"))
	learned("redis is back, and emptied")
	f.eachHas(3, "at the end")
	for _, admin := range f.admins {
		require.Zero(t, metric(t, admin, "tandem_kv_events_lost_total"))
	}
}
