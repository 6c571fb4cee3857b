package kvstate

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// A KV load fails where a decode endpoint cannot read what a prefill endpoint keeps for it. Both answer their health checks
// meanwhile, so neither is marked as failed: it may be the network between them, or the transfer port of either. The first
// failure is therefore the pair's alone. When a second decode endpoint fails with the same prefill endpoint, the prefill
// endpoint is left out of all pairs; when a decode endpoint fails with a second prefill endpoint that others can read from, the
// decode endpoint is.
//
// A pair comes back by one request at a time (a trial). For a while only a request that is not streamed may be the trial,
// since a streamed one cannot be repaired; after twice that time any request may.

// LoadFaults is what of KV loads an endpoint is left out of. It is never changed once made.
type LoadFaults struct {
	Decodes []string // addresses that could not load KV from this endpoint
	Parts   Role     // parts of a pair that the endpoint is not to play at all
	Trial   *LoadFaults
}

// Avoids reports whether a decode endpoint is not to load KV from this one.
func (f *LoadFaults) Avoids(decode string) bool {
	return f != nil && slices.Contains(f.Decodes, decode)
}

// Bars reports whether the endpoint is not to play a part of a pair.
func (f *LoadFaults) Bars(part Role) bool { return f != nil && f.Parts&part != 0 }

// How long a pair is avoided after a failure: loadPause, and twice as long after each failure of a trial, up to maxLoadPause.
// A pair without failures for forgetLoad is forgotten.
const (
	loadPause    = 30 * time.Second
	maxLoadPause = 10 * time.Minute
	forgetLoad   = time.Hour
	maxLoadPairs = 4096
	failedPairs  = 2 // failures with so many others are the endpoint's own
)

// loadPairs remembers the failed loads of one pool.
type loadPairs struct {
	mu    sync.Mutex
	pairs map[loadPair]*loadFault
	begun map[loadPair]time.Time // when a decode endpoint was last told to load from a prefill endpoint
	stale bool                   // pairs were forgotten, and the endpoints still have them
}

type loadPair struct{ prefill, decode string }

// loadFault is one pair whose loads fail.
type loadFault struct {
	last, until time.Time // of the last failure, and until when no request tries the pair
	pause       time.Duration
	trial       [16]byte // the attempt that tries it now
}

func newLoadPairs() *loadPairs {
	return &loadPairs{pairs: map[loadPair]*loadFault{}, begun: map[loadPair]time.Time{}}
}

// LoadFailed notes that a decode endpoint could not load the KV that a prefill endpoint keeps. It reports whether the pair was not
// avoided before: several requests may fail before the first is known to.
func (s *State) LoadFailed(p *Pool, prefill, decode string) (news bool) {
	now := s.o.Now()
	l := p.loads
	l.mu.Lock()
	defer l.mu.Unlock()
	key := loadPair{prefill, decode}
	f := l.pairs[key]
	switch {
	case f == nil && len(l.pairs) >= maxLoadPairs:
		return false
	case f == nil:
		news = true
		f = &loadFault{pause: loadPause, until: now.Add(loadPause)}
		l.pairs[key] = f
	case !now.Before(f.until) || f.trial != [16]byte{}:
		news = true
		f.pause = min(2*f.pause, maxLoadPause)
		f.until = now.Add(f.pause)
	}
	f.last, f.trial = now, [16]byte{}
	if p.leaveOut(now); news {
		s.changed()
	}
	return news
}

// loadTime is how long after it was told of it a decode endpoint may report a failed load.
const loadTime = 15 * time.Second

// LoadBegun notes that a decode endpoint is told to load the KV that a prefill endpoint keeps.
func (s *State) LoadBegun(p *Pool, prefill, decode string) {
	now := s.o.Now()
	l := p.loads
	l.mu.Lock()
	defer l.mu.Unlock()
	key := loadPair{prefill, decode}
	if _, known := l.begun[key]; !known && len(l.begun) >= maxLoadPairs {
		maps.DeleteFunc(l.begun, func(_ loadPair, at time.Time) bool { return now.Sub(at) > loadTime })
		if len(l.begun) >= maxLoadPairs {
			return
		}
	}
	l.begun[key] = now
}

// OnTransferFailed sets what is called when an engine's own count of failed transfers blames a pair. The default is [State.LoadFailed].
// To be called before the state is used.
func (s *State) OnTransferFailed(f func(p *Pool, prefill, decode string)) { s.transferFailed = f }

// transfersFailed blames a pair for transfers that failed at a decode endpoint after a look at its metrics. The engine does not say whose KV it
// was: nobody is blamed where several prefill endpoints had some for it.
func (s *State) transfersFailed(e *Endpoint, since time.Time) {
	for _, p := range s.Pools() {
		if p.Endpoint(e.Addr) != e {
			continue
		}
		if prefill := p.loads.onlySource(e.Addr, since.Add(-loadTime)); prefill == "" {
			continue
		} else if s.transferFailed != nil {
			s.transferFailed(p, prefill, e.Addr)
		} else {
			s.LoadFailed(p, prefill, e.Addr)
		}
	}
}

// onlySource returns the prefill endpoint that alone had KV for a decode endpoint since a moment; "": none or several had.
func (l *loadPairs) onlySource(decode string, since time.Time) (prefill string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for k, at := range l.begun {
		if k.decode != decode || at.Before(since) {
			continue
		}
		if prefill != "" {
			return ""
		}
		prefill = k.prefill
	}
	return prefill
}

// LoadGood notes that a decode endpoint has loaded the KV of a prefill endpoint. Other pairs of the same prefill endpoint may be tried
// at once.
func (s *State) LoadGood(p *Pool, prefill, decode string) {
	if e := p.Endpoint(prefill); e == nil || e.loads.Load() == nil {
		return
	}
	now := s.o.Now()
	l := p.loads
	l.mu.Lock()
	defer l.mu.Unlock()
	key := loadPair{prefill, decode}
	if l.pairs[key] == nil {
		return
	}
	delete(l.pairs, key)
	for k, f := range l.pairs {
		if k.prefill == prefill && f.until.After(now) {
			f.until = now
		}
	}
	p.leaveOut(now)
}

// ClaimLoad makes an attempt the trial of a pair whose loads failed, if it is one: until its end no other request tries the
// prefill endpoint.
func (s *State) ClaimLoad(p *Pool, prefill, decode string, attempt [16]byte) {
	if e := p.Endpoint(prefill); e == nil || e.loads.Load() == nil {
		return
	}
	now := s.o.Now()
	l := p.loads
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.pairs[loadPair{prefill, decode}]
	if f == nil || now.Before(f.until) {
		return
	}
	f.trial = attempt
	for k, other := range l.pairs {
		if k.prefill == prefill {
			other.until = now.Add(other.pause)
		}
	}
	p.leaveOut(now)
}

// LoadTrial reports whether an attempt is the trial of a pair.
func (p *Pool) LoadTrial(prefill, decode string, attempt [16]byte) bool {
	if e := p.Endpoint(prefill); e == nil || e.loads.Load() == nil {
		return false
	}
	p.loads.mu.Lock()
	defer p.loads.mu.Unlock()
	f := p.loads.pairs[loadPair{prefill, decode}]
	return f != nil && f.trial == attempt
}

// forgetLoads forgets the failed loads of an endpoint that was out and is back: it may be another process.
func (s *State) forgetLoads(e *Endpoint) {
	for _, p := range s.Pools() {
		if p.Endpoint(e.Addr) != e {
			continue
		}
		p.loads.forget(e.Addr)
		p.loads.mu.Lock()
		p.leaveOut(s.o.Now())
		p.loads.mu.Unlock()
	}
}

// forget forgets the failed loads of an endpoint.
func (l *loadPairs) forget(addr string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.begun, func(k loadPair, _ time.Time) bool { return k.prefill == addr || k.decode == addr })
	for k := range l.pairs {
		if k.prefill == addr || k.decode == addr {
			delete(l.pairs, k)
			l.stale = true
		}
	}
}

// sweepLoads lets pairs come back whose time is over.
func (p *Pool) sweepLoads(now time.Time) {
	l := p.loads
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.pairs) == 0 && !l.stale {
		return
	}
	for k, f := range l.pairs {
		if now.Sub(f.last) > forgetLoad {
			delete(l.pairs, k)
		}
	}
	p.leaveOut(now)
}

// leaveOut makes the endpoints' LoadFaults what the failed loads say at a moment. The lock of p.loads is held.
func (p *Pool) leaveOut(now time.Time) {
	strict := p.loads.faults(func(f *loadFault) bool { return now.Before(f.until.Add(f.pause)) })
	loose := p.loads.faults(func(f *loadFault) bool { return now.Before(f.until) })
	p.loads.stale = false
	for _, e := range p.endpoints {
		f := strict[e.Addr]
		if f == nil && p.loads.names(e.Addr) {
			f = &LoadFaults{} // nothing is avoided now, but a trial has to be claimed
		}
		if f != nil {
			f.Trial = loose[e.Addr]
		}
		e.loads.Store(f)
	}
}

// names reports whether a load of the endpoint's KV has failed.
func (l *loadPairs) names(prefill string) bool {
	for k := range l.pairs {
		if k.prefill == prefill {
			return true
		}
	}
	return false
}

// faults works out what endpoints are left out of, by address, from those failures that count.
func (l *loadPairs) faults(counts func(*loadFault) bool) map[string]*LoadFaults {
	out := map[string]*LoadFaults{}
	at := func(addr string) *LoadFaults {
		if out[addr] == nil {
			out[addr] = &LoadFaults{}
		}
		return out[addr]
	}
	for k, f := range l.pairs {
		if counts(f) {
			at(k.prefill).Decodes = append(at(k.prefill).Decodes, k.decode)
		}
	}
	with := map[string]int{} // prefill endpoints that are not to blame themselves, by decode endpoint
	for _, f := range out {
		if len(f.Decodes) >= failedPairs {
			f.Parts = RolePrefill
			continue
		}
		for _, d := range f.Decodes {
			with[d]++
		}
	}
	for d, n := range with {
		if n >= failedPairs {
			at(d).Parts |= RoleDecode
		}
	}
	return out
}

// LoadFaults is what of KV loads the endpoint is left out of now; nil: nothing.
func (e *Endpoint) LoadFaults() *LoadFaults { return e.loads.Load() }

// AllowTrials makes the view one for a request that may be the trial of a pair: it is not streamed.
func (v *View) AllowTrials() {
	for i := range v.Endpoints {
		if c := &v.Endpoints[i]; c.Faults != nil {
			c.Faults = c.Faults.Trial
		}
	}
}

// ForgetFaults makes every pair of the view eligible, whatever loads of it failed. It reports whether any was not.
func (v *View) ForgetFaults() (changed bool) {
	for i := range v.Endpoints {
		if c := &v.Endpoints[i]; c.Faults != nil {
			c.Faults, changed = nil, true
		}
	}
	return changed
}
