package status

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/pass"
	"tandem/extproc/telemetry"
	"tandem/picker"
)

func TestPrintExplanation(t *testing.T) {
	p1 := picker.Weighed{Endpoint: "10.0.1.1:8000", Name: "p1", Role: "prefill", Hit: 3, Prefill: &picker.PrefillPrice{Queue: .5, Work: .5}}
	p2 := picker.Weighed{Endpoint: "10.0.1.2:8000", Role: "prefill", Out: "failed"}
	d1 := picker.Weighed{Endpoint: "10.0.2.1:8000", Name: "d1", Role: "decode", Step: 2, Transfer: .1, Decode: &picker.DecodePrice{Step: .02}, Alone: &picker.AlonePrice{Work: 2}}
	e := pass.Explanation{Waiting: 2, Longest: 1.5, Explanation: picker.Explanation{
		Prefill: p1.Endpoint, Decode: d1.Endpoint, Price: 1.12, Load: .4, FirstToken: .7, TokenTime: .02, Answer: 256, Candidates: []picker.Weighed{p1, p2, d1}}}
	var text strings.Builder
	PrintExplanation(&text, &Explained{Explanation: e})
	require.Equal(t, `Split: p1 computes the prompt, d1 answers: 880 ms cheaper than decode alone.
2 requests wait, the longest for 1.5 s.
The first token is expected after 700 ms, then one each 20 ms; 256 in the answer.
A price is what the request costs all requests, not the time that its client waits or saves.
Prefill endpoints are 40 % busy.

  endpoint       role     cached blocks  prefill  transfer and decode  decode alone  note
  p1             prefill  3              1.00 s   -                    -             chosen
  10.0.1.2:8000  prefill  -              -        -                    -             left out: failed
  d1             decode   0              -        120 ms               2.00 s        chosen, decode times 2
`, text.String())

	e.Candidates[0].State = "failed"
	require.Equal(t, "All prefill endpoints have failed: start one again. Until then a request may try each of them "+
		"once, p1 first,\nbecause one may be back. If none is, decode computes the prompt.", Sentence(&e))
	e.NoFallback = true
	require.Contains(t, Sentence(&e), "If none is, the request gets an error (503): the pool does not let decode compute")
	text.Reset()
	PrintExplanation(&text, &Explained{Explanation: e})
	require.Contains(t, text.String(), "\nIf the chosen one is back, the first token is expected after 700 ms")
	e.Candidates[0].State = ""
	e.Candidates[2].State = "failed"
	require.Equal(t, "All decode endpoints have failed: start one again. Until then a request gets an error (503), "+
		"unless one is back.", Sentence(&e))
	e.Candidates[2].State = ""
	e.Candidates[2].Busy = true
	require.Equal(t, "Split: p1 computes the prompt, d1 answers: decode endpoints are too busy to compute it, too; "+
		"splitting it is 880 ms cheaper, too.", Sentence(&e))
	e.Candidates[2].TooLong = true
	require.Equal(t, "Split: p1 computes the prompt, d1 answers: the prompt is too long for decode alone, where "+
		"answers would suffer; splitting it is 880 ms cheaper, too.", Sentence(&e))
	e.Candidates[2].TooLong = false
	e.Paused = true
	text.Reset()
	PrintExplanation(&text, &Explained{Explanation: e})
	require.True(t, strings.HasPrefix(text.String(),
		"The pool is paused: its requests get an error (503 pool_paused). Otherwise:\nSplit: p1"), text.String())
	e.Candidates[2].Busy, e.Always, e.Paused = false, true, false
	require.Equal(t, "Split: p1 computes the prompt, d1 answers: the pool splits every prompt (split is always).", Sentence(&e))
	e.Always = false
	e.Defaults = []string{"speed of decode", "length of answers"}
	text.Reset()
	PrintExplanation(&text, &Explained{Explanation: e})
	require.Contains(t, text.String(), "40 % busy.\n"+
		"Not learned yet, so the model's defaults count: speed of decode, length of answers (from 20 answers on).\n\n  endpoint")

	e.Prompt, e.Candidates[2].KVTokens = 2000, 1000
	text.Reset()
	PrintExplanation(&text, &Explained{Explanation: e})
	require.Contains(t, text.String(), "No decode endpoint can hold the prompt: its KV cache has room for 1000 tokens at most.\n")
	e.Prefill, e.Price = "", 2
	require.Equal(t, "Decode alone on d1, though splitting it would be 880 ms cheaper: "+
		"the pool's settings or a target of the request ask for it, or endpoints have no capacity left.", Sentence(&e))
	require.Equal(t, ": as cheap as decode alone.", compared(0, "decode alone"))
	require.Equal(t, ": as cheap as decode alone.", compared(-.0004, "decode alone"))
	e.Candidates = []picker.Weighed{p2, d1}
	require.Equal(t, "Decode alone on d1: no prefill endpoint can take the request (10.0.1.2:8000 failed).", Sentence(&e))
	e.NotSplit = "no_prefill"
	require.Equal(t, "Decode alone on d1: no prefill endpoint can take the request (10.0.1.2:8000 failed).", Sentence(&e))
	e.Candidates = []picker.Weighed{d1}
	require.Equal(t, "Decode alone on d1: the pool has no prefill endpoint.", Sentence(&e))
	e.Candidates = []picker.Weighed{p1, d1}
	text.Reset()
	PrintExplanation(&text, &Explained{Explanation: e})
	require.Contains(t, text.String(), " no decode endpoint of its group can answer\n")
	for why, want := range map[string]string{
		"no_prefill":     "no prefill endpoint shares its group with a decode endpoint that can answer",
		"policy":         "the pool splits nothing (split is never)",
		"no_kv_transfer": "the pool splits nothing (kvTransfer is none)",
		"unknown_peer": "the prefill engine has not said who it is, which the pool's kvTransfer needs. The log names it: " +
			"look whether its bootstrap port answers",
		"min_prefill_tokens": "the pool splits no prompt as short as this (minPrefillTokens)",
	} {
		e.NotSplit = why
		require.Equal(t, "Decode alone on d1: "+want+".", Sentence(&e))
	}
	d2 := picker.Weighed{Endpoint: "10.0.2.2:8000", Role: "decode", Out: "paused"}
	e.Refused, e.Candidates = "picker: no endpoint can decode this request", []picker.Weighed{p2, d2}
	require.Equal(t, "No endpoint can take the request: no endpoint can decode this request (10.0.2.2:8000 paused).", Sentence(&e))
	e.Candidates = nil
	e.Refused = "no endpoint"
	require.Equal(t, "No endpoint can take the request: no endpoint.", Sentence(&e))
}

// An endpoint that is chosen in want of a better one is marked, whichever leg it serves.
func TestExplainedState(t *testing.T) {
	for want, tt := range map[string]struct {
		c      picker.Weighed
		chosen bool
	}{
		"":                                      {},
		"chosen":                                {chosen: true},
		"stale":                                 {c: picker.Weighed{State: "stale"}},
		"chosen, stale, decode times 2":         {c: picker.Weighed{State: "stale", Step: 2}, chosen: true},
		"out: failed; chosen since all are out": {c: picker.Weighed{State: "failed"}, chosen: true},
		"out: failed; weighed since all are out, prefill times 3": {c: picker.Weighed{State: "failed", Speed: 3}},
		"out: model; chosen since all are out":                    {c: picker.Weighed{Out: "model"}, chosen: true},
		"left out: failed":                                        {c: picker.Weighed{Out: "failed"}},
	} {
		require.Equal(t, want, remark(&tt.c, tt.chosen, false))
	}
	require.Equal(t, "chosen, no decode alone here: its answers would suffer", remark(&picker.Weighed{Busy: true}, true, true))
	require.Equal(t, "no decode alone here: the prompt is too long, answers would suffer",
		remark(&picker.Weighed{Busy: true, TooLong: true}, false, true))
}

// Requests that wait are counted in a sentence, without places where none wait.
func TestWaiting(t *testing.T) {
	for want, e := range map[string]pass.Explanation{
		"1 request waits, for 1.5 s.":                                         {Waiting: 1, Longest: 1.5},
		"2 requests wait, the longest for 1.5 s.":                             {Waiting: 2, Longest: 1.5},
		"1 request here and 2 in other replicas wait, the longest for 10 ms.": {Waiting: 1, Remote: 2, Longest: .01},
		"1 request in other replicas waits.":                                  {Remote: 1},
		"3 requests in other replicas wait.":                                  {Remote: 3},
	} {
		require.Equal(t, want, waiting(&e))
	}
	for want, q := range map[string]telemetry.Queued{
		"": {}, ", behind 1 request": {Behind: 1}, ", behind 1 request in other replicas": {BehindRemote: 1},
		", behind 2 requests here and 1 in other replicas": {Behind: 2, BehindRemote: 1},
	} {
		require.Equal(t, want, behindOf(&telemetry.Trace{Queued: q}))
	}
}
