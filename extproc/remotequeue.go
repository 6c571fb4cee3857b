package extproc

import (
	"cmp"
	"slices"

	"tandem/kvstate"
	"tandem/picker"
)

// This file is what replicas have to do with each other's waiting rooms: each tells who waits in its own, and hears who waits
// in the others'. Those stand in everybody's queue (picker/elsewhere.go); only the replica that has the stream can send them.

// tell has other replicas know that a request waits here, or that endpoints hold more or less of it than they were told. One
// that waits for its targets is in nobody's way, so nobody needs to know of it. Nor are others told of one that only some of the
// endpoints serve: they would have their own stand behind it at all the others too.
func (w *admission) publish(r *waiter) {
	if !w.s.State.HasReplicas() || r.request.OnMiss == picker.MissWait || r.choosy || len(r.request.Labels) > 0 {
		return
	}
	held := w.heldOf(r)
	if r.published && slices.Equal(held, r.held) {
		return
	}
	r.published, r.held = true, slices.Clone(held)
	w.s.State.PublishQueued(r.pool, kvstate.Queued{
		ID: r.id, Arrived: r.came, Work: r.least, Position: r.place, Priority: r.request.Priority, Flow: r.request.Flow,
		PromptTokens: r.request.PromptTokens, Held: r.held,
	})
}

// heldOf is what endpoints hold of a request's prompt, those that hold most first, in memory that is used again.
func (w *admission) heldOf(r *waiter) []kvstate.Held {
	w.held = w.held[:0]
	blocks := int64(max(r.request.Blocks, 1))
	for i, e := range r.hitsOf.Endpoints() {
		if n := int64(r.hits[i]); n > 0 {
			w.held = append(w.held, kvstate.Held{Addr: e.Addr, Tokens: r.request.PromptTokens * n / blocks})
		}
	}
	if len(w.held) > kvstate.MaxHeld {
		slices.SortStableFunc(w.held, func(a, b kvstate.Held) int { return cmp.Compare(b.Tokens, a.Tokens) })
		w.held = w.held[:kvstate.MaxHeld]
	}
	return w.held
}

// hear takes in who waits elsewhere by now.
func (w *admission) syncRemote() {
	w.pool.SyncRemoteQueue(w.remote, &w.remoteVersion, func(o *kvstate.Queued) {
		w.queue.AddRemote(picker.Waiting{
			ID: o.ID, Arrived: o.Arrived.Sub(w.s.started).Seconds(), Work: o.Work.Seconds(),
			Priority: o.Priority, Flow: o.Flow, Replica: o.Replica,
		})
	}, func(id uint64, sent bool) { w.queue.RemoveRemote(id, sent) })
}

// lookElsewhere is look for a request that waits elsewhere. What is not known of it (the session it would like to go on with) is as
// if it had none: where that is wrong, it is not waited for long.
func (w *admission) lookRemote(id uint64, v *kvstate.View) *picker.Request {
	o := w.remote[id]
	if w.positionsOf != w.pool {
		w.positionsOf, w.positions = w.pool, make(map[string]int, len(w.pool.Endpoints()))
		for i, e := range w.pool.Endpoints() {
			w.positions[e.Addr] = i
		}
	}
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		c.Hit, c.Session = 0, 0
		c.Usable = w.usable[i] && !(w.pairs && c.Endpoint.Role == kvstate.RoleBoth)
	}
	v.Uses = v.Uses[:0] // not shared: a miss of theirs has its full price here
	for _, h := range o.Held {
		if i, ok := w.positions[h.Addr]; ok {
			v.Endpoints[i].Hit = int(h.Tokens)
		}
	}
	w.other = picker.Request{
		PromptTokens: o.PromptTokens, Blocks: int(o.PromptTokens), Split: true, Rand: picker.Chance(id), Priority: o.Priority, Flow: o.Flow,
	}
	return &w.other
}
