package e2e

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// One trace contains a request's two hops: the client's span, Envoy's, Tandem's three, and the parents of the engines'
// spans.
func TestOneTraceOverBothHops(t *testing.T) {
	t.Parallel()
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

	p, d := f.hops("not-a-uuid")
	joins := func(hop seen) string { // the parent of the engine's own span
		require.Len(t, hop.Headers["Traceparent"], 1, hop.Leg)
		return strings.Split(hop.Headers["Traceparent"][0], "-")[2]
	}
	named := func(name string) func(span) bool { return func(s span) bool { return s.name == name } }
	var spans []span
	byID := map[string]span{}
	whole := func() bool { // all three of Tandem's, and no orphaned span; Envoy sends every 5 s
		spans = c.of(trace)
		for _, s := range spans {
			byID[s.id] = s
		}
		return slices.ContainsFunc(spans, named("tandem decide")) && slices.ContainsFunc(spans, named("tandem prefill answer")) &&
			slices.ContainsFunc(spans, named("tandem hand over")) && byID[joins(p)].id != "" && byID[joins(d)].id != "" &&
			!slices.ContainsFunc(spans, func(s span) bool { return s.parent != client && byID[s.parent].id == "" })
	}
	require.Eventually(t, whole, patience, 50*time.Millisecond, "the spans of Tandem and of Envoy")
	decide := spans[slices.IndexFunc(spans, named("tandem decide"))]
	require.Equal(t, "tandem", decide.service)
	require.Equal(t, "envoy", byID[decide.parent].service, "the decision hangs below Envoy's request")
	require.Contains(t, decide.attributes["tandem.route"], "split")
	require.Contains(t, decide.attributes, "tandem.prefill.cost.work")

	for _, hop := range []seen{p, d} {
		parts := strings.Split(hop.Headers["Traceparent"][0], "-")
		require.Equal(t, trace, parts[1])
		require.Equal(t, "01", parts[3], hop.Leg)
		require.Empty(t, hop.Headers["X-Tandem-Traceparent"])
	}
	require.Equal(t, "envoy", byID[joins(p)].service, "of the prefill leg's listener")
	require.Equal(t, "tandem hand over", byID[joins(d)].name)
	for _, name := range []string{"tandem_hop_duration_seconds", "tandem_hop_first_byte_seconds", "tandem_request_duration_seconds", "tandem_request_first_byte_seconds", "tandem_ext_proc_duration_seconds"} {
		led := regexp.MustCompile(`(?m)^` + name + `_bucket\{.*\} \d+ # \{trace_id="` + trace + `"\}`)
		soon(t, name+" leads to the trace", func() bool { return led.MatchString(f.openMetrics()) }) // Envoy's access log has the rest
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		require.Equal(t, trace, s.trace, "the other request is not traced: no client asked, and sampleRatio is 0")
	}
}

// One trace contains both concurrent legs: the decision with its prices, P's answer, the watch over D.
func TestOneTraceOverLegsAtOnce(t *testing.T) {
	t.Parallel()
	c := startCollector(t)
	top := "tracing: {endpoint: \"" + c.addr + "\", sampleRatio: 0}\n"
	atOnce := []string{"sglang", "mooncake", "nixl-push", "moriio"}
	f := start(t, options{top: top, mix: atOnce, prefills: len(atOnce), decodes: len(atOnce)})
	for i, dialect := range atOnce {
		body := strings.Replace(pairBody, `"tiny"`, `"`+dialect+`"`, 1)
		require.Equal(t, 200, f.post("/v1/chat/completions", body).status) // a dialect's first leg may learn P's identity
		f.sendTraced(i, body)
	}
	for i, dialect := range atOnce {
		t.Run(dialect, func(t *testing.T) { f.oneTraceOfAPair(t, c, i) })
	}
}

const clientsSpan = "b7ad6b7169203331"

func traceOf(n int) (trace, requestID string) {
	return fmt.Sprintf("0af7651916cd43dd8448eb211c8031%02x", n), fmt.Sprint("traced-", n)
}

func (f *fleet) sendTraced(n int, body string) {
	f.t.Helper()
	trace, id := traceOf(n)
	got := f.post("/v1/chat/completions", body, "x-request-id", id, "traceparent", "00-"+trace+"-"+clientsSpan+"-01")
	require.Equal(f.t, 200, got.status, got.body)
}

// oneTraceOfAPair checks the spans of such a request at the collector and the engines.
func (f *fleet) oneTraceOfAPair(t *testing.T, c *collector, n int) {
	t.Helper()
	trace, _ := traceOf(n)
	byName, byID := map[string]span{}, map[string]span{}
	joined := func(engines []*engine) (parents []string) { // the parents of the engines' own spans
		for _, hop := range f.requests("", engines...) {
			if parts := strings.Split(strings.Join(hop.Headers["Traceparent"], ""), "-"); len(parts) == 4 && parts[1] == trace {
				require.Equal(t, "01", parts[3], hop.Leg)
				parents = append(parents, parts[2])
			}
		}
		return parents
	}
	require.Eventually(t, func() bool {
		for _, s := range c.of(trace) {
			byName[s.name], byID[s.id] = s, s
		}
		for _, s := range byID {
			if s.parent != clientsSpan && byID[s.parent].id == "" {
				return false // an orphaned span: Envoy sends every 5 s
			}
		}
		for _, parent := range joined(f.engines()) {
			if byID[parent].id == "" {
				return false
			}
		}
		return byName["tandem decide"].id != "" && byName["tandem prefill answer"].id != "" && byName["tandem decode leg"].id != ""
	}, patience, 50*time.Millisecond, "the spans of Tandem and of Envoy")
	t.Cleanup(func() {
		for _, s := range c.of(trace) {
			t.Logf("%-8s %-40s %s <- %s", s.service, s.name, s.id, s.parent)
		}
	})
	decide := byName["tandem decide"]
	require.Contains(t, decide.attributes["tandem.route"], "pair")
	require.Contains(t, decide.attributes, "tandem.prefill.cost.work")
	for _, leg := range []string{"tandem prefill answer", "tandem decode leg"} {
		require.Contains(t, byName[leg].attributes["tandem.result"], "ok", leg)
		above := []string{}
		for up := byID[byName[leg].parent]; up.id != ""; up = byID[up.parent] {
			require.True(t, up.service == "envoy" || up.id == decide.id, up.name)
			above = append(above, up.name)
		}
		if leg == "tandem decode leg" {
			require.Contains(t, above, "tandem decide")
		} else {
			require.Contains(t, above, "mirror", "Envoy's span of the copy comes between, which is not below the decision")
		}
		require.Equal(t, "ingress", above[len(above)-1], "%s leads up to the request", leg)
	}
	require.Len(t, joined(f.prefills), 1)
	require.Len(t, joined(f.decodes), 1)
}

// Without tracing in Envoy, Tandem carries the trace by itself.
func TestATraceWithoutEnvoysPart(t *testing.T) {
	t.Parallel()
	c := startCollector(t)
	f := start(t, options{top: "tracing: {endpoint: \"" + c.addr + "\"}\n", untracedEnvoy: true})
	require.Equal(t, 200, f.post("/v1/chat/completions", apis[0].body, "x-request-id", "rooted-here").status)
	p, d := f.hops("rooted-here")
	trace := strings.Split(p.Headers["Traceparent"][0], "-")[1]
	require.Equal(t, trace, strings.Split(d.Headers["Traceparent"][0], "-")[1], "both engines join one trace")
	spans := 2 // decide and hand over
	if runsInside() {
		spans = 3 // and prefill answer
	}
	require.Eventually(t, func() bool { return len(c.of(trace)) == spans }, patience, 50*time.Millisecond)
}

// Logs contain the request's id, and never a word of its prompt, whatever happens to it.
func TestLogsAndSpansHoldNoPrompt(t *testing.T) {
	t.Parallel()
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
	}, patience, 20*time.Millisecond)
	log, err := os.ReadFile(f.tandems[0].log)
	require.NoError(t, err)
	require.NotContains(t, string(log), secret)
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, `"planned"`) || strings.Contains(line, `"pass ended"`) || strings.Contains(line, `refused`) {
			require.Contains(t, line, `"request_id":"`, line)
		}
	}
	soon(t, "spans come", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return len(c.spans) > 0 })
	f.tandems[0].stop(os.Interrupt) // sends the remaining spans
	c.mu.Lock()
	defer c.mu.Unlock()
	require.NotEmpty(t, c.spans)
	for _, s := range c.spans {
		for key, value := range s.attributes {
			require.NotContains(t, value, secret, "%s %s", s.name, key)
		}
	}
}

// openMetrics returns the metrics for a scraper that asks for exemplars.
func (f *fleet) openMetrics() string {
	f.t.Helper()
	r, err := http.NewRequestWithContext(f.t.Context(), http.MethodGet, f.admins[0]+"/metrics", nil)
	require.NoError(f.t, err)
	r.Header.Set("Accept", "application/openmetrics-text; version=1.0.0")
	resp, err := client.Do(r)
	require.NoError(f.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(f.t, err)
	require.Contains(f.t, resp.Header.Get("Content-Type"), "openmetrics")
	return string(text)
}

// With usage the trace has a span of the answer, with what the request used in the names of OpenTelemetry's conventions
// for GenAI: below the last hop's span, or at once below Envoy's where the answer came in one hop or by two legs at once.
func TestTraceHasWhatARequestUsed(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "sglang", "none"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			c := startCollector(t)
			f := start(t, options{dialect: dialect, prefills: 1, decodes: 1, replicas: 2, top: "usage: {tenantHeader: x-tenant}\n" +
				"tracing: {endpoint: \"" + c.addr + "\", sampleRatio: 0}\n"})
			trace, id := traceOf(1)
			got := f.post("/v1/chat/completions", `{"model":"tiny","stream":true,"stream_options":{"include_usage":true},`+
				`"max_tokens":12,"messages":[{"role":"user","content":"Two hops, please."}]}`,
				"x-request-id", id, "x-tenant", "team-a", "traceparent", "00-"+trace+"-"+clientsSpan+"-01")
			require.Equal(t, 200, got.status, got.body)
			want := usageOf(got)
			byID := map[string]span{}
			var answers []span
			soon(t, "the span of the answer, and its parent", func() bool {
				answers = nil
				for _, s := range c.of(trace) {
					if byID[s.id] = s; s.name == "tandem answer" {
						answers = append(answers, s)
					}
				}
				return len(answers) > 0 && byID[answers[0].parent].id != ""
			})
			require.Len(t, answers, 1, "one replica counts it")
			is := answers[0].attributes
			for name, value := range map[string]string{
				"gen_ai.request.model": "tiny", "gen_ai.request.stream": "true", "tandem.tenant": "team-a", "tandem.ended": "ok",
				"gen_ai.usage.input_tokens": fmt.Sprint(want.Prompt), "gen_ai.usage.output_tokens": "12", "http.response.status_code": "200",
			} {
				require.Contains(t, is[name], value, "%s of %v", name, is)
			}
			require.Contains(t, is, "gen_ai.response.time_to_first_chunk")
			require.Contains(t, is, "tandem.time_per_output_token")
		})
	}
}
