package status

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/telemetry"
	"tandem/extproc/usage"
	"tandem/kvstate"
)

// Each row changes one part of the time of a request that took as long as it was foreseen, and the verdict names it.
func TestVerdict(t *testing.T) {
	const ms = time.Millisecond
	tokens := func(n int64) *int64 { return &n }
	at := func(name string, v float64) telemetry.Part { return telemetry.Part{Name: name, Value: v} }
	usual := func() *telemetry.Trace {
		r := &telemetry.Trace{RequestID: "r", Route: "split", Prefill: "p1:1", Decode: "d1:1", PromptTokens: 8000, CachedTokens: -1,
			PrefillTime: 1000 * ms, DecodeTime: 1100 * ms, Status: 200, Weighed: []telemetry.Weighed{
				{Endpoint: "p1:1", Role: "prefill", Prefill: []telemetry.Part{at("queue", 0), at("work", 1), at("others", 9)}},
				{Endpoint: "p2:1", Role: "prefill", Prefill: []telemetry.Part{at("queue", 2), at("work", 1)}},
				{Endpoint: "p3:1", Role: "prefill", Out: true},
				{Endpoint: "d1:1", Role: "decode", Decode: []telemetry.Part{at("transfer", .08), at("step", .02), at("overflow", 0)}},
			}}
		r.ExpectedPrefill, r.ExpectedFirst, r.ExpectedToken, r.Streamed = 1000*ms, 1100*ms, 10*ms, true
		r.Took, r.Ended = 2100*ms, "ok"
		r.Used = &usage.Used{Answer: tokens(101), PerToken: 10 * ms}
		r.FirstToken = 1100 * ms
		return r
	}
	type row struct {
		name    string
		change  func(*telemetry.Trace)
		because string
		lost    time.Duration
		words   string
	}
	for _, c := range []row{
		{"as foreseen", func(*telemetry.Trace) {}, becausePrompt, 0,
			"Verdict: not slow for what it asked. Most of its time: p1:1 computed the prompt of 8000 tokens in 1.0 s.\n"},
		{"a long answer", func(r *telemetry.Trace) { r.Took, r.Used.Answer = 11100*ms, tokens(1001) }, becauseAnswer, 0,
			"Verdict: not slow for what it asked. Most of its time: d1:1 wrote 1001 tokens in 10.0 s, 10 ms each.\n"},
		{"it waited", func(r *telemetry.Trace) {
			r.Waited, r.WaitedFor = 1000*ms, "p2:1"
			r.Took, r.FirstToken = 3100*ms, 2100*ms
		}, becauseRoom, 1000 * ms, "Verdict: slow because it waited 1.0 s for room at p2:1. In all it lost 1.0 s.\n"},
		{"it waited for memory", func(r *telemetry.Trace) {
			r.Waited, r.WaitedFor, r.ForMemory = 1000*ms, "p2:1", true
			r.Took, r.FirstToken = 3100*ms, 2100*ms
		}, becauseMemory, 1000 * ms, "Verdict: slow because it waited 1.0 s until conversations that come back left room for its KV. In all it lost 1.0 s.\n"},
		{"its KV was evicted", func(r *telemetry.Trace) {
			r.PrefillTime, r.ExpectedPrefill, r.ExpectedFirst = 4000*ms, 4000*ms, 4100*ms
			r.Took, r.FirstToken = 5100*ms, 4100*ms
			r.PromptTokens, r.CachedTokens, r.Had, r.Evicted = 64000, 16000, 52000, 36000
		}, becauseAgain, 3000 * ms, "Verdict: slow because p1:1 computed again in 3.0 s what earlier turns had: " +
			"36k are computed again, since no endpoint holds them any more (evicted). In all it lost 3.0 s.\n"},
		{"a queue in front of it", func(r *telemetry.Trace) {
			r.PrefillTime, r.ExpectedPrefill, r.ExpectedFirst = 3000*ms, 3000*ms, 3100*ms
			r.Took, r.FirstToken, r.Weighed[0].Prefill[0].Value = 4100*ms, 3100*ms, 2
		}, becauseQueue + "P", 2000 * ms, "Verdict: slow because it was behind 2.0 s of other prompts at p1:1. In all it lost 2.0 s.\n"},
		{"P is known to be slow", func(r *telemetry.Trace) {
			r.PrefillTime, r.ExpectedPrefill, r.ExpectedFirst = 6000*ms, 6000*ms, 6100*ms
			r.Took, r.FirstToken, r.Weighed[0].Prefill[1].Value = 7100*ms, 6100*ms, 6
		}, "P" + becausePeers, 5000 * ms, "Verdict: slow because p1:1 computed the prompt of 8000 tokens in 6.0 s, " +
			"6.0 times as slow as its peers. In all it lost 5.0 s.\n"},
		{"P is slower than it was known to be", func(r *telemetry.Trace) {
			r.PrefillTime, r.Took, r.FirstToken, r.CachedTokens = 3000*ms, 4100*ms, 3100*ms, 64
		}, "P" + becauseExpected, 2000 * ms, "Verdict: slow because p1:1 computed the prompt of 8000 tokens, 64 of them cached, in 3.0 s, " +
			"where 1.0 s was expected. In all it lost 2.0 s.\n"},
		{"the first token is late", func(r *telemetry.Trace) { r.Took, r.FirstToken = 4100*ms, 3100*ms }, becauseGap, 2000 * ms,
			"Verdict: slow because the KV transfer to d1:1 and its queue took 2.1 s, where 100 ms was expected. In all it lost 2.0 s.\n"},
		{"the transfer", func(r *telemetry.Trace) {
			r.Took, r.FirstToken, r.Weighed[3].Decode[0].Value = 5000*ms, 4000*ms, 1.6
		}, becauseTransfer, 2900 * ms, "Verdict: slow because the KV transfer to d1:1 took 3.0 s, where 100 ms was expected. In all it lost 2.9 s.\n"},
		{"no memory at D", func(r *telemetry.Trace) {
			r.Took, r.FirstToken, r.Weighed[3].Decode[2].Value, r.ExpectedFirst = 4100*ms, 3100*ms, 2, 3100*ms
		}, becauseQueue + "D", 2000 * ms, "Verdict: slow because its KV waited for memory of d1:1 for 2.1 s, where 100 ms was expected. In all it lost 2.0 s.\n"},
		{"D's pace", func(r *telemetry.Trace) { r.Took = 4100 * ms }, becausePace, 2000 * ms,
			"Verdict: slow because d1:1 wrote 101 tokens in 3.0 s, 30 ms each where 10 ms was expected, " +
				"unless the client was slow to read them. In all it lost 2.0 s.\n"},
		{"an engine failed before", func(r *telemetry.Trace) {
			r.Took, r.FirstToken, r.Replans = 7100*ms, 6100*ms, 2
			r.Failed = []telemetry.FailedHop{{Hop: "prefill", Endpoint: "p2:1"}, {Hop: "prefill", Endpoint: "p2:1"}}
		}, becauseRetry, 5000 * ms, "Verdict: slow because it was planned again after a failure (prefill at p2:1), " +
			"which took 5.0 s. In all it lost 5.0 s.\n"},
		{"Tandem gave up", func(r *telemetry.Trace) {
			r.Took, r.Status, r.Decode, r.Used, r.DecodeTime, r.Refused = 9000*ms, 503, "", nil, 0, "no_endpoint"
			r.Failed = []telemetry.FailedHop{{Hop: "prefill", Endpoint: "p1:1"}}
		}, becauseRetry, 9000 * ms, "Verdict: slow because it was planned again after a failure (prefill at p1:1), " +
			"which took 9.0 s. In all it lost 9.0 s.\n"},
		{"decode alone, with a queue", func(r *telemetry.Trace) {
			r.Route, r.Prefill, r.PrefillTime, r.DecodeTime = "decode_alone", "", 0, 4000*ms
			r.Took, r.ExpectedPrefill, r.ExpectedFirst, r.FirstToken = 4000*ms, 0, 3000*ms, 3000*ms
			r.Weighed[3].Alone = []telemetry.Part{at("queue", 2), at("work", 1)}
		}, becauseQueue + "D", 2000 * ms, "Verdict: slow because it was behind 2.0 s of other prompts at d1:1. In all it lost 2.0 s.\n"},
		{"both legs at once", func(r *telemetry.Trace) {
			r.Route, r.DecodeTime, r.Replans, r.Took = "pair", 2100*ms, 1, 3100*ms
			r.FirstToken = 2100 * ms
		}, becauseRetry, 1000 * ms, "Verdict: slow because it was planned again, which took 1.0 s. In all it lost 1.0 s.\n"},
		{"nobody saw its first token", func(r *telemetry.Trace) { r.Used, r.FirstToken = nil, 0 }, becauseDecode, 0,
			"Verdict: not slow for what it asked. Most of its time: d1:1 took 1.1 s to answer.\n"},
		{"not streamed", func(r *telemetry.Trace) { r.FirstToken, r.Took = 0, 5100*ms }, becauseDecode, 3000 * ms,
			"Verdict: slow because d1:1 took 4.1 s for an answer of 101 tokens, where 1.1 s was expected: " +
				"in its queue, the KV transfer or its pace. In all it lost 3.0 s.\n"},
		{"no prices were kept", func(r *telemetry.Trace) {
			r.Weighed, r.PrefillTime, r.Took, r.FirstToken = nil, 3000*ms, 4100*ms, 3100*ms
		}, "P" + becauseExpected, 2000 * ms, "Verdict: slow because p1:1 computed the prompt of 8000 tokens in 3.0 s, " +
			"where 1.0 s was expected. In all it lost 2.0 s.\n"},
		{"passed through", func(r *telemetry.Trace) {
			r.Route, r.Prefill, r.PrefillTime, r.Used, r.FirstToken, r.Weighed = "pass_through", "", 0, nil, 0, nil
		}, becauseEngine, 0, "Verdict: not slow for what it asked. Most of its time: d1:1 answered in 2.1 s.\n"},
		{"it runs", func(r *telemetry.Trace) { r.Took, r.Status, r.Ended, r.Used, r.FirstToken = 0, 0, "", nil, 0 }, becausePrompt, 0, ""},
		{"it runs, and has waited", func(r *telemetry.Trace) {
			r.Took, r.Status, r.Ended, r.Used, r.FirstToken, r.Waited = 0, 0, "", nil, 0, 9000*ms
		}, becauseRoom, 9000 * ms, "Verdict: slow because it waited 9.0 s for room at the endpoints. In all it lost 9.0 s.\n"},
		{"nothing is known", func(r *telemetry.Trace) { *r = telemetry.Trace{Status: 200} }, "", 0, ""},
	} {
		r := usual()
		c.change(r)
		v := verdictOf(r)
		require.Equal(t, c.because, v.because, c.name)
		require.Equal(t, c.lost, v.lost, c.name)
		var said strings.Builder
		printVerdict(&said, r)
		require.Equal(t, c.words, said.String(), c.name)
	}
}

// The request that lost most comes first, not the longest one, and the table says why.
func TestSlowRequests(t *testing.T) {
	var long, waited, usual telemetry.Trace
	long.RequestID, long.Decode, long.Route, long.Took, long.Status = "long", "d1:1", "pass_through", time.Minute, 200
	waited.RequestID, waited.Decode, waited.Route, waited.Took, waited.Status = "waited", "d1:1", "pass_through", 3*time.Second, 200
	waited.Waited, waited.WaitedFor = 2*time.Second, "p1:1"
	usual.RequestID, usual.Decode, usual.Route, usual.Took, usual.Status = "usual", "d1:1", "pass_through", time.Second, 200
	for _, r := range []*telemetry.Trace{&long, &waited, &usual} {
		r.CachedTokens, r.Started = -1, time.Date(2026, 11, 28, 19, 40, 3, 0, time.Local)
	}
	f := NewFeed(Source{State: kvstate.New(kvstate.Options{}), Ready: func() bool { return true },
		Totals:  func() telemetry.Totals { return telemetry.Totals{} },
		Sharing: func() Sharing { return Sharing{} },
		Recent:  func(n int) []telemetry.Trace { return []telemetry.Trace{usual, long, waited}[:min(n, 3)] }})
	all, _ := f.Requests(t.Context(), Wanted{N: 2, Slow: true})
	require.Len(t, all, 2)
	require.Equal(t, []string{"waited", "long"}, []string{all[0].RequestID, all[1].RequestID})
	var out strings.Builder
	PrintRequests(&out, all, false, true)
	rows := strings.Split(out.String(), "\n")
	require.Regexp(t, `^  status +at +route .* took +lost +because of +request id$`, rows[0])
	require.Regexp(t, `^  200 +(Nov 28 )?19:40:03 +pass_through .* 3\.0 s +2\.0 s +waited for room +waited$`, rows[1])
	require.Regexp(t, ` 60\.0 s +- +engine +long$`, rows[2])
}
