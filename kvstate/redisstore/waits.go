package redisstore

import (
	"time"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

// Requests that wait for endpoints (late binding) are published as they change, and in full with every complete batch:
// those in front of the queue, some 50 bytes each. So a loss is repaired within a second, as with reservations, and
// ends with a replica's lease.

// publishWaits adds to a batch the changes of the requests that wait here; with complete, all of them.
// poolReplica.mu is held.
func (p *poolReplica) publishWaits(b *statev1.Batch, t *addressTable, pool *kvstate.Pool, complete bool,
	now time.Time) {
	here := pool.Queued()
	b.WaitsSent = pool.TakeDispatched()
	b.WaitsAll, p.waitsUnknown = complete || p.waitsUnknown, false
	if len(here)+len(p.waits) == 0 {
		return
	}
	waiting := make(map[uint64]uint64, len(here))
	for i := range here {
		w := &here[i]
		waiting[w.ID] = w.Version
		if b.WaitsAll || p.waits[w.ID] != w.Version {
			b.Waits = append(b.Waits, waitsOf(w, t, now))
		}
	}
	for id := range p.waits {
		if _, still := waiting[id]; !still && !b.WaitsAll {
			b.WaitsOver = append(b.WaitsOver, id)
		}
	}
	p.waits = waiting
}

func waitsOf(w *kvstate.Queued, t *addressTable, now time.Time) *statev1.Waits {
	out := &statev1.Waits{
		Id: w.ID, WaitedUs: uint64(max(now.Sub(w.Arrived), 0).Microseconds()),
		WorkUs:   uint64(max(w.Work, 0).Microseconds()),
		Priority: w.Priority, Flow: w.Flow, PromptTokens: w.PromptTokens,
	}
	for _, h := range w.Held {
		out.HeldAt, out.Held = append(out.HeldAt, t.position(h.Addr)), append(out.Held, h.Tokens)
	}
	return out
}

// applyWaits applies the requests that waited at a replica at the time sent. poolReplica.mu is held.
func (p *poolReplica) applyWaits(pool *kvstate.Pool, b *statev1.Batch, at positions, sent time.Time) {
	if len(b.GetWaits()) == 0 && len(b.GetWaitsOver())+len(b.GetWaitsSent()) == 0 && !b.GetWaitsAll() {
		return
	}
	said := make([]kvstate.Queued, 0, min(len(b.GetWaits()), kvstate.MaxQueuedPublished))
	for _, w := range b.GetWaits()[:cap(said)] {
		if w.GetId() != 0 {
			said = append(said, readWaits(w, at, sent))
		}
	}
	pool.ApplyQueued(b.GetReplica(), said, b.GetWaitsOver(), b.GetWaitsSent(), b.GetWaitsAll())
}

func readWaits(w *statev1.Waits, at positions, sent time.Time) kvstate.Queued {
	micros := func(n uint64) time.Duration { return time.Duration(min(n, uint64(maxWork))) * time.Microsecond }
	out := kvstate.Queued{
		ID: w.GetId(), Arrived: sent.Add(-micros(w.GetWaitedUs())), Work: micros(w.GetWorkUs()),
		Priority: w.GetPriority(), Flow: w.GetFlow(), PromptTokens: min(max(w.GetPromptTokens(), 1), maxPrompt),
	}
	for i, position := range w.GetHeldAt() {
		if e := at.of(position); e != nil && i < len(w.GetHeld()) && i < kvstate.MaxHeld {
			out.Held = append(out.Held,
				kvstate.Held{Addr: e.Addr, Tokens: min(max(w.GetHeld()[i], 0), out.PromptTokens)})
		}
	}
	return out
}
