package kvstate

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Booking is what a request will cost the endpoint it is booked on.
type Booking struct {
	// For is the leg: RolePrefill stands in the endpoint's queue of prefills until it is released, RoleDecode is an answer
	// that runs, RoleBoth an answer whose prompt the endpoint computes itself, RoleEncode media that it encodes.
	For          Role
	PromptTokens int64         // whose KV the endpoint will hold
	Uncached     int64         // of those, what the endpoint has to compute
	Work         time.Duration // of computing them, as the cost model has it; the endpoint's learned speed comes on top
	// Coming: it may never come to this endpoint, and not before its prompt is computed elsewhere. It is held, and counts nowhere.
	Coming bool
}

// counts is how many requests of so many tokens the booking is to the endpoint.
func (b *Booking) counts() (requests, tokens int64) {
	if b.Coming {
		return 0, 0
	}
	return 1, b.PromptTokens
}

// prefillQueue is what is booked on an endpoint for prefill, in the order in which engines serve it: first come, first
// served. Its sums are published for views, which take no lock.
type prefillQueue struct {
	mu   sync.Mutex
	jobs []prefillJob

	n     atomic.Int64
	total atomic.Int64 // work booked, ns
	lead  atomic.Int64 // of those jobs at the front that fit into one step of the engine, at least the first, ns
	since atomic.Int64 // when the first became the first, Unix ns
}

// prefillJob is one booking of the queue.
type prefillJob struct {
	id       ReservationID
	uncached int64
	work     time.Duration // at the endpoint's speed when it was booked
	model    time.Duration // at speed 1
}

// push appends a job.
func (q *prefillQueue) push(j prefillJob, stepTokens int64, now time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.jobs) == 0 {
		q.since.Store(now.UnixNano())
	}
	q.jobs = append(q.jobs, j)
	q.publish(stepTokens)
}

// remove takes a job out. busy is for how long the engine had worked on the front of the queue if the job was the first
// there, else 0: over many jobs the sum of busy is the time the engine was at work, however it batched them.
func (q *prefillQueue) remove(id ReservationID, stepTokens int64, now time.Time) (j prefillJob, busy time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.jobs {
		if q.jobs[i].id != id {
			continue
		}
		j = q.jobs[i]
		if i == 0 {
			busy = max(now.Sub(time.Unix(0, q.since.Load())), 0)
			q.since.Store(now.UnixNano())
		}
		q.jobs = append(q.jobs[:i], q.jobs[i+1:]...)
		break
	}
	q.publish(stepTokens)
	return j, busy
}

// publish writes the sums. Jobs that share a step are under way together, so what the engine has done since the first
// became the first it has done for all of them.
func (q *prefillQueue) publish(stepTokens int64) {
	var total, lead time.Duration
	var tokens int64
	leading := true
	for i, j := range q.jobs {
		total += j.work
		tokens += j.uncached
		if leading = leading && (i == 0 || tokens <= stepTokens); leading {
			lead += j.work
		}
	}
	q.n.Store(int64(len(q.jobs)))
	q.total.Store(int64(total))
	q.lead.Store(int64(lead))
}

// ahead is the work still to be done before a job that would be booked now.
func (q *prefillQueue) ahead(now int64) time.Duration {
	total := q.total.Load()
	if total == 0 {
		return 0
	}
	return time.Duration(max(total-min(q.lead.Load(), max(now-q.since.Load(), 0)), 0))
}

// localWork is the prefill that an endpoint which decodes does by itself. Nobody tells when such a prefill ends, so it is
// taken to be worked off at the endpoint's speed, one after the other.
type localWork struct {
	until  atomic.Int64 // when all of it will be done, Unix ns
	share  atomic.Uint64
	at     atomic.Int64
	mu     sync.Mutex
	recent decayed
}

// localWindow is how far back the share of an endpoint's time that goes into local prefills looks.
const localWindow = 10 * time.Second

// add books work and returns when it will be done.
func (l *localWork) add(work time.Duration, now time.Time) (until int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	until = max(l.until.Load(), now.UnixNano()) + int64(work)
	l.until.Store(until)
	l.recent.add(work.Seconds(), localWindow, now)
	l.share.Store(math.Float64bits(l.recent.sum))
	l.at.Store(now.UnixNano())
	return until
}

// cancel gives back what was not done yet of work that was to be done at until.
func (l *localWork) cancel(work time.Duration, until int64, now time.Time) {
	left := min(int64(work), until-now.UnixNano())
	if left <= 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.until.Store(max(l.until.Load()-left, now.UnixNano()))
}

// ahead is the work not done yet, and share the part of its time that the endpoint lately gave to such work, 0 to 1.
func (l *localWork) ahead(now int64) (ahead time.Duration, share float64) {
	until := l.until.Load()
	if until == 0 {
		return 0, 0
	}
	age := time.Duration(now - l.at.Load()).Seconds()
	share = math.Float64frombits(l.share.Load()) / localWindow.Seconds() * math.Exp(-age/localWindow.Seconds())
	return time.Duration(max(until-now, 0)), min(share, 1)
}

// decayed is a sum of which the past counts less and less.
type decayed struct {
	sum float64
	at  time.Time
}

func (d *decayed) add(x float64, window time.Duration, now time.Time) {
	d.sum = d.value(window, now) + x
	d.at = now
}

func (d *decayed) value(window time.Duration, now time.Time) float64 {
	if d.sum == 0 {
		return 0
	}
	return d.sum * math.Exp(-max(now.Sub(d.at), 0).Seconds()/window.Seconds())
}

// Seconds is a duration of so many seconds.
func Seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
