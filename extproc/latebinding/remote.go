package latebinding

import (
	"cmp"
	"slices"
	"time"

	"tandem/kvstate"
	"tandem/picker"
	"tandem/picker/admission"
)

// Replicas publish the requests that wait for endpoints. Those of other replicas have a place in everybody's queue
// (picker/admission/remote.go), but only the replica with the stream can dispatch them.

// publish tells other replicas that a request waits here, or that endpoints hold another part of its prompt than
// published. A request that waits for its targets is not published, because it blocks no others. A request that only
// some of the endpoints serve is not published either: it would block all others, too.
func (q *Queue) publish(r *Waiter) {
	if r.request.OnMiss == picker.MissWait || r.choosy || len(r.request.Labels) > 0 {
		return
	}
	held := q.heldOf(r)
	if r.published && slices.Equal(held, r.held) {
		return
	}
	r.published, r.held = true, slices.Clone(held)
	q.State.PublishQueued(r.pool, kvstate.Queued{
		ID: r.id, Arrived: r.came, Work: r.least, Position: r.place, Priority: r.request.Priority, Flow: r.request.Flow,
		PromptTokens: r.request.PromptTokens, Held: r.held,
	})
}

// heldOf returns the parts of a request's prompt that endpoints hold, the largest first. The memory is reused.
func (q *Queue) heldOf(r *Waiter) []kvstate.Held {
	q.held = q.held[:0]
	blocks := int64(max(r.request.Blocks, 1))
	for i, e := range r.hitsOf.Endpoints() {
		if n := int64(r.hits[i].Hit); n > 0 {
			q.held = append(q.held, kvstate.Held{Addr: e.Addr, Tokens: r.request.PromptTokens * n / blocks})
		}
	}
	if len(q.held) > kvstate.MaxHeld {
		slices.SortStableFunc(q.held, func(a, b kvstate.Held) int { return cmp.Compare(b.Tokens, a.Tokens) })
		q.held = q.held[:kvstate.MaxHeld]
	}
	return q.held
}

// syncRemote updates the requests of other replicas.
func (q *Queue) syncRemote() {
	q.pool.SyncRemoteQueue(q.remote, &q.remoteVersion, func(o *kvstate.Queued) {
		q.requests.AddRemote(admission.Waiting{
			ID: o.ID, Arrived: o.Arrived.Sub(q.Started).Seconds(), Work: o.Work.Seconds(),
			Priority: o.Priority, Flow: o.Flow, Replica: o.Replica,
		})
	}, func(id uint64, sent bool) { q.requests.RemoveRemote(id, sent) })
}

// lookRemote does what look does, for a request of another replica. Its session is unknown here, so it counts as one
// without. If its own replica therefore places it differently, it blocks others here only for a short time.
func (q *Queue) lookRemote(id uint64, v *kvstate.View) *picker.Request {
	o := q.remote[id]
	if q.positionsOf != q.pool {
		q.positionsOf, q.positions = q.pool, make(map[string]int, len(q.pool.Endpoints()))
		for i, e := range q.pool.Endpoints() {
			q.positions[e.Addr] = i
		}
	}
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		c.SetHeld(kvstate.HeldBlocks{})
		c.Session = 0
		c.Usable = q.usable[i]
		if q.pairs {
			c.LeaveOut(kvstate.RoleBoth)
		}
	}
	v.Uses = v.Uses[:0] // unknown: a miss has its full price here
	for _, h := range o.Held {
		if i, ok := q.positions[h.Addr]; ok {
			v.Endpoints[i].Hit = int(h.Tokens)
		}
	}
	q.other = picker.Request{
		PromptTokens: o.PromptTokens, Blocks: int(o.PromptTokens), Split: true, Rand: admission.Chance(id),
		Priority: o.Priority, Flow: o.Flow, Waited: time.Since(o.Arrived).Seconds(),
	}
	return &q.other
}
