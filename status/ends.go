package status

import (
	"sync"

	"tandem/extproc/telemetry"
)

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

// fill adds the ends that are known from before to all requests, and keeps those ends that this replica's own traces
// lack.
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
