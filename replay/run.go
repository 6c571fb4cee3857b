package replay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"tandem/picker"
)

// Config is what a trace is played against.
type Config struct {
	Prefill, Decode int          // endpoints of either role; without any that prefills, decode does all
	Engine          picker.Model // what work costs the engines. KVTokens may be infinite: caches that never forget
	Seed            uint64

	Late        bool         // Tandem's own: requests wait until an endpoint is free ...
	MaxWait     float64      // ... but no longer than so many seconds; may be infinite
	Split       picker.Split // Tandem's own: when a request is split
	Temperature float64      // Tandem's own: of its choice, seconds; 0: the cheapest
	Replicas    int          // Tandem's own: so many take turns; 0: one
	Sharing     float64      // Tandem's own: after so many seconds replicas know of each other's decisions; negative: never

	Routed bool // Tandem's own: hits are what it routed, not what engines tell of their caches

	TTFT, TPOT float64 // targets of goodput, seconds

	Progress func(done, of int) // nil: nobody wants to know
}

// DefaultConfig is a fleet of four and four.
func DefaultConfig() Config {
	return Config{Prefill: 4, Decode: 4, Engine: picker.DefaultModel(), Seed: 1, Late: true, MaxWait: picker.MaxWait, Split: picker.SplitAuto, TTFT: 5, TPOT: 0.050}
}

// Policies are the names that [Run] takes.
func Policies() []string {
	return []string{"tandem", "random", "round-robin", "least-requests", "longest-prefix", "llm-d", "dynamo", "smg", "aibrix", "mooncake"}
}

// newPolicy is the policy of that name.
func newPolicy(name string, f *fleet, c Config) (policy, error) {
	if name == "tandem" {
		return newTandem(f, c), nil
	}
	p := &peer{fleet: f}
	switch name {
	case "random":
		p.choose = &randomly{p}
	case "round-robin":
		p.choose = &roundRobin{peer: p}
	case "least-requests":
		p.choose = &leastRequests{p}
	case "longest-prefix":
		p.choose = &longestPrefix{p}
	case "llm-d":
		p.choose = &llmd{p}
	case "dynamo":
		p.choose = &dynamo{p}
	case "smg":
		p.choose = &smg{p}
	case "aibrix":
		p.choose = &aibrix{p}
	case "mooncake":
		p.choose = &mooncake{p}
	default:
		return nil, fmt.Errorf("%q is not a policy: one of %v", name, Policies())
	}
	return p, nil
}

// Check says what is wrong with a configuration.
func (c *Config) Check() error {
	switch {
	case c.Prefill < 1 || c.Prefill > 1024:
		return fmt.Errorf("%d prefill endpoints: between 1 and 1024", c.Prefill)
	case c.Decode < 1 || c.Decode > 1024:
		return fmt.Errorf("%d decode endpoints: between 1 and 1024", c.Decode)
	case c.Replicas < 0 || c.Replicas > 64:
		return fmt.Errorf("%d replicas: between 1 and 64", c.Replicas)
	case c.Temperature < 0:
		return fmt.Errorf("a temperature of %g s: not below 0", c.Temperature)
	case !(c.TTFT > 0) || !(c.TPOT > 0):
		return errors.New("targets of goodput must be above 0")
	}
	return nil
}

// Run plays a trace under a policy.
func Run(ctx context.Context, t *Trace, name string, c Config) (*Result, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	f := newFleet(c, rand.New(rand.NewPCG(c.Seed, 3)))
	var err error
	if f.policy, err = newPolicy(name, f, c); err != nil {
		return nil, err
	}
	jobs := make([]job, len(t.Requests))
	next := 0
	var arrive func()
	arrive = func() {
		j := &jobs[next]
		next++
		if next < len(jobs) {
			f.after(t.Requests[next].Arrival-f.now, arrive)
		}
		f.policy.arrive(j)
	}
	for i := range jobs {
		jobs[i] = job{Request: &t.Requests[i], id: uint64(i), prefill: -1, decode: -1}
	}
	f.after(t.Requests[0].Arrival, arrive)
	shown := 0
	for f.step() && f.ended < len(jobs) {
		if f.ended-shown >= 256 {
			if shown = f.ended; c.Progress != nil {
				c.Progress(f.ended, len(jobs))
			}
			if err := ctx.Err(); err != nil {
				return nil, err
			}
		}
	}
	if f.ended < len(jobs) {
		return nil, fmt.Errorf("%s: %d of %d requests never ended", name, len(jobs)-f.ended, len(jobs))
	}
	if c.Progress != nil {
		c.Progress(len(jobs), len(jobs))
	}
	return newResult(name, f, jobs, c), nil
}

// Load is how much of the time the busier side of a fleet would be at work if its prefill caches were one: 1 is where it
// saturates at best.
func Load(t *Trace, c Config) (prefill, decode float64, err error) {
	duration := t.Duration()
	if duration <= 0 {
		return 0, 0, ErrNoDuration
	}
	m := &c.Engine
	blocks := capacity(*m) * c.Prefill
	pooled := newCache(blocks)
	work, context, tokens := 0.0, 0.0, 0.0
	for i := range t.Requests {
		q := &t.Requests[i]
		cached := min(pooled.hit(q.Blocks)*BlockTokens, q.Input-1)
		pooled.add(q.Blocks, blocks)
		n := q.Input - cached
		work += m.PrefillStep*float64(n)/m.StepTokens + chunkTime(m, n, cached)
		context += float64(q.Output) * (float64(q.Input) + float64(q.Output)/2)
		tokens += float64(q.Output)
	}
	kv := context / tokens // of an answer while it is written, on average
	answers := max(min(m.MaxAnswers, m.KVTokens/kv), 1)
	step := m.DecodeStep + m.DecodeAnswer*answers + m.DecodeToken*answers*kv
	return work / duration / float64(c.Prefill), tokens * step / answers / duration / float64(c.Decode), nil
}

// AtLoad is the trace at the rate at which [Load] is so much on the busier side.
func AtLoad(t *Trace, c Config, load float64) (*Trace, error) {
	if !(load > 0) || math.IsInf(load, 1) {
		return nil, fmt.Errorf("a load of %v: must be above 0", load)
	}
	for range 5 { // more sessions at a time share a cache of the same size: that takes a few rounds to settle
		p, d, err := Load(t, c)
		if err != nil {
			return nil, err
		}
		if t, err = t.Faster(load / max(p, d)); err != nil {
			return nil, err
		}
		if t.again == nil {
			break
		}
	}
	return t, nil
}

func sorted(values []float64) []float64 {
	slices.Sort(values)
	return values
}
