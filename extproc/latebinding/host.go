package latebinding

import (
	"time"

	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
	"tandem/picker/admission"
)

// The host of an admission queue: the fleet as it is, including dispatched requests; how it looks to one request;
// and what to do with its choice.

// settle sets a request's choice, and the view that it was made on.
func (q *Queue) settle(r *Waiter, v *kvstate.View, c picker.Choice, err error) {
	r.settled, r.choice, r.err = true, c, err
	if own := r.view; own != v {
		q.restoreView(r)
		own.Copy(v)
	}
	if err != nil {
		return
	}
	r.decode, r.pending = v.Endpoints[c.Decode].Endpoint, q
	at := c.Decode
	if c.Prefill >= 0 {
		at = c.Prefill
		r.prefill = v.Endpoints[at].Endpoint
	}
	r.work = kvstate.Seconds(c.Work * max(v.Endpoints[at].Speed, 0.1))
	q.committed = append(q.committed, r)
}

// commit removes a request from those that are not reserved yet.
func (q *Queue) commit(r *Waiter) {
	for i, l := range q.committed {
		if l == r {
			q.committed = append(q.committed[:i], q.committed[i+1:]...)
			break
		}
	}
	r.pending = nil
}

// Fleet implements [admission.Host].
func (q *Queue) Fleet() *kvstate.View {
	v := &q.view
	if q.arriving != nil {
		v = q.arriving.view
	}
	q.fill(v)
	return v
}

// fill sets v to the current fleet, including dispatched requests that are not reserved yet.
func (q *Queue) fill(v *kvstate.View) {
	q.State.View(q.pool, nil, v)
	q.usable = q.usable[:0]
	for i := range v.Endpoints {
		q.usable = append(q.usable, v.Endpoints[i].Usable)
	}
	for _, l := range q.committed {
		for i := range v.Endpoints {
			c := &v.Endpoints[i]
			if l.prefill != nil && c.Endpoint.Addr == l.prefill.Addr {
				c.Requests, c.PromptTokens = c.Requests+1, c.PromptTokens+l.choice.Uncached
				c.Jobs, c.Queue = c.Jobs+1, c.Queue+l.work
				c.Room.Held += l.choice.MostTokens
			}
			if c.Endpoint.Addr == l.decode.Addr {
				c.Requests, c.PromptTokens = c.Requests+1, c.PromptTokens+l.choice.PromptTokens
				c.Coming += float64(l.choice.PromptTokens)
				c.Room.Need = max(c.Room.Need, l.choice.MostTokens+l.choice.AnswerTokens)
				if l.prefill == nil {
					c.Local += l.work
				}
			}
		}
	}
}

// Look implements [admission.Host].
func (q *Queue) Look(id uint64, v *kvstate.View) *picker.Request {
	if a := q.arriving; a != nil && a.id == id {
		return q.look(a, v)
	}
	if r := q.waiters[id]; r != nil {
		return q.look(r, v)
	}
	return q.lookRemote(id, v)
}

// look adds to a view what depends on the request.
func (q *Queue) look(r *Waiter, v *kvstate.View) *picker.Request {
	now := time.Now()
	if r.hitsOf != q.pool || now.Sub(r.hitsAt) > HitsTTL {
		q.State.Hits(q.pool, r.of.Hashes, v)
		r.of.MatchTokens(q.pool, v)
		r.save(v, q.pool, now)
		if r.published {
			q.publish(r)
		}
	}
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		c.SetHeld(r.hits[i])
		c.Session = 0
		c.Usable = q.usable[i]
		if q.pairs {
			c.LeaveOut(kvstate.RoleBoth)
		}
	}
	q.State.FindUses(q.pool, r.of.Hashes, v)
	if r.of.Session != 0 {
		q.State.Sessions.MarkSession(q.pool, r.of.Session, v)
	}
	r.request.Waited, r.request.Rand = now.Sub(r.of.Began).Seconds(), admission.Chance(r.id)
	return &r.request
}

// Send implements [admission.Host].
func (q *Queue) Send(id uint64, _ *picker.Request, v *kvstate.View, c picker.Choice, err error, how admission.Outcome) {
	if a := q.arriving; a != nil && a.id == id {
		q.settle(a, v, c, err)
		return
	}
	r := q.waiters[id]
	q.forget(r)
	q.settle(r, v, c, err)
	switch {
	case how == admission.Early:
		r.finish(early)
	case how == admission.Expired:
		r.finish(expired)
	case err != nil:
		r.finish(shed)
	default:
		r.finish(bound)
	}
}

// Shed implements [admission.Host].
func (q *Queue) Shed(id uint64) {
	r := q.waiters[id]
	q.forget(r)
	r.err = plan.Overloaded()
	r.finish(shed)
}

// ShortOfMemory implements [admission.Host].
func (q *Queue) ShortOfMemory() bool { return q.Options.ShortOfMemory() }
