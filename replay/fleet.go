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
	hits           []int32 // blocks of the prompt on each endpoint, at the last lookup
	lookedAt       float64
	published      []int32 // hits, as published to the other replicas while the request waits
	arrived, work  float64 // in the queue: time of arrival, and its work there in seconds
	uncached       int     // as the policy estimated it when it bound the request
	asked          *traces.Request
	conversation   *residency.Conversation // as Tandem knows it
}

// newJobs returns the requests of a trace, on their way to no endpoint.
func newJobs(t *traces.Trace) []job {
	jobs := make([]job, len(t.Requests))
	for i := range jobs {
		q := &t.Requests[i]
		jobs[i] = job{Job: engine.Job{ID: uint64(i), Input: q.Input, Output: q.Output, Blocks: q.Blocks},
			Arrival: q.Arrival, asked: q, prefill: -1, decode: -1}
	}
	return jobs
}

// fleet is the engines and the requests on their way to them.
type fleet struct {
	engine.Clock
	model picker.Model
	// engines by role: those that do both are in both lists, at the same positions
	prefills, decodes []*engine.Engine
	both              bool
	jobs              []job
	policy            policy
	random            *rand.Rand
	ended             int
}

// policy routes. It is called when a request arrives, and binds it with fleet.bind, then or later.
type policy interface {
	arrive(j *job)
	// prefilled is called at the end of a prefill, and returns the decode endpoint.
	prefilled(j *job) (decode int)
	done(j *job)
}

func newFleet(c Config, jobs []job, random *rand.Rand) *fleet {
	f := &fleet{model: c.Engine, random: random, jobs: jobs, both: c.Both > 0}
	on := engine.Events{Prefilled: f.prefilled, First: f.first, Done: f.done}
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
	j.prefill, j.decode, j.alone = prefill, decode, prefill < 0
	if j.alone {
		f.decodes[decode].Add(&j.Job, engine.Both)
		return
	}
	f.prefills[prefill].Add(&j.Job, engine.Prefill)
}

// refuse ends a request without an answer.
func refuse(f *fleet, j *job) {
	j.firstAt, j.endAt = f.Now, f.Now
	f.ended++
}

// refused reports whether a request has ended without an endpoint.
func (j *job) refused() bool { return j.decode < 0 }

func (f *fleet) prefilled(q *engine.Job) {
	j := &f.jobs[q.ID]
	j.decode = f.policy.prefilled(j)
	if d := f.decodes[j.decode]; d == f.prefills[j.prefill] { // it has the KV already
		d.Reclaim(q)
		d.Add(q, engine.Both)
	} else {
		d.Add(q, engine.Decode)
	}
}

func (f *fleet) first(q *engine.Job) { f.jobs[q.ID].firstAt = f.Now }

func (f *fleet) done(q *engine.Job) {
	j := &f.jobs[q.ID]
	j.endAt = f.Now
	f.ended++
	f.policy.done(j)
}
