package status

import (
	"time"

	"tandem/kvstate"
)

// Envoy carries answers past Tandem, so how fast they are written is what engines report: vLLM and SGLang count tokens
// and the time between two of them. Tandem reads these counters every 2 s, one replica each engine, and all replicas
// know them. The answers of requests that did not come through Tandem count, too.

// outputWindow is the time that rates of output are of.
const outputWindow = time.Minute

// outputStale is the age from which counters are too old for a rate of now.
const outputStale = 20 * time.Second

// Output is what an engine, or all of a pool, wrote in the last minute.
type Output struct {
	// tokens per second, of finished and running answers; -1: not reported
	Rate float64 `json:"output_tokens_per_second"`
	// milliseconds between two tokens of an answer, the mean; 0: not reported, or none were written
	PerToken float64 `json:"time_per_output_token_ms"`

	gaps    int64
	gapTime time.Duration
}

// written is what an engine had written at a time.
type written struct {
	at time.Time
	kvstate.AnswerCounters
}

// outputKey is an endpoint of a pool.
type outputKey struct{ pool, address string }

// sampleOutput notes the counters of all endpoints that write answers. Feed.mu is held.
func (f *Feed) sampleOutput(now time.Time) {
	seen := make(map[outputKey]bool, len(f.output))
	for _, p := range f.source.State.Pools() {
		for _, e := range p.Endpoints() {
			g := e.Signals()
			if g == nil || e.Role&kvstate.RoleDecode == 0 || g.Answers == (kvstate.AnswerCounters{}) || g.ScrapedAt.IsZero() {
				continue
			}
			key := outputKey{p.Spec.Name, e.Addr}
			seen[key] = true
			f.output[key] = noteOutput(f.output[key], written{g.ScrapedAt, g.Answers}, now)
		}
	}
	for key := range f.output {
		if !seen[key] {
			delete(f.output, key)
		}
	}
}

// noteOutput adds counters, if they are newer, to those of the last minute.
func noteOutput(all []written, next written, now time.Time) []written {
	if n := len(all); n > 0 {
		last := &all[n-1]
		if !next.at.After(last.at) {
			return all
		}
		if next.Written() < last.Written() || next.Gaps < last.Gaps || next.GapTime < last.GapTime {
			all = all[:0] // the engine has restarted
		}
	}
	all = append(dropOver(all, keptTotals-1), next)
	for len(all) > 1 && now.Sub(all[1].at) >= outputWindow { // one older than the window is where it begins
		all = all[1:]
	}
	return all
}

// outputOf returns what an endpoint wrote in the last minute. Feed.mu is held.
func (f *Feed) outputOf(pool, address string, now time.Time) Output {
	out := Output{Rate: -1}
	all := f.output[outputKey{pool, address}]
	if len(all) < 2 || now.Sub(all[len(all)-1].at) > outputStale {
		return out
	}
	first, last := &all[0], &all[len(all)-1]
	out.Rate = float64(last.Written()-first.Written()) / last.at.Sub(first.at).Seconds()
	out.gaps, out.gapTime = last.Gaps-first.Gaps, last.GapTime-first.GapTime
	out.average()
	return out
}

// add adds what another engine of the pool wrote.
func (o *Output) add(other *Output) {
	if other.Rate >= 0 {
		o.Rate = max(o.Rate, 0) + other.Rate
	}
	o.gaps, o.gapTime = o.gaps+other.gaps, o.gapTime+other.gapTime
	o.average()
}

func (o *Output) average() {
	if o.gaps > 0 {
		o.PerToken = milliseconds(o.gapTime / time.Duration(o.gaps))
	}
}
