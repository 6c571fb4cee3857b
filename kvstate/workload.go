package kvstate

import (
	"math"
	"sync"
	"time"
)

// workload is what a pool is asked to do, as its bookings tell, and how fast its endpoints are seen to do it. It stays
// with the pool when its endpoints change.
type workload struct {
	mu      sync.Mutex
	since   time.Time // of the first booking
	prefill decayed   // seconds of work booked on endpoints that prefill
	local   decayed   // and on endpoints that decode, for prompts of their own
	work    mean      // of a prefill, seconds
	speed   speed
}

// loadWindow is how far back a pool's utilisation looks.
const loadWindow = time.Minute

// Utilisation is how much of its time a fleet's prefill is at work, and what it works on.
type Utilisation struct {
	Prefills, Decodes int // endpoints that can serve either leg now; both 0: not counted

	Prefill float64       // 0 to 1: of the endpoints that prefill
	Local   float64       // 0 to 1: of the endpoints that decode, for prompts they compute themselves
	Work    time.Duration // mean of a prefill, at the endpoints' speed
	Speed   float64       // of the fleet, as observed over modelled time; 1: as the cost model has it
}

func newWorkload() *workload { return &workload{} }

// booked counts a prefill.
func (w *workload) booked(b Booking, work time.Duration, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.since.IsZero() {
		w.since = now
	}
	if b.For == RolePrefill {
		w.prefill.add(work.Seconds(), loadWindow, now)
	} else {
		w.local.add(work.Seconds(), loadWindow, now)
	}
	w.work.add(work.Seconds())
}

// utilisation is the state of things over so many endpoints of either kind. In its first minutes a sum that looks back
// one minute has not seen one yet.
func (w *workload) utilisation(prefills, decodes int, now time.Time) Utilisation {
	w.mu.Lock()
	defer w.mu.Unlock()
	u := Utilisation{Prefills: prefills, Decodes: decodes, Work: time.Duration(w.work.value * float64(time.Second)), Speed: w.speed.ratio(1)}
	if w.since.IsZero() {
		return u
	}
	seen := 1 - math.Exp(-max(now.Sub(w.since), time.Second).Seconds()/loadWindow.Seconds())
	share := func(d *decayed, n int) float64 {
		return min(d.value(loadWindow, now)/loadWindow.Seconds()/seen/float64(max(n, 1)), 1)
	}
	u.Prefill, u.Local = share(&w.prefill, prefills), share(&w.local, decodes)
	return u
}

// mean is an average in which a new value weighs one in a hundred, and the first hundred weigh alike.
type mean struct {
	value float64
	n     int
}

func (m *mean) add(x float64) {
	m.n = min(m.n+1, 100)
	m.value += (x - m.value) / float64(m.n)
}

// speed learns how much longer an endpoint takes than the cost model says: as a ratio of sums. A mean of ratios would not
// do: small jobs carry the overhead of a whole step, so an endpoint that got many of them would look slow, get no more
// of any other, and never be found out.
type speed struct {
	observed, modelled float64 // seconds, decayed by observation
}

const (
	speedDecay = 0.97 // an observation weighs half as much after 23 more
	speedPrior = 2.0  // seconds of the model that the start counts for
	speedBound = 10.0 // nothing is taken for more than ten times faster or slower than the model
	speedNoise = 1.25 // endpoints that differ less from their fleet are taken for equal
)

func (s *speed) add(observed, modelled time.Duration) {
	s.observed = s.observed*speedDecay + observed.Seconds()
	s.modelled = s.modelled*speedDecay + modelled.Seconds()
}

// ratio is observed over modelled time, as long as little was observed close to prior. An endpoint's prior is its fleet's
// ratio, so that one which was never used does not look faster than its neighbours.
func (s *speed) ratio(prior float64) float64 {
	r := (s.observed + speedPrior*prior) / (s.modelled + speedPrior)
	return min(max(r, 1/speedBound), speedBound)
}

// within is an endpoint's ratio in a fleet: the fleet's own unless it clearly differs.
func (s *speed) within(fleet float64) float64 {
	r := s.ratio(fleet)
	if r < fleet*speedNoise && r > fleet/speedNoise {
		return fleet
	}
	return r
}
