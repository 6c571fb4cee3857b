package status

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/status/written"
)

// An hour of steps: rates and percentiles of ten seconds each, and what each endpoint had to do at their ends. It takes
// some 120 kB, and 9 kB for each endpoint.
const (
	stepSeconds = 10
	keptSteps   = 360
)

// EnginePoint is what engines report at the end of a point, summed over all pools. Every replica knows the same.
type EnginePoint struct {
	Running float64 `json:"running,omitempty"` // requests in engines' batches
	Waiting float64 `json:"waiting,omitempty"` // in engines' queues
	Written float64 `json:"written,omitempty"` // tokens of answers per second, in the last minute
	Each    float64 `json:"each,omitempty"`    // milliseconds between two tokens of an answer, the last minute's mean
}

// Hour is the history of one endpoint as the asked replica saw it.
type Hour struct {
	Pool    string `json:"pool"`
	Address string `json:"address"`
	// Unix second; requests at the engine, those that wait included, -1 if the endpoint was out; milliseconds between
	// two tokens of its answers, 0 if it wrote none or does not report it
	Steps [][3]float64 `json:"steps"`
}

// endpointKey is an endpoint of a pool.
type endpointKey struct{ pool, address string }

// history keeps the steps of an hour. It is not safe for concurrent use.
type history struct {
	steps []Point // oldest first, at most keptSteps; N are multiples of stepSeconds, so that replicas agree on them
	of    map[endpointKey][][3]float64

	began   telemetry.Totals // of the step that is not complete
	beganAt time.Time
	most    EnginePoint // of it
	queued  float64     // likewise
}

func newHistory(t telemetry.Totals, now time.Time) history {
	return history{began: t, beganAt: now, of: map[endpointKey][][3]float64{}}
}

// last returns the second at which the last complete step ended; 0: there is none.
func (h *history) last() int64 {
	if len(h.steps) == 0 {
		return 0
	}
	return h.steps[len(h.steps)-1].N
}

// sample is called once a second. p is the point of this second: of running and waiting requests a step has the most.
func (h *history) sample(p *Point, t *telemetry.Totals, state *kvstate.State, m *written.Meter, now time.Time) {
	h.most.Running, h.most.Waiting = max(h.most.Running, p.Running), max(h.most.Waiting, p.Waiting)
	h.most.Written, h.most.Each = p.Written, p.Each
	h.queued = max(h.queued, p.Queued)
	n := now.Unix() / stepSeconds * stepSeconds
	took := now.Sub(h.beganAt).Seconds()
	if n <= h.beganAt.Unix() || took <= 0 {
		return
	}
	lately := t.Since(&h.began)
	step := rates(&lately, took)
	step.percentiles(&lately)
	step.N, step.EnginePoint, step.Queued = n, h.most, h.queued
	h.steps = append(dropOver(h.steps, keptSteps-1), step)
	h.began, h.beganAt, h.most, h.queued = *t, now, EnginePoint{}, 0
	seen := make(map[endpointKey]bool, len(h.of))
	for _, p := range state.Pools() {
		for _, e := range p.Endpoints() {
			at := endpointKey{p.Spec.Name, e.Addr}
			seen[at] = true
			h.of[at] = append(dropOver(h.of[at], keptSteps-1),
				[3]float64{float64(n), loadOf(e), m.Of(p.Spec.Name, e.Addr, now).PerToken})
		}
	}
	maps.DeleteFunc(h.of, func(at endpointKey, _ [][3]float64) bool { return !seen[at] })
}

// loadOf returns the requests that an engine reports, or those that Tandem has booked if it reports none; -1: it is out.
func loadOf(e *kvstate.Endpoint) float64 {
	if e.Failed() {
		return -1
	}
	if g := e.Signals(); g != nil && g.Running >= 0 {
		return float64(g.Running + max(g.Waiting, 0))
	}
	requests, _ := e.Load()
	return float64(requests)
}

// after returns the points after a second.
func after(points []Point, n int64) []Point {
	from, _ := slices.BinarySearchFunc(points, n+1, func(p Point, n int64) int { return cmp.Compare(p.N, n) })
	return slices.Clone(points[from:])
}

// hours returns the endpoints' parts after a second.
func (h *history) hours(n int64) []Hour {
	out := make([]Hour, 0, len(h.of))
	for at, all := range h.of {
		from, _ := slices.BinarySearchFunc(all, float64(n+1), func(step [3]float64, n float64) int {
			return cmp.Compare(step[0], n)
		})
		if from < len(all) {
			out = append(out, Hour{at.pool, at.address, slices.Clone(all[from:])})
		}
	}
	return out
}

// enginePoint sums what engines report now.
func enginePoint(state *kvstate.State, m *written.Meter, now time.Time) (p EnginePoint) {
	sum := written.Output{Rate: -1}
	for _, pool := range state.Pools() {
		for _, e := range pool.Endpoints() {
			if g := e.Signals(); g != nil && !e.Failed() {
				p.Running, p.Waiting = p.Running+float64(max(g.Running, 0)), p.Waiting+float64(max(g.Waiting, 0))
			}
			of := m.Of(pool.Spec.Name, e.Addr, now)
			sum.Add(&of)
		}
	}
	p.Written, p.Each = max(sum.Rate, 0), sum.PerToken
	return p
}
