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
	"tandem/picker/admission"
)

// Late binding (docs/adr/0009): a request waits in pass 1, with its stream open and its body here, until an
// endpoint has less than about a step of work ahead. Nothing is reserved and no engine knows of it yet, so a client
// that leaves costs nothing. Package admission decides which request is next; this file is its host with real time:
// streams that wait, timers, and a goroutine that dispatches. admissionhost.go gives it the fleet, remotequeue.go
// the requests of other replicas.
//
// Some requests are bound at once: those whose hop failed after they were admitted, those without memory to keep
// them, and those whose time is over.

// Waiting bounds how requests of a pool wait for their endpoints. Zero values mean the defaults.
type Waiting struct {
	MaxTime time.Duration // after which a request is dispatched before its turn; default admission.MaxWait
	Max     int           // requests that may wait at one time; default 4096
}

const (
	waitTick  = 20 * time.Millisecond // the longest time between two dispatches
	waitPause = 2 * time.Millisecond  // the shortest: a burst of answers causes one dispatch
	hitsTTL   = 50 * time.Millisecond // how long a waiting request uses the cache hits that it has looked up
)

// How waiting ended: label values of a metric.
const (
	waitBound   = "bound"       // dispatched in its turn
	waitExpired = "expired"     // dispatched before its turn after Waiting.MaxTime
	waitEarly   = "pushed"      // dispatched before its turn for want of space or memory
	waitShed    = "shed"        // refused for one of higher priority, or because its targets could not be met any more
	waitGone    = "client_gone" // the client left
)

// poolAdmission holds the waiting requests of one pool. It is the host of their queue.
type poolAdmission struct {
	s    *Server
	name string // of the pool

	mu        sync.Mutex
	maxTime   time.Duration
	queue     admission.Queue
	picker    picker.Picker
	pairs     bool // endpoints with both roles are excluded
	pool      *kvstate.Pool
	view      kvstate.View
	usable    []bool // of the endpoints in the last view, before a request's own conditions
	waiters   map[uint64]*waiter
	arriving  *waiter   // the request in Arrive; not one of waiters yet
	committed []*waiter // dispatched, but not reserved yet: views count them as reserved
	spare     [][]kvstate.Candidate
	lastID    uint64
	running   bool

	remote        map[uint64]kvstate.Queued // at other replicas
	remoteVersion uint64                    // version of the pool's remote queue that remote has
	other         picker.Request            // scratch for one of them
	positions     map[string]int            // of addresses in the pool positionsOf
	positionsOf   *kvstate.Pool
	held          []kvstate.Held
}

// waiter is one request. It is part of its stream's memory; the stream only waits meanwhile.
type waiter struct {
	x       *planning
	id      uint64
	pool    *kvstate.Pool // when it arrived
	request picker.Request
	came    time.Time

	hits   []kvstate.HeldBlocks // by position in the pool hitsOf
	hitsOf *kvstate.Pool
	hitsAt time.Time

	least     time.Duration // its least work over all endpoints
	place     float64       // its key in the queue
	choosy    bool          // not every endpoint serves its model
	published bool          // other replicas know that it waits
	held      []kvstate.Held
	blockedOn blockedOn

	done    chan struct{} // closed when it is settled; nil: it did not wait
	end     string        // one of the wait constants
	settled bool
	choice  picker.Choice
	err     error

	pending         *poolAdmission    // the queue that counts it as committed; nil: none
	prefill, decode *kvstate.Endpoint // its choice; prefill may be nil
	work            time.Duration
}

// blockedOn is what a request had to wait for when it arrived.
type blockedOn struct {
	endpoint      string // its best endpoint, which had a step of work ahead, including requests before it
	local, remote int    // requests before it
}

func newPoolAdmission(s *Server, name string) *poolAdmission {
	w := &poolAdmission{s: s, name: name, waiters: map[uint64]*waiter{}, remote: map[uint64]kvstate.Queued{}}
	w.lastID = random() // so that ids of different replicas differ
	return w
}

// set applies a policy, to waiting requests as well.
func (w *poolAdmission) set(p *Policy) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.maxTime, w.queue.Max, w.picker.Policy = p.Waiting.MaxTime, p.Waiting.Max, p.Placement()
	w.pairs = p.Dialect.PairsOnly()
	orDefault(&w.maxTime, kvstate.Seconds(admission.MaxWait))
}

// choose picks the endpoints of a request in x.view: at once or, if its pool makes requests wait, when it is its
// turn. A view that lacks some of the pool's endpoints cannot be filled again, so its requests do not wait.
func (x *planning) choose(policy *Policy, r *picker.Request) (picker.Choice, error) {
	r.MinAnswer, r.MaxAnswer = x.req.AnswerTokens()
	c, err := x.chooseNow(policy, r)
	x.req.Priority, x.req.Foreseen = r.Priority, plan.Foresee(&c)
	return c, missed(r, &c, err)
}

func (x *planning) chooseNow(policy *Policy, r *picker.Request) (picker.Choice, error) {
	pool := x.req.Pool
	x.picker.Policy = policy.Placement()
	if policy.admission == nil || x.req.Redirects > 0 || len(x.view.Endpoints) != len(pool.Endpoints()) {
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
		w.hits = append(w.hits, x.view.Endpoints[i].HeldBlocks())
	}
	w.hitsOf, w.hitsAt = pool, w.came
	if policy.admission.enter(w) {
		policy.admission.wait(w)
		x.waited, x.blockedOn = time.Since(w.came), w.blockedOn
		x.LeaveOut(x.waited) // waiting is no part of deciding
		x.s.metrics.WaitEnded(policy.admission.name, w.end, x.waited)
	}
	*r = w.request
	return w.choice, w.err
}

// committed records that the request's choice is reserved, or never will be. Other replicas learn only now that it
// does not wait any more: earlier they would take the endpoint for free.
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

// enter admits a request; true if it must wait.
func (w *poolAdmission) enter(r *waiter) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lastID++
	r.id, w.pool = w.lastID, r.pool
	w.syncRemote()
	w.arriving = r
	defer func() { w.arriving = nil }()
	now, enough := r.came.Sub(w.s.started).Seconds(), w.picker.Model.FullStep()
	if !w.queue.Arrive(&w.picker, w, r.id, now, enough) {
		r.err = overloaded()
		return false
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

// setBlockedOn records what a request waits for.
func (w *poolAdmission) setBlockedOn(r *waiter) {
	local, remote, self := w.queue.Before(r.id)
	r.least, r.place = kvstate.Seconds(self.Work), self.Key
	r.choosy = w.queue.Selective()
	r.blockedOn = blockedOn{local: local, remote: remote}
	if at := w.queue.Wanted(); at >= 0 && at < len(r.x.view.Endpoints) {
		r.blockedOn.endpoint = r.x.view.Endpoints[at].Endpoint.Addr
	}
}

// maxSpare bounds the views of waiting requests that are kept for dispatched ones.
const maxSpare = 64

// deferView takes the view of a waiting request: the view of a large fleet is large, and thousands may wait.
func (w *poolAdmission) deferView(r *waiter) {
	if len(w.spare) < maxSpare {
		w.spare = append(w.spare, r.x.view.Endpoints[:0])
	}
	r.x.view.Endpoints = nil
}

// restoreView gives a request a view again.
func (w *poolAdmission) restoreView(r *waiter) {
	if n := len(w.spare); r.x.view.Endpoints == nil && n > 0 {
		r.x.view.Endpoints = w.spare[n-1]
		w.spare = w.spare[:n-1]
	}
}

// wait waits until a request is settled.
func (w *poolAdmission) wait(r *waiter) {
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

// leave ends a request's wait before its turn, unless it was dispatched a moment ago.
func (w *poolAdmission) leave(r *waiter, why string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch why {
	case waitGone:
		if w.queue.Remove(r.id) {
			w.forget(r)
		}
		w.commit(r)
		r.end, r.err = waitGone, io.EOF
	case waitExpired:
		w.queue.Expire(&w.picker, w, r.id)
	default:
		w.queue.DispatchEarly(&w.picker, w, r.id)
	}
}

// forget removes a request from the list of those that wait.
func (w *poolAdmission) forget(r *waiter) {
	delete(w.waiters, r.id)
	w.s.metrics.QueueChanged(w.name, -1)
}

// finish wakes the request's goroutine.
func (r *waiter) finish(end string) {
	r.end = end
	close(r.done)
}

// run dispatches until no request waits.
func (w *poolAdmission) run() {
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

// dispatch dispatches the requests whose turn it is. freed signals that another dispatch may be due before the next
// tick.
func (w *poolAdmission) dispatch() (freed <-chan struct{}, more bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p := w.s.State.Pool(w.name); p != nil { // else the pool was removed: its last endpoints still serve
		w.pool = p
	}
	w.syncRemote()
	w.queue.Dispatch(&w.picker, w, time.Since(w.s.started).Seconds(), w.picker.Model.FullStep())
	w.running = w.queue.Len() > 0
	return w.pool.Freed(), w.running
}

// waits returns the number of requests that wait here and at other replicas, and the longest wait here, in seconds.
func (w *poolAdmission) waits(now time.Time) (local, remote int, longest float64) {
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
