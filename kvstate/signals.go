package kvstate

import (
	"math"
	"time"
)

// Signals are the load figures that an engine reports. -1 means not reported: an engine that reports nothing is not
// idle.
type Signals struct {
	Running  int64   // requests in its batch
	Waiting  int64   // requests outside its batch
	KVUsage  float64 // of the KV cache: 0 empty, 1 full
	KVTokens int64   // capacity of the KV cache, in tokens

	// External is the number of running and waiting requests that no replica had reserved, in this scrape and in the
	// one before: load that did not come through Tandem. A request between its booking and its arrival at the
	// engine counts in one of two scrapes only.
	External int64
	unbooked int64 // in this scrape alone
	oldest   int64 // time of the oldest figure, ns. Every decision reads it: with the figures above in one cache line

	// Work is 1 and the sum of its counters that rise with whatever it does, since it started; 0: not reported.
	Work int64
	// Expired counts the KV that it kept for other engines and freed because nobody had fetched it in time (its lease
	// ended), since it started.
	Expired int64

	Transfers TransferCounters // KV that it fetched; a counter until the engine restarts
	Answers   AnswerCounters   // likewise, of answers
	Host      HostMemory
	At        time.Time // when it reported any of this; zero: never

	// ScrapedAt is the time of the last scrape of its metrics, which contain all figures; zero: never, or too long
	// ago. Response headers contain Waiting and KVUsage only, so Running, KVTokens and External are no newer than the
	// last scrape.
	ScrapedAt time.Time
}

// UnknownSignals returns the signals of an engine that has reported nothing.
func UnknownSignals() Signals { return Signals{Running: -1, Waiting: -1, KVUsage: -1, KVTokens: -1} }

// Signals are trusted fully up to signalsFresh, and not at all from signalsDead on. In between trust falls
// linearly.
const (
	signalsFresh = 5 * time.Second // two scrapes, and a failed one between them
	signalsDead  = 20 * time.Second
)

// Trust returns the weight of the signals now: 1 fresh, 0 too old or nil.
func (g *Signals) Trust(now time.Time) float64 {
	if g == nil {
		return 0
	}
	return trust(g.Age(now))
}

// trust returns the weight of signals of that age.
func trust(age time.Duration) float64 {
	if age <= signalsFresh {
		return 1
	}
	return max(0, float64(signalsDead-age)/float64(signalsDead-signalsFresh))
}

// Age returns the age of the oldest figure.
func (g *Signals) Age(now time.Time) time.Duration { return now.Sub(g.oldestFigure()) }

// oldestFigure returns the time of the oldest figure.
func (g *Signals) oldestFigure() time.Time {
	if g.ScrapedAt.IsZero() {
		return g.At
	}
	return g.ScrapedAt
}

// Observe records the load that an endpoint reports. A figure of -1 keeps its previous value until that is too old.
// Reports older than the known ones are dropped. Signals with Running come from a scrape of the metrics.
func (s *State) Observe(e *Endpoint, g Signals) {
	if s.observed(e, g, func(before *Signals) (external, unbooked int64) {
		if unbooked = max(e.unbooked(&g), 0); before != nil {
			external = min(unbooked, before.unbooked)
		}
		return external, unbooked
	}) {
		s.link.changed()
	}
}

// ApplyObserved applies [State.Observe] of another replica. It reports whether anything changed.
func (s *State) ApplyObserved(e *Endpoint, g Signals) bool {
	return s.observed(e, g, func(*Signals) (external, unbooked int64) { return g.External, g.External })
}

// observed records signals. count returns the number of external requests in a scrape, given the previous scrape if
// that is not too old.
func (s *State) observed(e *Endpoint, g Signals, count func(before *Signals) (external, unbooked int64)) bool {
	if g.Running >= 0 && g.ScrapedAt.IsZero() {
		g.ScrapedAt = g.At
	}
	for {
		known := e.state.signals.Load()
		next, isNew := g.mergeInto(known, count)
		if !isNew {
			return false
		}
		if e.state.signals.CompareAndSwap(known, &next) {
			if known == nil || known.KVTokens != next.KVTokens || known.Host != next.Host {
				e.state.sizeRouted(&next)
				e.state.resizeMemory(&next, s.o.Now())
			}
			if known != nil {
				s.compare(e, known, &next)
			}
			if known != nil && next.ScrapedAt.After(known.ScrapedAt) && next.Waiting >= 0 &&
				e.state.memory.room.Waiting(next.Waiting, known.ScrapedAt.UnixNano()) {
				s.link.changed()
			}
			s.follow(e, known, &next)
			return true
		}
	}
}

// restarted forgets what another process held, and how fast it was.
func (l *endpointState) restarted() {
	l.blocks.Forget()
	l.emptyMemory()
	l.memory.room.Restarted()
	l.steps.Store(nil)
}

// compare learns from what an engine's counters have moved since its last report.
func (s *State) compare(e *Endpoint, before, after *Signals) {
	if after.Answers.restarted(before.Answers) {
		e.state.restarted()
		e.state.awaitReport(s.o.Now())
	}
	if before.Host != after.Host && e.state.load != nil {
		e.state.load.learnLoads(&after.Host, &before.Host, e.Transfer.TP, s.o.Now())
	}
	if after.Transfers.Failed > before.Transfers.Failed && after.ScrapedAt.After(before.ScrapedAt) {
		s.KVLoads.blameTransfers(e, before.ScrapedAt)
	}
	if e.Role&RoleDecode == 0 {
		return
	}
	if d, ok := after.Transfers.since(before.Transfers); ok {
		e.state.learnTransfers(d, e.Transfer.TP, s.o.Now().UnixNano())
	}
	if d, ok := after.Answers.since(before.Answers); ok && !before.ScrapedAt.IsZero() {
		e.learnAnswers(d, before, after)
	}
}

// mergeInto returns the known signals updated by g, and whether g is newer. Scrapes and headers are compared by their
// own dates: a scrape takes a while, and answers may arrive in between.
func (g *Signals) mergeInto(
	known *Signals, count func(before *Signals) (external, unbooked int64),
) (next Signals, changed bool) {
	if next = UnknownSignals(); known != nil {
		next = *known
	}
	newer, look := g.At.After(next.At), g.ScrapedAt.After(next.ScrapedAt)
	if !newer && !look {
		return next, false
	}
	if newer {
		stale := g.At.Sub(next.At) >= signalsDead
		next.Waiting, next.KVUsage = newest(g.Waiting, next.Waiting, stale), newest(g.KVUsage, next.KVUsage, stale)
		next.At = g.At
	} else {
		next.Waiting, next.KVUsage = newest(next.Waiting, g.Waiting, false), newest(next.KVUsage, g.KVUsage, false)
	}
	switch {
	case look:
		stale, before := g.ScrapedAt.Sub(next.ScrapedAt) >= signalsDead, known
		if stale {
			before = nil
		}
		next.External, next.unbooked = count(before)
		next.Running, next.KVTokens, next.ScrapedAt = g.Running, newest(g.KVTokens, next.KVTokens, stale), g.ScrapedAt
		next.Work, next.Expired = g.Work, g.Expired
	case next.At.Sub(next.ScrapedAt) >= signalsDead: // answers came, but no scrape
		next.Running, next.KVTokens, next.External, next.unbooked, next.ScrapedAt = -1, g.KVTokens, 0, 0, time.Time{}
	}
	if g.Transfers != (TransferCounters{}) {
		next.Transfers = g.Transfers
	}
	if look || g.Answers != (AnswerCounters{}) { // all 0 in a scrape: the engine has just started
		next.Answers = g.Answers
	}
	if g.Host != (HostMemory{}) {
		next.Host = g.Host
	}
	next.oldest = next.oldestFigure().UnixNano()
	return next, true
}

// newest returns the figure, or the old one if the figure is missing and the old one is not stale.
func newest[T int64 | float64](figure, old T, stale bool) T {
	if figure < 0 && !stale {
		return old
	}
	return figure
}

// unbooked returns the number of requests at an engine that no replica reserved; -1 if it does not report them.
func (e *Endpoint) unbooked(g *Signals) int64 {
	if g.Running < 0 || g.Waiting < 0 {
		return -1
	}
	return max(g.Running+g.Waiting-e.state.requests.Load()-e.RemoteLoad().Requests, 0)
}

// addTo adds external requests to a candidate, weighted by trust. On a decode endpoint they count as answers as
// long as the reserved ones, or externalTokens without any; on a prefill endpoint as waiting prompts. Their duration
// is unknown, so no request waits for them ([Candidate.Queue]).
func (g *Signals) addTo(c *Candidate) {
	if g.External <= 0 {
		return
	}
	n := int64(math.Round(c.Trust * float64(g.External)))
	each := int64(externalTokens)
	if c.Requests > 0 && c.PromptTokens > 0 {
		each = c.PromptTokens / c.Requests
	}
	if c.Endpoint.Role&RoleDecode == 0 {
		c.Jobs += n
	}
	c.Requests += n
	c.PromptTokens += n * each
}

const externalTokens = 1000

// Signals returns the endpoint's last report; nil if there is none. Do not modify.
func (e *Endpoint) Signals() *Signals { return e.state.signals.Load() }
