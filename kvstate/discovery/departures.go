package discovery

import (
	"slices"
	"time"

	"tandem/kvstate"
)

// drainFor is the time for which an endpoint that has left its cluster stays, as a draining one: its requests end, and
// blocks that it holds for others are fetched, for which engines allow about as long (vLLM's lease from 0.22 on).
const drainFor = 30 * time.Second

// departures has the times at which endpoints left, by address. Their pods may still run: a pod that is not ready any
// more or that a selector no longer finds, or a port that an InferencePool has dropped.
type departures map[string]time.Time

// keep appends to next, as draining, the endpoints of current that have left, until their time is over. again is the
// earliest of these ends, 0 if there are none. Endpoints that were draining already are removed at once: their pods
// are gone.
func (d departures) keep(current, next []kvstate.EndpointSpec,
	now time.Time) (all []kvstate.EndpointSpec, again time.Duration) {
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
