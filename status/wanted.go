package status

import (
	"cmp"
	"context"
	"net/url"
	"slices"
	"strings"
	"time"

	"tandem/extproc/telemetry"
)

// Wanted is which of the latest requests are wanted.
type Wanted struct {
	N      int  // at most
	Alone  bool // only those that this replica planned
	Failed bool // only those that failed
	Slow   bool // those that lost most time first
	// only those that have each of these words, in any case, in their id, pool, route, endpoints, replicas, model or
	// tenant (the last two are known with the configuration's usage)
	Search string

	names map[string]string // of endpoints, by their addresses
}

// wantedIn reads what is wanted from a query.
func wantedIn(q url.Values) Wanted {
	return Wanted{Alone: q.Get("scope") == "replica", Failed: q.Get("failed") == "true", Slow: q.Get("slow") == "true",
		Search: q.Get("search")}
}

// all reports whether the latest requests are wanted as they are.
func (w *Wanted) all() bool { return !w.Failed && !w.Slow && w.Search == "" }

// of returns those of all, which are the newest first, that are wanted. It may change all.
func (w *Wanted) of(all []telemetry.Trace) []telemetry.Trace {
	if !w.all() {
		all = slices.Clone(all)
	}
	if w.Failed {
		all = slices.DeleteFunc(all, func(t telemetry.Trace) bool { return !t.HasFailed() })
	}
	if words := strings.Fields(strings.ToLower(w.Search)); len(words) > 0 {
		all = slices.DeleteFunc(all, func(t telemetry.Trace) bool {
			text := searched(&t, w.names)
			return slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(text, word) })
		})
	}
	if w.Slow {
		bySlowness(all)
	}
	return named(all[:min(w.N, len(all))], w.names)
}

// named returns requests with the names of their endpoints, as the status has them, in place of the addresses.
func named(requests []telemetry.Trace, names map[string]string) []telemetry.Trace {
	out := slices.Clone(requests)
	name := func(address *string) { *address = cmp.Or(names[*address], *address) }
	for i := range out {
		t := &out[i]
		name(&t.Prefill)
		name(&t.Decode)
		name(&t.WaitedFor)
		t.Failed, t.Weighed = slices.Clone(t.Failed), slices.Clone(t.Weighed)
		for j := range t.Failed {
			name(&t.Failed[j].Endpoint)
		}
		for j := range t.Weighed {
			name(&t.Weighed[j].Endpoint)
		}
	}
	return out
}

// searched returns the text in which a request is searched for.
func searched(t *telemetry.Trace, names map[string]string) string {
	parts := []string{t.RequestID, t.Pool, t.Route, strings.ReplaceAll(t.Route, "_", " "), t.Reason, t.Prefill, names[t.Prefill],
		t.Decode, names[t.Decode], t.Ended, t.Refused}
	if t.Used != nil {
		parts = append(parts, t.Used.Model, t.Used.Tenant)
	}
	for _, hop := range t.Failed {
		parts = append(parts, hop.Hop, hop.Endpoint, names[hop.Endpoint])
	}
	return strings.ToLower(strings.Join(append(parts, t.Replicas...), "\n"))
}

// namesOf returns the names of the pools' endpoints by their addresses.
func namesOf(pools []Pool) map[string]string {
	out := map[string]string{}
	for i := range pools {
		for j := range pools[i].Endpoints {
			e := &pools[i].Endpoints[j]
			out[e.Address] = cmp.Or(out[e.Address], e.Name)
		}
	}
	return out
}

// names is namesOf for answers that have no pools.
func (f *Feed) names() map[string]string {
	out := map[string]string{}
	for _, p := range f.source.State.Pools() {
		for _, e := range p.Endpoints() {
			out[e.Addr] = cmp.Or(out[e.Addr], e.DisplayName())
		}
	}
	return out
}

// Requests returns the latest requests of all replicas, newest first unless the slow ones are wanted.
func (f *Feed) Requests(ctx context.Context, w Wanted) ([]telemetry.Trace, Asked) {
	q := question{Since: -1, Traces: min(w.N, allRecent)}
	if !w.all() {
		q.Traces = allRecent
	}
	got := f.gather(ctx, q, w.Alone)
	w.names = f.names()
	return w.of(got.traces(time.Now())), f.asked(&got)
}
