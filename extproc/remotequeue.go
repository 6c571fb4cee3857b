package extproc

import (
	"cmp"
	"slices"

	"tandem/kvstate"
	"tandem/picker"
	"tandem/picker/admission"
)

// Replicas publish the requests that wait for endpoints. Those of other replicas have a place in everybody's queue
// (picker/admission/remote.go), but only the replica with the stream can dispatch them.

// publish tells other replicas that a request waits here, or that endpoints hold another part of its prompt than
// published. A request that waits for its targets is not published, because it blocks no others. Neither is one
// that only some of the endpoints serve: it would block requests for all the others too.
func (w *poolAdmission) publish(r *waiter) {
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

// heldOf returns the parts of a request's prompt that endpoints hold, the largest first. The memory is reused.
func (w *poolAdmission) heldOf(r *waiter) []kvstate.Held {
	w.held = w.held[:0]
	blocks := int64(max(r.request.Blocks, 1))
	for i, e := range r.hitsOf.Endpoints() {
		if n := int64(r.hits[i].Hit); n > 0 {
			w.held = append(w.held, kvstate.Held{Addr: e.Addr, Tokens: r.request.PromptTokens * n / blocks})
		}
	}
	if len(w.held) > kvstate.MaxHeld {
		slices.SortStableFunc(w.held, func(a, b kvstate.Held) int { return cmp.Compare(b.Tokens, a.Tokens) })
		w.held = w.held[:kvstate.MaxHeld]
	}
	return w.held
}

// syncRemote updates the requests of other replicas.
func (w *poolAdmission) syncRemote() {
	w.pool.SyncRemoteQueue(w.remote, &w.remoteVersion, func(o *kvstate.Queued) {
		w.queue.AddRemote(admission.Waiting{
			ID: o.ID, Arrived: o.Arrived.Sub(w.s.started).Seconds(), Work: o.Work.Seconds(),
			Priority: o.Priority, Flow: o.Flow, Replica: o.Replica,
		})
	}, func(id uint64, sent bool) { w.queue.RemoveRemote(id, sent) })
}

// lookRemote is look for a request of another replica. Its session is unknown here, so it counts as one without. If
// its replica places it differently for that, it blocks others here only for a short time.
func (w *poolAdmission) lookRemote(id uint64, v *kvstate.View) *picker.Request {
	o := w.remote[id]
	if w.positionsOf != w.pool {
		w.positionsOf, w.positions = w.pool, make(map[string]int, len(w.pool.Endpoints()))
		for i, e := range w.pool.Endpoints() {
			w.positions[e.Addr] = i
		}
	}
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		c.SetHeld(kvstate.HeldBlocks{})
		c.Session = 0
		c.Usable = w.usable[i] && !(w.pairs && c.Endpoint.Role == kvstate.RoleBoth)
	}
	v.Uses = v.Uses[:0] // unknown: a miss has its full price here
	for _, h := range o.Held {
		if i, ok := w.positions[h.Addr]; ok {
			v.Endpoints[i].Hit = int(h.Tokens)
		}
	}
	w.other = picker.Request{
		PromptTokens: o.PromptTokens, Blocks: int(o.PromptTokens), Split: true, Rand: admission.Chance(id), Priority: o.Priority, Flow: o.Flow,
	}
	return &w.other
}
