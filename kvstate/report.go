package kvstate

import (
	"strconv"
	"strings"
	"time"
)

// Fact is a property of an engine that can decide whether another engine may use its KV.
type Fact uint8

// The facts. For each dialect, kvtransfer's Reports has those in which the two engines of a pair must agree.
const (
	FactRelease       Fact = iota // of the engine, without its build
	FactModel                     // as it was started with: a path, or a name of a hub
	FactRevision                  // of the model
	FactQuantization              // of the weights
	FactDtype                     // of the activations
	FactKVDtype                   // of the KV cache
	FactBlockSize                 // of the KV cache, in tokens
	FactKVLayout                  // of the KV cache
	FactAttention                 // backend, if it was chosen
	FactSlidingWindow             // of attention, as the cache is configured
	FactHybrid                    // whether the hybrid KV cache manager is on
	FactHashing                   // how the prefix cache names blocks
	FactSpeculation               // method and draft model
	FactRanks                     // tensor-parallel ranks: equally many
	FactRankMultiples             // tensor-parallel ranks: one size is a multiple of the other
	FactBackend                   // SGLang: what moves the KV
	Facts                         // how many there are
)

// factNames are the facts in words for people, and the values of the setting pairUnlike.
func factNames() [Facts][2]string {
	return [Facts][2]string{
		FactRelease: {"release", "release"}, FactModel: {"model", "model"},
		FactRevision:     {"model revision", "revision"},
		FactQuantization: {"quantization", "quantization"}, FactDtype: {"dtype", "dtype"},
		FactKVDtype: {"KV cache dtype", "kvDtype"}, FactBlockSize: {"block size", "blockSize"},
		FactKVLayout: {"KV cache layout", "kvLayout"}, FactSlidingWindow: {"sliding window", "slidingWindow"},
		FactAttention: {"attention backend", "attentionBackend"},
		FactHybrid:    {"hybrid KV cache manager", "hybridKvCache"},
		FactHashing:   {"hash of blocks", "hashing"}, FactSpeculation: {"speculative decoding", "speculation"},
		FactRanks:         {"tensor-parallel size", "tensorParallelSize"},
		FactRankMultiples: {"tensor-parallel size", "tensorParallelSize"},
		FactBackend:       {"transfer backend", "transferBackend"},
	}
}

func (f Fact) String() string { return factNames()[f][0] }

// Setting returns the fact's name in the setting pairUnlike.
func (f Fact) Setting() string { return factNames()[f][1] }

// FactSet is a set of facts, a bit each.
type FactSet uint32

// FactsOf returns the set of some facts.
func FactsOf(facts ...Fact) (set FactSet) {
	for _, f := range facts {
		set |= 1 << f
	}
	return set
}

// Has reports whether the set contains f.
func (s FactSet) Has(f Fact) bool { return s&(1<<f) != 0 }

// Report is what an engine reports of itself, by fact; "": it does not report that. Never modified after it was given
// to [State.SetReport].
type Report [Facts]string

// maxFact bounds the text of one fact.
const maxFact = 256

// Know stores a fact, unless it is known already.
func (r *Report) Know(f Fact, value string) {
	if r[f] == "" {
		r[f] = strings.Clone(value[:min(len(value), maxFact)])
	}
}

// only returns the report without the facts that are not in a set.
func (r *Report) only(set FactSet) *Report {
	out := *r
	for f := range Facts {
		if !set.Has(f) {
			out[f] = ""
		}
	}
	return &out
}

// Fits reports whether two engines may be paired, as far as both have reported their facts. nil: not reported.
func (r *Report) Fits(o *Report) bool {
	_, unlike := r.Unlike(o)
	return !unlike
}

// Unlike returns the first fact that is against a pair.
func (r *Report) Unlike(o *Report) (first Fact, unlike bool) {
	if r == nil || o == nil || r == o {
		return 0, false
	}
	for f := range Facts {
		if !FactFits(f, r[f], o[f]) {
			return f, true
		}
	}
	return 0, false
}

// FactFits reports whether two engines may be paired, by what they report of one fact.
func FactFits(f Fact, a, b string) bool {
	return a == b || a == "" || b == "" || f == FactRankMultiples && multiples(a, b)
}

// multiples reports whether one of two numbers is a multiple of the other.
func multiples(a, b string) bool {
	x, errX := strconv.Atoi(a)
	y, errY := strconv.Atoi(b)
	return errX == nil && errY == nil && x > 0 && y > 0 && (x%y == 0 || y%x == 0)
}

// ReportWait is how long an endpoint that is new or was away waits for its engine's report before it is paired without.
const ReportWait = 5 * time.Second

// awaitReport keeps an endpoint out of pairs until its engine has reported, or for [ReportWait]: it may be another
// engine than before.
func (l *endpointState) awaitReport(now time.Time) {
	if l.reports {
		l.reportDue.Store(now.Add(ReportWait).UnixNano())
	}
}

// AwaitsReports reports whether an endpoint that has not failed still waits for its engine's first report.
func (s *State) AwaitsReports() bool {
	now := s.o.Now().UnixNano()
	for _, p := range s.Pools() {
		for _, e := range p.endpoints {
			if e.state.awaits(now) && !e.Failed() {
				return true
			}
		}
	}
	return false
}

// awaits reports whether the endpoint waits for its engine's report.
func (l *endpointState) awaits(now int64) bool { return l.reportDue.Load() > now }

// AwaitsReport reports whether an endpoint is not paired yet, since its engine has not reported what it is.
func (s *State) AwaitsReport(e *Endpoint) bool {
	return e.state != nil && e.state.awaits(s.o.Now().UnixNano())
}

// SetReport records what an endpoint's engine reports of itself, as far as its pool compares it. all: the report is
// complete, so the endpoint can be paired.
func (s *State) SetReport(e *Endpoint, r Report, all bool) {
	due := e.state.reportDue.Load()
	s.mu.Lock()
	for _, p := range s.Pools() {
		if at := p.Endpoint(e.Addr); at != nil && at.state == e.state {
			p.setReport(at, &r)
		}
	}
	s.mu.Unlock()
	if all && due != 0 {
		e.state.reportDue.CompareAndSwap(due, 0) // unless it was away meanwhile
		s.link.changed()
	}
}

// setReport stores a report. Equal reports of a pool are one, so that decisions compare pointers.
func (p *Pool) setReport(e *Endpoint, said *Report) {
	e.state.said.Store(said)
	r := said.only(p.Spec.Alike)
	if *r == (Report{}) {
		r = nil
	}
	for _, o := range p.endpoints {
		if of := o.state.report.Load(); of != nil && r != nil && *of == *r {
			r = of
		}
	}
	e.state.report.Store(r)
	unlike := false
	for _, o := range p.endpoints {
		unlike = unlike || o.state.report.Load() != r
	}
	p.unlike.Store(unlike)
}

// Reports reports whether the endpoint's engine is asked what it is.
func (e *Endpoint) Reports() bool { return e.state != nil && e.state.reports }

// Report returns what the endpoint's engine said of the facts in which the engines of a pair must not differ; nil:
// nothing. Equal reports of a pool are one. Do not modify.
func (e *Endpoint) Report() *Report {
	if e.state == nil {
		return nil
	}
	return e.state.report.Load()
}

// Said returns all that the endpoint's engine has reported of itself; nil: nothing. Do not modify.
func (e *Endpoint) Said() *Report {
	if e.state == nil {
		return nil
	}
	return e.state.said.Load()
}
