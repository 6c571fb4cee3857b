package kvstate

import (
	"math"
	"slices"
	"sync"
	"time"

	"tandem/kvstate/lengths"
	"tandem/kvstate/speed"
)

// workload is the recent work of a pool, according to its reservations, and the observed speed of its endpoints. It
// stays with the pool when its endpoints change.
type workload struct {
	mu           sync.Mutex
	since        time.Time // time of the first booking
	prefill      decayed   // seconds of work reserved on prefill endpoints
	local        decayed   // the same on decode endpoints, for prompts that they compute themselves
	work         mean      // mean work of a prefill, seconds
	speed        speed.Learned
	steps        speed.Learned // of decode
	transferTime transferRatio
	answers      lengths.Mean
	byModel      lengths.ByModel
	freed        chan struct{} // holds a token if a booking has ended since the last receive

	remotePrefill, remoteLocal float64 // work reserved by other replicas, seconds per second
	movedBytes, movedTokens    float64 // of KV transfers
	loadedBytes, loadTime      float64 // of loads from CPU memory; s
	loadedAt                   time.Time
	zoned                      bool // endpoints run in several zones
}

// loadWindow is the period over which a pool's utilisation is measured, and leastWindow the shortest one, since a first
// prompt of a second is no load of 100 %.
const (
	loadWindow  = time.Minute
	leastWindow = 10 * time.Second
)

// Utilisation is the share of time that a fleet's prefill is busy, and the work that it does.
type Utilisation struct {
	Prefills, Decodes int // usable endpoints of each role; both 0: not counted

	Prefill float64       // 0 to 1: of the prefill endpoints
	Local   float64       // 0 to 1: of the decode endpoints, for prompts that they compute themselves
	Work    time.Duration // mean of a prefill, at the endpoints' speed
	Speed   float64       // of the fleet: observed over modelled time; 1: as modelled

	Step       float64 // of decode steps: observed over modelled time; 0: unknown
	TokenBytes float64 // KV bytes of one token, as observed; 0: unknown
	Densest    float64 // tokens that a byte of a prompt may have; 0: estimates are right
	Answer     float64 // mean tokens of an answer, as observed; 0: unknown

	// tokens of conversations that are expected back soon, each once; 0: unknown
	Live float64

	LoadBandwidth float64 // of loads of KV from CPU memory, as observed, bytes/s; 0: unknown
}

func newWorkload() *workload { return &workload{freed: make(chan struct{}, 1)} }

// signalFreed signals that a booking has ended.
func (w *workload) signalFreed() {
	if w == nil {
		return
	}
	select {
	case w.freed <- struct{}{}:
	default: // the last signal was not received yet
	}
}

// Freed receives a value after a booking of the pool has ended here, or the queue of another replica has changed.
// It is for one receiver.
func (p *Pool) Freed() <-chan struct{} { return p.load.freed }

// booked counts the work of a prefill.
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

// rates returns the seconds of work reserved per second, on prefill and on decode endpoints. In the first minute the
// window is not full yet, which the sum is corrected for, from leastWindow on. The caller holds w.mu.
func (w *workload) rates(now time.Time) (prefill, local float64) {
	if w.since.IsZero() {
		return 0, 0
	}
	seen := loadWindow.Seconds() * (1 - math.Exp(-max(now.Sub(w.since), leastWindow).Seconds()/loadWindow.Seconds()))
	return w.prefill.value(loadWindow, now) / seen, w.local.value(loadWindow, now) / seen
}

// fleetSpeeds returns [Utilisation.Speed] and the pool's own [Candidate.Transfer] and [Candidate.Step].
func (w *workload) fleetSpeeds(now int64) (prefill, transfer, step float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	moves := w.transferTime.doubted(1, now, speed.DoubtPool)
	return doubted(&w.speed, now), moves.ratio(1, now), doubted(&w.steps, now)
}

// doubted returns a pool's ratio to the model.
func doubted(s *speed.Learned, now int64) float64 {
	left := s.Doubted(1, now, speed.DoubtPool)
	return left.Ratio(1, now)
}

// setZones records whether endpoints run in several zones.
func (w *workload) setZones(all []*Endpoint) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.zoned = slices.ContainsFunc(all, func(e *Endpoint) bool { return e.Zone != all[0].Zone })
}

// utilisation returns the utilisation of that many endpoints of each role, including the work of other replicas. Those
// that serve both have a part of either work.
func (w *workload) utilisation(prefills, decodes, both int, now time.Time) Utilisation {
	w.mu.Lock()
	defer w.mu.Unlock()
	p, d := float64(max(prefills, 1)), float64(max(decodes, 1))
	prefill, local := w.rates(now)
	prefill, local = prefill+w.remotePrefill, local+w.remoteLocal
	prefill, local = prefill+local*float64(both)/d, local+prefill*float64(both)/p
	return Utilisation{
		Prefills: prefills, Decodes: decodes, Work: time.Duration(w.work.value * float64(time.Second)),
		Speed: doubted(&w.speed, now.UnixNano()), Step: doubted(&w.steps, now.UnixNano()),
		TokenBytes: w.tokenBytes(), Answer: w.answers.Value(), LoadBandwidth: w.loadBandwidth(now),
		Prefill: min(prefill/p, 1), Local: min(local/d, 1),
	}
}

// mean is a moving average: a new value weighs one in a hundred, and the first hundred weigh alike.
type mean struct {
	value float64
	n     int
}

func (m *mean) add(x float64) {
	m.n = min(m.n+1, 100)
	m.value += (x - m.value) / float64(m.n)
}
