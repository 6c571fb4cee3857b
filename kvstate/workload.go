package kvstate

import (
	"math"
	"slices"
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
	steps   speed // of decode
	moves   transfers
	answers answers
	freed   chan struct{} // holds a token when a booking has ended since it was taken

	othersPrefill, othersLocal float64 // seconds of work a second that other replicas book
	movedBytes, movedTokens    float64 // of KV transfers
	zoned                      bool    // endpoints run in several zones
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

	Step       float64 // of decode steps, as observed over modelled time; 0: not known
	TokenBytes float64 // of KV for one token, as observed; 0: not known
	Answer     float64 // tokens of an answer in the mean, as observed; 0: not known
}

func newWorkload() *workload { return &workload{freed: make(chan struct{}, 1)} }

// freedSome notes that a booking has ended.
func (w *workload) freedSome() {
	if w == nil {
		return
	}
	select {
	case w.freed <- struct{}{}:
	default: // nobody has looked since the last one
	}
}

// Freed gets a value when a booking of the pool has ended here, or others who wait at other replicas have become others, since the
// last value was taken. It is for one reader.
func (p *Pool) Freed() <-chan struct{} { return p.load.freed }

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

// rates are the seconds of work booked a second, on endpoints that prefill and on endpoints that decode. In the first minutes
// a sum that looks back one minute has not seen one yet. w.mu is held.
func (w *workload) rates(now time.Time) (prefill, local float64) {
	if w.since.IsZero() {
		return 0, 0
	}
	seen := loadWindow.Seconds() * (1 - math.Exp(-max(now.Sub(w.since), time.Second).Seconds()/loadWindow.Seconds()))
	return w.prefill.value(loadWindow, now) / seen, w.local.value(loadWindow, now) / seen
}

// fleetSpeeds are [Utilisation.Speed] and the pool's own [Candidate.Transfer] and [Candidate.Step].
func (w *workload) fleetSpeeds(now int64) (prefill, transfer, step float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.speed.ratio(1, now), w.moves.ratio(1, now), w.steps.ratio(1, now)
}

// setZones notes whether endpoints run in several zones.
func (w *workload) setZones(all []*Endpoint) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.zoned = slices.ContainsFunc(all, func(e *Endpoint) bool { return e.Zone != all[0].Zone })
}

// utilisation is the state of things over so many endpoints of either kind, with what all replicas book.
func (w *workload) utilisation(prefills, decodes int, now time.Time) Utilisation {
	w.mu.Lock()
	defer w.mu.Unlock()
	prefill, local := w.rates(now)
	return Utilisation{
		Prefills: prefills, Decodes: decodes, Work: time.Duration(w.work.value * float64(time.Second)), Speed: w.speed.ratio(1, now.UnixNano()),
		Step: w.steps.ratio(1, now.UnixNano()), TokenBytes: w.tokenBytes(), Answer: w.answers.mean(),
		Prefill: min((prefill+w.othersPrefill)/float64(max(prefills, 1)), 1),
		Local:   min((local+w.othersLocal)/float64(max(decodes, 1)), 1),
	}
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
	faded              float64 // 0 to 1: of the start, which fades, or short jobs would never outweigh it
	at                 int64   // ns since 1970: of the last observation
}

const (
	speedDecay = 0.97             // an observation weighs half as much after 23 more
	speedPrior = 2.0              // seconds of the model that the start counts for ...
	priorDecay = 0.95             // ... less with each observation: it fades faster than they do
	speedBound = 10.0             // nothing is taken for more than ten times faster or slower than the model
	speedNoise = 1.25             // endpoints that differ less from their fleet are taken for equal
	speedLeap  = 4.0              // one observation counts for at most so many times what is known ...
	speedStep  = 0.5              // ... of its work or of a full step's, seconds: the first of a batch that ends has all of its time
	speedKept  = 10 * time.Minute // observations hold for so long after the last one
)

func (s *speed) add(observed, modelled time.Duration, prior float64, now int64) {
	known := s.ratio(prior, now)
	if now-s.at > int64(speedKept) {
		*s = speed{}
	}
	model := modelled.Seconds()
	seen := min(observed.Seconds(), speedLeap*known*max(model, speedStep))
	s.observed, s.modelled = s.observed*speedDecay+seen, s.modelled*speedDecay+model
	s.faded, s.at = 1-(1-s.faded)*priorDecay, now
}

// ratio is observed over modelled time, as long as little was observed close to prior, and prior again after some time without
// an observation. An endpoint's prior is its fleet's ratio, so that one which was never used does not look faster than its
// neighbours.
func (s *speed) ratio(prior float64, now int64) float64 {
	if now-s.at > int64(speedKept) {
		return prior
	}
	weight := speedPrior * (1 - s.faded)
	r := (s.observed + weight*prior) / (s.modelled + weight)
	return min(max(r, 1/speedBound), speedBound)
}

// within is an endpoint's ratio in a fleet: the fleet's own unless it clearly differs.
func (s *speed) within(fleet float64, now int64) float64 {
	r := s.ratio(fleet, now)
	if r < fleet*speedNoise && r > fleet/speedNoise {
		return fleet
	}
	return r
}
