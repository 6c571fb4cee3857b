package admission

import (
	"cmp"
	"slices"

	"tandem/picker"
)

// Queue is the order in which the requests of a pool wait until an endpoint has less than about a step of work
// ahead of it. It is bounded and deterministic.
//
// Requests are ordered by priority, within one by whether they can still keep the pool's promise (order.go), and then
// by their key: their work plus a fifth of their arrival time. So
// the shortest goes first, and five seconds of age outweigh a second of work: no request waits for ever behind
// others of its priority. The key is fixed on arrival, which keeps the order stable and the queue cheap.
//
// If requests of several flows wait, each flow gets its share of the dispatched work (shares.go): the order above
// holds among requests whose flows have got about the same, and always within a flow.
//
// Several replicas have a queue each. Requests that wait at other replicas have a place in this one too
// ([Queue.AddRemote], remote.go), so that all replicas walk the same order and each dispatches its own requests
// when it is their turn.
type Queue struct {
	Max int // requests that may wait; 0: 4096

	// Promise is the time from arrival to the first token that the pool promises, seconds; 0: none.
	Promise float64

	waiting   []Waiting // by priority and key
	ahead     []float64 // work of the requests that were passed over, by position in the view
	inTime    []float64 // of those, the work of requests that can keep the promise
	walked    float64   // when that was computed
	wanted    int       // position in the view where the last request to wait would have gone
	selective bool      // of the last arrival

	lacksMemory bool // likewise
	shares      shares
	replicas    map[uint64]*replica // those with requests in this queue; nil: none so far
	remote      int                 // requests of those
	changed     bool                // the remote requests, since walked
	order       []int32             // in which waiting is walked, if not as it stands
	slots       []int32
}

// Waiting is a request in a queue.
type Waiting struct {
	ID       uint64  // the caller's; unique, remote requests included
	Key      float64 // sort key
	Arrived  float64 // seconds
	Work     float64 // seconds, on the endpoint that holds most of it
	Priority int32
	Flow     uint64
	Replica  uint64 // where it waits; 0: this one

	due  float64 // of a remote request: since when it could be dispatched, as seen from here; infinite: it cannot
	sent bool
	look float64 // when to check again whether there is memory for it; 0: it does not wait for memory
}

// MaxWait is how long a request may wait by default, in seconds. Then its host calls [Queue.Expire]. If Envoy buffers
// bodies, a server has a lower limit.
const MaxWait = 60.0

const (
	defaultMaxWaiting = 4096
	ageing            = 0.2 // of the key per second of arrival
	maxWalk           = 128 // requests that one dispatch considers ...
	maxHeld           = 512 // ... plus those that wait for their targets, which block no others
	// fullWalk of these are checked once every endpoint is busy: only decode alone may be possible then.
	fullWalk = 16

	walkEvery = 0.020 // s: how often the queue is walked if nothing happens
	lookEvery = 0.250 // s: how often what waits for memory is looked at
)

// MemoryWaits is how many times as long as others a request may wait for the memory of engines.
const MemoryWaits = 5

// WaitsForMemory reports whether a request waits for room in the memory of engines ([picker.Choice.NoMemory]).
func (q *Queue) WaitsForMemory(id uint64) bool {
	at := q.at(id)
	return at >= 0 && q.waiting[at].look > 0
}

// Len returns the number of local requests.
func (q *Queue) Len() int { return len(q.waiting) - q.remote }

// Full reports whether no more requests may wait.
func (q *Queue) Full() bool { return q.Len() >= cmp.Or(q.Max, defaultMaxWaiting) }

// Add inserts a request with its work in seconds on the endpoint that holds most of its prompt
// ([picker.Picker.Work]). It returns false if the queue is full.
func (q *Queue) Add(r *picker.Request, id uint64, work, now float64) bool {
	if q.Full() {
		return false
	}
	q.insert(Waiting{ID: id, Arrived: now, Work: work, Priority: r.Priority, Flow: r.Flow})
	return true
}

// insert sets a request's key and inserts it in order.
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

// Remove removes a request whose client has left; false if it is not there.
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

// Sheddable returns the request to shed for a request of a priority: the last local one of the lowest priority, if that
// is below 0 and below the given one.
func (q *Queue) Sheddable(priority int32) (id uint64, ok bool) {
	for i := len(q.waiting) - 1; i >= 0; i-- {
		if last := &q.waiting[i]; last.Replica == 0 {
			return last.ID, last.Priority < 0 && last.Priority < priority
		}
	}
	return 0, false
}

// First returns the first local request; false if there is none.
func (q *Queue) First() (id uint64, ok bool) {
	for i := range q.waiting {
		if q.waiting[i].Replica == 0 {
			return q.waiting[i].ID, true
		}
	}
	return 0, false
}

// Before returns how many local and remote requests are before one, and the request itself.
func (q *Queue) Before(id uint64) (local, remote int, self Waiting) {
	for i := range q.waiting {
		w := &q.waiting[i]
		switch {
		case w.ID == id:
			return local, remote, *w
		case w.Replica == 0:
			local++
		default:
			remote++
		}
	}
	return local, remote, Waiting{}
}

// Wanted returns the endpoint, as a position in the view, to which the last request to wait would have gone for its
// prompt; -1: none, because it waits for its targets.
func (q *Queue) Wanted() int { return q.wanted }

// LacksMemory reports whether the last request to wait does so for the memory of that endpoint.
func (q *Queue) LacksMemory() bool { return q.lacksMemory }

// Selective reports whether the last request to wait has a model that not every endpoint serves
// ([picker.Choice.Selective]).
func (q *Queue) Selective() bool { return q.selective }

// Waiting returns the requests by priority and key, remote ones included. Do not modify.
func (q *Queue) Waiting() []Waiting { return q.waiting }
