package picker

import (
	"cmp"
	"math"
	"slices"

	"tandem/kvstate"
)

// Queue is where the requests of a pool wait until an endpoint has less than about a step of work ahead of it. A request
// that is bound on arrival stands in one endpoint's queue for good, first come, first served; one that waits here goes to
// whichever endpoint is free first, and short ones need not wait behind long ones. It is bounded and deterministic, and
// knows no clock: time comes in as seconds since any moment.
//
// Requests stand in the order of their priority, and within one of their key: the work they are, plus a fifth of their
// arrival. So they go shortest first, and a second more of work yields to five seconds of age: nobody waits for ever behind
// others of the same priority. The key is fixed on arrival, which keeps the order stable and the queue cheap.
//
// Where requests of several flows wait, each flow gets its share of the work that is sent (shares.go): the order above holds
// among requests whose flows have got about the same. Within a flow it always does.
//
// Several replicas have a queue each. Those who wait at the others stand in this one too, as far as it is told of them
// ([Queue.Hear], elsewhere.go), so that all walk the same order and each sends its own when it is their turn in all of it.
type Queue struct {
	Max int // requests that may wait; 0: 4096

	waiting   []Waiting // by priority and key
	ahead     []float64 // work that those who were passed over will be, by position in the view
	walked    float64   // when that was found out
	wanted    int       // where who was last to wait would have gone, as a position in the view
	selective bool      // of the one that last arrived
	shares    shares
	replicas  map[uint64]*replica // the others who have requests wait here; nil: none had yet
	remote    int                 // requests of those
	changed   bool                // of them since walked
	order     []int32             // in which waiting is walked, where that is another order
	slots     []int32
}

// Waiting is a request in a queue.
type Waiting struct {
	ID       uint64  // the caller's; of requests that wait elsewhere too, so no two may have the same
	Key      float64 // what it is sorted by
	Arrived  float64 // seconds
	Work     float64 // seconds, on the endpoint that holds most of it
	Priority int32
	Flow     uint64
	Replica  uint64 // where it waits; 0: here

	due  float64 // elsewhere: since when it could be sent, as it looks from here; infinite: it cannot
	sent bool
}

// MaxWait is how many seconds a request stays in a queue unless it is configured otherwise. Then whoever keeps the queue binds it,
// whatever waits before it.
const MaxWait = 20.0

const (
	defaultMaxWaiting = 4096
	ageing            = 0.2 // of the key for each second of arrival
	maxWalk           = 128 // requests that one dispatch looks at ...
	maxHeld           = 512 // ... beside so many that wait for their targets, and are in nobody's way
	fullWalk          = 16  // of those, once every endpoint has enough to do: what may still go is decode alone

	walkEvery = 0.020 // s: as often as who waits is looked at where nothing happens
)

// Len is how many wait here.
func (q *Queue) Len() int { return len(q.waiting) - q.remote }

// Full reports whether no more may wait.
func (q *Queue) Full() bool { return q.Len() >= cmp.Or(q.Max, defaultMaxWaiting) }

// Add puts a request into the queue that takes so many seconds of work on the endpoint that holds most of it ([Picker.Work]).
// It is false where the queue is full.
func (q *Queue) Add(r *Request, id uint64, work, now float64) bool {
	if q.Full() {
		return false
	}
	q.insert(Waiting{ID: id, Arrived: now, Work: work, Priority: r.Priority, Flow: r.Flow})
	return true
}

// insert gives a request its key, and puts it in its place.
func (q *Queue) insert(w Waiting) {
	w.Key = w.Work + ageing*w.Arrived
	at, _ := slices.BinarySearchFunc(q.waiting, w, func(a, b Waiting) int {
		if a.Priority > b.Priority || a.Priority == b.Priority && a.Key <= b.Key { // equals keep the order of arrival
			return -1
		}
		return 1
	})
	q.waiting = slices.Insert(q.waiting, at, w)
	q.shares.join(w.Flow)
}

// Remove takes a request out whose client does not wait any more; false if it is not there.
func (q *Queue) Remove(id uint64) bool {
	at := q.at(id)
	if at < 0 {
		return false
	}
	q.delete(at)
	return true
}

func (q *Queue) at(id uint64) int {
	return slices.IndexFunc(q.waiting, func(w Waiting) bool { return w.ID == id })
}

func (q *Queue) delete(at int) {
	q.shares.leave(q.waiting[at].Flow)
	q.waiting = slices.Delete(q.waiting, at, at+1)
}

// GivesWay is who makes room for a request of that priority: the last of the least priority that waits here, if that is below
// 0 and below the other.
func (q *Queue) Sheddable(priority int32) (id uint64, ok bool) {
	for i := len(q.waiting) - 1; i >= 0; i-- {
		if last := &q.waiting[i]; last.Replica == 0 {
			return last.ID, last.Priority < 0 && last.Priority < priority
		}
	}
	return 0, false
}

// First is the first of those that wait here; false if none does.
func (q *Queue) First() (id uint64, ok bool) {
	for i := range q.waiting {
		if q.waiting[i].Replica == 0 {
			return q.waiting[i].ID, true
		}
	}
	return 0, false
}

// Before is how many wait before one that waits here or elsewhere, at which of both, and what it is itself.
func (q *Queue) Before(id uint64) (here, elsewhere int, self Waiting) {
	for i := range q.waiting {
		w := &q.waiting[i]
		switch {
		case w.ID == id:
			return here, elsewhere, *w
		case w.Replica == 0:
			here++
		default:
			elsewhere++
		}
	}
	return here, elsewhere, Waiting{}
}

// Wanted is where the request that [Queue.Arrive] had wait would have gone to prefill, as a position in the view; -1: nowhere,
// since it waits for its targets.
func (q *Queue) Wanted() int { return q.wanted }

// Choosy reports whether the request that last arrived and waits has a model that not every endpoint serves ([Choice.Choosy]).
func (q *Queue) Selective() bool { return q.selective }

// Waiting are those that wait, by priority and key, here and elsewhere. Do not modify.
func (q *Queue) Waiting() []Waiting { return q.waiting }

// Room is what a queue asks of those who use it.
type Host interface {
	// Fleet gives the fleet as it is now, what was just sent included. It may be given the same memory again.
	Fleet() *kvstate.View
	// Look gives a request that waits, and fills its hits into the view.
	Look(id uint64, v *kvstate.View) *Request
	// Send binds a request; it leaves the queue. err is that of Pick.
	Send(id uint64, r *Request, v *kvstate.View, c Choice, err error)
}

// Arrive is what begins with a request: it is sent if there is room for it beside those who wait, and else waits with them.
// It is false where the queue is full. enough is a step of work in seconds ([Model.FullStep]).
func (q *Queue) Arrive(k *Picker, room Host, id uint64, now, enough float64) bool {
	if q.Len() == 0 && q.remote > 0 && (q.changed || now-q.walked > walkEvery) { // who waits here sees to it else
		q.Dispatch(k, room, now, enough)
	}
	v := room.Fleet()
	r := room.Look(id, v)
	if len(q.waiting) > 0 && r.Priority <= q.waiting[0].Priority { // else all of them stand behind it
		q.book(v)
	}
	c, err := k.Pick(r, v)
	if mayGo(k, v, c, err, enough) {
		room.Send(id, r, v, c, err)
		if len(q.waiting) > 0 {
			q.shares.sent(r.Flow, c.Work)
		}
		return true
	}
	q.wanted, q.selective = c.Prefill, c.Selective
	return q.Add(r, id, k.Work(r, v), now)
}

// Dispatch sends those requests for which it is time. Call it every few milliseconds while any wait: endpoints are never
// left without work for so long, because they are kept a step ahead. It walks the first requests in order. Each is
// placed as if those before it that wait were at work already; it is sent if the endpoint that it would go to has less than
// a step of work ahead. One that waits for its targets is in nobody's way. now is in seconds, as [Waiting] has it.
func (q *Queue) Dispatch(k *Picker, room Host, now, enough float64) {
	clear(q.ahead)
	q.walked, q.changed = now, false
	v := q.fleet(room)
	sent, full, held := 0, 0, 0
	order := q.inOrder()
	for i := 0; i < len(q.waiting) && i-held < maxWalk && held < maxHeld && full < fullWalk; i++ {
		w := &q.waiting[i]
		if order != nil {
			w = &q.waiting[order[i]]
		}
		r := room.Look(w.ID, v)
		c, err := k.Pick(r, v)
		switch may := mayGo(k, v, c, err, enough); {
		case w.Replica != 0:
			if !q.blocks(w, &c, may, now) {
				continue
			}
		case may:
			room.Send(w.ID, r, v, c, err)
			q.shares.sent(w.Flow, c.Work)
			w.sent = true
			sent++
			v = q.fleet(room)
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
	if sent > 0 {
		q.drop()
	}
	q.resetDue(now)
}

// drop takes out who was sent.
func (q *Queue) drop() {
	q.waiting = slices.DeleteFunc(q.waiting, func(w Waiting) bool {
		if w.sent {
			q.shares.leave(w.Flow)
		}
		return w.sent
	})
}

// pass counts a request that waits as if it were at work where it would go.
func (q *Queue) pass(v *kvstate.View, c *Choice) {
	at := c.Prefill
	if at < 0 {
		at = c.Decode
	}
	p := &v.Endpoints[at]
	work := c.Work * speed(p, 1)
	p.Queue += kvstate.Seconds(work)
	q.ahead[at] += work
}

// mayGo reports whether it is time for a choice: what cannot be served need not wait either.
func mayGo(k *Picker, v *kvstate.View, c Choice, err error, enough float64) bool {
	switch {
	case err != nil:
		return true
	case c.Wait:
		return false
	}
	return !k.Late || c.Prefill < 0 || seconds(v.Endpoints[c.Prefill].Queue) < enough
}

// fleet is the fleet with those who wait before as if they were booked.
func (q *Queue) fleet(room Host) *kvstate.View {
	v := room.Fleet()
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
