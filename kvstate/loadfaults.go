package kvstate

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// A KV load fails when a decode endpoint cannot read the blocks that a prefill endpoint holds for it. Both may
// still pass their health checks, so neither is marked as failed: the cause may be the network between them, or the
// transfer port of either. The first failure therefore counts against the pair only. When a second decode endpoint
// fails with the same prefill endpoint, the prefill endpoint is excluded from all pairs. When a decode endpoint
// fails with a second prefill endpoint that others can read from, the decode endpoint is excluded.
//
// One request at a time tries the pair again (a trial). At first only a request that is not streamed may be the
// trial, since a streamed answer cannot be repaired. After twice that time any request may be.

// KVLoads records which pairs fail to transfer KV, and excludes them for a while.
type KVLoads struct {
	*link
	now            func() time.Time
	pools          func() []*Pool
	transferFailed func(p *Pool, prefill, decode string) // nil: LoadFailed
}

// LoadFaults lists the pairs and parts that an endpoint is excluded from after failed KV loads. It is immutable.
type LoadFaults struct {
	Decodes []string // addresses that failed to load KV from this endpoint
	Parts   Role     // legs that the endpoint must not serve in any pair
	Trial   *LoadFaults
}

// Avoids reports whether a decode endpoint must not load KV from this one.
func (f *LoadFaults) Avoids(decode string) bool {
	return f != nil && slices.Contains(f.Decodes, decode)
}

// Excludes reports whether the endpoint must not serve a leg of any pair.
func (f *LoadFaults) Excludes(part Role) bool { return f != nil && f.Parts&part != 0 }

// How long a pair is avoided after a failure: loadPause at first, twice as long after each failed trial, at most
// maxLoadPause. A pair without failures for forgetLoad is forgotten.
const (
	loadPause    = 30 * time.Second
	maxLoadPause = 10 * time.Minute
	forgetLoad   = time.Hour
	maxLoadPairs = 4096
	failedPairs  = 2 // after failures with this many others the endpoint itself is excluded
)

// loadPairs records the failed loads of one pool.
type loadPairs struct {
	mu      sync.Mutex
	pairs   map[loadPair]*loadFault
	started map[loadPair]time.Time // when a decode endpoint last received KV parameters of a prefill endpoint
	stale   bool                   // pairs were removed, but the endpoints' LoadFaults still list them
}

type loadPair struct{ prefill, decode string }

// loadFault is one pair with failed loads.
type loadFault struct {
	last, until time.Time // time of the last failure, and the end of the pause
	pause       time.Duration
	trial       [16]byte // the attempt that is the current trial
}

func newLoadPairs() *loadPairs {
	return &loadPairs{pairs: map[loadPair]*loadFault{}, started: map[loadPair]time.Time{}}
}

// LoadFailed records that a decode endpoint could not load the KV of a prefill endpoint. It reports whether this is
// new: several requests may fail before the first failure is known. What is new is published.
func (s *KVLoads) LoadFailed(p *Pool, prefill, decode string) (isNew bool) {
	if isNew = s.ApplyLoadFailed(p, prefill, decode); isNew && s.replicas != nil {
		s.replicas.KVLoaded(p, prefill, decode, true)
	}
	return isNew
}

// ApplyLoadFailed applies [KVLoads.LoadFailed] of another replica.
func (s *KVLoads) ApplyLoadFailed(p *Pool, prefill, decode string) (isNew bool) {
	now := s.now()
	l := p.loads
	l.mu.Lock()
	defer l.mu.Unlock()
	key := loadPair{prefill, decode}
	f := l.pairs[key]
	switch {
	case f == nil && len(l.pairs) >= maxLoadPairs:
		return false
	case f == nil:
		isNew = true
		f = &loadFault{pause: loadPause, until: now.Add(loadPause)}
		l.pairs[key] = f
	case !now.Before(f.until) || f.trial != [16]byte{}:
		isNew = true
		f.pause = min(2*f.pause, maxLoadPause)
		f.until = now.Add(f.pause)
	}
	f.last, f.trial = now, [16]byte{}
	p.publishFaults(now)
	return isNew
}

// longest time from a decode request to the report of its failed load.
const loadTime = 15 * time.Second

// LoadStarted records that a decode endpoint is asked to load the KV of a prefill endpoint.
func (s *KVLoads) LoadStarted(p *Pool, prefill, decode string) {
	now := s.now()
	l := p.loads
	l.mu.Lock()
	defer l.mu.Unlock()
	key := loadPair{prefill, decode}
	if _, known := l.started[key]; !known && len(l.started) >= maxLoadPairs {
		maps.DeleteFunc(l.started, func(_ loadPair, at time.Time) bool { return now.Sub(at) > loadTime })
		if len(l.started) >= maxLoadPairs {
			return
		}
	}
	l.started[key] = now
}

// OnTransferFailed sets the function that is called when an engine's counter of failed transfers blames a pair. The
// default is [KVLoads.LoadFailed]. Call it before the state is used.
func (s *KVLoads) OnTransferFailed(f func(p *Pool, prefill, decode string)) { s.transferFailed = f }

// blameTransfers finds the pair of transfers that failed at a decode endpoint since a scrape of its metrics. The
// engine does not report whose KV it was. If several prefill endpoints had KV for it, no pair is blamed.
func (s *KVLoads) blameTransfers(e *Endpoint, since time.Time) {
	for _, p := range s.pools() {
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

// onlySource returns the only prefill endpoint that had KV for a decode endpoint since a moment; "" if there were
// none or several.
func (l *loadPairs) onlySource(decode string, since time.Time) (prefill string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for k, at := range l.started {
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

// LoadSucceeded records that a decode endpoint has loaded the KV of a prefill endpoint. Other pairs of that prefill
// endpoint may be tried at once. If it had failed before, this is published.
func (s *KVLoads) LoadSucceeded(p *Pool, prefill, decode string) {
	if s.ApplyLoadSucceeded(p, prefill, decode) && s.replicas != nil {
		s.replicas.KVLoaded(p, prefill, decode, false)
	}
}

// ApplyLoadSucceeded applies [KVLoads.LoadSucceeded] of another replica, and reports whether a failure was known.
func (s *KVLoads) ApplyLoadSucceeded(p *Pool, prefill, decode string) bool {
	if e := p.Endpoint(prefill); e == nil || e.loads.Load() == nil {
		return false
	}
	now := s.now()
	l := p.loads
	l.mu.Lock()
	defer l.mu.Unlock()
	key := loadPair{prefill, decode}
	if l.pairs[key] == nil {
		return false
	}
	delete(l.pairs, key)
	for k, f := range l.pairs {
		if k.prefill == prefill && f.until.After(now) {
			f.until = now
		}
	}
	p.publishFaults(now)
	return true
}

// ClaimTrial makes an attempt the trial of a pair whose pause has ended. Until the attempt ends, no other request
// tries the prefill endpoint.
func (s *KVLoads) ClaimTrial(p *Pool, prefill, decode string, attempt [16]byte) {
	if e := p.Endpoint(prefill); e == nil || e.loads.Load() == nil {
		return
	}
	now := s.now()
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
	p.publishFaults(now)
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

// forgetLoadFaults removes the failed loads of an endpoint that has recovered: it may be another process.
func (s *KVLoads) forgetLoadFaults(e *Endpoint) {
	for _, p := range s.pools() {
		if p.Endpoint(e.Addr) != e {
			continue
		}
		p.loads.forget(e.Addr)
		p.loads.mu.Lock()
		p.publishFaults(s.now())
		p.loads.mu.Unlock()
	}
}

// forget removes the failed loads of an endpoint.
func (l *loadPairs) forget(addr string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.started, func(k loadPair, _ time.Time) bool { return k.prefill == addr || k.decode == addr })
	before := len(l.pairs)
	maps.DeleteFunc(l.pairs, func(k loadPair, _ *loadFault) bool { return k.prefill == addr || k.decode == addr })
	l.stale = l.stale || len(l.pairs) < before
}

// sweepLoads makes pairs eligible again when their pause has ended.
func (p *Pool) sweepLoads(now time.Time) {
	l := p.loads
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.pairs) == 0 && !l.stale {
		return
	}
	maps.DeleteFunc(l.pairs, func(_ loadPair, f *loadFault) bool { return now.Sub(f.last) > forgetLoad })
	p.publishFaults(now)
}

// publishFaults updates the endpoints' LoadFaults from the failed loads. The caller holds the lock of p.loads.
func (p *Pool) publishFaults(now time.Time) {
	strict := p.loads.faults(func(f *loadFault) bool { return now.Before(f.until.Add(f.pause)) })
	loose := p.loads.faults(func(f *loadFault) bool { return now.Before(f.until) })
	p.loads.stale = false
	for _, e := range p.endpoints {
		f := strict[e.Addr]
		if f == nil && p.loads.names(e.Addr) {
			f = &LoadFaults{} // nothing is avoided now, but a trial must be claimed
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

// faults returns, by address, what endpoints are excluded from, given which failures count.
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
	with := map[string]int{} // by decode endpoint: failures with prefill endpoints that are not excluded themselves
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

// LoadFaults returns what the endpoint is excluded from; nil: nothing.
func (e *Endpoint) LoadFaults() *LoadFaults { return e.loads.Load() }

// AllowTrials prepares the view for a request that may be a trial: one that is not streamed.
func (v *View) AllowTrials() {
	for i := range v.Endpoints {
		if c := &v.Endpoints[i]; c.Faults != nil {
			c.Faults = c.Faults.Trial
		}
	}
}

// ForgetFaults makes every pair of the view eligible despite failed loads. It reports whether any pair was not.
func (v *View) ForgetFaults() (changed bool) {
	for i := range v.Endpoints {
		if c := &v.Endpoints[i]; c.Faults != nil {
			c.Faults, changed = nil, true
		}
	}
	return changed
}
