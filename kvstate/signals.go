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
	At       time.Time // when it said so; zero: never

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
	age := now.Sub(g.At)
	return min(1, max(0, float64(signalsDead-age)/float64(signalsDead-signalsFresh)))
}

// Observe notes what an endpoint says about its load. What is -1 in g stays as it was, except that a figure older than
// signals live is forgotten. Older news than what is known already are dropped.
func (s *State) Observe(e *Endpoint, g Signals) {
	look := func(known *Signals) (elsewhere, unbooked int64) {
		switch unbooked := e.unbooked(&g); {
		case known == nil:
			return 0, max(unbooked, 0)
		case unbooked < 0:
			return known.Elsewhere, known.unbooked
		default:
			return min(unbooked, known.unbooked), unbooked
		}
	}
	if s.observed(e, g, look) {
		s.changed()
	}
}

// ApplyObserved is [State.Observe] by another replica. It reports whether it was news.
func (s *State) ApplyObserved(e *Endpoint, g Signals) bool {
	return s.observed(e, g, func(*Signals) (elsewhere, unbooked int64) { return g.Elsewhere, g.Elsewhere })
}

// observed notes signals. look says how many requests came another way, given what was known if that is not too old.
func (s *State) observed(e *Endpoint, g Signals, look func(known *Signals) (elsewhere, unbooked int64)) bool {
	for {
		known := e.signals.Load()
		next := g
		var recent *Signals
		if known != nil {
			if !g.At.After(known.At) {
				return false
			}
			if g.At.Sub(known.At) < signalsDead {
				next, recent = g.over(*known), known
			}
		}
		next.Elsewhere, next.unbooked = look(recent)
		if next.Moved == (Moved{}) && known != nil {
			next.Moved = known.Moved
		}
		if e.signals.CompareAndSwap(known, &next) {
			if known != nil && e.Role&RoleDecode != 0 {
				if d, ok := next.Moved.since(known.Moved); ok {
					e.learnMoved(d, e.Transfer.TP, s.o.Now().UnixNano())
				}
			}
			return true
		}
	}
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

// over is g, and old where g says nothing.
func (g Signals) over(old Signals) Signals {
	if g.Running < 0 {
		g.Running = old.Running
	}
	if g.Waiting < 0 {
		g.Waiting = old.Waiting
	}
	if g.KVUsage < 0 {
		g.KVUsage = old.KVUsage
	}
	if g.KVTokens < 0 {
		g.KVTokens = old.KVTokens
	}
	return g
}

// Signals is what the endpoint said last, nil if it never said anything. Not to be changed.
func (e *Endpoint) Signals() *Signals { return e.signals.Load() }
