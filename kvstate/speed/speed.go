// Package speed learns how long work takes relative to a model of its cost. It is pure: times come as values.
package speed

import "time"

// Learned learns an endpoint's time relative to the cost model, as a ratio of sums. A mean of ratios would mislead: a
// small job carries the overhead of a whole step, so an endpoint that got many of them would look slow and get no
// larger ones to prove otherwise.
type Learned struct {
	observed, modelled float64 // seconds; both decay with each observation
	faded              float64 // 0 to 1: how much the prior has faded. It must, or short jobs would never outweigh it
	at                 int64   // time of the last observation, Unix ns
}

const (
	// Decay is the factor on what was observed with each new observation: one weighs half as much after 23 more.
	Decay = 0.97
	// Noise is the ratio within which an endpoint counts as equal to its fleet.
	Noise = 1.25
	// Kept is how long observations are used after the last one.
	Kept = 10 * time.Minute

	// DoubtEndpoint is the age of the last observation from which on the trust in what was learned of an endpoint
	// falls: to a quarter at twice that age. A healthy endpoint in use is observed every few seconds.
	DoubtEndpoint = 30 * time.Second
	// DoubtPool is the same age for what was learned of a whole pool.
	DoubtPool = 2 * time.Minute

	priorWeight = 2.0 // at first, in modelled seconds
	// factor on that weight with each observation: the prior fades faster than observations do.
	priorDecay = 0.95
	bound      = 10.0 // the largest ratio to the model, either way
	leap       = 4.0  // one observation counts for at most this many times the known ratio ...
	// ... of its work or of a full step's, seconds: the first of a batch that ends has the time of all of them. The
	// work counts for at most a multiple of what was observed, because its estimate may be far too high.
	fullStep = 0.5
)

// Add adds an observation at a time in Unix ns. prior is as Ratio has it.
func (s *Learned) Add(observed, modelled time.Duration, prior float64, now int64) {
	known := s.Ratio(prior, now)
	if now-s.at > int64(Kept) {
		*s = Learned{}
	}
	seen, model := observed.Seconds(), modelled.Seconds()
	seen, model = min(seen, leap*known*max(model, fullStep)), min(model, leap/known*max(seen, fullStep))
	s.observed, s.modelled = s.observed*Decay+seen, s.modelled*Decay+model
	s.faded, s.at = 1-(1-s.faded)*priorDecay, now
}

// Ratio returns observed over modelled time. With few observations it is close to prior, and prior again when the
// last one is too old. An endpoint's prior is its fleet's ratio, so that an unused endpoint does not look faster
// than the others.
func (s *Learned) Ratio(prior float64, now int64) float64 {
	if now-s.at > int64(Kept) {
		return prior
	}
	weight := priorWeight * (1 - s.faded)
	r := (s.observed + weight*prior) / (s.modelled + weight)
	return min(max(r, 1/bound), bound)
}

// Trust returns the weight of what was learned, by the age of its last observation: 1 up to the age from which on it is
// doubted, and then less. Without it an endpoint that was slow once would get nothing, and could not show that it has
// recovered.
func Trust(age, doubted time.Duration) float64 {
	if age <= doubted {
		return 1
	}
	part := doubted.Seconds() / age.Seconds()
	return part * part
}

// Doubted returns what is left of what was learned at a time in Unix ns: its ratio has moved towards the prior, and its
// weight is less, so that the next observations count for more.
func (s Learned) Doubted(prior float64, now int64, doubted time.Duration) Learned {
	trust := Trust(time.Duration(now-s.at), doubted)
	if trust == 1 {
		return s
	}
	r := prior + trust*(s.Ratio(prior, now)-prior)
	s.modelled, s.faded = s.modelled*trust, s.faded*trust
	weight := priorWeight * (1 - s.faded)
	s.observed = r*(s.modelled+weight) - weight*prior
	return s
}

// Within returns an endpoint's ratio: the fleet's unless it clearly differs.
func (s *Learned) Within(fleet float64, now int64) float64 {
	doubted := s.Doubted(fleet, now, DoubtEndpoint)
	r := doubted.Ratio(fleet, now)
	if r < fleet*Noise && r > fleet/Noise {
		return fleet
	}
	return r
}
