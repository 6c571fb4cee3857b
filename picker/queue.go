package picker

import (
	"math"
	"slices"

	"tandem/kvstate"
)

// Queue is where the requests of a pool wait until an endpoint has less than about a step of work ahead of it. A request
// that is bound on arrival stands in one endpoint's queue for good, first come, first served; one that waits here goes to
// whichever endpoint is free first, and short ones need not wait behind long ones. It is bounded and deterministic, and
// knows no clock: time comes in as seconds since any moment.
//
// Requests stand in the order of their key: the work they are, plus a fifth of their arrival. So they go shortest first,
// and a second more of work yields to five seconds of age: nobody waits for ever. The key is fixed on arrival, which keeps
// the order stable and the queue cheap.
type Queue struct {
	Max int // requests that may wait; 0: 4096

	waiting []Waiting
	ahead   []float64 // work that those who were passed over will be, by position in the view
}

// Waiting is a request in a queue.
type Waiting struct {
	ID      uint64  // the caller's
	Key     float64 // what it is sorted by
	Arrived float64 // seconds
}

const (
	defaultMaxWaiting = 4096
	ageing            = 0.2 // of the key for each second of arrival
	maxWalk           = 128 // requests that one dispatch looks at
	fullWalk          = 16  // of those, once every endpoint has enough to do: what may still go is decode alone
)

// Len is how many wait.
func (q *Queue) Len() int { return len(q.waiting) }

// Add puts a request into the queue that takes so many seconds of work on the endpoint that holds most of it ([Picker.Work]).
// It is false where the queue is full.
func (q *Queue) Add(id uint64, work, now float64) bool {
	limit := q.Max
	if limit == 0 {
		limit = defaultMaxWaiting
	}
	if len(q.waiting) >= limit {
		return false
	}
	w := Waiting{ID: id, Key: work + ageing*now, Arrived: now}
	at, _ := slices.BinarySearchFunc(q.waiting, w, func(a, b Waiting) int {
		if a.Key <= b.Key { // equals keep the order of arrival
			return -1
		}
		return 1
	})
	q.waiting = slices.Insert(q.waiting, at, w)
	return true
}

// Remove takes a request out whose client does not wait any more; false if it is not there.
func (q *Queue) Remove(id uint64) bool {
	at := slices.IndexFunc(q.waiting, func(w Waiting) bool { return w.ID == id })
	if at < 0 {
		return false
	}
	q.waiting = slices.Delete(q.waiting, at, at+1)
	return true
}

// Waiting are those that wait, next first. Do not modify.
func (q *Queue) Waiting() []Waiting { return q.waiting }

// Room is what a queue asks of those who use it.
type Room interface {
	// Fleet gives the fleet as it is now, what was just sent included. It may be given the same memory again.
	Fleet() *kvstate.View
	// Look gives a request that waits, and fills its hits into the view.
	Look(id uint64, v *kvstate.View) *Request
	// Send binds a request; it leaves the queue. err is that of Pick.
	Send(id uint64, r *Request, v *kvstate.View, c Choice, err error)
}

// Arrive is what begins with a request: it is sent if there is room for it beside those who wait, and else waits with them.
// It is false where the queue is full. enough is a step of work in seconds ([Model.FullStep]).
func (q *Queue) Arrive(k *Picker, room Room, id uint64, now, enough float64) bool {
	v := q.fleet(room)
	r := room.Look(id, v)
	c, err := k.Pick(r, v)
	if q.mayGo(v, c, err, enough) {
		room.Send(id, r, v, c, err)
		return true
	}
	return q.Add(id, k.Work(r, v), now)
}

// Dispatch sends those requests for which it is time. Call it every few milliseconds while any wait: endpoints are never
// left without work for so long, because they are kept a step ahead. It walks the first requests in order. Each is
// placed as if those before it that wait were at work already; it is sent if the endpoint that it would go to has less than
// a step of work ahead.
func (q *Queue) Dispatch(k *Picker, room Room, enough float64) {
	clear(q.ahead)
	v := q.fleet(room)
	kept, full := 0, 0
	for i, w := range q.waiting {
		if i == maxWalk || full == fullWalk {
			kept += copy(q.waiting[kept:], q.waiting[i:])
			break
		}
		r := room.Look(w.ID, v)
		c, err := k.Pick(r, v)
		if q.mayGo(v, c, err, enough) {
			room.Send(w.ID, r, v, c, err)
			v = q.fleet(room)
			continue
		}
		p := &v.Endpoints[c.Prefill]
		work := c.Work * speed(p, 1)
		p.Queue += kvstate.Seconds(work)
		q.ahead[c.Prefill] += work
		q.waiting[kept] = w
		kept++
		if busy(v, enough) {
			full++
		}
	}
	q.waiting = q.waiting[:kept]
}

// mayGo reports whether it is time for a choice: what cannot be served need not wait either.
func (q *Queue) mayGo(v *kvstate.View, c Choice, err error, enough float64) bool {
	return err != nil || c.Prefill < 0 || seconds(v.Endpoints[c.Prefill].Queue) < enough
}

// fleet is the fleet with those who wait before as if they were booked.
func (q *Queue) fleet(room Room) *kvstate.View {
	v := room.Fleet()
	for len(q.ahead) < len(v.Endpoints) {
		q.ahead = append(q.ahead, 0)
	}
	for i := range v.Endpoints {
		v.Endpoints[i].Queue += kvstate.Seconds(q.ahead[i])
	}
	return v
}

// busy reports whether every endpoint that prefills has enough to do.
func busy(v *kvstate.View, enough float64) bool {
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if c.Usable && c.Endpoint.Role&kvstate.RolePrefill != 0 && seconds(c.Queue) < enough {
			return false
		}
	}
	return true
}

// Work is how much a request is to prefill, in seconds, on the endpoint where that is least: the key of a [Queue].
func (k *Picker) Work(r *Request, v *kvstate.View) float64 {
	t := k.terms(r, v, 0, 0)
	least := math.Inf(1)
	for i := range v.Endpoints {
		if c := &v.Endpoints[i]; c.Usable && c.Endpoint.Role&kvstate.RolePrefill != 0 {
			uncached, cached := t.split(c)
			least = min(least, t.m.prefill(uncached, cached)*speed(c, t.fleet))
		}
	}
	if math.IsInf(least, 1) {
		return 0
	}
	return least
}
