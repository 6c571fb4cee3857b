package status

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/picker/roles"
	"tandem/status/words"
)

// Request returns the requests with an id of all replicas, newest first; with alone those that this one planned. There
// may be several: clients choose ids.
func (f *Feed) Request(ctx context.Context, id string, alone bool) ([]telemetry.Trace, Asked) {
	got := f.gather(ctx, question{Since: -1, Traces: allRecent, ID: id}, alone)
	return withID(got.traces(time.Now()), id), f.asked(&got) // a replica of an earlier release reports all
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
	if t.Waited > 0 {
		fmt.Fprintf(w, "It waited %s for %s%s.\n",
			words.Millis(milliseconds(t.Waited)), words.Plain(t.WaitedFor), behindOf(t))
	}
	if len(t.Replicas) > 1 {
		fmt.Fprintf(w, "The replicas that served it: %s.\n", words.Plain(strings.Join(t.Replicas, ", ")))
	}
	prompt := fmt.Sprintf("Prompt: about %d tokens.", t.PromptTokens)
	if t.CachedTokens >= 0 {
		prompt = fmt.Sprintf("Prompt: %d tokens, %d of them cached at prefill.", t.PromptTokens, t.CachedTokens)
	}
	fmt.Fprint(w, prompt, " Took: ")
	printTimes(w, t)
	fmt.Fprint(w, words.Used(t.Used))
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
	took := func(d time.Duration) string { return words.Millis(milliseconds(d)) }
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
		if t.ExpectedFirst > 0 && (t.Used == nil || t.Used.FirstToken == 0) { // vLLM, for one, sends headers at once
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
	case status == "no answer":
		return "the client got no answer"
	}
	return "still running, or its end is not reported yet"
}

// failedHop names a hop that failed, and its endpoint.
func failedHop(h *telemetry.FailedHop) string {
	hop := map[string]string{
		"prefill": "prefill", "decode": "decode", "encode": "encode",
		"turn":              "prefill, which was to fetch the conversation's last turn",
		"router":            "the replica of Tandem that decided",
		"hand_over_expired": "the hand-over from prefill to decode was too old",
		"hand_over_spent":   "the hand-over from prefill to decode was consumed already",
		"pool_gone":         "the pool was removed or changed between the hops",
	}[h.Hop]
	if hop = cmp.Or(hop, words.Plain(h.Hop)); h.Endpoint != "" {
		hop += " at " + words.Plain(h.Endpoint)
	}
	return hop
}

// refusal begins the name of what ended a request that Tandem itself refused between its hops; its code follows.
const refusal = "Tandem's own error "

// failedHops counts the hops that failed since then, those that ended a request and those after which it was planned
// again, and names the latest request that failed. recent has the newest first.
func (f *Failed) failedHops(recent []telemetry.Trace, since time.Time) {
	ended, again := map[string]int{}, map[string]int{}
	for i := range recent {
		t := &recent[i]
		if !t.Started.Add(t.Took).After(since) {
			continue
		}
		hops := t.Failed
		if t.Ended == telemetry.EndedTicketRefused {
			f.TicketID = cmp.Or(f.TicketID, t.RequestID)
		} else if t.HasFailed() {
			f.FailedID = cmp.Or(f.FailedID, t.RequestID)
			last := telemetry.FailedHop{Hop: "decode", Endpoint: t.AnsweredBy()}
			if t.Final {
				last.Hop = "prefill"
			}
			n := len(hops)
			switch {
			case n > 0 && n >= t.Plans && t.Ended != telemetry.EndedCut: // none answered the last plan
				hops, last = hops[:n-1], hops[n-1]
			case t.Refused != "": // Tandem did not ask the last plan's endpoint
				last = telemetry.FailedHop{Hop: refusal + t.Refused}
			}
			f.EngineFailed = f.EngineFailed || !strings.HasPrefix(last.Hop, refusal)
			ended[failedHop(&last)]++
		}
		for _, hop := range hops {
			again[failedHop(&hop)]++
		}
	}
	f.FailedHops, f.AgainHops = counted(ended), counted(again)
}

// counted lists names, the most frequent first: "prefill at p1:1 (2), decode at d1:1".
func counted(counts map[string]int) string {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(counts[b]-counts[a], strings.Compare(a, b))
	})
	for i, name := range names {
		if counts[name] > 1 {
			names[i] = fmt.Sprintf("%s (%d)", name, counts[name])
		}
	}
	return words.List(names)
}

// failuresPage returns the page of the documentation about what failed.
func (f *Failed) failuresPage() string {
	if f.FailedHops != "" && !f.EngineFailed {
		return "operations.md#errors-that-tandem-answers"
	}
	return "operations.md#when-an-engine-fails"
}

// whereFailed ends the sentence that says how many requests failed: where, and how to find them.
func (f *Failed) whereFailed() string {
	s := "."
	if f.FailedHops != "" {
		s = ": " + f.FailedHops + "."
	}
	if f.FailedID != "" {
		s += fmt.Sprintf(" The latest is %.40s: tandem requests --failed lists them.", f.FailedID)
	}
	if f.AgainHops != "" {
		s += " Hops of requests that were planned again: " + f.AgainHops + "."
	}
	return s
}

// ticketsRefused says how many tickets were refused, why, and how to find the requests.
func (f *Failed) ticketsRefused() string {
	were := "tickets were"
	if f.TicketsRefused == 1 {
		were = "ticket was"
	}
	s := fmt.Sprintf("%d %s refused in the last minute, and the requests failed: replicas have different ticket keys, "+
		"or releases. No engine is at fault.", f.TicketsRefused, were)
	if f.TicketID != "" {
		s += fmt.Sprintf(" The latest is %.40s: tandem requests --failed lists them.", f.TicketID)
	}
	return s
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

// printBusy says how busy prefill was, and what of the price of the chosen prefill endpoint, or of the lowest price, is
// for that: it may be most of it.
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

// decided describes a recorded decision in a sentence.
func decided(t *telemetry.Trace) string {
	switch {
	case t.Prefill == "" && t.Route != "decode_alone":
		route := routeOf(&telemetry.Trace{Route: t.Route, Reason: t.Reason})
		return "It went to " + words.Plain(t.Decode) + " as it came (" + route + ")."
	case t.Prefill == "" && t.Reason == "no_prefill" && otherGroups(t):
		return "Decode alone on " + words.Plain(t.Decode) + ": " + otherGroup + " (no_prefill)."
	case t.Prefill == "" && t.Reason != "" && t.Reason != "cheaper":
		return "Decode alone on " + words.Plain(t.Decode) + ": " + cmp.Or(words.Because(t.Reason), words.Plain(t.Reason)) +
			" (" + words.Plain(t.Reason) + ")."
	}
	switch {
	case t.Prefill == "":
		return holding(t, decidedAlone(t), t.Decode)
	case t.Decode == "":
		return decidedSplit(t)
	}
	return holding(t, decidedSplit(t), t.Prefill, t.Decode)
}

// holding adds to a sentence what the chosen endpoints held of the prompt, as far as it is worth saying.
func holding(t *telemetry.Trace, sentence string, chosen ...string) string {
	held := ""
	for _, address := range chosen {
		w := weighed(t, address)
		if w == nil || t.PromptBlocks == 0 || 10*w.Hit < t.PromptBlocks {
			continue
		}
		percent := min(100*w.Hit/t.PromptBlocks, 100)
		if held == "" {
			held = fmt.Sprintf("; by the prefix index %s holds %d %% of the prompt", words.Plain(address), percent)
		} else {
			held += fmt.Sprintf(", %s %d %%", words.Plain(address), percent)
		}
	}
	return strings.TrimSuffix(sentence, ".") + held + "."
}

// decidedSplit describes a decision for two endpoints.
func decidedSplit(t *telemetry.Trace) string {
	if t.Decode == "" && t.Final {
		return "Split: " + words.Plain(t.Prefill) + " computed the prompt, and its answer was the client's."
	}
	if t.Decode == "" {
		return "Split: " + words.Plain(t.Prefill) +
			" was to compute the prompt, and failed. No decode endpoint was asked."
	}
	answers := "answers"
	if t.Refused != "" {
		answers = "was to answer"
	}
	s := fmt.Sprintf("Split: %s computes the prompt, %s %s", words.Plain(t.Prefill), words.Plain(t.Decode), answers)
	if t.Always {
		return s + splitAlways
	}
	paid := at(t, t.Prefill, prefillOf) + at(t, t.Decode, decodeOf)
	why, all := kept(t)
	more := least(t, func(w *telemetry.Weighed) []telemetry.Part {
		if w.NotAlone != "" {
			return nil
		}
		return w.Alone
	}) - paid
	switch {
	case len(t.Weighed) == 0 && t.NotAlone:
		return s + ": decode endpoints were too busy to compute it, too, or it is too long for that."
	case len(t.Weighed) == 0 && t.Cheaper != 0:
		return s + compared(t.Cheaper, "decode alone")
	case all:
		return s + notOffered(why == telemetry.NotAloneTooLong, least(t, aloneOf)-paid)
	case finite(more):
		return s + compared(more, "decode alone")
	}
	return s + "."
}

// decidedAlone describes a decision for decode alone that prices made.
func decidedAlone(t *telemetry.Trace) string {
	s := "Decode alone on " + words.Plain(t.Decode)
	more := least(t, prefillOf) + least(t, decodeOf) - at(t, t.Decode, aloneOf)
	switch {
	case len(t.Weighed) == 0 && t.Cheaper != 0:
		return s + compared(t.Cheaper, "splitting it")
	case finite(more) && more < 0 && len(t.Failed) > 0:
		return s + ": pairs that failed it, or failed lately, were left out."
	case finite(more):
		return s + compared(more, "splitting it")
	case t.Reason == "cheaper":
		return s + ": " + words.Because(t.Reason) + "."
	}
	return s + "."
}

func prefillOf(w *telemetry.Weighed) []telemetry.Part { return w.Prefill }
func decodeOf(w *telemetry.Weighed) []telemetry.Part  { return w.Decode }
func aloneOf(w *telemetry.Weighed) []telemetry.Part   { return w.Alone }

// otherGroups reports whether a prefill endpoint could take the request, but no decode endpoint of its group.
func otherGroups(t *telemetry.Trace) bool {
	return slices.ContainsFunc(t.Weighed, func(w telemetry.Weighed) bool {
		return !w.Out && w.Role == kvstate.RolePrefill.String()
	})
}

// kept reports whether answers that would suffer kept every decode endpoint from doing both, and why: for this prompt
// alone, if that is so at one of them.
func kept(t *telemetry.Trace) (why string, all bool) {
	for i := range t.Weighed {
		w := &t.Weighed[i]
		switch {
		case w.Out || w.Alone == nil:
		case w.NotAlone == "":
			return "", false
		case why != telemetry.NotAloneTooLong:
			why = w.NotAlone
		}
	}
	return why, why != ""
}

// least returns the lowest price of one kind; infinite if no endpoint has one.
func least(t *telemetry.Trace, of func(*telemetry.Weighed) []telemetry.Part) float64 {
	out := math.Inf(1)
	for i := range t.Weighed {
		if !t.Weighed[i].Out {
			out = min(out, sum(of(&t.Weighed[i])))
		}
	}
	return out
}

// at returns an endpoint's price of one kind; infinite if it has none.
func at(t *telemetry.Trace, address string, of func(*telemetry.Weighed) []telemetry.Part) float64 {
	if w := weighed(t, address); w != nil {
		return sum(of(w))
	}
	return math.Inf(1)
}

// weighed returns an endpoint as it was weighed; nil if it was not.
func weighed(t *telemetry.Trace, address string) *telemetry.Weighed {
	i := slices.IndexFunc(t.Weighed, func(w telemetry.Weighed) bool { return w.Endpoint == address })
	if i < 0 {
		return nil
	}
	return &t.Weighed[i]
}

func finite(v float64) bool { return !math.IsInf(v, 0) && !math.IsNaN(v) }
