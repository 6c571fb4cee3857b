package picker

import "math"

// Several replicas bind the requests of one pool, and each has those wait that came to it. If each sorted only its own, the
// shortest of one would go before a shorter one of another, and two would send to the same endpoint when it is free. So
// replicas tell each other who waits; those of the others stand in everybody's queue, are placed as its own are, and count
// as work where they would go. Nobody asks, and nobody leads: what all see alike they decide alike, and each sends its own.
//
// What is heard is late, and who said it may be gone. So nobody is waited for longer than [patience]: a request elsewhere that
// could go, as it looks from here, and does not, is in nobody's way any more, nor are others of its replica.

// replica is another one, of which requests wait.
type replica struct {
	waiting int
	due     float64 // since when one of them could go, as it looks from here; infinite: none can
	walked  float64 // when one of them last could
}

// patience is how long a request elsewhere that could go is waited for, seconds: the time that word of it takes there, a tick,
// and the time that word takes back. It is below what endpoints have ahead, so that none runs dry meanwhile.
const patience = 0.150

// Others is how many are known to wait elsewhere.
func (q *Queue) Remote() int { return q.remote }

// Hear notes that a request waits at another replica: w says who and since when, what work it is, and at which
// replica (not 0). Its place among those here follows from that. Of what is known already nothing changes.
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

// Gone notes that a request does not wait elsewhere any more. With sent it was its turn there, and its flow has got that work; else
// its client left, its replica ended, or it stands too far behind to be told of. False if it was not known.
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

// counts reports whether a request elsewhere is one that those behind it here have to stand behind. may is whether it could
// go now.
func (q *Queue) blocks(w *Waiting, c *Choice, may bool, now float64) bool {
	if !may {
		w.due = math.Inf(1)
		return true
	}
	at := q.replicas[w.Replica]
	w.due, at.due, at.walked = min(w.due, now), min(at.due, now), now
	return c.Prefill >= 0 && now-at.due <= patience && now-w.due <= patience
}

// quiet forgets since when replicas could have sent one of their requests that cannot now.
func (q *Queue) resetDue(now float64) {
	for _, at := range q.replicas {
		if at.walked != now {
			at.due = math.Inf(1)
		}
	}
}

// Chance is a number for [Request.Rand] that all replicas have alike for a request that waits: else they would disagree about
// where it goes.
func Chance(id uint64) uint64 { // the output function of SplitMix64 (Steele, Lea and Flood, 2014)
	id += 0x9e3779b97f4a7c15
	id = (id ^ id>>30) * 0xbf58476d1ce4e5b9
	id = (id ^ id>>27) * 0x94d049bb133111eb
	return id ^ id>>31
}
