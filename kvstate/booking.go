package kvstate

import (
	"cmp"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"tandem/kvstate/kvroom"
	"tandem/kvstate/residency"
)

// Booking is the cost of a request to the endpoint that it is reserved on.
type Booking struct {
	// For is the leg. A RolePrefill booking stays in the endpoint's prefill queue until it is released. RoleDecode
	// is an answer being generated, RoleBoth an answer whose prompt the endpoint computes itself, RoleEncode media
	// to encode.
	For          Role
	PromptTokens int64 // tokens whose KV the endpoint will hold
	Uncached     int64 // of those, the tokens that the endpoint has to compute
	// time to compute them according to the cost model, before the endpoint's learned speed is applied
	Work time.Duration
	// Tentative bookings are held but not counted: the request may go to another endpoint, and comes only after its
	// prompt has been computed.
	Tentative bool
	Need      int64     // of an answer: most tokens of KV, of prompt and answer, that the endpoint must have room for
	From      *Endpoint // of an answer: whose memory the prompt's KV is fetched from; nil: none
	Kept      int64     // most tokens that From keeps; 0: PromptTokens
	// Of is the conversation that an answer is of ([State.Arrived]); nil: unknown.
	Of *residency.Conversation
	// Media: the prompt has media. Work lacks what it takes to encode them, so nothing is learned from its time.
	Media bool
}

// claim claims the room that an answer needs, and what it holds at another endpoint until then.
func (b *Booking) claim(e *Endpoint, now time.Time) (slot int32, claimed bool) {
	if b.For&RoleDecode == 0 || b.From == nil && e.Role&RoleBoth != RoleBoth {
		return 0, false
	}
	var from *kvroom.Room
	if b.From != nil {
		from = &b.From.state.memory.room
	}
	sent := now.UnixNano()
	if b.Tentative {
		sent = 0
	}
	return e.state.memory.room.Claim(max(b.Need, b.PromptTokens), from, cmp.Or(b.Kept, b.PromptTokens), sent), true
}

// counts returns the number of requests and tokens that the booking adds to the endpoint's load.
func (b *Booking) counts() (requests, tokens int64) {
	if b.Tentative {
		return 0, 0
	}
	return 1, b.PromptTokens
}

// prefillQueue is the queue of prefills reserved on an endpoint, first come, first served, as engines serve them.
// Views read its sums without a lock.
type prefillQueue struct {
	mu   sync.Mutex
	jobs []prefillJob

	n     atomic.Int64
	total atomic.Int64 // sum of the reserved work, ns
	lead  atomic.Int64 // work of the jobs at the front that fit into one engine step (at least the first), ns
	since atomic.Int64 // when the current first job reached the front, Unix ns
}

// prefillJob is one booking of the queue.
type prefillJob struct {
	id       ReservationID
	uncached int64
	work     time.Duration // at the endpoint's learned speed when it was reserved
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

// remove takes a job out of the queue. If the job was first, busy is how long the engine has worked on the front of
// the queue, else 0. Summed over many jobs, busy is the time that the engine was busy, however it batched them.
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

// publish updates the sums. Jobs that share an engine step run together, so the time since the first job reached
// the front counts for all of them.
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

// ahead returns the remaining work before a job that would be reserved now.
func (q *prefillQueue) ahead(now int64) time.Duration {
	total := q.total.Load()
	if total == 0 {
		return 0
	}
	return time.Duration(max(total-min(q.lead.Load(), max(now-q.since.Load(), 0)), 0))
}

// localWork is the prefill work of an endpoint that decodes and computes some prompts itself. Nothing reports when
// such a prefill ends, so Tandem assumes that they run one after the other at the endpoint's speed. Its share counts
// what the endpoint computes for others, too.
type localWork struct {
	until  atomic.Int64 // when all of it will be done, Unix ns
	share  atomic.Uint64
	at     atomic.Int64
	mu     sync.Mutex
	recent decayed
}

// localWindow is the period over which an endpoint's share of time spent on local prefills is measured.
const localWindow = 10 * time.Second

// add reserves work and returns when it will be done.
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

// count adds work that is queued at other replicas to the share only.
func (l *localWork) count(work time.Duration, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.until.CompareAndSwap(0, now.UnixNano())
	l.recent.add(work.Seconds(), localWindow, now)
	l.share.Store(math.Float64bits(l.recent.sum))
	l.at.Store(now.UnixNano())
}

// cancel subtracts the unfinished part of work that was expected to end at until.
func (l *localWork) cancel(work time.Duration, until int64, now time.Time) {
	left := min(int64(work), until-now.UnixNano())
	if left <= 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.until.Store(max(l.until.Load()-left, now.UnixNano()))
}

// ahead returns the unfinished work, and the share of the endpoint's recent time that such work took, 0 to 1.
func (l *localWork) ahead(now int64) (ahead time.Duration, share float64) {
	until := l.until.Load()
	if until == 0 {
		return 0, 0
	}
	age := time.Duration(now - l.at.Load()).Seconds()
	share = math.Float64frombits(l.share.Load()) / localWindow.Seconds() * math.Exp(-age/localWindow.Seconds())
	return time.Duration(max(until-now, 0)), min(share, 1)
}

// decayed is a sum that decays exponentially with time.
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

// Seconds converts seconds to a duration.
func Seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
