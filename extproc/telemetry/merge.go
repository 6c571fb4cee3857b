package telemetry

import (
	"cmp"
	"slices"
)

// Merge makes one trace of all parts of a request, newest request first. parts has the traces of each replica, by its
// name. A request of which only legs are known is left out: the replica that planned it does not answer, or is gone.
func Merge(parts map[string][]Trace) []Trace {
	type part struct {
		*Trace
		replica string
	}
	requests := map[traceKey][]part{}
	for replica, traces := range parts {
		for i := range traces {
			requests[traces[i].key()] = append(requests[traces[i].key()], part{&traces[i], replica})
		}
	}
	out := make([]Trace, 0, len(requests))
	for _, parts := range requests {
		slices.SortFunc(parts, func(a, b part) int {
			return cmp.Or(cmp.Compare(a.Pass, b.Pass), cmp.Compare(b.Plans, a.Plans), cmp.Compare(a.replica, b.replica))
		})
		all := *parts[0].Trace
		all.Replicas = []string{parts[0].replica}
		for _, p := range parts[1:] {
			all.add(p.Trace)
			all.Replicas = append(all.Replicas, p.replica)
		}
		all.Replans = max(all.Plans-1, all.Replans, 0)
		if all.Final || all.lost() {
			all.Decode = ""
		}
		if all.Route != "" {
			out = append(out, all)
		}
	}
	slices.SortFunc(out, func(a, b Trace) int {
		return cmp.Or(b.Started.Compare(a.Started), cmp.Compare(a.RequestID, b.RequestID))
	})
	return out
}

// add adds a part of another replica, which is about the same pass or a later one.
func (t *Trace) add(p *Trace) {
	if p.Route != "" { // planned anew
		t.Pool, t.Route, t.Reason, t.Prefill, t.Decode = p.Pool, p.Route, p.Reason, p.Prefill, p.Decode
		t.Foreseen, t.Weighed, t.Always = p.Foreseen, p.Weighed, p.Always
	} else if p.Decode != "" {
		t.Decode = p.Decode
	}
	if t.CachedTokens < 0 || p.CachedTokens >= 0 {
		t.CachedTokens, t.PromptTokens = p.CachedTokens, cmp.Or(p.PromptTokens, t.PromptTokens)
	}
	if p.Waited > 0 {
		t.Queued = p.Queued
	}
	t.PrefillTime = cmp.Or(p.PrefillTime, t.PrefillTime)
	t.DecodeTime = cmp.Or(p.DecodeTime, t.DecodeTime)
	t.FirstByte, t.FirstToken = cmp.Or(p.FirstByte, t.FirstByte), cmp.Or(p.FirstToken, t.FirstToken)
	t.Took, t.Ended = max(t.Took, p.Took), cmp.Or(p.Ended, t.Ended)
	t.Used = cmp.Or(p.Used, t.Used)
	t.Refused = cmp.Or(p.Refused, t.Refused)
	t.Status = max(t.Status, p.Status)
	t.Plans += p.Plans
	t.Pass, t.Next = p.Pass, max(t.Next, p.Next)
	t.Failed = append(slices.Clone(t.Failed), p.Failed...)
	t.DiedUnder = append(slices.Clone(t.DiedUnder), p.DiedUnder...)
	t.Streamed = t.Streamed || p.Streamed
	t.Final = t.Final || p.Final
}

// lost reports whether prefill failed in the last plan, which no other followed: the decode endpoint was never asked.
func (t *Trace) lost() bool {
	last := len(t.Failed) - 1
	return last >= 0 && t.Status > 0 && t.Plans <= len(t.Failed) && t.Prefill != "" && t.Failed[last].Hop == "prefill"
}
