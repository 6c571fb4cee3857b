// Package standstill follows the counters of one engine from scrape to scrape, and detects an engine that has requests
// and does nothing.
//
// The API server of vLLM answers /health, /metrics and a stream's first 200 while its core stands still (0.32.0,
// 0.33.0): during a long compilation, a stalled collective, in a debugger. What a core that stands still had to fetch
// from a prefill engine may be another prompt's by the time it goes on, because it sends no heartbeats meanwhile. So
// the bound of a [Tracker] is well below the time for which prefill engines keep KV (the lease).
//
// Two questions have two answers:
//
//   - Does it stand? The evidence is what a working core cannot show: requests run and nothing is computed, or
//     requests have come that it does not see. An engine that merely has waiting requests may wait for memory, or for
//     its partner in a hand-over, and is well.
//   - For how long has nothing proven that it works ([Tracker.Longest])? There a waiting engine counts, because what it
//     reads late may be foreign.
//
// The package knows no clock and starts nothing: times come with the samples.
package standstill

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// Bounds of a standstill.
const (
	// base is how long an engine with requests may show no progress: three scrapes, and a failed one.
	base = 8 * time.Second
	// samples is the least number of scrapes without progress before an engine counts as standing.
	samples = 3
	// doubt is how long an engine may go without proof that it works if only reservations say that it has requests.
	// Beyond it they count as lost.
	doubt = time.Minute
	// stale is the age of the last scrape from which on nothing is known any more.
	stale = 20 * time.Second
	// noticed is the length from which on a standstill is remembered: shorter ones are between two scrapes.
	noticed = 4 * time.Second
	kept    = 16 // past standstills that are remembered, and times without waiting requests
	// between is the longest time between two scrapes that belong together, and within which an engine has taken a
	// request into its queue.
	between = 5 * time.Second
)

// DefaultLease is vLLM's kv_lease_duration (0.32.0, nixl/base_scheduler.py:82), for pools that configure no other.
const DefaultLease = 30 * time.Second

// Counts are what an engine reports of its work. Any change is progress, a fall too: it was started again.
type Counts struct {
	// Work is 1 and the sum of counters that rise while it computes: tokens computed, tokens generated, steps,
	// transfers. 0: not reported.
	Work             int64
	Running, Waiting int64 // requests; -1: not reported
	Done             int64 // answers that it has finished
	Usage            float64
}

// Sample is one scrape.
type Sample struct {
	At       time.Time
	Counts   Counts
	Reserved int64 // requests that replicas have reserved there
	// Patience is the time that the prompts which are reserved there may still need, by the cost model: an engine that
	// computes a long prompt in one step shows no progress meanwhile.
	Patience time.Duration
}

// HandOver is what a pool's dialect says of the KV that its engines hand over.
type HandOver struct {
	Lease time.Duration // how long prefill keeps KV that nobody has fetched (vLLM: kv_lease_duration); 0: DefaultLease
	Final bool          // nothing renews the lease, however long a request waits for its turn
	// Partners: requests are reserved at this engine while another one works for them, and reach it only after that.
	// Then its reservations show nothing about it.
	Partners bool
	// KeepsAnswers: engines that decode keep the KV of their answers for a while, in case somebody fetches it.
	KeepsAnswers bool
}

// Tracker follows one engine. The zero value is ready. It is safe for concurrent use.
type Tracker struct {
	mu       sync.Mutex
	handOver HandOver
	fetched  []period // periods without a waiting request, so each had its KV; oldest first
	last     Sample
	moved    time.Time // when it last showed progress
	// since when nothing but reservations shows that it has requests; zero: something else does, or it has none
	only     time.Time
	lost     int64     // reservations that count as lost
	shown    int64     // reservations that it may have answered, because it has worked since they were made
	stuck    time.Time // since when it must work, and does not; zero: it need not
	stuckFor int       // scrapes since
	standing bool
	expired  time.Time // when a scrape last showed that it had freed KV that nobody had fetched
	past     []period  // standstills that are over, oldest first
}

type period struct{ from, to time.Time }

// Change is what a sample changed.
type Change int

// The changes.
const (
	Same  Change = iota
	Stood        // the engine stands still from now on
	Moved        // it had stood still, and goes on
)

// Observe adds a scrape. Scrapes older than the last one are ignored.
func (t *Tracker) Observe(s Sample) Change {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !s.At.After(t.last.At) {
		return Same
	}
	before := t.last
	t.last = s
	if final := t.handOver.Final && s.Counts.Waiting == 0; final && before.Counts.Waiting == 0 && len(t.fetched) > 0 &&
		s.At.Sub(before.At) <= between {
		t.fetched[len(t.fetched)-1].to = s.At
	} else if final {
		t.fetched = append(t.fetched[max(0, len(t.fetched)-kept+1):], period{s.At, s.At})
	}
	if before.At.IsZero() || s.Counts != before.Counts || !t.busy(s) {
		return t.progress(&before, &s)
	}
	if t.shown = min(t.shown, s.Reserved); !t.mustWork(&s) {
		t.stuck, t.stuckFor = time.Time{}, 0
		return Same
	}
	if t.stuck.IsZero() {
		t.stuck = before.At
	}
	if t.stuckFor++; t.standing || t.stuckFor < samples || s.At.Sub(t.stuck) < t.bound(&s) {
		return Same
	}
	t.standing = true
	return Stood
}

// mustWork reports whether an engine that is well would show work: requests run, or more have come than it reports to
// wait and may have answered. The client of an answered one has not read it to its end.
func (t *Tracker) mustWork(s *Sample) bool {
	c := s.Counts
	return c.Running > 0 || !t.handOver.Partners && s.Reserved > max(t.shown, c.Waiting)
}

// busy reports whether the engine has requests, and counters that could show progress. One that reports gauges alone
// may generate a long answer for minutes without a change.
func (t *Tracker) busy(s Sample) bool {
	if s.Counts.Work == 0 {
		return false
	}
	if s.Counts.Running > 0 || s.Counts.Waiting > 0 {
		t.only, t.lost = time.Time{}, 0
		return true
	}
	if s.Reserved <= 0 || s.Reserved == t.lost {
		return false
	}
	if t.only.IsZero() || t.lost != 0 {
		t.only, t.lost = s.At, 0
	}
	if s.At.Sub(t.only) >= doubt {
		t.lost = s.Reserved
		return false
	}
	return true
}

// progress records that the engine is idle or has worked. Of the requests that have come since the last scrape, it may
// have answered as many as it counts as finished.
func (t *Tracker) progress(before, s *Sample) Change {
	if !t.moved.IsZero() && s.At.Sub(t.moved) >= noticed {
		if len(t.past) == kept {
			t.past = t.past[1:]
		}
		t.past = append(t.past, period{t.moved, s.At})
	}
	stood := t.standing
	t.shown = min(before.Reserved+max(s.Counts.Done-before.Counts.Done, 0), s.Reserved)
	t.moved, t.standing, t.stuck, t.stuckFor = s.At, false, time.Time{}, 0
	if t.lost == 0 {
		t.only = time.Time{}
	}
	if stood {
		return Moved
	}
	return Same
}

// bound returns how long the engine may show no progress: longer while it computes prompts, and three fifths of the
// lease at most, and before it has worked.
func (t *Tracker) bound(s *Sample) time.Duration {
	most := DefaultLease * 3 / 5
	if !t.handOver.Final {
		most = cmp.Or(t.handOver.Lease, DefaultLease) * 3 / 5
	}
	if s.Counts.Work == 1 { // its first request: the engine may compile for it, and its speed is not known
		return most
	}
	return min(base+max(s.Patience, 0), most)
}

// Configure sets what the engine hands over and fetches.
func (t *Tracker) Configure(h HandOver) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h.Lease, h.Final = max(h.Lease, 0), h.Final && h.Lease > 0
	t.handOver = h
}

// LatestFetch returns the part of a final lease in which decode must have fetched its KV, counted from when it was
// asked: prefill has kept the KV for a while by then.
func LatestFetch(lease time.Duration) time.Duration { return lease - min(30*time.Second, lease/2) }

// anyFetched reports whether a scrape between two moments showed no waiting request. The lock is held.
func (t *Tracker) anyFetched(from, to time.Time) bool {
	return slices.ContainsFunc(t.fetched, func(p period) bool {
		within := func(at time.Time) bool { return !at.Before(from) && !at.After(to) }
		return within(p.from) || within(p.to) || p.from.Before(from) && p.to.After(to) && to.Sub(from) >= between
	})
}

// Standing reports whether the engine stands still. A mark without a recent scrape has no force.
func (t *Tracker) Standing(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.standing && now.Sub(t.last.At) < stale
}

// Longest returns the longest time without progress that overlaps the time from since to now, as far as it has been
// scraped. An engine that answers no scrapes shows no progress. ok is false if it was never scraped.
func (t *Tracker) Longest(since, now time.Time) (longest time.Duration, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.moved.IsZero() {
		return 0, false
	}
	if t.last.At.Equal(t.moved) && now.Sub(t.last.At) < noticed {
		longest = 0 // the last scrape showed progress, and the next is not due
	} else {
		longest = now.Sub(t.moved)
	}
	for _, p := range t.past {
		if p.to.After(since) {
			longest = max(longest, p.to.Sub(p.from))
		}
	}
	return longest, true
}

// KeepsAnswers reports whether the engine keeps the KV of answers that it has written: see [HandOver].
func (t *Tracker) KeepsAnswers() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.handOver.KeepsAnswers
}

// Expired records that the engine has freed KV that nobody had fetched in time, by a scrape.
func (t *Tracker) Expired(at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expired = at
}

func (t *Tracker) expiredSince(since time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.expired.After(since)
}

// Reason is why KV may be outdated.
type Reason string

// The reasons.
const (
	StoodStill Reason = "standstill" // the decode engine stood still for so long that no heartbeat renewed the lease
	Expired    Reason = "expired"    // it stood still, and the prefill engine reports that leases have ended
	Late       Reason = "late"       // nothing renews the lease, and nothing shows that it had fetched the KV in time
)

// heartbeats is the part of the lease within which a decode engine that works renews it: vLLM sends a heartbeat each
// sixth of it, which prolongs it to two thirds from then on (0.32.0, nixl/base_scheduler.py:88, base_worker.py:532).
// So the lease of what waits in an engine that stands still ends after half of it at the earliest.
const heartbeats = 2

// suspect is how long the decode engine must have stood for the prefill engine's count to concern its requests: two
// scrapes, and a part of a third.
const suspect = 5 * time.Second

// Outdated returns why KV that prefill has held for decode since a moment may be another prompt's by now, if decode has
// not fetched it yet; "" if nothing says so. prefill may be nil.
func Outdated(prefill, decode *Tracker, since, now time.Time) Reason {
	stood, known := decode.Longest(since, now)
	decode.mu.Lock()
	lease, final := cmp.Or(decode.handOver.Lease, DefaultLease), decode.handOver.Final
	by := since.Add(LatestFetch(lease))
	inTime := now.Before(by.Add(-time.Second)) || decode.anyFetched(since.Add(between), by)
	decode.mu.Unlock()
	if final && inTime {
		return ""
	} else if final {
		return Late
	}
	switch stood = min(stood, now.Sub(since)); {
	case !known || stood < suspect:
		return ""
	case stood >= lease/heartbeats:
		return StoodStill
	case prefill != nil && prefill.expiredSince(since):
		return Expired
	}
	return ""
}
