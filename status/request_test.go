package status

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/names"
	"tandem/extproc/telemetry"
	"tandem/kvstate/operator"
	"tandem/status/words"
)

// A request of the past is explained by what was recorded of it.
func TestPrintDecided(t *testing.T) {
	now := time.Now()
	part := func(v float64) []telemetry.Part { return []telemetry.Part{{Name: "work", Value: v}} }
	prices := []telemetry.Weighed{
		{Endpoint: "p1:1", Role: "prefill", Hit: 3, Prefill: []telemetry.Part{{Name: "work", Value: .06}, {Name: "others", Value: .04}}}, {Endpoint: "p2:1", Role: "prefill", Out: true, Why: "failed_request"},
		{Endpoint: "d1:1", Role: "decode", Decode: part(.05), Alone: part(.5)},
	}
	whole := []telemetry.Weighed{{Endpoint: "d1:1", Role: "decode", Decode: part(.5)}}
	notAlone := func(alone float64, why string) []telemetry.Weighed {
		return append(prices[:2:2], telemetry.Weighed{Endpoint: "d1:1", Role: "decode", Decode: part(.05), Alone: part(alone), NotAlone: why})
	}
	holds := func(hit int, alone float64) []telemetry.Weighed {
		return append(prices[:2:2], telemetry.Weighed{Endpoint: "d1:1", Role: "decode", Hit: hit, Decode: part(.05), Alone: part(alone)})
	}
	r := telemetry.Trace{RequestID: "r-1", Route: "split", Prefill: "p1:1", Decode: "d1:1", PromptTokens: 800,
		CachedTokens: 48, PrefillTime: 120 * time.Millisecond, DecodeTime: 2 * time.Second, Status: 200, Answered: telemetry.Answered{Streamed: true},
		Started: now.Add(-5 * time.Second), Weighed: prices}
	r.FirstByte, r.ExpectedFirst = 125*time.Millisecond, 135*time.Millisecond
	r.PrefillBusy = .44
	r.ExpectedPrefill, r.Waited, r.WaitedFor, r.Behind = 100*time.Millisecond, time.Second, "p1:1", 2
	var text strings.Builder
	printDecided(&text, &r, now)
	require.Equal(t, `Request r-1, 5s ago, status 200.
Split: p1:1 computes the prompt, d1:1 answers: 350 ms cheaper than decode alone.
It waited 1.0 s for p1:1, behind 2 requests.
Prompt: 800 tokens, 48 of them cached at prefill. Took: prefill 120 ms (expected 100 ms), `+
		`headers of the answer after 125 ms (first token expected after 135 ms), last hop 2.0 s.
Prefill endpoints were 44 % busy.
Of the price of prefill at p1:1, 40 ms are for the delay of other requests.

  endpoint  role     cached blocks  prefill  transfer and decode  decode alone  note
  p1:1      prefill  3              100 ms   -                    -             chosen
  p2:1      prefill  -              -        -                    -             left out: it failed this request
  d1:1      decode   0              -        50 ms                500 ms        chosen

The prices of the last plan, as they were then. --output json has their parts.
`, text.String())

	for want, change := range map[string]func(*telemetry.Trace){
		"the prompt is too long for decode alone, where answers would suffer; splitting it is 350 ms cheaper, too.\n": func(r *telemetry.Trace) {
			r.Prefill, r.Route, r.Weighed = "p1:1", "split", notAlone(.5, telemetry.NotAloneTooLong)
		},
		"d1:1 answers: decode endpoints are too busy to compute it, too; otherwise decode alone would be 50 ms cheaper.\n": func(r *telemetry.Trace) {
			r.Prefill, r.Route, r.Weighed = "p1:1", "split", notAlone(.1, telemetry.NotAloneBusy)
		},
		"50 ms                100 ms        chosen, no decode alone here: its answers would suffer\n": func(r *telemetry.Trace) {
			r.Prefill, r.Route, r.Weighed = "p1:1", "split", notAlone(.1, telemetry.NotAloneBusy)
		},
		"d1:1 answers: the pool splits every prompt (split is always).\n": func(r *telemetry.Trace) {
			r.Prefill, r.Route, r.Always, r.Weighed = "p1:1", "split", true, notAlone(.1, telemetry.NotAloneBusy)
		},
		"Decode alone on d1:1: no prefill endpoint shares its group with a decode endpoint that can answer (no_prefill).": func(r *telemetry.Trace) {
			r.Reason, r.Weighed = "no_prefill", []telemetry.Weighed{{Endpoint: "p1:1", Role: "prefill"}, whole[0]}
		},
		"Of the price of prefill at p1:1, 40 ms are for": func(r *telemetry.Trace) {
			cheap := telemetry.Weighed{Endpoint: "p0:1", Role: "prefill", Prefill: []telemetry.Part{{Name: "others", Value: .01}}}
			r.Prefill, r.Route, r.Weighed = "p1:1", "split", append([]telemetry.Weighed{cheap}, prices...)
		},
		"chosen since there is no other way, though its answers suffer": func(r *telemetry.Trace) {
			r.Weighed = notAlone(.5, telemetry.NotAloneBusy)
		},
		"d1:1 answers: 350 ms cheaper than decode alone; by the prefix index p1:1 holds 75 % of the prompt.\n": func(r *telemetry.Trace) {
			r.Prefill, r.Route, r.PromptBlocks = "p1:1", "split", 4
		},
		"Split: p1:1 computes the prompt, d1:1 answers: 340 ms cheaper than decode alone; by the prefix index p1:1 holds 50 % of the prompt, d1:1 33 %.\n": func(r *telemetry.Trace) {
			r.Prefill, r.Route, r.Weighed, r.PromptBlocks = "p1:1", "split", holds(2, .49), 6
		},
		"Decode alone on d1:1: 100 ms cheaper than splitting it; by the prefix index d1:1 holds 10 % of the prompt.\n": func(r *telemetry.Trace) {
			r.Reason, r.Weighed, r.PromptBlocks = "cheaper", holds(2, .05), 20
		},
		"Decode alone on d1:1: 100 ms cheaper than splitting it.\n": func(r *telemetry.Trace) { // of less it says nothing
			r.Reason, r.Weighed, r.PromptBlocks = "cheaper", holds(2, .05), 21
		},
		"Decode alone on d1:1: 101 ms cheaper than splitting it.\n": func(r *telemetry.Trace) { // planned by a replica of an earlier release
			r.Reason, r.Weighed = "cheaper", holds(2, .049)
		},
		"Decode alone on d1:1: 102 ms cheaper than splitting it; by the prefix index d1:1 holds 100 % of the prompt.\n": func(r *telemetry.Trace) {
			r.Reason, r.Weighed, r.PromptBlocks = "cheaper", holds(8, .048), 7
		},
		"Decode alone on d1:1, though splitting it would be 350 ms cheaper: ": func(r *telemetry.Trace) { r.Reason = "cheaper" },
		"d1:1 refused it: its answer says why.\n":                             func(r *telemetry.Trace) { r.Status = 400 },
		"Decode alone on d1:1: pairs that failed it, or failed lately, were left out.": func(r *telemetry.Trace) {
			r.Reason, r.Failed = "cheaper", []telemetry.FailedHop{{Hop: "decode", Endpoint: "d1:1"}}
		},
		"Split: p1:1 computes the prompt, d1:1 answers: 120 ms cheaper than decode alone.\n": func(r *telemetry.Trace) {
			r.Prefill, r.Route, r.Weighed, r.Cheaper = "p1:1", "split", nil, .12
		},
		"d1:1 answers: decode endpoints were too busy to compute it, too, or it is too long for that.\n": func(r *telemetry.Trace) {
			r.Prefill, r.Route, r.Weighed, r.NotAlone = "p1:1", "split", nil, true
		},
		"Decode alone on d1:1: 12 ms cheaper than splitting it.\n": func(r *telemetry.Trace) {
			r.Reason, r.Weighed, r.Cheaper = "cheaper", nil, .012
		},
		"Decode alone on d1:1: it cost less than two hops.": func(r *telemetry.Trace) { r.Reason, r.Weighed = "cheaper", nil },
		"Decode alone on d1:1: the pool splits no prompt as short as this (minPrefillTokens) (min_prefill_tokens).": func(r *telemetry.Trace) {
			r.Reason = "min_prefill_tokens"
		},
		"cached at prefill. Took: headers of the answer after 125 ms, last hop": func(r *telemetry.Trace) { r.PrefillTime = 0 },
		"The first token was expected after 135 ms. When it came is not known: headers may come before it.": func(r *telemetry.Trace) {
			r.PrefillTime = 0
		},
		"cached at prefill.\n": func(r *telemetry.Trace) { r.PrefillTime, r.FirstByte, r.DecodeTime = 0, 0, 0 },
		"Took: prefill of a former plan 120 ms, headers of the answer after": func(*telemetry.Trace) {},
		"Took: prefill failed after 120 ms, headers of the answer after": func(r *telemetry.Trace) {
			r.Prefill, r.Decode, r.Route, r.Failed = "p1:1", "", "split", []telemetry.FailedHop{{Hop: "prefill", Endpoint: "p1:1"}}
		},
		"The price of each endpoint was not kept": func(r *telemetry.Trace) { r.Weighed = nil },
		"Decode alone on d1:1: it asks for several choices (n), and a KV cache that is handed over serves one (several_choices).": func(r *telemetry.Trace) { r.Reason, r.Weighed = "several_choices", whole },
		"d1:1      decode  0              -        -                    500 ms":                                                   func(r *telemetry.Trace) { r.Weighed = whole },
		"p1:1      prefill  3              -        -                    -             not weighed: one endpoint was to do both": func(r *telemetry.Trace) {
			r.Weighed = []telemetry.Weighed{{Endpoint: "p1:1", Role: "prefill", Hit: 3}, prices[2]}
		},
		"It went to d1:1 as it came (pass_through).": func(r *telemetry.Trace) { r.Route, r.Weighed = "pass_through", nil },
		"Took: whole answer 1.5 s, last hop 1.5 s.\nThe first token was expected after 300 ms. When it came is not known, since": func(r *telemetry.Trace) {
			r.Streamed, r.PrefillTime, r.FirstByte, r.ExpectedFirst = false, 0, 1500*time.Millisecond, 300*time.Millisecond
		},
		"Split: p1:1 was to compute the prompt, and failed. No decode endpoint was asked.\nFailed: prefill at p1:1.\n": func(r *telemetry.Trace) {
			r.Prefill, r.Decode, r.Route, r.Failed = "p1:1", "", "split", []telemetry.FailedHop{{Hop: "prefill", Endpoint: "p1:1"}}
		},
		"Split: p1:1 computed the prompt, and its answer was the client's.": func(r *telemetry.Trace) {
			r.Prefill, r.Decode, r.Route, r.Final = "p1:1", "", "split", true
		},
		"Request r-1, 5s ago, status 200, cut.\nThe answer broke off after 1.6 s at d1:1.\n": func(r *telemetry.Trace) {
			r.Ended, r.Took = telemetry.EndedCut, 1600*time.Millisecond
		},
		"the client left before the answer": func(r *telemetry.Trace) { r.Status, r.Ended = 0, "client_gone" },
		"5s ago, unknown: lost when t2:9091 ended without a shutdown.": func(r *telemetry.Trace) {
			r.Status, r.GoneWith = 0, []string{"t2:9091"}
		},
		"That is plan 2: a hop of the former failed.": func(r *telemetry.Trace) { r.Replans = 1 },
	} {
		one := r
		one.Prefill, one.Route = "", "decode_alone"
		change(&one)
		text.Reset()
		PrintDecided(&text, []telemetry.Trace{one, one}, nil)
		require.Equal(t, 2, strings.Count(text.String(), want), text.String())
	}
}

// What a request's KV cost conversations, why it waited for memory, and what was computed again.
func TestMemoryOfARequest(t *testing.T) {
	part := func(name string, v float64) telemetry.Part { return telemetry.Part{Name: name, Value: v} }
	r := telemetry.Trace{RequestID: "r-1", Route: "decode_alone", Reason: "cheaper", Decode: "d1:1", PromptTokens: 100_000, CachedTokens: -1,
		DecodeTime: 9 * time.Second, Status: 200, Weighed: []telemetry.Weighed{
			{Endpoint: "d1:1", Role: "both", Discards: 42_000, Back: .31, Alone: []telemetry.Part{part("work", 9), part("evicts", 1.2), part("returns", 3.4)}},
			{Endpoint: "d2:1", Role: "both", Discards: 90_000, Back: .9, Alone: []telemetry.Part{part("work", 9), part("evicts", 11)}},
		}}
	r.Waited, r.WaitedFor, r.ForMemory, r.Behind = 12*time.Second, "d1:1", true, 1
	r.Had, r.Evicted, r.Elsewhere = 98_000, 60_000, 8_000
	var text strings.Builder
	printWay(&text, &r)
	require.Contains(t, text.String(), `Decode alone on d1:1: it cost less than two hops.
It waited 12.0 s until conversations that come back left room for its KV at d1:1, behind 1 request.
Earlier turns had 98k of its tokens, of which 60k are computed again, since no endpoint holds them any more (evicted), `+
		`8.0k are computed again, though another endpoint holds them (elsewhere).
For its KV d1:1 discards 42k tokens of conversations, which come back within two minutes with a chance of 31 %: 1.2 s to compute them again.
Conversations that come back to d1:1 while it computes the prompt wait 3.4 s in all.
`)
	r.Weighed, r.Waited, r.Evicted, r.Elsewhere = nil, 0, 0, 0
	text.Reset()
	printWay(&text, &r)
	require.NotContains(t, text.String(), "tokens of conversations")
	require.NotContains(t, text.String(), "Earlier turns")
}

// Every reason of the documentation is explained in words, and has another one for each.
func TestReasonsHaveWords(t *testing.T) {
	text, err := os.ReadFile("../docs/operations.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(text), "Reasons for `decode_alone`:\n")
	require.True(t, found)
	table, _, found := strings.Cut(rest, "\n- ")
	require.True(t, found)
	reasons, said := 0, map[string]string{}
	for row := range strings.Lines(table) {
		names, _, _ := strings.Cut(strings.TrimPrefix(row, "|"), "|")
		for i, name := range strings.Split(names, "`") {
			if i%2 == 0 || name == "reason" {
				continue
			}
			reasons++
			why := words.Because(name)
			require.NotEmpty(t, why, name)
			require.Empty(t, said[why], name)
			said[why] = name
		}
	}
	require.Greater(t, reasons, 20)
	require.Empty(t, words.Because("of another release"))
}

// The hops that failed are counted by endpoint, those of the last minute: those that ended a request, and others.
func TestFailedHops(t *testing.T) {
	now := time.Now()
	p1, d1 := telemetry.FailedHop{Hop: "prefill", Endpoint: "p1:1"}, telemetry.FailedHop{Hop: "decode", Endpoint: "d1:1"}
	var lost, again, old, cut, broken telemetry.Trace
	lost.RequestID, lost.Started, lost.Failed, lost.Status = "lost", now, []telemetry.FailedHop{p1}, 503
	again.Started, again.Failed, again.Status = now, []telemetry.FailedHop{p1, d1, {Hop: "router"}}, 200
	again.Plans, again.Ended = 4, "ok"
	old.Started, old.Failed = now.Add(-2*time.Minute), []telemetry.FailedHop{d1}
	cut.RequestID, cut.Started, cut.Took, cut.Decode = "cut", now.Add(-5*time.Minute), 5*time.Minute, "d2:1"
	cut.Status, cut.Ended, cut.Failed, cut.Plans = 200, telemetry.EndedCut, []telemetry.FailedHop{p1}, 2
	broken.Started, broken.Status, broken.Ended, broken.Decode, broken.Plans = now, 500, "failed", "d2:1", 1
	since := now.Add(-time.Minute)
	var f Failed
	f.failedHops([]telemetry.Trace{cut, lost, again, broken, old}, since)
	require.Equal(t, Failed{FailedID: "cut", EngineFailed: true, FailedHops: "decode at d2:1 (2), prefill at p1:1",
		AgainHops: "prefill at p1:1 (2), decode at d1:1, the replica of Tandem that decided"}, f)
	require.Equal(t, ": decode at d2:1 (2), prefill at p1:1. The latest is cut: tandem requests --failed lists them. "+
		"Hops of requests that were planned again: "+f.AgainHops+".", f.whereFailed())
	f = Failed{}
	f.failedHops([]telemetry.Trace{old}, since)
	require.Zero(t, f)
	require.Equal(t, ".", f.whereFailed())

	none := telemetry.Trace{RequestID: "none", Started: now, Decode: "d1:1"}
	none.Status, none.Ended, none.Plans, none.Refused = 503, "failed", 1, names.CodeNoRoute
	f.failedHops([]telemetry.Trace{none}, since)
	require.Equal(t, Failed{FailedID: "none", NoRouteID: "none", FailedHops: "Envoy, which has no route for it"}, f)
	require.Equal(t, "operations.md#errors-that-tandem-answers", f.failuresPage())

	lost.Pool, lost.Route, lost.Prefill = "chat", "split", "p1:1"
	require.Empty(t, flow([]telemetry.Trace{lost}, since), "no pair served it")
	require.Equal(t, "split (prefill failed)", routeOf(&lost))
}

// The end of a request that only a replica knew that is gone is unknown; that of others may still come.
func TestEndsThatWentWithAReplica(t *testing.T) {
	now := time.Now()
	restarted := []operator.Gone{}
	row := func(change func(*telemetry.Trace)) string {
		r := telemetry.Trace{Route: "split", Prefill: "p1:1", Decode: "d1:1", Started: now.Add(-20 * time.Second)}
		r.Plans, r.Next, r.PrefillTime = 1, 1, time.Second
		change(&r)
		a := answers{reports: []report{{Name: "t1:1", Traces: []telemetry.Trace{r}}},
			gone: []operator.Gone{{Name: "t2:1", Heard: now.Add(-19 * time.Second)}}, restarted: restarted}
		all := a.traces(now)
		return statusOf(&all[0], now) + " " + strings.Join(all[0].GoneWith, ",")
	}
	require.Equal(t, "unknown t2:1", row(func(*telemetry.Trace) {}))
	require.Equal(t, "unknown t2:1", row(func(r *telemetry.Trace) { r.Next, r.PrefillTime = 0, 0 }), "it saw the leg end")
	require.Equal(t, "200 ", row(func(r *telemetry.Trace) { r.Status = 200 }))
	require.Equal(t, "running ", row(func(r *telemetry.Trace) { r.Started = now.Add(-10 * time.Second) }), "since it is gone")
	require.Equal(t, "running ", row(func(r *telemetry.Trace) { r.Pass = 1 }), "a living replica serves the next pass")
	require.Equal(t, "running ", row(func(r *telemetry.Trace) { r.Prefill, r.Next, r.PrefillTime = "", 0, 0 }))
	require.Equal(t, "running ", row(func(r *telemetry.Trace) { r.PrefillTime = 17 * time.Second }), "the next pass may come")
	restarted = []operator.Gone{{Name: "t3:1", Heard: now}, {Name: "t3:1", Heard: now.Add(-time.Second)}}
	require.Equal(t, "unknown t2:1,t3:1", row(func(*telemetry.Trace) {}))
}

// A replica that is asked alone, or whose Redis is away, does not know whether a leg of its own is over, for another
// replica may have served what came next.
func TestEndsThatAnotherReplicaKnows(t *testing.T) {
	now := time.Now()
	status := func(replicas int, change func(*telemetry.Trace)) string {
		r := telemetry.Trace{Route: "split", Prefill: "p1:1", Decode: "d1:1", Started: now.Add(-20 * time.Second)}
		change(&r)
		one := report{Sharing: Sharing{Replicas: 1, Configured: replicas}, Traces: []telemetry.Trace{r}}
		all := (&answers{reports: []report{one}}).traces(now)
		return statusOf(&all[0], now)
	}
	passed := func(r *telemetry.Trace) { r.Next, r.PrefillTime = 1, time.Second }
	require.Equal(t, "unknown here", status(2, func(*telemetry.Trace) {}))
	require.Equal(t, "unknown here", status(2, passed))
	require.Equal(t, "running", status(1, passed))
	require.Equal(t, "running", status(2, func(r *telemetry.Trace) { passed(r); r.Pass = 1 }), "its last pass is here")
	require.Equal(t, "running", status(2, func(r *telemetry.Trace) { r.Prefill = "" }), "its only pass is here")
	require.Equal(t, "200", status(2, func(r *telemetry.Trace) { r.Status = 200 }))
}

// A request whose ticket a replica refused says so, and counts on no endpoint. One replica may refuse the ticket, and
// another have the request.
func TestTicketRefused(t *testing.T) {
	now := time.Now()
	lost := telemetry.Trace{RequestID: "r-1", Pool: "chat", Route: "split", Prefill: "p1:1", Decode: "d1:1", Served: telemetry.Served{Plans: 1}, Status: 503, Started: now}
	lost.Ended = telemetry.EndedTicketRefused
	failed := telemetry.Trace{RequestID: "r-2", Pool: "chat", Route: "split", Prefill: "p1:1", Decode: "d1:1", Served: telemetry.Served{Plans: 1}, Status: 503, Started: now.Add(-time.Second)}
	failed.Ended = "failed"
	one := report{Minute: telemetry.Totals{Failed: 2, TicketFailures: 1}, Ready: true, Traces: []telemetry.Trace{lost, failed}}
	other := report{Name: "other", Minute: telemetry.Totals{TicketsRefused: 1}, Ready: true}
	s := merge(answers{reports: []report{one, other}}, now, &Wanted{N: shownRecent})
	require.Equal(t, Failed{Failures: 1, FailedHops: "decode at d1:1", FailedID: "r-2", EngineFailed: true, TicketsRefused: 1, TicketID: "r-1"}, s.Failed)
	require.Equal(t, "503, ticket refused", statusOf(&lost, now))
	var text strings.Builder
	printDecided(&text, &lost, now)
	require.Contains(t, text.String(), "status 503, ticket refused.\nIts ticket was refused: ")
}

// A request that Tandem refused between its hops, as when its last decode endpoint is paused meanwhile, names the error
// and blames no engine. After failed hops the last of them is to blame, whatever Tandem answered.
func TestRefusedBetweenHops(t *testing.T) {
	now := time.Now()
	r := telemetry.Trace{RequestID: "r-1", Pool: "chat", Route: "split", Prefill: "p1:1", Decode: "d1:1", Served: telemetry.Served{Plans: 1}, Status: 503, Started: now}
	r.Ended, r.Refused = "failed", "no_endpoint"
	s := merge(answers{reports: []report{{Minute: telemetry.Totals{Failed: 1}, Ready: true, Traces: []telemetry.Trace{r}}}}, now, &Wanted{N: shownRecent})
	require.Equal(t, Failed{Failures: 1, FailedHops: "Tandem's own error no_endpoint", FailedID: "r-1"}, s.Failed)
	require.Equal(t, "503, no_endpoint", statusOf(&r, now))
	found := slices.IndexFunc(s.Attention, func(n Notice) bool { return n.Doc == "operations.md#errors-that-tandem-answers" })
	require.GreaterOrEqual(t, found, 0, s.Attention)
	require.Contains(t, s.Attention[found].Text, "1 request failed in the last minute: Tandem's own error no_endpoint. ")
	var text strings.Builder
	printDecided(&text, &r, now)
	require.Contains(t, text.String(), "status 503, no_endpoint.\nTandem ended it with the error no_endpoint (docs/operations.md#")

	r.Refused, r.Failed = "endpoint_failed", []telemetry.FailedHop{{Hop: "decode", Endpoint: "d1:1"}}
	var f Failed
	f.failedHops([]telemetry.Trace{r}, now.Add(-time.Minute))
	require.Equal(t, Failed{FailedHops: "decode at d1:1", FailedID: "r-1", EngineFailed: true}, f)
}

// What was found out about the end of a request is kept: the replica that knew it may be gone later, or Redis, which
// says who is.
func TestEndsAreKept(t *testing.T) {
	now := time.Now()
	row := func(id string, change func(*telemetry.Trace)) telemetry.Trace {
		r := telemetry.Trace{RequestID: id, Route: "split", Prefill: "p1:1", Decode: "d1:1", Started: now.Add(-20 * time.Second)}
		r.Plans, r.Next, r.PrefillTime = 1, 1, time.Second
		change(&r)
		return r
	}
	mine := func() report {
		return report{Name: "t1:1", Traces: []telemetry.Trace{
			row("answered", func(*telemetry.Trace) {}), row("lost", func(*telemetry.Trace) {}),
			row("runs", func(r *telemetry.Trace) { r.Started = now }),
		}}
	}
	gone := []operator.Gone{{Name: "t2:1", Heard: now.Add(-19 * time.Second)}}
	other := report{Name: "t2:1", Traces: []telemetry.Trace{row("answered", func(r *telemetry.Trace) {
		r.Route, r.Pass, r.Status, r.Ended, r.DecodeTime = "", 1, 200, "ok", 302*time.Millisecond
	})}}
	var found ends
	for _, got := range []answers{
		{reports: []report{mine(), other}},
		{reports: []report{mine()}, gone: gone},
		{reports: []report{mine()}, noRedis: true},
		{reports: []report{mine()}},
	} {
		before := len(found.found)
		got.ends = &found
		var rows []string
		for _, r := range got.traces(now) {
			rows = append(rows, r.RequestID+" "+statusOf(&r, now)+" "+strings.Join(r.GoneWith, ","))
		}
		if before == 0 {
			require.Equal(t, []string{"runs running ", "answered 200 ", "lost running "}, rows)
		} else {
			require.Equal(t, []string{"runs running ", "answered 200 ", "lost unknown t2:1"}, rows)
		}
	}
	// Another replica that asks later is told. What was lost it finds out itself.
	told := mine()
	told.Ends = found.of(told.Traces)
	require.Len(t, told.Ends, 1)
	asked := answers{reports: []report{{Name: "t2:1"}, told}, ends: &ends{}}
	all := asked.traces(now)
	require.Equal(t, "answered", all[1].RequestID)
	require.Equal(t, 200, all[1].Status)
	require.Equal(t, 302*time.Millisecond, all[1].DecodeTime)
	require.Equal(t, []string{"t1:1", "t2:1"}, all[1].Replicas)
	require.Zero(t, all[2].Status, "lost")
	for i := range 2 * allRecent {
		all := []telemetry.Trace{{RequestID: "later", Started: now.Add(time.Duration(i) * time.Second)}}
		own := []telemetry.Trace{all[0]}
		all[0].Status = 200
		found.fill(all, own)
	}
	require.Len(t, found.found, allRecent)
	require.NotContains(t, found.found, endKey{"lost", now.Add(-20 * time.Second).UnixMicro()})
}
