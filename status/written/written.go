// Package written is how fast engines write answers. Envoy carries answers past Tandem, so it is what engines report:
// vLLM and SGLang count tokens and the time between two of them. Tandem reads these counters every 2 s, one replica
// each engine, and all replicas know them. The answers of requests that did not come through Tandem count, too.
package written

import (
	"maps"
	"slices"
	"time"

	"tandem/kvstate"
)

// window is the time over which rates are taken, and kept how many counters are kept of it, one a second.
const (
	window = time.Minute
	kept   = 61
)

// stale is the age from which counters are too old for a rate of now.
const stale = 20 * time.Second

// slack is what the figures of a whole minute may lack of it: reports come every 2 s.
const slack = 5 * time.Second

// Output is what an engine, or all of a pool, wrote in the last minute.
type Output struct {
	// tokens per second, of finished and running answers; -1: not reported
	Rate float64 `json:"output_tokens_per_second"`
	// milliseconds between two tokens of an answer, the mean; 0: not reported, or none were written
	PerToken float64 `json:"time_per_output_token_ms"`
	// seconds that were seen of the last minute; of a pool those of the endpoint seen shortest. 0: nothing is known
	Seconds float64 `json:"output_seconds,omitempty"`

	gaps    int64
	gapTime time.Duration
}

// written is what an engine had written at a time.
type written struct {
	at time.Time
	kvstate.AnswerCounters
}

// key is an endpoint of a pool.
type key struct{ pool, address string }

// Meter keeps what endpoints wrote in the last minute. It is not safe for concurrent use.
type Meter struct {
	of map[key][]written // oldest first, at most kept of each endpoint
}

// Sample notes the counters of all endpoints that write answers. It is called once a second.
func (m *Meter) Sample(state *kvstate.State, now time.Time) {
	if m.of == nil {
		m.of = map[key][]written{}
	}
	seen := make(map[key]bool, len(m.of))
	for _, p := range state.Pools() {
		for _, e := range p.Endpoints() {
			g := e.Signals()
			if g == nil || e.Role&kvstate.RoleDecode == 0 || g.ScrapedAt.IsZero() {
				continue
			}
			at := key{p.Spec.Name, e.Addr}
			seen[at] = true
			all := note(m.of[at], written{g.ScrapedAt, g.Answers}, now)
			if e.Failed() { // if it comes back, only what it writes from now on counts
				all = dropOver(all, 1)
			}
			m.of[at] = all
		}
	}
	maps.DeleteFunc(m.of, func(at key, _ []written) bool { return !seen[at] })
}

// note adds counters, if they are newer, to those of the last minute. Counters that fell are a new process's: they
// began at 0, no earlier than the last of the former. The time between two tokens may seem to fall: Redis rounds it.
func note(all []written, next written, now time.Time) []written {
	if n := len(all); n > 0 {
		last := &all[n-1]
		if !next.at.After(last.at) {
			return all
		}
		if next.Written() < last.Written() || next.Gaps < last.Gaps {
			began := last.at
			if earliest := now.Add(-window); began.Before(earliest) {
				began = earliest
			}
			all = append(all[:0], written{at: began})
		}
	}
	all = append(dropOver(all, kept-1), next)
	for len(all) > 1 && now.Sub(all[1].at) >= window { // one older than the window is where it begins
		all = all[1:]
	}
	return all
}

// Of returns what an endpoint wrote in the last minute. That it wrote nothing is known after a minute only.
func (m *Meter) Of(pool, address string, now time.Time) Output {
	out := Output{Rate: -1}
	all := m.of[key{pool, address}]
	if len(all) < 2 || now.Sub(all[len(all)-1].at) > stale {
		return out
	}
	first, last := &all[0], &all[len(all)-1]
	seen, wrote := last.at.Sub(first.at).Seconds(), last.Written()-first.Written()
	gaps := last.Gaps - first.Gaps
	if seen <= 0 || last.AnswerCounters == (kvstate.AnswerCounters{}) {
		return out
	}
	if wrote == 0 && gaps == 0 && now.Sub(first.at) < window-slack {
		return out
	}
	out.Seconds, out.gaps, out.gapTime = seen, gaps, last.GapTime-first.GapTime
	if last.Written() > 0 { // else it counts no tokens
		out.Rate = float64(wrote) / seen
	}
	average(&out)
	return out
}

// Add adds what another engine of the pool wrote.
func (o *Output) Add(other *Output) {
	if other.Rate >= 0 {
		o.Rate = max(o.Rate, 0) + other.Rate
	}
	if o.Seconds == 0 || other.Seconds > 0 && other.Seconds < o.Seconds {
		o.Seconds = other.Seconds
	}
	o.gaps, o.gapTime = o.gaps+other.gaps, o.gapTime+other.gapTime
	average(o)
}

// KnownBetter reports whether other, another replica's, is to be shown instead: it knows more of the last minute. A
// replica that has just started knows little.
func (o *Output) KnownBetter(other *Output) bool { return o.Rate < 0 || other.Seconds > o.Seconds }

func average(o *Output) {
	if o.gaps > 0 && o.gapTime > 0 {
		o.PerToken = float64((o.gapTime / time.Duration(o.gaps)).Microseconds()) / 1000
	}
}

// dropOver drops the oldest elements beyond n.
func dropOver(all []written, n int) []written { return slices.Delete(all, 0, max(len(all)-n, 0)) }
