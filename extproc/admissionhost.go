package extproc

import (
	"time"

	"tandem/kvstate"
	"tandem/picker"
	"tandem/picker/admission"
)

// The host of an admission queue: the fleet as it is, including dispatched requests; how it looks to one request;
// and what to do with its choice.

// settle sets a request's choice, and the view that it was made on.
func (w *poolAdmission) settle(r *waiter, v *kvstate.View, c picker.Choice, err error) {
	r.settled, r.choice, r.err = true, c, err
	if own := &r.x.view; own != v {
		w.restoreView(r)
		own.Copy(v)
	}
	if err != nil {
		return
	}
	r.decode, r.pending = v.Endpoints[c.Decode].Endpoint, w
	at := c.Decode
	if c.Prefill >= 0 {
		at = c.Prefill
		r.prefill = v.Endpoints[at].Endpoint
	}
	r.work = kvstate.Seconds(c.Work * max(v.Endpoints[at].Speed, 0.1))
	w.committed = append(w.committed, r)
}

// commit removes a request from those that are not reserved yet.
func (w *poolAdmission) commit(r *waiter) {
	for i, l := range w.committed {
		if l == r {
			w.committed = append(w.committed[:i], w.committed[i+1:]...)
			break
		}
	}
	r.pending = nil
}

// Fleet implements [admission.Host].
func (w *poolAdmission) Fleet() *kvstate.View {
	v := &w.view
	if w.arriving != nil {
		v = &w.arriving.x.view
	}
	w.fill(v)
	return v
}

// fill sets v to the current fleet, including dispatched requests that are not reserved yet.
func (w *poolAdmission) fill(v *kvstate.View) {
	w.s.State.View(w.pool, nil, v)
	w.usable = w.usable[:0]
	for i := range v.Endpoints {
		w.usable = append(w.usable, v.Endpoints[i].Usable)
	}
	for _, l := range w.committed {
		for i := range v.Endpoints {
			c := &v.Endpoints[i]
			if l.prefill != nil && c.Endpoint.Addr == l.prefill.Addr {
				c.Requests, c.PromptTokens = c.Requests+1, c.PromptTokens+l.choice.Uncached
				c.Jobs, c.Queue = c.Jobs+1, c.Queue+l.work
			}
			if c.Endpoint.Addr == l.decode.Addr {
				c.Requests, c.PromptTokens = c.Requests+1, c.PromptTokens+l.choice.PromptTokens
				if l.prefill == nil {
					c.Local += l.work
				}
			}
		}
	}
}

// Look implements [admission.Host].
func (w *poolAdmission) Look(id uint64, v *kvstate.View) *picker.Request {
	if a := w.arriving; a != nil && a.id == id {
		return w.look(a, v)
	}
	if r := w.waiters[id]; r != nil {
		return w.look(r, v)
	}
	return w.lookRemote(id, v)
}

// look adds to a view what depends on the request.
func (w *poolAdmission) look(r *waiter, v *kvstate.View) *picker.Request {
	now := time.Now()
	if r.hitsOf != w.pool || now.Sub(r.hitsAt) > hitsTTL {
		w.s.State.Hits(w.pool, r.x.req.Hashes, v)
		r.x.req.MatchTokens(w.pool, v)
		r.hits = r.hits[:0]
		for i := range v.Endpoints {
			r.hits = append(r.hits, v.Endpoints[i].HeldBlocks())
		}
		r.hitsOf, r.hitsAt = w.pool, now
		if r.published {
			w.publish(r)
		}
	}
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		c.SetHeld(r.hits[i])
		c.Session = 0
		c.Usable = w.usable[i] && !(w.pairs && c.Endpoint.Role == kvstate.RoleBoth)
	}
	w.s.State.FindUses(w.pool, r.x.req.Hashes, v)
	if r.x.req.Session != 0 {
		w.s.State.MarkSession(w.pool, r.x.req.Session, v)
	}
	r.request.Waited, r.request.Rand = now.Sub(r.x.Began).Seconds(), admission.Chance(r.id)
	return &r.request
}

// Send implements [admission.Host].
func (w *poolAdmission) Send(id uint64, _ *picker.Request, v *kvstate.View, c picker.Choice, err error, how admission.Outcome) {
	if a := w.arriving; a != nil && a.id == id {
		w.settle(a, v, c, err)
		return
	}
	r := w.waiters[id]
	w.forget(r)
	w.settle(r, v, c, err)
	switch {
	case how == admission.Early:
		r.finish(waitEarly)
	case how == admission.Expired:
		r.finish(waitExpired)
	case err != nil:
		r.finish(waitShed)
	default:
		r.finish(waitBound)
	}
}

// Shed implements [admission.Host].
func (w *poolAdmission) Shed(id uint64) {
	r := w.waiters[id]
	w.forget(r)
	r.err = overloaded()
	r.finish(waitShed)
}

// ShortOfMemory implements [admission.Host].
func (w *poolAdmission) ShortOfMemory() bool { return w.s.shortOfMemory() }
