package admission

import (
	"errors"
	"slices"

	"tandem/kvstate"
	"tandem/picker"
)

// Outcome is how a request left the queue.
type Outcome uint8

// The outcomes of a request that gets a choice.
const (
	Dispatched Outcome = iota // in its turn
	Early                     // before its turn: there was no space or no memory for it
	Expired                   // before its turn: it had waited for as long as it may
)

// Host is what a queue needs of its user. Its methods are called from the queue's, never later.
type Host interface {
	// Fleet returns the fleet as it is now, dispatched requests included. It may return the same memory again.
	Fleet() *kvstate.View
	// Look returns a request that waits or arrives, and sets its hits in the view.
	Look(id uint64, v *kvstate.View) *picker.Request
	// Send dispatches a request that has left the queue to its endpoints; err is that of Pick.
	Send(id uint64, r *picker.Request, v *kvstate.View, c picker.Choice, err error, how Outcome)
	// Shed refuses a request that has left the queue.
	Shed(id uint64)
	// ShortOfMemory reports whether there is too little memory to keep requests waiting.
	ShortOfMemory() bool
}

// Arrive handles a request that arrives: it is dispatched if an endpoint has capacity for it after the requests before
// it, and waits otherwise. If the queue is full, a request of lower priority is shed or the first one dispatched early.
// Arrive returns false if the request itself must be refused. enough is the time of an engine step in seconds
// ([picker.Model.FullStep]).
func (q *Queue) Arrive(k *picker.Picker, h Host, id uint64, now, enough float64) bool {
	if h.ShortOfMemory() {
		q.bind(k, h, id, Early)
		return true
	}
	ok, priority := q.arrive(k, h, id, now, enough)
	if ok {
		return true
	}
	if !q.makeSpace(k, h, priority) {
		return false
	}
	q.arrive(k, h, id, now, enough)
	return true
}

// arrive returns false if the queue is full, and the request's priority.
func (q *Queue) arrive(k *picker.Picker, h Host, id uint64, now, enough float64) (ok bool, priority int32) {
	// else the host's dispatches keep it current
	if q.Len() == 0 && q.remote > 0 && (q.changed || now-q.walked > walkEvery) {
		q.walk(k, h, now, enough)
	}
	v := h.Fleet()
	r := h.Look(id, v)
	if len(q.waiting) > 0 && r.Priority <= q.waiting[0].Priority { // else it is before all of them
		q.book(v)
	}
	c, err := k.Pick(r, v)
	if mayGo(k, v, c, err, enough) {
		h.Send(id, r, v, c, err, Dispatched)
		if len(q.waiting) > 0 {
			q.shares.sent(r.Flow, c.Work)
		}
		return true, r.Priority
	}
	q.wanted, q.selective, q.lacksMemory = c.Prefill, c.Selective, c.NoMemory
	if c.NoMemory {
		q.wanted = firstLeg(&c)
	}
	return q.Add(r, id, k.Work(r, v), now), r.Priority
}

// makeSpace makes space in a full queue for a request of a priority: it sheds a request of lower priority, else
// dispatches the first one early. It returns false if the newcomer must be refused instead, because its own
// priority is below 0.
func (q *Queue) makeSpace(k *picker.Picker, h Host, priority int32) bool {
	if id, ok := q.Sheddable(priority); ok {
		q.Remove(id)
		h.Shed(id)
		return true
	}
	if priority < 0 {
		return false
	}
	q.dispatchFirst(k, h)
	return true
}

func (q *Queue) dispatchFirst(k *picker.Picker, h Host) {
	if id, ok := q.First(); ok {
		q.Remove(id)
		q.bind(k, h, id, Early)
	}
}

// Expire ends the wait of a request whose time is over. It is shed if its priority is below 0, else dispatched
// before its turn. It returns false if the request does not wait any more.
func (q *Queue) Expire(k *picker.Picker, h Host, id uint64) bool {
	at := q.at(id)
	if at < 0 {
		return false
	}
	priority := q.waiting[at].Priority
	q.delete(at)
	if priority < 0 {
		h.Shed(id)
	} else {
		q.bind(k, h, id, Expired)
	}
	return true
}

// DispatchEarly dispatches a request before its turn; false if it does not wait any more.
func (q *Queue) DispatchEarly(k *picker.Picker, h Host, id uint64) bool {
	if !q.Remove(id) {
		return false
	}
	q.bind(k, h, id, Early)
	return true
}

// bind picks endpoints for a request regardless of the others. Missed targets do not hold it back any more.
func (q *Queue) bind(k *picker.Picker, h Host, id uint64, how Outcome) {
	v := h.Fleet()
	r := h.Look(id, v)
	if r.OnMiss == picker.MissWait {
		r.OnMiss = picker.MissGoOn
	}
	c, err := k.Pick(r, v)
	h.Send(id, r, v, c, err, how)
}

// Dispatch sends the requests whose turn it is. Call it every few milliseconds while any wait: endpoints are kept a
// step ahead, so none is without work for that long. It walks the first requests in order. Each is placed as if
// those before it that wait were at work already, and dispatched if its endpoint has less than a step of work
// ahead. A request that waits for its targets, for the memory of engines, or for
// endpoints that are full, blocks no others. While memory is short, the first requests are
// dispatched early. now is in seconds, as in [Waiting].
func (q *Queue) Dispatch(k *picker.Picker, h Host, now, enough float64) {
	for q.Len() > 0 && h.ShortOfMemory() {
		q.dispatchFirst(k, h)
	}
	q.walk(k, h, now, enough)
}

func (q *Queue) walk(k *picker.Picker, h Host, now, enough float64) {
	clear(q.ahead)
	q.walked, q.changed = now, false
	v := q.fleet(h)
	sent, full, held := 0, 0, 0
	order := q.inOrder(now)
	late := false
	for i := 0; i < len(q.waiting) && i-held < maxWalk && held < maxHeld && full < fullWalk; i++ {
		w := &q.waiting[i]
		if order != nil {
			w = &q.waiting[order[i]]
		}
		if !late && q.misses(w, now) {
			late, q.inTime = true, append(q.inTime[:0], q.ahead...)
		}
		if now < w.look {
			held++
			continue
		}
		r := h.Look(w.ID, v)
		c, err := k.Pick(r, v)
		switch may := mayGo(k, v, c, err, enough); {
		case errors.Is(err, picker.ErrFull):
			held++
			continue
		case err == nil && c.NoMemory:
			w.look = now + lookEvery
			held++
			continue
		case w.Replica != 0:
			if !q.blocks(w, &c, may, now) {
				continue
			}
		case may:
			h.Send(w.ID, r, v, c, err, Dispatched)
			q.shares.sent(w.Flow, c.Work)
			w.sent = true
			sent++
			v = q.fleet(h)
			continue
		case c.Wait:
			held++
			continue
		}
		q.pass(v, &c)
		if busy(v, enough) {
			full++
		}
	}
	if late { // those that arrive go before them
		clear(q.ahead)
		copy(q.ahead, q.inTime)
	}
	if sent > 0 {
		q.dropSent()
	}
	q.resetDue(now)
}

// dropSent removes the requests that were sent.
func (q *Queue) dropSent() {
	q.waiting = slices.DeleteFunc(q.waiting, func(w Waiting) bool {
		if w.sent {
			q.shares.leave(w.Flow)
		}
		return w.sent
	})
}

// pass counts a request that waits as if it were at work at its endpoint.
func (q *Queue) pass(v *kvstate.View, c *picker.Choice) {
	at := firstLeg(c)
	p := &v.Endpoints[at]
	work := c.Work
	if p.Speed > 0 {
		work *= p.Speed
	}
	p.Queue += kvstate.Seconds(work)
	q.ahead[at] += work
}

// firstLeg returns the position of the endpoint that computes the prompt.
func firstLeg(c *picker.Choice) int {
	if c.Prefill >= 0 {
		return c.Prefill
	}
	return c.Decode
}

// mayGo reports whether a request may go to its choice now. One that cannot be served need not wait either, unless its
// endpoints are only full. A request whose endpoint has failed and gets a trial does not count either: its work there
// does not end.
func mayGo(k *picker.Picker, v *kvstate.View, c picker.Choice, err error, enough float64) bool {
	switch {
	case c.Wait:
		return false
	case err != nil, v.Endpoints[firstLeg(&c)].Endpoint.Failed():
		return true
	case (c.NoRoom || c.NoMemory) && k.Late:
		return false
	}
	return !k.Late || c.Prefill < 0 || queued(v, c.Prefill) < enough
}

// queued returns the work ahead of an endpoint in seconds, with the prompts whose answers it writes itself.
// Duration.Seconds divides integers, which is slow.
func queued(v *kvstate.View, at int) float64 {
	c := &v.Endpoints[at]
	if c.Endpoint.Role == kvstate.RoleBoth {
		return float64(c.Queue+c.Local) * 1e-9
	}
	return float64(c.Queue) * 1e-9
}

// fleet returns the fleet as if the requests that were passed over were reserved.
func (q *Queue) fleet(h Host) *kvstate.View {
	v := h.Fleet()
	q.book(v)
	return v
}

func (q *Queue) book(v *kvstate.View) {
	for len(q.ahead) < len(v.Endpoints) {
		q.ahead = append(q.ahead, 0)
	}
	for i := range v.Endpoints {
		v.Endpoints[i].Queue += kvstate.Seconds(q.ahead[i])
	}
}

// busy reports whether every prefill endpoint has enough work.
func busy(v *kvstate.View, enough float64) bool {
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if c.Usable && c.Used()&kvstate.RolePrefill != 0 && queued(v, i) < enough {
			return false
		}
	}
	return true
}
