package discovery

import (
	"slices"
	"time"

	"tandem/kvstate"
)

// lingerFor is how long an endpoint that its cluster no longer names goes on as one that drains: what runs on it ends, and
// blocks that it holds for others are fetched, for which engines give about as long (vLLM's lease from 0.22 on).
const lingerFor = 30 * time.Second

// departures are when endpoints left, by address, whose pods may still run: a pod that is not ready any more, one that a selector
// has ceased to find, a port that an InferencePool has dropped.
type departures map[string]time.Time

// keep puts behind next those of current that have left, as draining, until their time is over; again is when the first of
// those is, 0 if there are none. Those that drained already are gone for good: so is their pod.
func (d departures) keep(current, next []kvstate.EndpointSpec, now time.Time) (all []kvstate.EndpointSpec, again time.Duration) {
	all = slices.Clone(next)
	stays := make(map[string]bool, len(next))
	for _, e := range next {
		stays[e.Addr] = true
		delete(d, e.Addr)
	}
	for _, e := range current {
		if stays[e.Addr] {
			continue
		}
		since, left := d[e.Addr]
		if !left && !e.Draining {
			since, left = now, true
			d[e.Addr] = now
		}
		rest := lingerFor - now.Sub(since)
		if !left || rest <= 0 {
			delete(d, e.Addr)
			continue
		}
		e.Draining = true
		all = append(all, e)
		if again == 0 || rest < again {
			again = rest
		}
	}
	return all, again
}
