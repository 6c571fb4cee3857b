package replay

import (
	"math/rand/v2"
	"slices"

	"tandem/kvstate/residency"
	"tandem/picker"
	"tandem/replay/engine"
	"tandem/replay/traces"
)

// job is a request on its way.
type job struct {
	engine.Job
	Arrival float64
	prefill int // endpoint; -1: the decode endpoint computes the prompt
	decode  int // -1: not chosen yet
	alone   bool

	firstAt, endAt float64
	prefilledAt    float64
	boundAt        float64 // when it got its endpoints
	hits           []int32 // blocks of the prompt on each endpoint, at the last lookup
	lookedAt       float64
	published      []int32 // hits, as published to the other replicas while the request waits
	arrived, work  float64 // in the queue: time of arrival, and its work there in seconds
	uncached       int     // as the policy estimated it when it bound the request
	asked          *traces.Request
	conversation   *residency.Conversation // as Tandem knows it
	turn           *playedTurn             // of a session, in a closed loop
	at             *engine.Engine          // where it is now; nil: it waits in the router
	gone           bool                    // its user has given up
}

// whole returns the blocks of a prompt that it fills.
func (j *job) whole() []uint64 { return j.Blocks[:min(j.Input/engine.BlockTokens, len(j.Blocks))] }

// newJobs returns the requests of a trace, on their way to no endpoint.
func newJobs(t *traces.Trace) []*job {
	jobs := make([]*job, len(t.Requests))
	for i := range jobs {
		jobs[i] = newJob(i, &t.Requests[i])
	}
	return jobs
}

func newJob(id int, q *traces.Request) *job {
	return &job{Job: engine.Job{ID: uint64(id), Input: q.Input, Output: q.Output, Blocks: q.Blocks},
		Arrival: q.Arrival, asked: q, prefill: -1, decode: -1}
}

// fleet is the engines and the requests on their way to them.
type fleet struct {
	engine.Clock
	model picker.Model
	// engines by role: those that do both are in both lists, at the same positions
	prefills, decodes []*engine.Engine
	both              bool
	jobs              []*job
	policy            policy
	random            *rand.Rand
	ended             int
	// what a closed loop wants to know; nil in an open one
	started  func(j *job, cached, computes int) // a prompt is about to be computed
	answered func(*job)                         // a request has ended
}

// policy routes. It is called when a request arrives, and binds it with fleet.bind, then or later.
type policy interface {
	arrive(j *job)
	// prefilled is called at the end of a prefill, and returns the decode endpoint.
	prefilled(j *job) (decode int)
	done(j *job)
}

func newFleet(c Config, jobs []*job, random *rand.Rand) *fleet {
	f := &fleet{model: c.Engine, random: random, jobs: jobs, both: c.Both > 0}
	on := engine.Events{Started: f.start, Prefilled: f.prefilled, First: f.first, Done: f.done}
	for range c.Both {
		f.decodes = append(f.decodes, engine.New(&f.Clock, c.Engine, c.LocalTokens, on))
	}
	if f.both {
		f.prefills = f.decodes
		return f
	}
	for range c.Prefill {
		f.prefills = append(f.prefills, engine.New(&f.Clock, c.Engine, int(c.Engine.StepTokens), on))
	}
	for range c.Decode {
		f.decodes = append(f.decodes, engine.New(&f.Clock, c.Engine, c.LocalTokens, on))
	}
	return f
}

// engines returns all engines, each once.
func (f *fleet) engines() []*engine.Engine {
	if f.both {
		return f.decodes
	}
	return append(slices.Clip(f.prefills), f.decodes...)
}

// bind sends a request to its endpoints: to prefill first, or to decode alone if prefill is -1.
func (f *fleet) bind(j *job, prefill, decode int) {
	j.prefill, j.decode, j.alone, j.boundAt = prefill, decode, prefill < 0, f.Now
	if j.gone {
		f.After(0, func() { f.leave(j) })
		return
	}
	if j.alone {
		j.at = f.decodes[decode]
		j.at.Add(&j.Job, engine.Both)
		return
	}
	j.at = f.prefills[prefill]
	j.at.Add(&j.Job, engine.Prefill)
}

// giveUp ends a request that has no first token yet, because its user has gone. One that waits in the router ends when
// the policy binds it, and one whose KV is being fetched when its answer is written.
func (f *fleet) giveUp(j *job) {
	if j.gone = true; j.at != nil && j.at.Cancel(&j.Job) {
		f.leave(j)
	}
}

// leave tells the policy that a request that it has bound has ended without an answer.
func (f *fleet) leave(j *job) {
	if j.prefill >= 0 && j.prefilledAt == 0 {
		j.decode = f.policy.prefilled(j)
	}
	f.done(&j.Job)
}

// refuse ends a request without an answer.
func refuse(f *fleet, j *job) {
	j.firstAt, j.endAt = f.Now, f.Now
	f.end(j)
}

// end counts a request that has ended.
func (f *fleet) end(j *job) {
	f.ended++
	if f.answered != nil {
		f.answered(j)
	}
}

// refused reports whether a request has ended without an endpoint.
func (j *job) refused() bool { return j.decode < 0 }

func (f *fleet) start(q *engine.Job, cached, computes int) {
	if f.started != nil {
		f.started(f.jobs[q.ID], cached, computes)
	}
}

func (f *fleet) prefilled(q *engine.Job) {
	j := f.jobs[q.ID]
	j.decode, j.prefilledAt = f.policy.prefilled(j), f.Now
	d := f.decodes[j.decode]
	if j.at = d; d == f.prefills[j.prefill] { // it has the KV already
		d.Reclaim(q)
		d.Add(q, engine.Both)
	} else {
		d.Add(q, engine.Decode)
	}
}

func (f *fleet) first(q *engine.Job) { f.jobs[q.ID].firstAt = f.Now }

func (f *fleet) done(q *engine.Job) {
	j := f.jobs[q.ID]
	j.endAt = f.Now
	f.policy.done(j)
	f.end(j)
}
