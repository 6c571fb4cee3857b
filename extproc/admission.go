package extproc

import (
	"context"
	"io"
	"slices"
	"sync"
	"time"

	"tandem/extproc/plan"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/picker"
)

// Late binding (docs/adr/0009): a request waits in pass 1, its stream open and its body here, until an endpoint has less than
// about a step of work ahead. Nothing is booked and no engine knows of it yet, so a client that leaves costs nothing. Which
// request is next is [picker.Queue]'s business; this file is what the queue needs of the world: who waits, the fleet as it
// is, time, and waking up.
//
// Every replica has a queue of its own, sees what the others have booked, and knows who waits there (waitingelsewhere.go). Some
// requests are bound at once: those that were let in before and whose hop failed, those that there is no memory to keep, and
// those whose time is over.

// Waiting is how requests of a pool wait for their endpoints. Zero values take the defaults.
type Waiting struct {
	MaxTime time.Duration // then a request is bound whatever waits before it; default picker.MaxWait
	Max     int           // requests that may wait at one time; default 4096
}

const (
	waitTick  = 20 * time.Millisecond // how often those who wait are looked at, at least
	waitPause = 2 * time.Millisecond  // and at most: a burst of answers is one occasion
	hitsTTL   = 50 * time.Millisecond // for so long who waits believes what it knows of caches
)

// How waiting ended: label values of a metric.
const (
	waitBound   = "bound"       // it was its turn
	waitExpired = "expired"     // Waiting.MaxTime was over: bound before its turn
	waitEarly   = "pushed"      // there was no room or no memory for it any more: bound before its turn
	waitShed    = "shed"        // it gave way, or its targets could not be met any more
	waitGone    = "client_gone" // nobody waited for it any more
)

// waitingRoom holds the requests of one pool that wait. It serves picker.Queue as its Room.
type admission struct {
	s    *Server
	name string // of the pool

	mu        sync.Mutex
	maxTime   time.Duration
	queue     picker.Queue
	picker    picker.Picker
	pairs     bool // endpoints that do both do not count
	pool      *kvstate.Pool
	view      kvstate.View
	usable    []bool // of the endpoints of the view filled last, before a request has its say
	waiters   map[uint64]*waiter
	arriving  *waiter   // asks to come in; not one of waiters yet
	committed []*waiter // were sent and have not booked yet: they count as if they had, on D too until they have
	spare     [][]kvstate.Candidate
	lastID    uint64
	running   bool

	remote        map[uint64]kvstate.Queued // at other replicas
	remoteVersion uint64                    // the pool's count of them that this is of
	other         picker.Request            // one of them
	positions     map[string]int            // of addresses in positionsOf
	positionsOf   *kvstate.Pool
	held          []kvstate.Held
}

// waiter is one request. It lives in its stream's memory, which does nothing but wait meanwhile.
type waiter struct {
	x       *planning
	id      uint64
	pool    *kvstate.Pool // that it came for
	request picker.Request
	came    time.Time

	hits   []int32 // by position in the pool hitsOf
	hitsOf *kvstate.Pool
	hitsAt time.Time

	least     time.Duration // its work, where that is least
	place     float64       // its key in the queue
	choosy    bool          // not every endpoint serves its model
	published bool          // others know that it waits
	held      []kvstate.Held
	blockedOn blockedOn

	done    chan struct{} // closed when it is settled; nil: it never waited
	end     string        // one of the wait constants
	settled bool
	choice  picker.Choice
	err     error

	pending         *admission        // nil: it is not landing
	prefill, decode *kvstate.Endpoint // that it lands on; prefill may be nil
	work            time.Duration
}

// stoodBy is what a request had to wait for when it came.
type blockedOn struct {
	endpoint      string // that it would have gone to: it had a step of work ahead, or less without those before it
	local, remote int    // requests that waited before it
}

func newAdmission(s *Server, name string) *admission {
	w := &admission{s: s, name: name, waiters: map[uint64]*waiter{}, remote: map[uint64]kvstate.Queued{}}
	w.lastID = random() // so that no other replica counts the same numbers
	return w
}

// set puts a policy in force, for those who wait as well.
func (w *admission) set(p *Policy) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.maxTime, w.queue.Max, w.picker.Policy = p.Waiting.MaxTime, p.Waiting.Max, p.Placement()
	w.pairs = p.Dialect.PairsOnly()
	orDefault(&w.maxTime, kvstate.Seconds(picker.MaxWait))
}

// choose picks the endpoints of a request, in x.view: at once or, where its pool has requests wait, when it is time. A view
// that does not have all of the pool's endpoints is such that it cannot be filled again: then it is at once.
func (x *planning) choose(pool *kvstate.Pool, policy *Policy, r *picker.Request, a *plan.Attempt) (picker.Choice, error) {
	r.MinAnswer, r.MaxAnswer = x.req.AnswerTokens()
	c, err := x.chooseNow(pool, policy, r, a)
	x.priority, x.foreseen = r.Priority, foreseen{kvstate.Seconds(c.Work), c.Price, kvstate.Seconds(c.PrefillTime), kvstate.Seconds(c.FirstToken)}
	return c, missed(r, &c, err)
}

func (x *planning) chooseNow(pool *kvstate.Pool, policy *Policy, r *picker.Request, a *plan.Attempt) (picker.Choice, error) {
	x.picker.Policy = policy.Placement()
	if policy.admission == nil || a.Redirects > 0 || len(x.view.Endpoints) != len(pool.Endpoints()) {
		if r.OnMiss == picker.MissWait {
			r.OnMiss = picker.MissGoOn
		}
		if policy.Dialect.PairsOnly() {
			x.view.Endpoints = slices.DeleteFunc(x.view.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint.Role == kvstate.RoleBoth })
		}
		return x.picker.Pick(r, &x.view)
	}
	w := &x.waits
	*w = waiter{x: x, pool: pool, request: *r, came: time.Now(), hits: w.hits[:0]}
	for i := range x.view.Endpoints {
		w.hits = append(w.hits, int32(x.view.Endpoints[i].Hit))
	}
	w.hitsOf, w.hitsAt = pool, w.came
	if policy.admission.enter(w) {
		policy.admission.wait(w)
		x.waited, x.blockedOn = time.Since(w.came), w.blockedOn
		x.LeaveOut(x.waited) // no part of deciding
		x.s.metrics.WaitEnded(policy.admission.name, w.end, x.waited)
	}
	*r = w.request
	return w.choice, w.err
}

// landed says that what the request was sent for is booked, or never will be. Other replicas hear only then that it does not
// wait any more: between the two they would take the endpoint for free.
func (x *planning) committed() {
	if w := &x.waits; w.published {
		w.published = false
		x.s.State.PublishDequeued(w.pool, w.id, w.end == waitBound && w.err == nil)
	}
	if room := x.waits.pending; room != nil {
		room.mu.Lock()
		defer room.mu.Unlock()
		room.commit(&x.waits)
	}
}

// enter asks for a request to be bound; true if it has to wait for that.
func (w *admission) enter(r *waiter) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lastID++
	r.id, w.pool = w.lastID, r.pool
	if w.s.shortOfMemory() {
		w.bind(r)
		return false
	}
	w.syncRemote()
	w.arriving = r
	defer func() { w.arriving = nil }()
	now, enough := r.came.Sub(w.s.started).Seconds(), w.picker.Model.FullStep()
	if !w.queue.Arrive(&w.picker, w, r.id, now, enough) {
		if !w.makeSpace(r.request.Priority) {
			r.err = overloaded()
			return false
		}
		w.queue.Arrive(&w.picker, w, r.id, now, enough)
	}
	if r.settled {
		return false
	}
	r.done = make(chan struct{})
	w.waiters[r.id] = r
	w.setBlockedOn(r)
	w.publish(r)
	w.deferView(r)
	w.s.metrics.QueueChanged(w.name, 1)
	if !w.running {
		w.running = true
		ctx := guard.With(context.Background(), w.s.guard)
		go guard.Keep(ctx, "late binding", w.run)
	}
	return true
}

// standBy notes what a request waits for.
func (w *admission) setBlockedOn(r *waiter) {
	here, elsewhere, self := w.queue.Before(r.id)
	r.least, r.place = kvstate.Seconds(self.Work), self.Key
	r.choosy = w.queue.Selective()
	r.blockedOn = blockedOn{local: here, remote: elsewhere}
	if at := w.queue.Wanted(); at >= 0 && at < len(r.x.view.Endpoints) {
		r.blockedOn.endpoint = r.x.view.Endpoints[at].Endpoint.Addr
	}
}

// maxSpare is how many views of those who wait are kept for those who are sent.
const maxSpare = 64

// putAside takes the view of a request that waits: of a large fleet it is large, and thousands may wait.
func (w *admission) deferView(r *waiter) {
	if len(w.spare) < maxSpare {
		w.spare = append(w.spare, r.x.view.Endpoints[:0])
	}
	r.x.view.Endpoints = nil
}

// takeBack gives a request a view again.
func (w *admission) restoreView(r *waiter) {
	if n := len(w.spare); r.x.view.Endpoints == nil && n > 0 {
		r.x.view.Endpoints = w.spare[n-1]
		w.spare = w.spare[:n-1]
	}
}

// makeRoom is what happens where as many wait as may: one that gives way is refused. Where there is none, the newcomer is,
// if it is to give way; and else the next one is bound before its time.
func (w *admission) makeSpace(priority int32) bool {
	if id, ok := w.queue.Sheddable(priority); ok {
		r := w.waiters[id]
		w.remove(r)
		r.err = overloaded()
		r.finish(waitShed)
		return true
	}
	if priority >= 0 {
		w.dispatchEarly()
		return true
	}
	return false
}

// push binds the next request before its time.
func (w *admission) dispatchEarly() {
	id, _ := w.queue.First()
	r := w.waiters[id]
	w.remove(r)
	w.bind(r)
	r.finish(waitEarly)
}

// wait returns when a request is settled.
func (w *admission) wait(r *waiter) {
	w.mu.Lock()
	limit := w.maxTime
	w.mu.Unlock()
	timer := time.NewTimer(limit - time.Since(r.came))
	defer timer.Stop()
	ctx := r.x.stream.Context()
	select {
	case <-r.done:
	case <-timer.C:
		w.leave(r, waitExpired)
	case <-w.s.draining:
		w.leave(r, waitEarly)
	case <-ctx.Done():
		w.leave(r, waitGone)
	}
}

// leave takes a request out before its turn, and binds it if it is still wanted. It may have been sent a moment ago.
func (w *admission) leave(r *waiter, why string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	waits := w.waiters[r.id] == r
	if waits {
		w.remove(r)
	}
	switch {
	case why == waitGone:
		w.commit(r)
		r.end, r.err = waitGone, io.EOF
	case !waits:
	case why == waitExpired && r.request.Priority < 0:
		r.end, r.err = waitShed, overloaded()
	default:
		w.bind(r)
		r.end = why
	}
}

// remove takes a request out of the queue, and off the list.
func (w *admission) remove(r *waiter) {
	w.queue.Remove(r.id)
	w.forget(r)
}

func (w *admission) forget(r *waiter) {
	delete(w.waiters, r.id)
	w.s.metrics.QueueChanged(w.name, -1)
}

// finish lets the request's own goroutine go on.
func (r *waiter) finish(end string) {
	r.end = end
	close(r.done)
}

// run sends those for whom it is time until nobody waits.
func (w *admission) run() {
	tick, pause := time.NewTicker(waitTick), time.NewTimer(waitPause)
	defer tick.Stop()
	defer pause.Stop()
	for {
		freed, more := w.dispatch()
		if !more {
			return
		}
		pause.Reset(waitPause)
		<-pause.C
		select {
		case <-tick.C:
		case <-freed:
		}
	}
}

// dispatch is one look at those who wait. freed says when to come back before the next tick.
func (w *admission) dispatch() (freed <-chan struct{}, more bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p := w.s.State.Pool(w.name); p != nil { // else it goes on with the pool that was
		w.pool = p
	}
	for w.queue.Len() > 0 && w.s.shortOfMemory() {
		w.dispatchEarly()
	}
	w.syncRemote()
	w.queue.Dispatch(&w.picker, w, time.Since(w.s.started).Seconds(), w.picker.Model.FullStep())
	w.running = w.queue.Len() > 0
	return w.pool.Freed(), w.running
}

// bind picks for a request whatever waits before it. Its goroutine must be waiting, or be the caller.
func (w *admission) bind(r *waiter) {
	if r.request.OnMiss == picker.MissWait {
		r.request.OnMiss = picker.MissGoOn
	}
	w.restoreView(r)
	v := &r.x.view
	w.fill(v)
	request := w.look(r, v)
	c, err := w.picker.Pick(request, v)
	w.settle(r, v, c, err)
}

// waits is how many wait here and elsewhere, and for how long, in seconds, the one here has who came first.
func (w *admission) waits(now time.Time) (n, elsewhere int, longest float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pool != nil {
		w.syncRemote()
	}
	for _, r := range w.waiters {
		longest = max(longest, now.Sub(r.came).Seconds())
	}
	return len(w.waiters), w.queue.Remote(), longest
}
