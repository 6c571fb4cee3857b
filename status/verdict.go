package status

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/status/words"
)

// The causes of a verdict, as `tandem requests --slow` shows them. docs/operations.md has what each means.
const (
	becauseRoom     = "waited for room"
	becauseMemory   = "waited for memory"
	becauseAgain    = "computed again"
	becauseRetry    = "planned again"
	becauseQueue    = "queued at " // and the leg
	becausePeers    = " slower than its peers"
	becauseExpected = " slower than expected"
	becausePrompt   = "prompt"
	becauseTransfer = "KV transfer"
	becauseGap      = "KV transfer or queue at D"
	becausePace     = "pace of D"
	becauseAnswer   = "length of answer"
	becauseDecode   = "decode"
	becauseEngine   = "engine"
)

// verdict is why a request took as long as it did.
type verdict struct {
	because string        // the part of its time in which most was lost, or the longest one; "": not known
	lost    time.Duration // by how much it took longer than it would have without queues, failures and slow engines
	slow    bool          // a fifth of its time or more was lost in one part
	words   string        // what happened in that part, as a clause
}

// spent is one part of a request's time.
type spent struct {
	because    string
	took, lost time.Duration
	words      string
}

// verdictOf judges by what was recorded of a request: its times, what was foreseen of them when it was planned, and
// the prices of the endpoints if they were kept.
func verdictOf(t *telemetry.Trace) (v verdict) {
	var whole time.Duration
	var worst, longest spent
	for _, s := range parts(t) {
		s.lost = min(max(s.lost, 0), s.took)
		v.lost, whole = v.lost+s.lost, whole+s.took
		if s.lost > worst.lost {
			worst = s
		}
		if s.took > longest.took {
			longest = s
		}
	}
	if v.slow = worst.lost > 0 && worst.lost >= max(whole, t.Took)/5; v.slow {
		longest = worst
	}
	v.because, v.words = longest.because, longest.words
	return v
}

// printVerdict prints the conclusion about a request.
func printVerdict(w io.Writer, t *telemetry.Trace) {
	v := verdictOf(t)
	switch {
	case v.because == "" || !ended(t) && !v.slow:
	case v.slow:
		fmt.Fprintf(w, "Verdict: slow because %s. In all it lost %s.\n", v.words, took(v.lost))
	default:
		fmt.Fprintf(w, "Verdict: not slow for what it asked. Most of its time: %s.\n", v.words)
	}
}

func took(d time.Duration) string { return words.Millis(milliseconds(d)) }

// parts returns where the time of a request went, in order.
func parts(t *telemetry.Trace) (all []spent) {
	again, prefill := retried(t), time.Duration(0)
	switch {
	case t.Waited > 0 && t.ForMemory:
		all = append(all, spent{becauseMemory, t.Waited, t.Waited, fmt.Sprintf(
			"it waited %s until conversations that come back left room for its KV", took(t.Waited))})
	case t.Waited > 0:
		all = append(all, spent{becauseRoom, t.Waited, t.Waited, fmt.Sprintf("it waited %s for room at %s",
			took(t.Waited), cmp.Or(words.Plain(t.WaitedFor), "the endpoints"))})
	}
	if again > 0 {
		all = append(all, spent{becauseRetry, again, again, fmt.Sprintf("it was planned again%s, which took %s", afterWhat(t),
			took(again))})
	}
	if t.Prefill != "" && t.PrefillTime > 0 && (t.Decode != "" || t.Final) {
		prefill = t.PrefillTime
		all = append(all, computed(t, "P", t.Prefill, prefill, t.ExpectedPrefill, prefillOf)...)
	}
	rest := t.Took - t.Waited - again - prefill
	if rest <= 0 || t.Decode == "" {
		return all
	}
	if t.FirstToken == 0 { // not streamed, or Envoy does not report it
		return append(all, undivided(t, rest))
	}
	first := min(max(t.FirstToken-t.Waited-again-prefill, 0), rest)
	switch {
	case t.Prefill != "":
		all = append(all, gap(t, first))
	case t.Route == "decode_alone":
		all = append(all, computed(t, "D", t.Decode, first, t.ExpectedFirst, func(w *telemetry.Weighed) []telemetry.Part {
			if w.Alone == nil { // it could not be split: the price of its only hop
				return w.Decode
			}
			return w.Alone
		})...)
	default:
		all = append(all, spent{becauseEngine, first, 0, fmt.Sprintf("%s took %s until its first token",
			words.Plain(t.Decode), took(first))})
	}
	return append(all, writing(t, rest-first))
}

// retried returns the time of the plans that failed, and of what lay between them and the last one.
func retried(t *telemetry.Trace) time.Duration {
	if t.Replans == 0 && len(t.Failed) == 0 {
		return 0
	}
	last := t.DecodeTime
	if t.Prefill != "" && (t.Decode != "" || t.Final) && t.Route != "pair" { // else both legs ran at once
		last += t.PrefillTime
	}
	return max(t.Took-t.Waited-last, 0)
}

// afterWhat names what failed.
func afterWhat(t *telemetry.Trace) string {
	var hops []string
	for i := range t.Failed {
		if hop := failedHop(&t.Failed[i]); !slices.Contains(hops, hop) {
			hops = append(hops, hop)
		}
	}
	if len(hops) == 0 {
		return ""
	}
	return " after a failure (" + words.List(hops) + ")"
}

// computed divides the time until a prompt was computed into what was foreseen to be in front of it, and its own.
func computed(
	t *telemetry.Trace, leg, address string, whole, expected time.Duration, of func(*telemetry.Weighed) []telemetry.Part,
) (all []spent) {
	name, queue, slower := words.Plain(address), time.Duration(0), 0.
	if w := weighed(t, address); w != nil {
		queue = min(kvstate.Seconds(part(of(w), "queue")), whole)
		slower = besideOthers(t, w, of)
	}
	if queue > 0 {
		all = append(all, spent{becauseQueue + leg, queue, queue, fmt.Sprintf("it was behind %s of other prompts at %s",
			took(queue), name)})
	}
	own, foreseen := whole-queue, max(expected-queue, 0)
	if n := t.Evicted + t.Elsewhere; n > 0 && t.PromptTokens > 0 {
		again := time.Duration(float64(own) * min(float64(n)/float64(max(t.PromptTokens-max(t.CachedTokens, 0), n)), 1))
		all = append(all, spent{becauseAgain, again, again, fmt.Sprintf("%s computed again in %s what earlier turns had: %s",
			name, took(again), againOf(t))})
		foreseen = max(foreseen-again, 0)
		own -= again
	}
	tokens := fmt.Sprintf("%d tokens", t.PromptTokens)
	if t.CachedTokens > 0 {
		tokens = fmt.Sprintf("%d tokens, %d of them cached,", t.PromptTokens, t.CachedTokens)
	}
	s := spent{becausePrompt, own, 0, fmt.Sprintf("%s computed the prompt of %s in %s", name, tokens, took(own))}
	if expected == 0 {
		return append(all, s)
	}
	s.lost = own - foreseen
	switch {
	case slower >= kvstate.SlowFrom:
		s.because, s.lost = leg+becausePeers, own-time.Duration(float64(foreseen)/slower)
		s.words += fmt.Sprintf(", %.1f times as slow as its peers", slower)
	case 2*own > 3*foreseen:
		s.because = leg + becauseExpected
		s.words += fmt.Sprintf(", where %s was expected", took(foreseen))
	}
	return append(all, s)
}

// besideOthers returns how many times as long as the median of the other endpoints, of those that hold as much of the
// prompt, an endpoint was expected to compute the rest of it; 0: not known.
func besideOthers(t *telemetry.Trace, w *telemetry.Weighed, of func(*telemetry.Weighed) []telemetry.Part) float64 {
	var peers []float64
	for i := range t.Weighed {
		o := &t.Weighed[i]
		if work := part(of(o), "work"); o != w && !o.Out && o.Hit == w.Hit && work > 0 {
			peers = append(peers, work)
		}
	}
	if len(peers) == 0 {
		return 0
	}
	slices.Sort(peers)
	return part(of(w), "work") / ((peers[(len(peers)-1)/2] + peers[len(peers)/2]) / 2)
}

// part returns a part of a price, in seconds; 0 if it has none.
func part(of []telemetry.Part, name string) float64 {
	for _, p := range of {
		if p.Name == name {
			return p.Value
		}
	}
	return 0
}

// gap is the time between P's answer and the first token, of which engines do not say what was transfer and what queue:
// the expected transfer, or the expected lack of room, has to make up most of it.
func gap(t *telemetry.Trace, whole time.Duration) spent {
	name, expected := words.Plain(t.Decode), max(t.ExpectedFirst-t.ExpectedPrefill, 0)
	s := spent{becauseGap, whole, 0, fmt.Sprintf("the KV transfer to %s and its queue took %s", name, took(whole))}
	if w := weighed(t, t.Decode); w != nil {
		switch transfer, full := kvstate.Seconds(part(w.Decode, "transfer")), kvstate.Seconds(part(w.Decode, "overflow")); {
		case 2*full > whole:
			s.because, s.words = becauseQueue+"D", fmt.Sprintf("its KV waited for memory of %s for %s", name, took(whole))
		case 2*transfer > whole:
			s.because, s.words = becauseTransfer, fmt.Sprintf("the KV transfer to %s took %s", name, took(whole))
		}
		expected -= min(kvstate.Seconds(part(w.Decode, "overflow")), expected)
	}
	if t.ExpectedFirst > 0 {
		s.lost = whole - expected
	}
	if s.lost > whole/3 {
		s.words += fmt.Sprintf(", where %s was expected", took(expected))
	}
	return s
}

// writing is the time from the first token to the end.
func writing(t *telemetry.Trace, whole time.Duration) spent {
	name := words.Plain(t.Decode)
	if t.Used == nil || t.Used.Answer == nil || *t.Used.Answer < 2 {
		return spent{becauseAnswer, whole, 0, fmt.Sprintf("%s wrote its answer in %s", name, took(whole))}
	}
	n := *t.Used.Answer - 1
	s := spent{becauseAnswer, whole, 0, fmt.Sprintf("%s wrote %d tokens in %s, %s each", name, n+1, took(whole),
		took(whole/time.Duration(n)))}
	if t.ExpectedToken == 0 {
		return s
	}
	expected := time.Duration(n) * t.ExpectedToken
	if s.lost = whole - expected; 2*whole > 3*expected {
		s.because = becausePace
		s.words += fmt.Sprintf(" where %s was expected, unless the client was slow to read them", took(t.ExpectedToken))
	}
	return s
}

// undivided is the time of the last hop of a request whose first token was not seen.
func undivided(t *telemetry.Trace, whole time.Duration) spent {
	name := words.Plain(t.Decode)
	if t.Route != "decode_alone" && t.Prefill == "" {
		return spent{becauseEngine, whole, 0, fmt.Sprintf("%s answered in %s", name, took(whole))}
	}
	s := spent{becauseDecode, whole, 0, fmt.Sprintf("%s took %s to answer", name, took(whole))}
	if t.Used == nil || t.Used.Answer == nil || t.ExpectedToken == 0 || t.ExpectedFirst == 0 {
		return s
	}
	n := *t.Used.Answer
	expected := max(t.ExpectedFirst-t.ExpectedPrefill, 0) + time.Duration(max(n-1, 0))*t.ExpectedToken
	s.words = fmt.Sprintf("%s took %s for an answer of %d tokens", name, took(whole), n)
	if s.lost = whole - expected; 2*whole <= 3*expected {
		s.because = becauseAnswer
		return s
	}
	s.words += fmt.Sprintf(", where %s was expected: in its queue, the KV transfer or its pace", took(expected))
	return s
}

// bySlowness sorts requests by how much they lost, those that lost most first.
func bySlowness(all []telemetry.Trace) {
	lost := make(map[endKey]time.Duration, len(all))
	for i := range all {
		lost[keyOf(&all[i])] = verdictOf(&all[i]).lost
	}
	slices.SortStableFunc(all, func(a, b telemetry.Trace) int {
		return cmp.Or(cmp.Compare(lost[keyOf(&b)], lost[keyOf(&a)]), cmp.Compare(b.Took, a.Took),
			strings.Compare(a.RequestID, b.RequestID))
	})
}
