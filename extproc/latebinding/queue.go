// Package latebinding lets requests wait for endpoints (docs/adr/0009). A request waits in pass 1, with its stream
// open and its body here, until an endpoint has less than about a step of work ahead. Nothing is reserved and no
// engine knows of it yet, so a client that leaves costs nothing.
//
//   - Package picker/admission decides which request is next. A [Queue] is its host with real time: requests that wait,
//     timers, and a goroutine that dispatches (queue.go); the fleet as it is (host.go); the requests of other replicas
//     (remote.go).
//   - A [Waiter] is one request's part of it: [Queue.Choose] returns when its endpoints are chosen, [Waiter.Committed]
//     says that they are reserved.
//
// Some requests are bound at once: those without memory to keep them, and those whose time is over.
package latebinding

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"tandem/extproc/plan"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/picker"
	"tandem/picker/admission"
)

// Limits bound how requests of a pool wait for their endpoints. Zero values mean the defaults.
type Limits struct {
	MaxTime time.Duration // after which a request is dispatched before its turn; default admission.MaxWait
	Max     int           // requests that may wait at one time; default 4096
	// Memory is MaxTime for requests that wait for the memory of engines ([picker.Choice.NoMemory]); at least MaxTime.
	Memory time.Duration
}

const (
	// Tick is the longest time between two dispatches.
	Tick = 20 * time.Millisecond
	// Pause is the shortest: a burst of answers causes one dispatch.
	Pause = 2 * time.Millisecond
	// HitsTTL is how long a waiting request uses the cache hits that it has looked up.
	HitsTTL = 50 * time.Millisecond
)

// How waiting ended: label values of a metric.
const (
	bound   = "bound"       // dispatched in its turn
	expired = "expired"     // dispatched before its turn after Limits.MaxTime
	early   = "pushed"      // dispatched before its turn for want of space or memory
	shed    = "shed"        // refused for one of higher priority, or because its targets could not be met any more
	gone    = "client_gone" // the client left
)

// Observer counts the requests that wait.
type Observer interface {
	QueueChanged(pool string, by float64)
	WaitEnded(pool, end string, took time.Duration)
}

// Options are what the queues of a server share.
type Options struct {
	State         *kvstate.State
	Guard         *guard.Guard
	Observer      Observer
	Started       time.Time       // of the server
	Draining      <-chan struct{} // closed when the request no longer waits
	ShortOfMemory func() bool     // nobody should wait with a body
}

// Queue holds the waiting requests of one pool. It is safe for concurrent use.
type Queue struct {
	*Options
	name string // of the pool

	mu        sync.Mutex
	maxTime   time.Duration
	maxMemory time.Duration // [Limits.Memory]
	requests  admission.Queue
	picker    picker.Picker
	pairs     bool // endpoints with both roles are excluded
	pool      *kvstate.Pool
	view      kvstate.View
	usable    []bool // of the endpoints in the last view, before a request's own conditions
	waiters   map[uint64]*Waiter
	arriving  *Waiter   // the request in Arrive; not one of waiters yet
	committed []*Waiter // dispatched, but not reserved yet: views count them as reserved
	spare     [][]kvstate.Candidate
	lastID    uint64
	running   bool
	remoteQueue
}

// remoteQueue are the requests that wait at other replicas.
type remoteQueue struct {
	remote        map[uint64]kvstate.Queued
	remoteVersion uint64         // version of the pool's remote queue that remote has
	other         picker.Request // scratch for one of them
	positions     map[string]int // of addresses in the pool positionsOf
	positionsOf   *kvstate.Pool
	held          []kvstate.Held
}

// Waiter is one request that may wait. It is part of its stream's memory.
type Waiter struct {
	Took      time.Duration // how long it waited; 0: not at all
	BlockedOn BlockedOn     // what it waited for

	of      *plan.Request
	view    *kvstate.View
	state   *kvstate.State
	id      uint64
	pool    *kvstate.Pool // when it arrived
	request picker.Request
	came    time.Time

	cachedHits
	least     time.Duration // its least work over all endpoints
	place     float64       // its key in the queue
	choosy    bool          // not every endpoint serves its model
	published bool          // other replicas know that it waits
	held      []kvstate.Held

	done chan struct{} // closed when it is settled; nil: it did not wait
	end  string        // how its wait ended
	settlement
}

// cachedHits are the cache hits of a request, by position in the pool hitsOf.
type cachedHits struct {
	hits   []kvstate.HeldBlocks
	hitsOf *kvstate.Pool
	hitsAt time.Time
}

// save keeps the cache hits of a view of a pool.
func (h *cachedHits) save(v *kvstate.View, of *kvstate.Pool, at time.Time) {
	h.hits, h.hitsOf, h.hitsAt = h.hits[:0], of, at
	for i := range v.Endpoints {
		h.hits = append(h.hits, v.Endpoints[i].HeldBlocks())
	}
}

// settlement is the choice for a request.
type settlement struct {
	settled         bool
	choice          picker.Choice
	err             error
	pending         *Queue            // the queue that counts it as committed; nil: none
	prefill, decode *kvstate.Endpoint // of the choice; prefill may be nil
	work            time.Duration
}

// BlockedOn is what a request had to wait for when it arrived.
type BlockedOn struct {
	Endpoint      string // its best endpoint, which had a step of work ahead, counting requests before it, or no memory
	Memory        bool   // conversations that are expected back left it no memory there
	Local, Remote int    // requests before it, in this replica and in others
}

// New returns the queue of a pool.
func New(o *Options, pool string) *Queue {
	return &Queue{
		Options: o, name: pool, waiters: map[uint64]*Waiter{},
		remoteQueue: remoteQueue{remote: map[uint64]kvstate.Queued{}},
		lastID:      rand.Uint64(), // so that ids of different replicas differ
	}
}

// Apply applies a pool's policy, to waiting requests as well.
func (q *Queue) Apply(p *plan.Policy, l Limits) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.maxTime, q.requests.Max, q.picker.Policy = l.MaxTime, l.Max, p.Placement()
	q.requests.Promise = q.picker.Promise.TTFT
	q.pairs = p.Dialect.PairsOnly()
	if q.maxTime == 0 {
		q.maxTime = kvstate.Seconds(admission.MaxWait)
	}
	q.maxMemory = max(l.Memory, q.maxTime)
}

// ErrWaits is the error of what would have to wait, for a caller that cannot ([AtOnce]).
var ErrWaits = errors.New("the request has to wait")

type atOnce struct{}

// AtOnce returns a context for a caller that cannot wait: [Queue.Choose] and [Queue.UntilFree] return [ErrWaits]
// instead. The caller tries again with another context.
func AtOnce(ctx context.Context) context.Context { return context.WithValue(ctx, atOnce{}, true) }

// IsAtOnce reports whether a context is one of [AtOnce].
func IsAtOnce(ctx context.Context) bool { return ctx.Value(atOnce{}) != nil }

// Choose chooses the endpoints of a request when it is its turn, which may be at once. v is a view of all endpoints
// of the request's pool; after the wait it is the view of the choice. want is what is asked of the picker, updated.
// waited is how long it took. [Waiter.Committed] must follow, or another Choose with the same waiter.
func (q *Queue) Choose(
	ctx context.Context, r *Waiter, of *plan.Request, v *kvstate.View, want *picker.Request,
) (c picker.Choice, waited time.Duration, err error) {
	r.Committed() // a choice that was not taken: another one is tried
	noWait := IsAtOnce(ctx)
	var left, rested time.Duration
	if !noWait {
		left, rested = q.Rest(ctx, of)
	}
	*r = Waiter{
		Took: r.Took, BlockedOn: r.BlockedOn, // of an earlier choice
		of: of, view: v, state: q.State, pool: of.Pool, request: *want, came: time.Now(),
		cachedHits: cachedHits{hits: r.hits[:0]},
	}
	r.save(v, of.Pool, r.came)
	if blocked, waits := q.enter(r, noWait); waits {
		q.wait(ctx, r, left)
		waited = time.Since(r.came)
		r.Took, r.BlockedOn = waited, blocked
		q.Observer.WaitEnded(q.name, r.end, waited)
	}
	*want = r.request
	return r.choice, rested + waited, r.err
}

// rests are how long a request rests before it is placed again after an endpoint was full, by the redirects that it has
// spent: a refused prefill leg takes one of the few that Envoy follows, a refused decode leg two. One of the rests is
// long, for an endpoint that is full for seconds. The others are shorter, so that an endpoint that is free sooner is
// tried sooner.
var rests = [...]time.Duration{
	1: 250 * time.Millisecond, 2: time.Second, 3: time.Second, 4: 8 * time.Second, 5: time.Second,
}

// Rest waits so that these redirects suffice for an endpoint that is full for seconds. After any other failure a
// request goes to another endpoint at once. left is how long the request may wait after it. A nil queue lets nobody
// wait.
func (q *Queue) Rest(ctx context.Context, of *plan.Request) (left, rested time.Duration) {
	if q == nil {
		return 0, 0
	}
	q.mu.Lock()
	left = q.maxTime
	q.mu.Unlock()
	if of.Attempt.Redirects == 0 {
		return left, 0
	}
	began := time.Now()
	left -= of.Attempt.Age()
	full := func(e *kvstate.Endpoint) bool { return e.JustFull(began) != 0 }
	if !slices.ContainsFunc(of.Pool.Endpoints(), full) {
		return left, 0
	}
	timer := time.NewTimer(min(rests[min(of.Attempt.Redirects, len(rests)-1)], left))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	case <-q.Draining:
	}
	rested = time.Since(began)
	return left - rested, rested
}

// UntilFree chooses again and again while the endpoints for a request are full ([picker.ErrFull]), for as long as
// requests may wait here and at most until a time. waited is how long it took. On a nil queue it chooses once. It is
// for pass 2: its prompt is already computed, so it goes before all requests that wait.
func (q *Queue) UntilFree(ctx context.Context, until time.Time, choose func() error) (waited time.Duration, err error) {
	if err = choose(); q == nil || !errors.Is(err, picker.ErrFull) {
		return 0, err
	}
	if IsAtOnce(ctx) {
		return 0, ErrWaits
	}
	q.mu.Lock()
	limit := min(q.maxTime, time.Until(until))
	q.mu.Unlock()
	began, over, tick := time.Now(), time.NewTimer(limit), time.NewTicker(Tick)
	defer over.Stop()
	defer tick.Stop()
	for errors.Is(err, picker.ErrFull) {
		select {
		case <-tick.C:
			err = choose()
			continue
		case <-ctx.Done():
			err = io.EOF
		case <-over.C:
		case <-q.Draining:
		}
		break
	}
	return time.Since(began), err
}

// Reset clears the waiter for another request; the memory stays.
func (r *Waiter) Reset() { *r = Waiter{cachedHits: cachedHits{hits: r.hits[:0]}} }

// Committed records that the request's choice is reserved, or never will be. Other replicas learn only now that it
// does not wait any more: earlier they would take the endpoint for free.
func (r *Waiter) Committed() {
	if r.published {
		r.published = false
		r.state.PublishDequeued(r.pool, r.id, r.end == bound && r.err == nil)
	}
	if q := r.pending; q != nil {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.commit(r)
	}
}

// enter admits a request. waits is true if it must wait, for what blocks it. noWait: it cannot, not even for the lock.
func (q *Queue) enter(r *Waiter, noWait bool) (blocked BlockedOn, waits bool) {
	if !noWait {
		q.mu.Lock()
	} else if !q.mu.TryLock() {
		r.err = ErrWaits
		return blocked, false
	}
	defer q.mu.Unlock()
	q.lastID++
	r.id, q.pool = q.lastID, r.pool
	q.syncRemote()
	q.arriving = r
	defer func() { q.arriving = nil }()
	now, enough := r.came.Sub(q.Started).Seconds(), q.picker.Model.FullStep()
	if !q.requests.Arrive(&q.picker, q, r.id, now, enough) {
		r.err = plan.Overloaded()
		return blocked, false
	}
	if r.settled {
		return blocked, false
	}
	if noWait {
		q.requests.Remove(r.id)
		r.err = ErrWaits
		return blocked, false
	}
	r.done = make(chan struct{})
	q.waiters[r.id] = r
	blocked = q.blockedOn(r)
	q.publish(r)
	q.deferView(r)
	q.Observer.QueueChanged(q.name, 1)
	if !q.running {
		q.running = true
		ctx := guard.With(context.Background(), q.Guard)
		go guard.Keep(ctx, "late binding", q.run)
	}
	return blocked, true
}

// blockedOn returns what a request waits for, and records its place in the queue.
func (q *Queue) blockedOn(r *Waiter) BlockedOn {
	local, remote, self := q.requests.Before(r.id)
	r.least, r.place = kvstate.Seconds(self.Work), self.Key
	r.choosy = q.requests.Selective()
	by := BlockedOn{Local: local, Remote: remote, Memory: q.requests.LacksMemory()}
	if at := q.requests.Wanted(); at >= 0 && at < len(r.view.Endpoints) {
		by.Endpoint = r.view.Endpoints[at].Endpoint.Addr
	}
	return by
}

// maxSpare bounds the views of waiting requests that are kept for dispatched ones.
const maxSpare = 64

// deferView takes the view of a waiting request: the view of a large fleet is large, and thousands may wait.
func (q *Queue) deferView(r *Waiter) {
	if len(q.spare) < maxSpare {
		q.spare = append(q.spare, r.view.Endpoints[:0])
	}
	r.view.Endpoints = nil
}

// restoreView gives a request a view again.
func (q *Queue) restoreView(r *Waiter) {
	if n := len(q.spare); r.view.Endpoints == nil && n > 0 {
		r.view.Endpoints = q.spare[n-1]
		q.spare = q.spare[:n-1]
	}
}

// wait waits until a request is settled, or has waited for as long as it may.
func (q *Queue) wait(ctx context.Context, r *Waiter, limit time.Duration) {
	timer := time.NewTimer(limit - time.Since(r.came))
	defer timer.Stop()
	for {
		select {
		case <-r.done:
		case <-timer.C:
			if more := q.expire(r, limit); more > 0 {
				timer.Reset(more)
				continue
			}
		case <-q.Draining:
			q.leave(r, early)
		case <-ctx.Done():
			q.leave(r, gone)
		}
		return
	}
}

// recheck is how often a request that has waited for longer than others is asked whether it still waits for memory.
const recheck = time.Second

// expire ends the wait of a request that has waited for as long as others may, or returns for how long it waits on:
// what waits for the memory of engines has more time. limit is what it had.
func (q *Queue) expire(r *Waiter, limit time.Duration) (more time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	left := limit + q.maxMemory - q.maxTime - time.Since(r.came)
	if left > 0 && q.requests.WaitsForMemory(r.id) {
		return min(left, recheck)
	}
	q.requests.Expire(&q.picker, q, r.id)
	return 0
}

// leave ends a request's wait before its turn, unless it was dispatched a moment ago.
func (q *Queue) leave(r *Waiter, why string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch why {
	case gone:
		if q.requests.Remove(r.id) {
			q.forget(r)
		}
		q.commit(r)
		r.end, r.err = gone, io.EOF
	default:
		q.requests.DispatchEarly(&q.picker, q, r.id)
	}
}

// forget removes a request from the list of those that wait.
func (q *Queue) forget(r *Waiter) {
	delete(q.waiters, r.id)
	q.Observer.QueueChanged(q.name, -1)
}

// finish wakes the request's goroutine.
func (r *Waiter) finish(end string) {
	r.end = end
	close(r.done)
}

// run dispatches until no request waits.
func (q *Queue) run() {
	tick, pause := time.NewTicker(Tick), time.NewTimer(Pause)
	defer tick.Stop()
	defer pause.Stop()
	for {
		freed, more := q.dispatch()
		if !more {
			return
		}
		pause.Reset(Pause)
		<-pause.C
		select {
		case <-tick.C:
		case <-freed:
		}
	}
}

// dispatch dispatches the requests whose turn it is. freed signals that another dispatch may be due before the next
// tick.
func (q *Queue) dispatch() (freed <-chan struct{}, more bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if p := q.State.Pool(q.name); p != nil { // else the pool was removed: its last endpoints still serve
		q.pool = p
	}
	q.syncRemote()
	q.requests.Dispatch(&q.picker, q, time.Since(q.Started).Seconds(), q.picker.Model.FullStep())
	q.running = q.requests.Len() > 0
	return q.pool.Freed(), q.running
}

// Status is how many requests wait.
type Status struct {
	Waiting, Remote int     // in this replica, and in others
	Memory          int     // of those in this replica, that wait for the memory of engines
	Longest         float64 // wait of one of this replica's, s
	Committed       int     // chosen, but not reserved yet
	Running         bool    // a goroutine dispatches
}

// Status returns how many requests wait now.
func (q *Queue) Status() Status {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pool != nil {
		q.syncRemote()
	}
	s := Status{Waiting: len(q.waiters), Remote: q.requests.Remote(), Committed: len(q.committed), Running: q.running}
	for _, r := range q.waiters {
		if q.requests.WaitsForMemory(r.id) {
			s.Memory++
		}
		s.Longest = max(s.Longest, time.Since(r.came).Seconds())
	}
	return s
}
