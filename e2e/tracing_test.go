package e2e

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// One trace holds a request's two hops: the client's span, Envoy's, Tandem's three, and what the engines are told to join.
func TestOneTraceOverBothHops(t *testing.T) {
	c := startCollector(t)
	f := start(t, options{top: "tracing: {endpoint: \"" + c.addr + "\", sampleRatio: 0}\n"})
	const trace, client = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	got := f.post("/v1/chat/completions", apis[0].body, "x-request-id", "not-a-uuid", "traceparent", "00-"+trace+"-"+client+"-01")
	require.Equal(t, 200, got.status, got.body)
	require.Equal(t, 200, f.post("/v1/chat/completions", apis[0].body, "x-request-id", "nobody-asked").status)
	t.Cleanup(func() {
		for _, s := range c.of(trace) {
			t.Logf("%-8s %-40s %s <- %s", s.service, s.name, s.id, s.parent)
		}
	})

	named := func(name string) func(span) bool { return func(s span) bool { return s.name == name } }
	var spans []span
	byID := map[string]span{}
	whole := func() bool { // all three of Tandem's, and none that hangs in the air; Envoy sends every 5 s
		spans = c.of(trace)
		for _, s := range spans {
			byID[s.id] = s
		}
		return slices.ContainsFunc(spans, named("tandem decide")) && slices.ContainsFunc(spans, named("tandem prefill answer")) &&
			slices.ContainsFunc(spans, named("tandem hand over")) &&
			!slices.ContainsFunc(spans, func(s span) bool { return s.parent != client && byID[s.parent].id == "" })
	}
	require.Eventually(t, whole, 30*time.Second, 50*time.Millisecond, "the spans of Tandem and of Envoy")
	decide := spans[slices.IndexFunc(spans, named("tandem decide"))]
	require.Equal(t, "tandem", decide.service)
	require.Equal(t, "envoy", byID[decide.parent].service, "the decision hangs below Envoy's request")
	require.Contains(t, decide.attributes["tandem.route"], "split")
	require.Contains(t, decide.attributes, "tandem.prefill.cost.work")

	p, d := f.hops("not-a-uuid")
	for _, hop := range []seen{p, d} {
		require.Len(t, hop.Headers["Traceparent"], 1, hop.Leg)
		parts := strings.Split(hop.Headers["Traceparent"][0], "-")
		require.Equal(t, trace, parts[1])
		require.Equal(t, "01", parts[3], hop.Leg)
		require.Contains(t, byID, parts[2], "the engine's span would hang in the air")
		require.Empty(t, hop.Headers["X-Tandem-Traceparent"])
	}
	require.Equal(t, "envoy", byID[strings.Split(p.Headers["Traceparent"][0], "-")[2]].service, "of the prefill leg's listener")
	require.Equal(t, "tandem hand over", byID[strings.Split(d.Headers["Traceparent"][0], "-")[2]].name)
	c.mu.Lock()
	defer c.mu.Unlock()
	require.Len(t, c.spans, len(spans), "the other request is not traced: no client asked, and sampleRatio is 0")
}

// Without Envoy's part Tandem carries the trace by itself.
func TestATraceWithoutEnvoysPart(t *testing.T) {
	c := startCollector(t)
	f := start(t, options{top: "tracing: {endpoint: \"" + c.addr + "\"}\n", untracedEnvoy: true})
	require.Equal(t, 200, f.post("/v1/chat/completions", apis[0].body, "x-request-id", "rooted-here").status)
	p, d := f.hops("rooted-here")
	trace := strings.Split(p.Headers["Traceparent"][0], "-")[1]
	require.Equal(t, trace, strings.Split(d.Headers["Traceparent"][0], "-")[1], "both engines join one trace")
	require.Eventually(t, func() bool { return len(c.of(trace)) == 2 }, 20*time.Second, 50*time.Millisecond, "decide and hand over")
}

// Logs have the request's id, and never a word of its prompt, whatever becomes of it.
func TestLogsAndSpansHoldNoPrompt(t *testing.T) {
	c := startCollector(t)
	f := start(t, options{top: "tracing: {endpoint: \"" + c.addr + "\"}\n", serveArgs: []string{"-log", "debug", "-log-format", "json"}})
	f.lenient = true
	const secret = "xyzzy-plugh-31337"
	chat := strings.Replace(apis[0].body, "Two hops, please.", secret, 1)
	for i, body := range []string{
		chat, strings.Replace(chat, `"max_tokens":12`, `"n":2`, 1), strings.Replace(chat, `"max_tokens":12`, `"kv_transfer_params":{"a":"`+secret+`"}`, 1),
		chat[:len(chat)-3], `{"model":"` + secret + `","messages":[{"role":"user","content":"` + secret + `"}]}`, `"` + secret + `"`, `{"` + secret + `":1,"` + secret + `":1}`,
	} {
		f.post("/v1/chat/completions", body, "x-request-id", "quiet-"+string(rune('a'+i)))
	}
	for _, e := range f.prefills {
		f.inject(e, `{"mode":"status","status":500}`)
	}
	f.post("/v1/chat/completions", chat, "x-request-id", "quiet-failing")
	require.Eventually(t, func() bool {
		log, err := os.ReadFile(f.tandems[0].log)
		return err == nil && strings.Contains(string(log), `"msg":"pass ended","request_id":"quiet-failing"`)
	}, 10*time.Second, 20*time.Millisecond)
	log, err := os.ReadFile(f.tandems[0].log)
	require.NoError(t, err)
	require.NotContains(t, string(log), secret)
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, `"planned"`) || strings.Contains(line, `"pass ended"`) || strings.Contains(line, `refused`) {
			require.Contains(t, line, `"request_id":"`, line)
		}
	}
	f.tandems[0].stop(os.Interrupt) // which sends what spans are left
	c.mu.Lock()
	defer c.mu.Unlock()
	require.NotEmpty(t, c.spans)
	for _, s := range c.spans {
		for key, value := range s.attributes {
			require.NotContains(t, value, secret, "%s %s", s.name, key)
		}
	}
}
