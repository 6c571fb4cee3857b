package telemetry

import (
	"bytes"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
)

// said is a trace in a line, without what this file does not test.
func said(t *Trace) string {
	return fmt.Sprintf("%s %s %s->%s %d/%d hops %v %v first %v status %d replans %d at %s", t.RequestID, t.Route, t.Prefill, t.Decode,
		t.CachedTokens, t.PromptTokens, t.PrefillTime, t.DecodeTime, t.FirstByte, t.Status, t.Replans, strings.Join(t.Replicas, ","))
}

// The passes and legs of one request are one row, whichever replicas served them, and whatever these are called.
func TestMerge(t *testing.T) {
	began := time.Date(2026, 11, 23, 12, 0, 0, 123456789, time.UTC)
	ticket := func(redirects int) *kvtransfer.Ticket {
		return &kvtransfer.Ticket{Started: time.UnixMicro(began.UnixMicro()), Redirects: redirects, Pool: "chat", Prefill: "p1", Decode: "d1", PromptTokens: 90}
	}
	planned := func(id string, pass int, p, d string) *Planned {
		return &Planned{RequestID: id, Started: began, Pass: pass, Pool: "chat", Route: "split", Prefill: p, Decode: d, PromptTokens: 100}
	}
	for _, names := range []string{"abc", "acb", "bac", "bca", "cab", "cba", "aaa"} {
		first, leg, second := names[:1], names[1:2], names[2:]
		at := map[string]*Recent{"a": NewRecent(), "b": NewRecent(), "c": NewRecent()}
		at[first].record(planned("r", 0, "p1", "d1"))
		at[leg].leg("r", ticket(0), func(t *Trace) { t.CachedTokens, t.PromptTokens, t.PrefillTime = 64, 120, time.Second })
		at[second].leg("r", ticket(1), func(t *Trace) { t.Decode = "d2" })
		for _, r := range at { // the access log's entry comes to all
			r.change("r", ticket(1).Started, func(t *Trace) { t.Status, t.DecodeTime, t.FirstByte = 200, 2*time.Second, 3*time.Second })
			r.change("other", began, func(t *Trace) { t.Status = 500 })
		}
		// Another one with the same id, whose hop failed: planned again elsewhere.
		at[first].record(&Planned{RequestID: "r", Started: began.Add(-time.Minute), Route: "split", Prefill: "p1", Decode: "d1"})
		at[second].record(&Planned{RequestID: "r", Started: began.Add(-time.Minute), Pass: 1, Route: "decode_alone", Decode: "d3"})

		parts := map[string][]Trace{}
		for name, r := range at {
			parts[name] = r.Latest(10)
		}
		all := Merge(parts)
		require.Len(t, all, 2)
		replicas := strings.Join([]string{first, leg, second}, ",")
		again := first + "," + second
		if names == "aaa" {
			replicas, again = "a", "a"
		}
		require.Equal(t, "r split p1->d2 64/120 hops 1s 2s first 3s status 200 replans 0 at "+replicas, said(&all[0]))
		require.Equal(t, "r decode_alone ->d3 -1/0 hops 0s 0s first 0s status 0 replans 1 at "+again, said(&all[1]))
		if leg == first {
			continue
		}
		delete(parts, first) // the replica that planned it has died
		for _, one := range Merge(parts) {
			require.Equal(t, "decode_alone", one.Route, "legs alone are no row")
		}
	}
}

// The decode endpoint is the one of the last pass's ticket, if another replica chose it; else the one that was seen.
func TestTicketNamesWhoAnswered(t *testing.T) {
	began := time.Now().Truncate(time.Microsecond)
	o := NewObserver(NewMetrics(prometheus.NewRegistry(), nil), slog.New(slog.DiscardHandler))
	for want, ticket := range map[string]kvtransfer.Ticket{
		"d2": {Stage: kvtransfer.DecodeLeg, Redirects: 1},
		"d1": {Stage: kvtransfer.DecodeLeg},
		"d3": {Stage: kvtransfer.HandOver, Redirects: 1}, // the client left before pass 2 was decided
	} {
		planned := want
		if want == "d2" {
			planned = "d1"
		}
		o.record(&Planned{RequestID: want, Started: began, Pool: "chat", Route: "split", Prefill: "p1", Decode: planned})
		ticket.Started, ticket.Pool, ticket.Decode = began, "chat", "d2"
		o.RequestEnded(&ticket, &ended.Pass{RequestID: []byte(want), Start: began, Status: 200}, time.Second, 0, true)
		require.Equal(t, want, o.Latest(1)[0].Decode)
	}
}

// A request that its first hop failed was never at the decode endpoint of the plan; one that was planned again is.
func TestMergeFailedHops(t *testing.T) {
	began := time.Now()
	o := NewObserver(NewMetrics(prometheus.NewRegistry(), nil), slog.New(slog.DiscardHandler))
	x := Meter{Observer: o}
	ticket := &kvtransfer.Ticket{Started: began, Pool: "chat", Prefill: "p1", Decode: "d1", Redirects: 1, Cause: kvtransfer.CausePrefill}
	o.record(&Planned{RequestID: "r", Started: began, Pool: "chat", Route: "split", Prefill: "p1", Decode: "d1"})
	x.Replanned("r", ticket)
	merged := func() Trace { return Merge(map[string][]Trace{"a": o.Latest(1)})[0] }
	require.Equal(t, "d1", merged().Decode, "another plan may follow")
	o.change("r", began.Truncate(time.Microsecond), func(t *Trace) { t.Status = 503 })
	require.Equal(t, []FailedHop{{"prefill", "p1"}}, merged().Failed)
	require.Empty(t, merged().Decode)

	o.change("r", began.Truncate(time.Microsecond), func(t *Trace) { t.Status = 0 })
	o.record(&Planned{RequestID: "r", Started: began, Pass: 1, Pool: "chat", Route: "split", Prefill: "p2", Decode: "d2"})
	o.change("r", began.Truncate(time.Microsecond), func(t *Trace) { t.Status = 200 })
	require.Equal(t, "d2", merged().Decode)
	require.Len(t, merged().Failed, 1)
}

// An answer that broke off is marked, with the time to its end, and logged; of many at once a few are logged.
func TestAnswersThatBrokeOff(t *testing.T) {
	var log bytes.Buffer
	o := NewObserver(NewMetrics(prometheus.NewRegistry(), nil), slog.New(slog.NewTextHandler(&log, nil)))
	began := time.Now().Truncate(time.Microsecond)
	end := func(id string, mine bool, e ended.Pass) Trace {
		o.record(&Planned{RequestID: id, Started: began, Pool: "chat", Route: "split", Prefill: "p1", Decode: "d1"})
		e.RequestID, e.Start, e.Duration = []byte(id), began, 3*time.Second
		ticket := &kvtransfer.Ticket{Started: began, Pool: "chat", Decode: "d1", Stage: kvtransfer.DecodeLeg}
		o.RequestEnded(ticket, &e, time.Second, 0, mine)
		return o.Latest(1)[0]
	}
	cut := ended.Pass{Status: 200, Details: []byte("upstream_reset_after_response_started{connection_termination}")}
	for i := range 3 * cutsLogged {
		got := end(fmt.Sprint("r", i), i > 0, cut)
		require.Equal(t, "200 cut 3s d1", fmt.Sprint(got.Status, " ", got.Ended, " ", got.Took, " ", got.AnsweredBy()))
		require.True(t, got.HasFailed())
	}
	require.NotContains(t, log.String(), "request_id=r0 ", "another replica logs it")
	require.Contains(t, log.String(), `msg="an answer broke off" request_id=r1 pool=chat endpoint=d1 status=200 after=3s`)
	lines := strings.Count(log.String(), "\n")
	require.GreaterOrEqual(t, lines, cutsLogged)
	require.Less(t, lines, 2*cutsLogged)
	for want, e := range map[string]ended.Pass{
		"ok": {Status: 200}, "refused": {Status: 400}, "failed": {Status: 503}, "client_gone": {ClientGone: true},
	} {
		got := end(want, true, e)
		require.Equal(t, want, got.Ended)
		require.Equal(t, want == "failed", got.HasFailed())
	}
	other := map[string][]Trace{"a": {end("merged", true, cut)}, "b": {{RequestID: "merged", Started: began}}}
	merged := Merge(other)
	require.Equal(t, EndedCut, merged[0].Ended)
	require.Equal(t, 3*time.Second, merged[0].Took)
}

// Prices are recorded of ten decisions a second, also if they follow each other at once.
func TestWantsWeighed(t *testing.T) {
	r, now, n := NewRecent(), time.Now(), 0
	for range 100 {
		if r.wantsWeighed(now) {
			n++
		}
	}
	require.Equal(t, 10, n)
	require.False(t, r.wantsWeighed(now.Add(99*time.Millisecond)))
	require.True(t, r.wantsWeighed(now.Add(100*time.Millisecond)))
	require.False(t, r.wantsWeighed(now.Add(100*time.Millisecond)))
}

// The list is bounded, and drops the oldest.
func TestRecentIsBounded(t *testing.T) {
	r := NewRecent()
	began := time.Now()
	for i := range 3 * recentTraces {
		r.record(&Planned{RequestID: "same", Started: began.Add(time.Duration(i) * time.Millisecond), Route: "split"})
	}
	all := r.Latest(10 * recentTraces)
	require.Len(t, all, recentTraces)
	require.Len(t, r.at, recentTraces)
	require.True(t, all[0].Started.After(all[recentTraces-1].Started))
	r.change("same", began, func(*Trace) { t.Fatal("it was dropped") })
}

// A refused ticket ends the request that it was of, whichever replica refuses it, and whether or not this one can open
// it. It is counted once.
func TestTicketRefused(t *testing.T) {
	began := time.Now().Add(-time.Second)
	entry := ended.Pass{RequestID: []byte("r"), Status: 503, Details: []byte("tandem_ticket_refused"), Start: began,
		Duration: time.Second}
	ticket := &kvtransfer.Ticket{Started: time.UnixMicro(began.UnixMicro()), Pool: "chat", Prefill: "p1", Decode: "d1", Stage: kvtransfer.HandOver}
	for name, tt := range map[string]struct {
		happens        func(o *Observer)
		refused, ended uint64
	}{
		"another refuses it":                             {func(o *Observer) { o.RequestEnded(ticket, &entry, 0, 0, true) }, 0, 1},
		"another refuses it, and it is not of this one":  {func(o *Observer) { o.EntryRefused(&entry) }, 0, 1},
		"this one refuses it":                            {func(o *Observer) { o.RequestLost("r"); o.EntryRefused(&entry) }, 1, 1},
		"this one refuses it, and another has booked it": {func(o *Observer) { o.RequestLost("r"); o.RequestEnded(ticket, &entry, 0, 0, false) }, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			o := NewObserver(NewMetrics(prometheus.NewRegistry(), kvstate.New(kvstate.Options{})), slog.New(slog.DiscardHandler))
			for _, id := range []string{"r", "other"} {
				o.record(&Planned{RequestID: id, Started: began, Pool: "chat", Route: "split", Prefill: "p1", Decode: "d1"})
			}
			tt.happens(o)
			all := o.Latest(2)
			require.Equal(t, EndedTicketRefused, all[1].Ended)
			require.Equal(t, 503, all[1].Status)
			require.Positive(t, all[1].Took)
			require.Empty(t, all[0].Ended)
			got := o.Totals()
			require.Equal(t, []uint64{tt.refused, tt.ended, tt.ended}, []uint64{got.TicketsRefused, got.TicketFailures, got.Failed})
		})
	}
}

// The margin says by how much the chosen way was cheaper, if both were offered.
func TestMarginOf(t *testing.T) {
	type margin struct {
		cheaper  float64
		notAlone bool
	}
	of := func(price, other float64, split bool) (m margin) {
		m.cheaper, m.notAlone = MarginOf(price, other, split)
		return m
	}
	require.Equal(t, margin{cheaper: .5}, of(1, 1.5, true))
	require.Equal(t, margin{cheaper: -.5}, of(1, .5, false), "the settings ask for it")
	require.Equal(t, margin{notAlone: true}, of(1, math.Inf(1), true))
	require.Zero(t, of(1, math.Inf(1), false), "it could not be split")
	require.Zero(t, of(1, 0, true), "the pool splits every prompt")
}
