package status

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"tandem/extproc/telemetry"
	"tandem/picker/roles"
	"tandem/status/words"
)

// Request returns the requests with an id of all replicas, newest first; with alone those that this one planned. There
// may be several: clients choose ids.
func (f *Feed) Request(ctx context.Context, id string, alone bool) ([]telemetry.Trace, Asked) {
	got := f.gather(ctx, question{Since: -1, Traces: allRecent, ID: id}, alone)
	return named(withID(got.traces(time.Now()), id), f.names()), f.asked(&got) // a replica of an earlier release reports all
}

// ScopeHeader is the header of an answer about requests that has the replicas that were asked, for people, if they are
// not all.
const ScopeHeader = "tandem-scope"

// Asked is which replicas were asked for their requests.
type Asked struct {
	Scope string   // as [Status.Scope], and whether Redis is the reason
	Gone  []string // replicas that are gone, and their requests with them
	all   bool     // as far as this replica knows
}

func (f *Feed) asked(got *answers) Asked {
	s := Status{
		Replicas: make([]Replica, len(got.reports)), Silent: got.silent, Gone: got.gone, Sharing: f.source.Sharing(),
	}
	out := Asked{Scope: scopeOf(&s)}
	down := s.Sharing.Redis && (!s.Sharing.Up || got.noRedis)
	known := max(len(s.Replicas)+len(s.Silent), s.Sharing.Replicas, s.Sharing.Configured)
	out.all = !down && len(s.Replicas) >= known
	switch {
	case down:
		out.Scope += ": Redis does not answer"
	case len(got.silent) > 0:
		out.Scope += "; no answer from " + words.Plain(words.List(got.silent))
	}
	for _, g := range got.gone {
		out.Gone = append(out.Gone, words.Plain(g.Name))
	}
	for _, g := range got.restarted {
		out.Gone = append(out.Gone, words.Plain(g.Name)+" before it was started again")
	}
	return out
}

// missing says that no request was found, and where it was looked for.
func (a *Asked) missing() string {
	text := "no request with this id is among the latest 256 of each replica (asked: " + a.Scope + ").\n" +
		"A replica that ends takes the requests that it planned with it"
	if len(a.Gone) > 0 {
		text += ", as did " + words.List(a.Gone)
	}
	return text + ".\nRequests that Tandem refused are not kept: the answer says why."
}

func withID(all []telemetry.Trace, id string) []telemetry.Trace {
	return slices.DeleteFunc(all, func(t telemetry.Trace) bool { return t.RequestID != id })
}

// PrintDecided writes the decisions about requests for a terminal, as they were recorded, and the roles that endpoints
// of their pools have now.
func PrintDecided(w io.Writer, requests []telemetry.Trace, now map[string]roles.Advice) {
	for i := range requests {
		if i > 0 {
			fmt.Fprintln(w)
		}
		t := &requests[i]
		printDecided(w, t, time.Now())
		printRoles(w, now[t.Pool].Words, func(addr string) string { return addr }, time.Now(), t.Started)
		printVerdict(w, t)
	}
}

func printDecided(w io.Writer, t *telemetry.Trace, now time.Time) {
	fmt.Fprintf(w, "Request %s, %s, %s.\n", words.Plain(t.RequestID), words.Ago(now, t.Started), endOf(t, now))
	printWay(w, t)
	printPrices(w, t)
}

// Decided is a request with what was decided about it, in sentences for people, one a line.
type Decided struct {
	telemetry.Trace
	Words string `json:"words"`
}

func inWords(requests []telemetry.Trace) []Decided {
	out := make([]Decided, len(requests))
	for i := range requests {
		var said strings.Builder
		printWay(&said, &requests[i])
		printBusy(&said, &requests[i])
		printVerdict(&said, &requests[i])
		out[i] = Decided{requests[i], said.String()}
	}
	return out
}

// printWay prints what was decided about a request, what failed, and how long it took.
func printWay(w io.Writer, t *telemetry.Trace) {
	if t.Ended == telemetry.EndedCut {
		fmt.Fprintf(w, "The answer broke off after %s at %s.\n",
			words.Millis(milliseconds(t.Took)), words.Plain(t.AnsweredBy()))
	}
	if t.Ended == telemetry.EndedTicketRefused {
		fmt.Fprintln(w, "Its ticket was refused: the replica that was to send it on has other ticket keys, "+
			"or another release.\nNo endpoint is at fault (docs/howto/several-replicas.md#tickets-are-refused).")
	} else if t.Refused != "" {
		fmt.Fprintf(w, "Tandem ended it with the error %s (docs/operations.md#errors-that-tandem-answers).\n",
			words.Plain(t.Refused))
	} else if t.Status >= 400 && t.Status < 500 {
		fmt.Fprintf(w, "%s refused it: its answer says why.\n", words.Plain(t.AnsweredBy()))
	}
	fmt.Fprintln(w, decided(t))
	if t.Replans > 0 {
		fmt.Fprintf(w, "That is plan %d: a hop of the former failed.\n", t.Replans+1)
	}
	for _, hop := range t.Failed {
		fmt.Fprintf(w, "Failed: %s.\n", failedHop(&hop))
	}
	switch {
	case t.Waited > 0 && t.ForMemory:
		fmt.Fprintf(w, "It waited %s until conversations that come back left room for its KV at %s%s.\n",
			words.Millis(milliseconds(t.Waited)), words.Plain(t.WaitedFor), behindOf(t))
	case t.Waited > 0:
		fmt.Fprintf(w, "It waited %s for %s%s.\n",
			words.Millis(milliseconds(t.Waited)), words.Plain(t.WaitedFor), behindOf(t))
	}
	printConversation(w, t)
	if len(t.Replicas) > 1 {
		fmt.Fprintf(w, "The replicas that served it: %s.\n", words.Plain(strings.Join(t.Replicas, ", ")))
	}
	prompt := fmt.Sprintf("Prompt: about %d tokens.", t.PromptTokens)
	if t.CachedTokens >= 0 {
		prompt = fmt.Sprintf("Prompt: %d tokens, %d of them cached at prefill.", t.PromptTokens, t.CachedTokens)
	}
	if t.PrefillTime+t.FirstByte+t.DecodeTime == 0 {
		fmt.Fprintln(w, prompt)
	} else {
		fmt.Fprint(w, prompt, " Took: ")
		printTimes(w, t)
	}
	fmt.Fprint(w, words.Used(t.Used, t.ExpectedFirst))
}

// behindOf says behind how many requests one waited, and where these were if not all here.
func behindOf(t *telemetry.Trace) string {
	if t.Behind+t.BehindRemote == 0 {
		return ""
	}
	return ", behind " + places(t.Behind, t.BehindRemote)
}

// places counts requests of this replica and of others.
func places(here, remote int) string {
	switch {
	case remote == 0:
		return words.Count(here, "request")
	case here == 0:
		return words.Count(remote, "request") + " in other replicas"
	}
	return fmt.Sprintf("%s here and %d in other replicas", words.Count(here, "request"), remote)
}

// printTimes prints how long the hops took, as far as it is known, and how long they were expected to take.
func printTimes(w io.Writer, t *telemetry.Trace) {
	switch {
	case t.Prefill != "" && t.Decode == "" && !t.Final && t.PrefillTime > 0:
		fmt.Fprintf(w, "prefill failed after %s, ", took(t.PrefillTime))
	case t.Prefill != "":
		fmt.Fprintf(w, "prefill %s (expected %s), ", took(t.PrefillTime), took(t.ExpectedPrefill))
	case t.PrefillTime > 0:
		fmt.Fprintf(w, "prefill of a former plan %s, ", took(t.PrefillTime))
	}
	switch split := t.Prefill != "" && t.Decode != "" && t.PrefillTime > 0; {
	case t.Streamed && split: // the prompt was computed before: the first token comes soon after the headers
		fmt.Fprintf(w, "headers of the answer after %s (first token expected after %s), last hop %s.\n",
			took(t.FirstByte), took(t.ExpectedFirst), took(t.DecodeTime))
	case t.Streamed:
		fmt.Fprintf(w, "headers of the answer after %s, last hop %s.\n", took(t.FirstByte), took(t.DecodeTime))
		if t.ExpectedFirst > 0 && t.FirstToken == 0 { // vLLM, for one, sends headers at once
			fmt.Fprintf(w, "The first token was expected after %s. "+
				"When it came is not known: headers may come before it.\n", took(t.ExpectedFirst))
		}
	default:
		whole := cmp.Or(t.Took, t.FirstByte) // the hop has the clock of tickets
		fmt.Fprintf(w, "whole answer %s, last hop %s.\n", took(whole), took(min(t.DecodeTime, whole)))
		if t.ExpectedFirst > 0 && t.FirstByte > 0 {
			fmt.Fprintf(w, "The first token was expected after %s. "+
				"When it came is not known, since the answer was not streamed.\n", took(t.ExpectedFirst))
		}
	}
	if t.FirstToken > 0 && t.Used == nil { // else it is among what was used
		fmt.Fprintf(w, "The first token came after %s.\n", took(t.FirstToken))
	}
}

// endOf describes the end of a request.
func endOf(t *telemetry.Trace, now time.Time) string {
	switch status := statusOf(t, now); {
	case t.Status > 0:
		return "status " + status
	case status == "client left":
		return "the client left before the answer"
	case status == "unknown" && len(t.GoneWith) > 0:
		return "unknown: lost when " + words.Plain(words.List(t.GoneWith)) + " ended without a shutdown"
	case status == "unknown":
		return "its end is unknown"
	case status == "unknown here":
		return "still running, or another replica knows its end"
	case status == "no answer":
		return "the client got no answer"
	}
	return "still running, or its end is not reported yet"
}

// printPrices writes the recorded price of each endpoint.
func printPrices(w io.Writer, t *telemetry.Trace) {
	if len(t.Weighed) == 0 {
		if t.Prefill != "" || t.Route == "decode_alone" {
			fmt.Fprintln(w, "The price of each endpoint was not kept: prices are of ten decisions a second at most.\n"+
				"tandem explain --tokens shows those of now.")
		}
		return
	}
	printBusy(w, t)
	fmt.Fprintln(w)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, priceColumns)
	for i := range t.Weighed {
		p := &t.Weighed[i]
		decode, alone := p.Decode, p.Alone
		if t.Prefill == "" && alone == nil { // it could not be split: the price of its only hop is that of both
			decode, alone = nil, p.Decode
		}
		fmt.Fprintf(table, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\n", words.Plain(p.Endpoint),
			words.Role(p.Role, p.Word), held(p.Out, p.Hit), price(p.Prefill != nil, sum(p.Prefill)), price(decode != nil, sum(decode)),
			price(alone != nil, sum(alone)), noteOf(t, p))
	}
	_ = table.Flush()
	fmt.Fprintln(w, "\nThe prices of the last plan, as they were then. --output json has their parts.")
}

// noteOf is the note at an endpoint in the table of a request's prices.
func noteOf(t *telemetry.Trace, p *telemetry.Weighed) (note string) {
	chosen := p.Endpoint == t.Prefill || p.Endpoint == t.Decode
	if chosen {
		note = "chosen"
	}
	switch {
	case p.NotAlone != "" && t.Prefill != "":
		note = words.Join(note, notAlone(p.NotAlone == telemetry.NotAloneTooLong))
	case p.NotAlone != "" && chosen:
		note = "chosen since there is no other way, though its answers suffer"
	}
	why := words.Plain(strings.ReplaceAll(p.Why, "failed_request", "it failed this request"))
	switch {
	case p.Out && chosen:
		note += ", since no other was left (" + why + ")"
	case p.Out && why == "":
		note = words.Join(note, "left out")
	case p.Out:
		note = words.Join(note, "left out: "+why)
	case p.Prefill == nil && p.Decode == nil && p.Alone == nil:
		note = words.Join(note, "not weighed: one endpoint was to do both")
	}
	return note
}

// printBusy says how busy prefill was, and how much of the price of the chosen prefill endpoint, or of the lowest
// price, that makes up: it may be most of it.
func printBusy(w io.Writer, t *telemetry.Trace) {
	var best *telemetry.Weighed
	for i := range t.Weighed {
		p := &t.Weighed[i]
		if p.Out || p.Prefill == nil || best != nil && best.Endpoint == t.Prefill {
			continue
		}
		if best == nil || p.Endpoint == t.Prefill || sum(p.Prefill) < sum(best.Prefill) {
			best = p
		}
	}
	if best == nil {
		return
	}
	if t.PrefillBusy > 0 {
		fmt.Fprintf(w, "Prefill endpoints were %.0f %% busy.\n", 100*t.PrefillBusy)
	}
	for _, part := range best.Prefill {
		if part.Name == "others" {
			fmt.Fprintf(w, "Of the price of prefill at %s, %s are for the delay of other requests.\n",
				words.Plain(best.Endpoint), words.Millis(1000*part.Value))
		}
	}
}

// sum returns the sum of parts; infinite if there are none.
func sum(parts []telemetry.Part) float64 {
	if parts == nil {
		return math.Inf(1)
	}
	all := 0.
	for _, p := range parts {
		all += p.Value
	}
	return all
}

// ends keeps what was found out about ends of requests that this replica does not know itself: what another replica
// reported, or that it was lost with one. The other may be gone later, or Redis, and with it the list of those gone.
type ends struct {
	mu    sync.Mutex
	found map[endKey]telemetry.Trace // without prices
}

// endKey identifies a request.
type endKey struct {
	id      string
	started int64 // Unix microseconds
}

func keyOf(t *telemetry.Trace) endKey { return endKey{t.RequestID, t.Started.UnixMicro()} }

func ended(t *telemetry.Trace) bool { return t.Status > 0 || t.Ended != "" }

// known reports whether something is known about the end of a request.
func known(t *telemetry.Trace) bool { return ended(t) || len(t.GoneWith) > 0 }

// take replaces a trace by one that was kept, which has no prices.
func take(t *telemetry.Trace, kept telemetry.Trace) {
	kept.Weighed = t.Weighed
	*t = kept
}

// of returns the ends that are kept of requests whose own traces lack them, for the other replicas.
func (e *ends) of(own []telemetry.Trace) (out []telemetry.Trace) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range own {
		if kept, found := e.found[keyOf(&own[i])]; found && ended(&kept) && !ended(&own[i]) {
			out = append(out, kept)
		}
	}
	return out
}

// fill completes requests with ends that were kept before, and keeps the ends that this replica's own traces do not
// have.
func (e *ends) fill(all, own []telemetry.Trace) {
	lacks := map[endKey]bool{}
	for i := range own {
		if !known(&own[i]) {
			lacks[keyOf(&own[i])] = true
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range all {
		t := &all[i]
		key := keyOf(t)
		before, found := e.found[key]
		switch {
		case known(t) && lacks[key] && (!found || ended(t)):
			kept := *t
			kept.Weighed = nil
			e.keep(key, kept)
		case found && !ended(t):
			take(t, before)
		}
	}
}

// keep keeps an end, in the place of the oldest if there are as many as a replica has traces.
func (e *ends) keep(key endKey, t telemetry.Trace) {
	if e.found == nil {
		e.found = map[endKey]telemetry.Trace{}
	}
	e.found[key] = t
	if len(e.found) <= allRecent {
		return
	}
	oldest := key
	for k := range e.found {
		if k.started < oldest.started {
			oldest = k
		}
	}
	delete(e.found, oldest)
}
