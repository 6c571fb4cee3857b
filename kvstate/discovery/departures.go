package discovery

import (
	"slices"
	"time"

	"tandem/kvstate"
)

// drainFor is how long an endpoint stays, as a draining one, after its cluster has stopped naming it: its requests
// end, and blocks that it holds for others are fetched, for which engines allow about as long (vLLM's lease from
// 0.22 on).
const drainFor = 30 * time.Second

// departures holds when endpoints left, by address, whose pods may still run: a pod that is not ready any more or
// that a selector no longer finds, or a port that an InferencePool has dropped.
type departures map[string]time.Time

// keep appends to next the endpoints of current that have left, as draining, until their time is over; again is
// when the first of those is, 0 if there are none. Endpoints that drained already are removed at once: their pods
// are gone.
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
		rest := drainFor - now.Sub(since)
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
