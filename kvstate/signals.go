package kvstate

import (
	"math"
	"time"
)

// Signals is what an engine says about its own load. What it does not say is -1: an engine that tells nothing is not idle.
type Signals struct {
	Running  int64     // requests in its batch
	Waiting  int64     // requests that are not
	KVUsage  float64   // of the KV cache: 0 empty, 1 full
	KVTokens int64     // capacity of the KV cache, in tokens
	Moved    Moved     // KV that it fetched; only ever more, until it starts anew
	Written  Written   // likewise, answers
	At       time.Time // when it said anything of this; zero: never

	// Looked is when its metrics were seen, which tell all of this; zero: never, or too long ago. Headers of answers may come all
	// the time and tell Waiting and KVUsage alone, so Running, KVTokens and Elsewhere are no newer than that look.
	Looked time.Time

	// Elsewhere is how many of Running and Waiting no replica had booked, in this look at all of the engine and in the one before: requests
	// that came another way. What is on its way between a booking and an engine is counted by one of two looks, not by both.
	Elsewhere int64
	unbooked  int64 // in this look alone
}

// UnknownSignals is those of an engine that has said nothing.
func UnknownSignals() Signals { return Signals{Running: -1, Waiting: -1, KVUsage: -1, KVTokens: -1} }

// How long signals are worth what they say, and from when on nothing. In between trust falls in a line.
const (
	signalsFresh = 5 * time.Second // two scrapes, and one that failed between them
	signalsDead  = 20 * time.Second
)

// Trust is how much the signals are worth by now: 1 fresh, 0 nothing, which is also what none at all are worth.
func (g *Signals) Trust(now time.Time) float64 {
	if g == nil {
		return 0
	}
	return min(1, max(0, float64(signalsDead-g.Age(now))/float64(signalsDead-signalsFresh)))
}

// Age is how old the oldest of the figures is.
func (g *Signals) Age(now time.Time) time.Duration {
	if g.Looked.IsZero() {
		return now.Sub(g.At)
	}
	return now.Sub(g.Looked)
}

// Observe notes what an endpoint says about its load. What is -1 in g stays as it was, except that a figure older than
// signals live is forgotten. Older news than what is known already are dropped. Signals that say Running are a look at its metrics.
func (s *State) Observe(e *Endpoint, g Signals) {
	if s.observed(e, g, func(before *Signals) (elsewhere, unbooked int64) {
		if unbooked = max(e.unbooked(&g), 0); before != nil {
			elsewhere = min(unbooked, before.unbooked)
		}
		return elsewhere, unbooked
	}) {
		s.changed()
	}
}

// ApplyObserved is [State.Observe] by another replica. It reports whether it was news.
func (s *State) ApplyObserved(e *Endpoint, g Signals) bool {
	return s.observed(e, g, func(*Signals) (elsewhere, unbooked int64) { return g.Elsewhere, g.Elsewhere })
}

// observed notes signals. count says how many requests a look finds that came another way, given the look before if that is not too old.
func (s *State) observed(e *Endpoint, g Signals, count func(before *Signals) (elsewhere, unbooked int64)) bool {
	if g.Running >= 0 && g.Looked.IsZero() {
		g.Looked = g.At
	}
	for {
		known := e.signals.Load()
		next, news := g.onto(known, count)
		if !news {
			return false
		}
		if e.signals.CompareAndSwap(known, &next) {
			if known == nil || known.KVTokens != next.KVTokens {
				e.keepTwice(next.KVTokens)
			}
			if known != nil && next.Moved.Failed > known.Moved.Failed && next.Looked.After(known.Looked) {
				s.transfersFailed(e, known.Looked)
			}
			if known != nil && e.Role&RoleDecode != 0 {
				if d, ok := next.Moved.since(known.Moved); ok {
					e.learnMoved(d, e.Transfer.TP, s.o.Now().UnixNano())
				}
				if d, ok := next.Written.since(known.Written); ok {
					e.learnWritten(d, known, &next)
				}
			}
			return true
		}
	}
}

// onto is what is known when g comes to it, and whether g is news. A look and a header are news each by its own date: a look takes
// a while to arrive, in which there may have been answers.
func (g *Signals) onto(known *Signals, count func(before *Signals) (elsewhere, unbooked int64)) (next Signals, news bool) {
	if next = UnknownSignals(); known != nil {
		next = *known
	}
	newer, look := g.At.After(next.At), g.Looked.After(next.Looked)
	if !newer && !look {
		return next, false
	}
	if newer {
		stale := g.At.Sub(next.At) >= signalsDead
		next.Waiting, next.KVUsage = over(g.Waiting, next.Waiting, stale), over(g.KVUsage, next.KVUsage, stale)
		next.At = g.At
	} else {
		next.Waiting, next.KVUsage = over(next.Waiting, g.Waiting, false), over(next.KVUsage, g.KVUsage, false)
	}
	switch {
	case look:
		stale, before := g.Looked.Sub(next.Looked) >= signalsDead, known
		if stale {
			before = nil
		}
		next.Elsewhere, next.unbooked = count(before)
		next.Running, next.KVTokens, next.Looked = g.Running, over(g.KVTokens, next.KVTokens, stale), g.Looked
	case next.At.Sub(next.Looked) >= signalsDead: // answers came, and no look
		next.Running, next.KVTokens, next.Elsewhere, next.unbooked, next.Looked = -1, g.KVTokens, 0, 0, time.Time{}
	}
	if g.Moved != (Moved{}) {
		next.Moved = g.Moved
	}
	if g.Written != (Written{}) {
		next.Written = g.Written
	}
	return next, true
}

// over is a figure, or the old one where it is not said, if that is not stale.
func over[T int64 | float64](figure, old T, stale bool) T {
	if figure < 0 && !stale {
		return old
	}
	return figure
}

// unbooked is how many requests an engine has that no replica booked; -1 where it does not say.
func (e *Endpoint) unbooked(g *Signals) int64 {
	if g.Running < 0 || g.Waiting < 0 {
		return -1
	}
	return max(g.Running+g.Waiting-e.requests.Load()-e.Others().Requests, 0)
}

// addTo counts what came another way into a candidate, as far as it is trusted: on an endpoint that decodes answers like those that
// are booked there, elsewhereTokens long where none is; on another, prompts that wait. For how long nobody knows, so
// nobody waits for them ([Candidate.Queue]).
func (g *Signals) addTo(c *Candidate) {
	n := int64(math.Round(c.Trust * float64(g.Elsewhere)))
	if n <= 0 {
		return
	}
	each := int64(elsewhereTokens)
	if c.Requests > 0 && c.PromptTokens > 0 {
		each = c.PromptTokens / c.Requests
	}
	if c.Endpoint.Role&RoleDecode == 0 {
		c.Jobs += n
	}
	c.Requests += n
	c.PromptTokens += n * each
}

const elsewhereTokens = 1000

// Signals is what the endpoint said last, nil if it never said anything. Not to be changed.
func (e *Endpoint) Signals() *Signals { return e.signals.Load() }
