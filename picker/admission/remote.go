package admission

import (
	"math"

	"tandem/picker"
)

// Several replicas dispatch the requests of one pool, and each holds the requests that arrived at it. If each replica
// ordered only its own requests, the shortest of one would go before a shorter one of another, and two replicas would
// send to the same endpoint when it is free. So replicas publish their requests, and each has those of the others in
// its queue: they are placed like its own, and count as work at their endpoints. There is no leader: with the same
// input all replicas decide the same, and each dispatches its own requests.
//
// Publications are late, and their sender may be gone. So no replica waits longer than [patience]: a remote request
// that could go, as seen from here, and does not, blocks no others any more, nor do others of its replica.

// replica is another replica with requests in the queue.
type replica struct {
	waiting int
	due     float64 // since when one of them could go, as seen from here; infinite: none can
	walked  float64 // when one of them last could
}

// patience is how long to wait for a remote request that could go, in seconds: a publication there, a tick, and a
// publication back. It is less than the work ahead of endpoints, so that none runs out of work meanwhile.
const patience = 0.150

// Remote returns the number of remote requests.
func (q *Queue) Remote() int { return q.remote }

// AddRemote adds a request that waits at another replica (w.Replica, not 0). Requests already known are left unchanged.
func (q *Queue) AddRemote(w Waiting) {
	if q.at(w.ID) >= 0 {
		return
	}
	if q.replicas == nil {
		q.replicas = map[uint64]*replica{}
	}
	at := q.replicas[w.Replica]
	if at == nil {
		at = &replica{due: math.Inf(1)}
		q.replicas[w.Replica] = at
	}
	at.waiting++
	q.remote++
	q.changed, w.due = true, math.Inf(1)
	q.insert(w)
}

// RemoveRemote removes a request that no longer waits at another replica. If it was sent there, its flow is charged
// with its work; otherwise its client left, its replica ended, or it is too far behind to be published. False if it
// is unknown.
func (q *Queue) RemoveRemote(id uint64, sent bool) bool {
	i := q.at(id)
	if i < 0 || q.waiting[i].Replica == 0 {
		return false
	}
	w := q.waiting[i]
	if sent {
		q.shares.sent(w.Flow, w.Work)
	}
	q.delete(i)
	q.remote--
	at := q.replicas[w.Replica]
	at.due = math.Inf(1)
	if at.waiting--; at.waiting == 0 {
		delete(q.replicas, w.Replica)
	}
	return true
}

// blocks reports whether local requests behind a remote one must wait for it. may is whether it could go now.
func (q *Queue) blocks(w *Waiting, c *picker.Choice, may bool, now float64) bool {
	if !may {
		w.due = math.Inf(1)
		return true
	}
	at := q.replicas[w.Replica]
	w.due, at.due, at.walked = min(w.due, now), min(at.due, now), now
	return c.Prefill >= 0 && now-at.due <= patience && now-w.due <= patience
}

// resetDue resets the replicas none of whose requests can go now.
func (q *Queue) resetDue(now float64) {
	for _, at := range q.replicas {
		if at.walked != now {
			at.due = math.Inf(1)
		}
	}
}

// Chance returns a number for [picker.Request.Rand] that is the same at all replicas: otherwise they would place
// the request differently.
func Chance(id uint64) uint64 { // the output function of SplitMix64 (Steele, Lea and Flood, 2014)
	id += 0x9e3779b97f4a7c15
	id = (id ^ id>>30) * 0xbf58476d1ce4e5b9
	id = (id ^ id>>27) * 0x94d049bb133111eb
	return id ^ id>>31
}
