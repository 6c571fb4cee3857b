package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// sample is the value of one of Tandem's metrics of an endpoint.
func (f *fleet) sample(name, endpoint string) float64 {
	return metric(f.t, f.admins[0], name, strconv.Quote(endpoint))
}

func (f *fleet) eventually(name string, e *engine, ok func(float64) bool) {
	f.t.Helper()
	require.Eventually(f.t, func() bool { return ok(f.sample(name, e.addr)) }, 20*time.Second, 20*time.Millisecond, "%s of %s", name, e.addr)
}

func (f *fleet) publishersConnect() {
	f.t.Helper()
	for _, e := range f.engines() {
		f.eventually("tandem_kv_events_connected", e, func(v float64) bool { return v == 1 })
	}
}

// conversation is a chat request of that many turns. Every turn is some 2,000 characters.
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

// A Tandem that starts anew has routed nothing yet. The engines tell it what they hold, and tokenize for it: conversations
// go on where they were.
func TestKVEventsWarmANewReplica(t *testing.T) {
	f := start(t, options{prefills: 3, decodes: 1, kvEvents: "{tokens: tokenize, tokenBudget: 5s}"})
	f.publishersConnect()
	where := map[string]string{}
	for i := range 6 {
		name := fmt.Sprint("warm-", i)
		require.Equal(t, 200, f.post("/v1/chat/completions", conversation(name, 3), "x-request-id", name).status)
		p, _ := f.hops(name)
		where[name] = p.Engine
		f.eventually("tandem_kv_events_blocks", f.engineAt(p.Engine), func(v float64) bool { return v >= 90 })
	}
	f.tandems[0].stop(syscall.SIGKILL)
	f.startTandem(0, f.config, f.admins[0])
	f.publishersConnect()
	require.Eventually(t, func() bool { return f.post("/v1/models", "").status != 503 }, 20*time.Second, 50*time.Millisecond)
	for name, engine := range where {
		require.Equal(t, 200, f.post("/v1/chat/completions", conversation(name, 4), "x-request-id", name+"-again").status)
		p, _ := f.hops(name + "-again")
		require.Equal(t, engine, p.Engine, name)
		require.Greater(t, p.CachedTokens, p.PromptTokens/2, name)
	}
}

// Batches that are lost on their way are asked for again, and a restarted engine holds nothing.
func TestKVEventsLostAndRestarted(t *testing.T) {
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
	require.InDelta(t, before, f.sample("tandem_kv_events_blocks", p.addr), 0, "what it stored was lost")
	ask("third")
	f.eventually("tandem_kv_events_blocks", p, func(v float64) bool { return v >= before+120 })
	require.InDelta(t, 1, f.sample("tandem_kv_events_gaps_total", p.addr), 0)
	require.Zero(t, f.sample("tandem_kv_events_lost_total", p.addr))
	require.Zero(t, f.sample("tandem_kv_events_blocks_aside", p.addr))

	p.stop(syscall.SIGKILL)
	f.eventually("tandem_kv_events_connected", p, func(v float64) bool { return v == 0 })
	f.restart(p)
	f.eventually("tandem_kv_events_connected", p, func(v float64) bool { return v == 1 })
	f.eventually("tandem_kv_events_blocks", p, func(v float64) bool { return v == 0 })
	require.InDelta(t, 1, f.sample("tandem_kv_events_restarts_total", p.addr), 0)
}
