package replay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"tandem/picker"
	"tandem/picker/admission"
	"tandem/picker/roles"
	"tandem/replay/engine"
	"tandem/replay/traces"
)

// Config is the fleet and the settings that a trace is played with.
type Config struct {
	Prefill, Decode int          // endpoints of either role
	Both            int          // endpoints that serve both legs, instead of those; 0: none
	Roles           bool         // Tandem's own: endpoints of Both have words (picker/roles)
	Engine          picker.Model // the engines' costs. KVTokens may be infinite: caches that never evict
	LocalTokens     int          // prompt and answer tokens in one step of an engine that decodes
	Seed            uint64

	Late     bool         // Tandem's own: requests wait until an endpoint is free ...
	MaxWait  float64      // ... but at most this many seconds; may be infinite
	Split    picker.Split // Tandem's own: when a request is split
	Replicas int          // Tandem's own: requests go to this many replicas in rotation; 0: one
	// Tandem's own: seconds until replicas learn each other's decisions; negative: never
	Sharing float64

	Promise      picker.Targets // Tandem's own: of the pool
	AnswerWeight float64        // Tandem's own: answerWeight of the pool

	AskTPOT float64 // Tandem's own: seconds between tokens that requests ask for; 0: they do not

	Routed bool // Tandem's own: hits come from its own routing, not from the engines' KV events

	TTFT, TPOT float64 // targets of goodput, seconds

	Progress func(done, of int)               // may be nil
	Changed  func(at float64, c roles.Change) // called with each new word; may be nil
}

// DefaultConfig returns a fleet of four and four.
func DefaultConfig() Config {
	m := picker.DefaultModel()
	return Config{
		Prefill: 4, Decode: 4, Engine: m, LocalTokens: int(m.StepTokens), Seed: 1,
		Late: true, MaxWait: admission.MaxWait, Split: picker.SplitAuto, AnswerWeight: picker.DefaultAnswerWeight,
		Promise: picker.DefaultPromise(),
		TTFT:    5, TPOT: 0.050,
	}
}

// Slower returns a model of engines that take times as long to compute and to write.
func Slower(m picker.Model, times float64) picker.Model {
	for _, t := range []*float64{&m.PrefillStep, &m.PrefillToken, &m.PrefillContext, &m.DecodeStep, &m.DecodeAnswer,
		&m.DecodeToken} {
		*t *= times
	}
	return m
}

// Policies returns the names that [Run] takes.
func Policies() []string {
	names := []string{"tandem", "random", "round-robin", "longest-prefix"}
	return slices.Concat(names, twoHops(), mayBypass(), aggregated(), []string{"smg-1.13", "dynamo-planner"})
}

// twoHops returns the peers that split every request.
func twoHops() []string {
	return []string{
		"least-requests", "power-of-two", "llm-d", "llm-d-in-flight", "dynamo", "smg", "smg-32", "aibrix", "mooncake",
		"trtllm", "production-stack", "netkv", "kairos",
	}
}

// mayBypass returns the peers that let decode compute short prompts itself, with thresholds.
func mayBypass() []string {
	return []string{
		"llm-d-in-flight/512", "llm-d-in-flight/2048", "llm-d-in-flight/8192", "dynamo/2048", "dynamo/load",
		"dynamo/isl-or-load", "trtllm/2048", "vllm-router/256", "deflection", "ppd",
	}
}

// aggregated returns the peers that never split, for endpoints that serve both legs: a router of equal engines.
func aggregated() []string {
	return append(programAware(), "least-requests/never", "llm-d/never", "llm-d-in-flight/never", "dynamo/never")
}

// programAware returns those of the aggregated peers that know programs.
func programAware() []string { return []string{"thunderagent", "autellix", "continuum"} }

// newPolicy returns the policy of that name.
func newPolicy(name string, f *fleet, c Config) (policy, error) {
	if name == "tandem" {
		return newTandem(f, c), nil
	}
	p := &peer{fleet: f}
	if kind, never := strings.CutSuffix(name, "/never"); never {
		p.choose = newAggregated(kind, p)
	} else {
		p.choose = newChooser(name, p)
	}
	known := programs{p, map[uint64]*program{}, nil}
	switch name {
	case "thunderagent":
		t := &thunderAgent{known}
		p.After(thunderEvery, t.watch)
		return t, nil
	case "autellix":
		return &inOrder{programs: known, rule: autellix{}}, nil
	case "continuum":
		return &inOrder{programs: known, rule: &continuum{}}, nil
	case "dynamo-planner":
		return newPlanner(p, c), nil
	case "smg-1.13":
		s := &smg113{peer: p}
		p.choose = s
		return s, nil
	case "deflection":
		p.choose = &deflection{&mooncake{p}, c.TPOT}
	case "netkv":
		p.choose = &netkv{&mooncake{p}}
	case "ppd":
		p.choose = &ppd{&mooncake{p}}
	case "kairos":
		p.choose = &slackest{&mooncake{p}}
		return &kairos{peer: p, ttft: c.TTFT}, nil
	}
	if p.choose == nil {
		return nil, fmt.Errorf("%q is not a policy: one of %v", name, Policies())
	}
	return p, nil
}

// newChooser returns a peer's formula by name; nil if there is none.
func newChooser(name string, p *peer) chooser {
	switch name {
	case "random":
		return &randomly{p}
	case "round-robin":
		return &roundRobin{peer: p}
	case "longest-prefix":
		return &longestPrefix{p}
	case "least-requests":
		return &leastRequests{p}
	case "power-of-two":
		return &powerOfTwo{p}
	case "llm-d":
		return &llmd{p}
	case "llm-d-in-flight":
		return &inFlight{p}
	case "dynamo":
		return &dynamo{p}
	case "smg":
		return &smg{p, 64, 1.5, 0.3}
	case "smg-32":
		return &smg{p, 32, 1.1, 0.5}
	case "aibrix":
		return &aibrix{p}
	case "mooncake":
		return &mooncake{p}
	case "trtllm":
		return &trtllm{p}
	case "production-stack":
		return &loadAware{p}
	case "llm-d-in-flight/512":
		return newBypass(p, &inFlight{p}, 512)
	case "llm-d-in-flight/2048":
		return newBypass(p, &inFlight{p}, 2048)
	case "llm-d-in-flight/8192":
		return newBypass(p, &inFlight{p}, 8192)
	case "dynamo/2048":
		return newDynamoBypass(p)
	case "dynamo/load":
		return newDynamoLoad(p, false)
	case "dynamo/isl-or-load":
		return newDynamoLoad(p, true)
	case "trtllm/2048":
		return newTRTBypass(p, 2048)
	case "vllm-router/256": // its own policy is a token cost, as Dynamo's (vllm-project/router, pull request 130)
		return newBypass(p, &dynamo{p}, 257)
	}
	return nil
}

// endpoints returns the size of the fleet.
func (c *Config) endpoints() int {
	if c.Both > 0 {
		return c.Both
	}
	return c.Prefill + c.Decode
}

// Check returns an error for an invalid configuration.
func (c *Config) Check() error {
	switch {
	case c.Both < 0 || c.Both == 1 || c.Both > 1024:
		return fmt.Errorf("%d endpoints that serve both legs: none, or between 2 and 1024", c.Both)
	case c.Prefill < 1 || c.Prefill > 1024:
		return fmt.Errorf("%d prefill endpoints: between 1 and 1024", c.Prefill)
	case c.Decode < 1 || c.Decode > 1024:
		return fmt.Errorf("%d decode endpoints: between 1 and 1024", c.Decode)
	case c.Replicas < 0 || c.Replicas > 64:
		return fmt.Errorf("%d replicas: between 1 and 64", c.Replicas)
	case !(c.Engine.PrefillToken > 0) || !(c.Engine.Bandwidth > 0) || c.Engine.TokenBytes < 0:
		return errors.New("times of engines and transfers must be above 0")
	case c.LocalTokens < 1:
		return fmt.Errorf("steps of %d tokens: at least 1", c.LocalTokens)
	case !(c.AnswerWeight > 0):
		return fmt.Errorf("a weight of answers of %v: must be above 0", c.AnswerWeight)
	case !(c.TTFT > 0) || !(c.TPOT > 0):
		return errors.New("targets of goodput must be above 0")
	}
	return nil
}

// Run plays a trace under a policy.
func Run(ctx context.Context, t *traces.Trace, name string, c Config) (*Result, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	jobs := newJobs(t)
	f := newFleet(c, jobs, rand.New(rand.NewPCG(c.Seed, 3)))
	var err error
	if f.policy, err = newPolicy(name, f, c); err != nil {
		return nil, err
	}
	next := 0
	var arrive func()
	arrive = func() {
		j := jobs[next]
		next++
		if next < len(jobs) {
			f.After(jobs[next].Arrival-f.Now, arrive)
		}
		f.policy.arrive(j)
	}
	f.After(jobs[0].Arrival, arrive)
	shown, last := 0, 0.0
	for ended := 0; f.Step() && f.ended < len(jobs); ended = f.ended {
		if f.ended > ended || next < len(jobs) {
			last = f.Now
		} else if f.Now-last > hangs {
			break
		}
		if f.ended-shown >= 256 {
			if shown = f.ended; c.Progress != nil {
				c.Progress(f.ended, len(jobs))
			}
			if err := ctx.Err(); err != nil {
				return nil, err
			}
		}
	}
	if c.Progress != nil {
		c.Progress(len(jobs), len(jobs))
	}
	return newResult(name, f, jobs, c), nil
}

// hangs is the time in which no request ends, seconds, after which those that are left never will: engines that serve
// both legs can wait for each other's memory for ever.
const hangs = 1800.0

// Load returns the share of time that prefill and decode would work if all prefill caches were one. At 1 a fleet
// saturates at best.
func Load(t *traces.Trace, c Config) (prefill, decode float64, err error) {
	duration := t.Duration()
	if duration <= 0 {
		return 0, 0, traces.ErrNoDuration
	}
	m := &c.Engine
	blocks := capacity(*m) * c.Prefill
	pooled := engine.NewCache(blocks > 0)
	work, context, tokens := 0.0, 0.0, 0.0
	for i := range t.Requests {
		q := &t.Requests[i]
		whole, _ := pooled.Hit(q.Blocks)
		cached := min(whole*engine.BlockTokens, q.Input-1)
		pooled.Add(q.Blocks, engine.BlockTokens, blocks)
		n := q.Input - cached
		work += m.PrefillStep*float64(n)/m.StepTokens + engine.ChunkTime(m, n, cached)
		context += float64(q.Output) * (float64(q.Input) + float64(q.Output)/2)
		tokens += float64(q.Output)
	}
	kv := context / tokens // of an answer while it is written, on average
	answers := max(min(m.MaxAnswers, m.KVTokens/kv), 1)
	step := m.DecodeStep + m.DecodeAnswer*answers + m.DecodeToken*answers*kv
	return work / duration / float64(c.Prefill), tokens * step / answers / duration / float64(c.Decode), nil
}

// capacity returns the number of blocks that a cache can hold; 0: no limit.
func capacity(m picker.Model) int {
	if math.IsInf(m.KVTokens, 1) {
		return 0
	}
	return max(int(m.KVTokens)/engine.BlockTokens, 1)
}

// AtLoad returns the trace with its rate changed: [Load] is then load, on the role that is busier.
func AtLoad(t *traces.Trace, c Config, load float64) (*traces.Trace, error) {
	if !(load > 0) || math.IsInf(load, 1) {
		return nil, fmt.Errorf("a load of %v: must be above 0", load)
	}
	for range 5 { // more concurrent sessions share a cache of the same size: it takes a few rounds to converge
		p, d, err := Load(t, c)
		if err != nil {
			return nil, err
		}
		if t, err = t.Faster(load / max(p, d)); err != nil {
			return nil, err
		}
		if !t.Generated() {
			break
		}
	}
	return t, nil
}

func sorted(values []float64) []float64 {
	slices.Sort(values)
	return values
}
