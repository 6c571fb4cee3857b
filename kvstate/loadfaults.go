package kvstate

import (
	"slices"
	"time"

	"tandem/kvstate/kvloads"
)

// KVLoads records which pairs fail to transfer KV, and excludes them for a while (package kvloads).
type KVLoads struct {
	link           *link
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

// LoadFailed records that a decode endpoint could not load the KV of a prefill endpoint. It reports whether this is
// new: several requests may fail before the first failure is known. What is new is published.
func (s *KVLoads) LoadFailed(p *Pool, prefill, decode string) (isNew bool) {
	if isNew = s.ApplyLoadFailed(p, prefill, decode); isNew && s.link.replicas != nil {
		s.link.replicas.KVLoaded(p, prefill, decode, true)
	}
	return isNew
}

// ApplyLoadFailed applies [KVLoads.LoadFailed] of another replica.
func (s *KVLoads) ApplyLoadFailed(p *Pool, prefill, decode string) (isNew bool) {
	now := s.now()
	isNew = p.loads.Failed(prefill, decode, now)
	p.publishFaults(now)
	return isNew
}

// LoadSuspected records that a decode endpoint with KV to load answered a request with an error that may concern the
// request or the KV. One request's error may be its own fault. If another request gets it without a success in between,
// the load counts as failed. It reports whether that is so and new.
func (s *KVLoads) LoadSuspected(p *Pool, prefill, decode string, request uint64) (isNew bool) {
	return p.loads.Suspected(prefill, decode, request, s.now()) && s.LoadFailed(p, prefill, decode)
}

// LoadStarted records that a decode endpoint is asked to load the KV of a prefill endpoint.
func (s *KVLoads) LoadStarted(p *Pool, prefill, decode string) {
	p.loads.Started(prefill, decode, s.now())
}

// OnTransferFailed sets the function that is called when an engine's counter of failed transfers blames a pair. The
// default is [KVLoads.LoadFailed]. Call it before the state is used.
func (s *KVLoads) OnTransferFailed(f func(p *Pool, prefill, decode string)) { s.transferFailed = f }

// blameTransfers finds the pair of transfers that failed at a decode endpoint since a scrape of its metrics. The engine
// does not report from which endpoint the KV came. If several prefill endpoints had KV for it, no pair is blamed.
func (s *KVLoads) blameTransfers(e *Endpoint, since time.Time) {
	for _, p := range s.pools() {
		if p.Endpoint(e.Addr) != e {
			continue
		}
		if prefill := p.loads.OnlySource(e.Addr, since.Add(-kvloads.LoadTime)); prefill == "" {
			continue
		} else if s.transferFailed != nil {
			s.transferFailed(p, prefill, e.Addr)
		} else {
			s.LoadFailed(p, prefill, e.Addr)
		}
	}
}

// LoadSucceeded records that a decode endpoint has loaded the KV of a prefill endpoint. Other pairs of that prefill
// endpoint may be tried at once. If it had failed before, this is published.
func (s *KVLoads) LoadSucceeded(p *Pool, prefill, decode string) {
	if s.ApplyLoadSucceeded(p, prefill, decode) && s.link.replicas != nil {
		s.link.replicas.KVLoaded(p, prefill, decode, false)
	}
}

// ApplyLoadSucceeded applies [KVLoads.LoadSucceeded] of another replica, and reports whether a failure was known.
func (s *KVLoads) ApplyLoadSucceeded(p *Pool, prefill, decode string) bool {
	now := s.now()
	if !p.loads.Succeeded(prefill, decode, now) {
		return false
	}
	p.publishFaults(now)
	return true
}

// ClaimTrial makes an attempt the trial of a pair whose pause has ended. Until the attempt ends, no other request
// tries the prefill endpoint.
func (s *KVLoads) ClaimTrial(p *Pool, prefill, decode string, attempt [16]byte) {
	if now := s.now(); p.loadFailed(prefill) && p.loads.Claim(prefill, decode, attempt, now) {
		p.publishFaults(now)
	}
}

// LoadTrial reports whether an attempt is the trial of a pair.
func (p *Pool) LoadTrial(prefill, decode string, attempt [16]byte) bool {
	return p.loadFailed(prefill) && p.loads.IsTrial(prefill, decode, attempt)
}

// loadFailed reports whether a load of the endpoint's KV has failed.
func (p *Pool) loadFailed(prefill string) bool {
	e := p.Endpoint(prefill)
	return e != nil && e.state.loads.Load() != nil
}

// forgetLoadFaults removes the failed loads of an endpoint that has recovered: it may be another process.
func (s *KVLoads) forgetLoadFaults(e *Endpoint) {
	for _, p := range s.pools() {
		if p.Endpoint(e.Addr) == e {
			p.loads.Forget(e.Addr)
			p.publishFaults(s.now())
		}
	}
}

// sweepLoads makes pairs eligible again when their pause has ended.
func (p *Pool) sweepLoads(now time.Time) {
	if p.loads.Sweep(now) {
		p.publishFaults(now)
	}
}

// publishFaults updates the endpoints' LoadFaults from the failed loads.
func (p *Pool) publishFaults(now time.Time) {
	p.loads.Publish(now, func(all, trial map[string]*kvloads.Avoided, failed func(string) bool) {
		for _, e := range p.endpoints {
			f := loadFaultsOf(all[e.Addr])
			if f == nil && failed(e.Addr) {
				f = &LoadFaults{} // nothing is avoided now, but a trial must be claimed
			}
			if f != nil {
				f.Trial = loadFaultsOf(trial[e.Addr])
			}
			e.state.loads.Store(f)
		}
	})
}

func loadFaultsOf(a *kvloads.Avoided) *LoadFaults {
	if a == nil {
		return nil
	}
	f := &LoadFaults{Decodes: a.Decodes}
	if a.NoPrefill {
		f.Parts = RolePrefill
	}
	if a.NoDecode {
		f.Parts |= RoleDecode
	}
	return f
}

// LoadFaults returns what the endpoint is excluded from; nil: nothing.
func (e *Endpoint) LoadFaults() *LoadFaults { return e.state.loads.Load() }
