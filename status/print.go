package status

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"tandem/extproc/telemetry"
	"tandem/status/words"
	"tandem/status/written"
)

// Print writes a status for a terminal: most of what the page shows, in lines.
func Print(w io.Writer, s *Status) {
	ready := "ready"
	if !s.Ready {
		ready = "NOT READY"
	}
	m := &s.Minute
	fmt.Fprintf(w, "Tandem %s, %s, up %s, %d booked; %s\n\n",
		s.Version, ready, s.Now.Sub(s.Started).Round(time.Second), s.Reservations, s.Scope)
	printAttention(w, s.Attention)
	fmt.Fprintf(w, "last minute  %s requests/s  %s failed/s  %s refused/s  %s replans/s  %s\n",
		words.Number(m.OK+m.Rejected+m.Failed+m.Gone), words.Number(m.Failed), words.Number(m.Refused),
		words.Number(m.Replans),
		spark(s.Points, func(p *Point) float64 { return p.OK + p.Rejected + p.Failed + p.Gone }))
	fmt.Fprintf(w, "headers      p50 %s  p99 %s   prefill p50 %s  p99 %s   deciding p50 %s  p99 %s\n",
		words.About(m.FirstByte50), words.About(m.FirstByte99), words.About(m.Prefill50), words.About(m.Prefill99),
		words.About(m.Decide50), words.About(m.Decide99))
	if s.FailedHops != "" {
		fmt.Fprintf(w, "hops failed  of failed requests: %s\n", words.Plain(s.FailedHops))
	}
	if s.AgainHops != "" {
		fmt.Fprintf(w, "hops failed  of requests planned again: %s\n", words.Plain(s.AgainHops))
	}
	cached := "-"
	if all := m.Cached + m.Computed; all > 0 {
		cached = fmt.Sprintf("%.0f %%", 100*m.Cached/all)
	}
	fmt.Fprintf(w, "at prefill   %s prompt tokens/s, %s cached\n", words.Number(m.Cached+m.Computed), cached)
	if m.Judged > 0 || m.Tokens > 0 {
		fmt.Fprintf(w, "answers      %s tokens/s   first token p50 %s  p99 %s   per token p50 %s   targets kept %s\n",
			words.Number(m.Tokens), words.About(m.FirstToken50), words.About(m.FirstToken99),
			words.About(m.PerToken50), words.Share(m.Kept, m.Judged))
	}
	for i := range s.Pools {
		printPool(w, &s.Pools[i], s.Now)
	}
	printReplicas(w, s)
	printEnvoys(w, s.Envoys, s.Now)
	printFlow(w, s.Flow, s.Pools)
	printRecent(w, s.Recent)
}

// scopeOf describes the replicas that a status is about.
func scopeOf(s *Status) string {
	asked := len(s.Replicas) + len(s.Silent)
	all := max(asked, s.Sharing.Replicas, s.Sharing.Configured)
	othersAsked := len(s.Gone) > 0 || s.Sharing.Replicas < 2 // one that is gone was asked before its lease ended
	switch {
	case all > 1 && len(s.Replicas) == all:
		return fmt.Sprintf("all %d replicas", all)
	case asked == 1 && all > 1 && (!othersAsked || !s.Sharing.Up):
		return fmt.Sprintf("this replica, 1 of %d", all)
	case all > 1:
		return fmt.Sprintf("%d of %d replicas", len(s.Replicas), all)
	case s.Sharing.Redis && s.Sharing.Up:
		return "the only replica"
	}
	return "this replica"
}

// printReplicas shows the replicas, if there are several.
func printReplicas(w io.Writer, s *Status) {
	if len(s.Replicas)+len(s.Silent)+len(s.Gone) < 2 {
		return
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "  replica\tstate\trelease\tup\tbooked")
	byName := slices.Clone(s.Replicas)
	slices.SortFunc(byName, func(a, b Replica) int { return cmp.Compare(a.Name, b.Name) })
	for _, r := range byName {
		state := "ready"
		if !r.Ready {
			state = "NOT READY"
		}
		if !r.Redis {
			state += ", without Redis"
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%d\n",
			words.Plain(r.Name), state, words.Plain(r.Version), s.Now.Sub(r.Started).Round(time.Second), r.Reservations)
	}
	silent := "NO ANSWER"
	if s.Sharing.NoAnswer || !s.Sharing.Up {
		silent = "not asked, without Redis"
	}
	for _, name := range s.Silent {
		fmt.Fprintf(t, "  %s\t%s\t-\t-\t-\n", words.Plain(name), silent)
	}
	for _, g := range s.Gone {
		fmt.Fprintf(t, "  %s\tGONE, last heard %s\t-\t-\t-\n", words.Plain(g.Name),
			words.MinutesAgo(s.Now.Sub(g.Heard)))
	}
	_ = t.Flush()
}

func printAttention(w io.Writer, notices []Notice) {
	for _, n := range notices {
		mark := "warning"
		if n.Bad {
			mark = "PROBLEM"
		}
		fmt.Fprintf(w, "%s  %s (docs/%s)\n", mark, words.Plain(n.Text), n.Doc)
	}
	if len(notices) > 0 {
		fmt.Fprintln(w)
	}
}

// printEnvoys shows the Envoys' configuration versions.
func printEnvoys(w io.Writer, envoys []Envoy, now time.Time) {
	if len(envoys) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "  envoy\trelease\tconfiguration\tconnected for")
	for _, e := range envoys {
		version := cmp.Or(e.Version, "none")
		if e.Pending {
			version += ", not answered yet"
		}
		if e.Refused != "" {
			version += ", REFUSED " + e.Refused
		}
		connected := now.Sub(e.Since).Round(time.Second).String()
		if !e.Left.IsZero() {
			connected = "LEFT " + words.MinutesAgo(now.Sub(e.Left))
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\n", words.Plain(e.Name), cmp.Or(e.Build, "-"), version, connected)
	}
	_ = t.Flush()
}

func printPool(w io.Writer, p *Pool, now time.Time) {
	fmt.Fprintf(w, "\npool %s (%s), prefix index %d blocks%s%s\n", words.Plain(p.Name),
		words.Plain(strings.Join(p.Models, ", ")), p.IndexBlocks, written1m(&p.Output), words.After(", ", p.Wanted))
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	notes := slices.ContainsFunc(p.Endpoints, func(e Endpoint) bool { return e.Unpaired || e.Now != nil })
	end := "\n"
	if notes {
		end = "\tnote\n"
	}
	fmt.Fprint(t, "  endpoint\trole\thealth\trequests\tprompt tokens\tof latest\tcache hits\tKV comes at\twrites\t"+
		"each token in\tof its peers' time"+end)
	for _, e := range p.Endpoints {
		hits, group, transfer, word := "-", "", "-", ""
		if e.Now != nil {
			word = e.Now.Word
		}
		if e.Transfer > 0 {
			transfer = words.PerSecond(e.Transfer)
		}
		if e.HitShare >= 0 {
			hits = fmt.Sprintf("%.0f %%", 100*e.HitShare)
		}
		if e.Group != "" {
			group = " (" + e.Group + ")"
		}
		output := "-"
		if e.Rate >= 0 {
			output = words.Number(e.Rate) + " tokens/s"
		}
		fmt.Fprintf(t, "  %s%s\t%s\t%s\t%d\t%d\t%d\t%s\t%s\t%s\t%s\t%s", words.Plain(e.Name), words.Plain(group),
			words.Role(e.Role, word), words.State(e.State, e.Paused), e.Requests, e.Tokens, e.Hops, hits, transfer,
			output, words.Millis(e.PerToken), besidePeers(&e))
		if e.Unpaired {
			fmt.Fprint(t, "\tnever used: pairs with no decode endpoint")
		} else if e.Now != nil {
			fmt.Fprintf(t, "\t%s for %s: %s", words.Plain(word), words.Since(now, e.Now.Since), words.Plain(e.Now.Why))
		}
		fmt.Fprintln(t)
	}
	_ = t.Flush()
	for _, text := range p.Unknown {
		fmt.Fprintf(w, "  not reported by engines, so pairs may differ in it: %s\n", words.Plain(text))
	}
	printMemory(w, &p.Memory)
	if len(p.Waiting) > 0 {
		fmt.Fprintf(w, "  not paired yet, since its engine has not said what it is: %s\n", words.Plain(some(p.Waiting)))
	}
}

// besidePeers returns how long an engine takes, compared with its peers: for prefill, for decode, or both.
func besidePeers(e *Endpoint) string {
	var of []string
	for _, times := range []float64{e.PrefillSlowness, e.DecodeSlowness} {
		if times > 0 {
			of = append(of, fmt.Sprintf("%.1fx", times))
		}
	}
	return cmp.Or(strings.Join(of, " / "), "-")
}

// written1m says what a pool wrote in the last minute.
func written1m(o *written.Output) string {
	switch {
	case o.Rate < 0:
		return ""
	case o.PerToken == 0:
		return fmt.Sprintf(", writes %s tokens/s in the last minute", words.Number(o.Rate))
	}
	return fmt.Sprintf(", writes %s tokens/s at %s each in the last minute",
		words.Number(o.Rate), words.Millis(o.PerToken))
}

func printFlow(w io.Writer, flow []Flow, pools []Pool) {
	if len(flow) == 0 {
		return
	}
	names := namesOf(pools)
	fmt.Fprintln(w, "\nflow of the last minute, among the latest requests")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range flow {
		fmt.Fprintf(t, "  %s\t%s\t->\t%s\t%d\n", words.Plain(f.Pool),
			words.Plain(cmp.Or(names[f.Prefill], f.Prefill, "decode alone")), words.Plain(cmp.Or(names[f.Decode], f.Decode)),
			f.Requests)
	}
	_ = t.Flush()
}

// terminalRecent is the number of latest requests that fit on a terminal together with the rest.
const terminalRecent = 10

func printRecent(w io.Writer, recent []Decided) {
	if len(recent) == 0 {
		return
	}
	fmt.Fprintln(w, "\nlatest requests")
	shown := make([]telemetry.Trace, min(len(recent), terminalRecent))
	for i := range shown {
		shown[i] = recent[i].Trace
	}
	PrintRequests(w, shown, false, false)
}

// PrintRequests writes a table of requests for a terminal; with failed they are those that failed, with slow those that
// lost most time first, and why.
func PrintRequests(w io.Writer, recent []telemetry.Trace, failed, slow bool) {
	if len(recent) == 0 && failed {
		fmt.Fprintln(w, "No request failed among the latest 256 that each replica keeps.\n"+
			"Requests that Tandem refused are not kept: their answer says why.")
		return
	}
	if len(recent) == 0 {
		fmt.Fprintln(w, "No request was planned yet. With --this-replica the list has only those that this replica\n"+
			"planned; otherwise Envoy has asked none of the replicas that answered (envoy.extProcs).")
		return
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	why := ""
	if slow {
		why = "took\tlost\tbecause of\t"
	}
	fmt.Fprintln(t, "  status\tat\troute\tprefill\tdecode\ttokens\tcached\thop 1 (expected)\thop 2\t"+why+"request id")
	now := time.Now()
	for _, r := range recent {
		status, cached := statusOf(&r, now), "-"
		if r.CachedTokens >= 0 {
			cached = fmt.Sprint(r.CachedTokens)
		}
		tokens := fmt.Sprint(r.PromptTokens)
		if r.CachedTokens < 0 { // P has not counted them
			tokens = "~" + tokens
		}
		if slow {
			v := verdictOf(&r)
			why = fmt.Sprintf("%s\t%s\t%s\t", took(r.Took), took(v.lost), cmp.Or(v.because, "-"))
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s%.40s\n", status, words.At(now, r.Started), routeOf(&r),
			words.Plain(cmp.Or(r.Prefill, "-")), words.Plain(cmp.Or(r.Decode, "-")), tokens, cached,
			hop1(&r), took(r.DecodeTime), why, words.Plain(r.RequestID))
	}
	_ = t.Flush()
}

// unknownAfter is the age from which a request without a reported end is not shown as running: the replica that got the
// report may be gone. Reservations end at the same age.
const unknownAfter = 15 * time.Minute

// statusOf returns the status of the client's answer, and whether it broke off.
func statusOf(r *telemetry.Trace, now time.Time) string {
	switch {
	case r.Ended == telemetry.EndedCut:
		return fmt.Sprintf("%d, cut", r.Status)
	case r.Ended == telemetry.EndedTicketRefused:
		return fmt.Sprintf("%d, ticket refused", r.Status)
	case r.Status > 0 && r.Refused != "":
		return fmt.Sprintf("%d, %s", r.Status, words.Plain(r.Refused))
	case r.Status > 0:
		return fmt.Sprint(r.Status)
	case r.Ended == "client_gone":
		return "client left"
	case r.Ended != "":
		return "no answer"
	case len(r.GoneWith) > 0 || now.Sub(r.Started) > unknownAfter:
		return "unknown"
	case r.EndElsewhere:
		return "unknown here"
	}
	return "running" // or its end is not reported yet
}

// routeOf returns the route, the reason if the request was not split, and which plan it was if not the first.
func routeOf(r *telemetry.Trace) string {
	route := r.Route
	switch r.Reason {
	case "":
	case "cheaper":
		route += " (cheaper than two hops)"
	default:
		route += " (" + r.Reason + ")"
	}
	if r.Prefill != "" && r.Decode == "" && !r.Final {
		route += " (prefill failed)"
	}
	switch plan := r.Replans + 1; plan {
	case 1:
	case 2:
		route += ", 2nd plan"
	case 3:
		route += ", 3rd plan"
	default:
		route += fmt.Sprintf(", %dth plan", plan)
	}
	return route
}

// hop1 returns the time of prefill, followed by the expected one.
func hop1(r *telemetry.Trace) string {
	switch of := took(r.PrefillTime); {
	case r.Prefill == "" && r.PrefillTime > 0:
		return of + " (former plan)"
	case r.Prefill == "" || r.ExpectedPrefill <= 0:
		return of
	default:
		return of + " (" + took(r.ExpectedPrefill) + ")"
	}
}

// Blocks of [spark], and the points in each: the last minute.
const (
	sparkBlocks = 30
	sparkPoints = 2
)

// spark draws the last minute as blocks of eight heights, each the sum of some points. Whatever is not nothing is
// higher than nothing.
func spark(points []Point, value func(*Point) float64) string {
	points = points[max(len(points)-sparkBlocks*sparkPoints, 0):]
	blocks := make([]float64, (len(points)+sparkPoints-1)/sparkPoints)
	most := 0.
	for i := range points {
		block := len(blocks) - 1 - (len(points)-1-i)/sparkPoints // the newest is whole
		blocks[block] += value(&points[i])
		most = max(most, blocks[block])
	}
	var b strings.Builder
	for _, v := range blocks {
		height := 0
		if v > 0 {
			height = max(int(v/most*7.99), 1)
		}
		b.WriteRune([]rune("▁▂▃▄▅▆▇█")[height])
	}
	return b.String()
}
