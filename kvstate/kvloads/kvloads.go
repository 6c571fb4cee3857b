// Package kvloads records between which endpoints KV could not be loaded, by their addresses: which pairs are avoided,
// for how long, and which request tries one again. It is pure except for its lock: callers pass the time.
//
// A KV load fails when a decode endpoint cannot read the blocks that a prefill endpoint holds for it. Both may
// still pass their health checks, so neither is marked as failed: the cause may be the network between them, or the
// transfer port of either. The first failure therefore counts against the pair only. When a second decode endpoint
// fails with the same prefill endpoint, the prefill endpoint is excluded from all pairs. When a decode endpoint
// fails with a second prefill endpoint that others can read from, the decode endpoint is excluded.
//
// One request at a time tries the pair again (a trial). At first only a request that is not streamed may be the trial,
// since a streamed answer cannot be repaired. After twice that time it may be any request.
package kvloads

import (
	"maps"
	"sync"
	"time"
)

// How long a pair is avoided after a failure: Pause at first, twice as long after each failed trial, at most
// maxPause. A pair without failures for Forgotten is forgotten.
const (
	Pause     = 30 * time.Second
	maxPause  = 10 * time.Minute
	Forgotten = time.Hour
	MaxPairs  = 4096
	several   = 2 // after failures with this many others the endpoint itself is excluded
	// LoadTime is the longest time from a decode request to the report of its failed load.
	LoadTime = 15 * time.Second
	// SuspectTime is how long an error of one request is remembered that may be a failed load.
	SuspectTime = time.Minute
)

// Pairs records the failed loads of one pool. It is safe for concurrent use.
type Pairs struct {
	mu       sync.Mutex
	pairs    map[pair]*fault
	started  map[pair]time.Time // when a decode endpoint last received KV parameters of a prefill endpoint
	suspects map[pair]suspect
	stale    bool // pairs were removed, but what was published still lists them
}

type pair struct{ prefill, decode string }

// fault is one pair with failed loads.
type fault struct {
	last, until time.Time // time of the last failure, and the end of the pause
	pause       time.Duration
	trial       [16]byte // the attempt that is the current trial
}

// suspect is a request whose decode leg answered an error with KV to load. The engine does not say whether the
// request or the KV was at fault.
type suspect struct {
	request uint64
	at      time.Time
}

// New returns an empty record.
func New() *Pairs {
	return &Pairs{pairs: map[pair]*fault{}, started: map[pair]time.Time{}, suspects: map[pair]suspect{}}
}

// Failed records a failed load. It reports whether this is new: several requests may fail before the first failure is
// known.
func (l *Pairs) Failed(prefill, decode string, now time.Time) (isNew bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := pair{prefill, decode}
	f := l.pairs[key]
	switch {
	case f == nil && len(l.pairs) >= MaxPairs:
		return false
	case f == nil:
		isNew = true
		f = &fault{pause: Pause, until: now.Add(Pause)}
		l.pairs[key] = f
	case !now.Before(f.until) || f.trial != [16]byte{}:
		isNew = true
		f.pause = min(2*f.pause, maxPause)
		f.until = now.Add(f.pause)
	}
	f.last, f.trial = now, [16]byte{}
	return isNew
}

// Suspected records an error of a request that may be a failed load. It reports whether another request met one
// too, with no success between.
func (l *Pairs) Suspected(prefill, decode string, request uint64, now time.Time) (again bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := pair{prefill, decode}
	old, known := l.suspects[key]
	if known && now.Sub(old.at) < SuspectTime {
		return old.request != request
	}
	if !known && len(l.suspects) >= MaxPairs {
		maps.DeleteFunc(l.suspects, func(_ pair, s suspect) bool { return now.Sub(s.at) >= SuspectTime })
	}
	if known || len(l.suspects) < MaxPairs {
		l.suspects[key] = suspect{request, now}
	}
	return false
}

// Started records that a decode endpoint is asked to load the KV of a prefill endpoint.
func (l *Pairs) Started(prefill, decode string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := pair{prefill, decode}
	if _, known := l.started[key]; !known && len(l.started) >= MaxPairs {
		maps.DeleteFunc(l.started, func(_ pair, at time.Time) bool { return now.Sub(at) > LoadTime })
		if len(l.started) >= MaxPairs {
			return
		}
	}
	l.started[key] = now
}

// OnlySource returns the only prefill endpoint that had KV for a decode endpoint since a moment; "" if there were
// none or several.
func (l *Pairs) OnlySource(decode string, since time.Time) (prefill string) {
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

// Succeeded records a load that worked. Other pairs of that prefill endpoint may be tried at once. It reports
// whether a failure was known.
func (l *Pairs) Succeeded(prefill, decode string, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := pair{prefill, decode}
	delete(l.suspects, key)
	if l.pairs[key] == nil {
		return false
	}
	delete(l.pairs, key)
	for k, f := range l.pairs {
		if k.prefill == prefill && f.until.After(now) {
			f.until = now
		}
	}
	return true
}

// Claim makes an attempt the trial of a pair whose pause has ended; false if it is not. Until the attempt ends, no
// other request tries the prefill endpoint.
func (l *Pairs) Claim(prefill, decode string, attempt [16]byte, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.pairs[pair{prefill, decode}]
	if f == nil || now.Before(f.until) {
		return false
	}
	f.trial = attempt
	for k, other := range l.pairs {
		if k.prefill == prefill {
			other.until = now.Add(other.pause)
		}
	}
	return true
}

// IsTrial reports whether an attempt is the trial of a pair.
func (l *Pairs) IsTrial(prefill, decode string, attempt [16]byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.pairs[pair{prefill, decode}]
	return f != nil && f.trial == attempt
}

// Forget removes what is recorded of an endpoint.
func (l *Pairs) Forget(addr string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.started, func(k pair, _ time.Time) bool { return k.prefill == addr || k.decode == addr })
	maps.DeleteFunc(l.suspects, func(k pair, _ suspect) bool { return k.prefill == addr || k.decode == addr })
	before := len(l.pairs)
	maps.DeleteFunc(l.pairs, func(k pair, _ *fault) bool { return k.prefill == addr || k.decode == addr })
	l.stale = l.stale || len(l.pairs) < before
}

// Sweep forgets old failures. It reports whether what is avoided may have changed.
func (l *Pairs) Sweep(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.suspects, func(_ pair, s suspect) bool { return now.Sub(s.at) >= SuspectTime })
	if len(l.pairs) == 0 && !l.stale {
		return false
	}
	maps.DeleteFunc(l.pairs, func(_ pair, f *fault) bool { return now.Sub(f.last) > Forgotten })
	return true
}

// Avoided is what an endpoint is excluded from.
type Avoided struct {
	Decodes             []string // addresses that failed to load KV from it
	NoPrefill, NoDecode bool     // it must not serve this leg of any pair
}

// Publish calls publish, under the lock, with three results by address: what an endpoint is excluded from for any
// request, what it is excluded from for a request that may be a trial, and whether any load of its KV has failed.
func (l *Pairs) Publish(now time.Time, publish func(all, trial map[string]*Avoided, failed func(prefill string) bool)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stale = false
	publish(
		l.avoided(func(f *fault) bool { return now.Before(f.until.Add(f.pause)) }),
		l.avoided(func(f *fault) bool { return now.Before(f.until) }),
		func(prefill string) bool {
			for k := range l.pairs {
				if k.prefill == prefill {
					return true
				}
			}
			return false
		})
}

// avoided returns, by address, what endpoints are excluded from, given which failures count.
func (l *Pairs) avoided(counts func(*fault) bool) map[string]*Avoided {
	out := map[string]*Avoided{}
	at := func(addr string) *Avoided {
		if out[addr] == nil {
			out[addr] = &Avoided{}
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
		if len(f.Decodes) >= several {
			f.NoPrefill = true
			continue
		}
		for _, d := range f.Decodes {
			with[d]++
		}
	}
	for d, n := range with {
		if n >= several {
			at(d).NoDecode = true
		}
	}
	return out
}
