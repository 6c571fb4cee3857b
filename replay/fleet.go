package replay

import (
	"math/rand/v2"

	"tandem/picker"
)

// job is a request on its way.
type job struct {
	*Request
	id       uint64
	prefill  int // endpoint; -1: decode computes the prompt
	decode   int // -1: not chosen yet
	alone    bool
	started  bool // its prefill
	computed int  // tokens of the prompt, those found in the cache included
	cached   int
	ends     int // the step of its decode endpoint
	joined   int // its place in the order in which answers began there
	written  int // tokens of its answer when it was preempted: their KV is to be computed again

	firstAt, endAt float64
	hits           []int32 // blocks of the prompt on each endpoint, as last asked
	lookedAt       float64
	published      []int32 // hits, as other replicas were told while it waits
	arrived, work  float64 // in the queue: when, and what it is there, seconds
	uncached       int     // as the policy had it when it bound the request
}

// fleet is the engines, and what is on its way to them.
type fleet struct {
	clock
	model    picker.Model
	prefills []*prefiller
	decodes  []*decoder
	index    []*index // of prefills
	policy   policy
	random   *rand.Rand
	ended    int
}

// policy routes. It is told of a request's arrival and answers, then or later, with fleet.bind.
type policy interface {
	arrive(j *job)
	// prefilled is told of the end of a prefill, and gives the decode endpoint.
	prefilled(j *job) (decode int)
	first(j *job) // token of the answer
	done(j *job)
}

func newFleet(c Config, random *rand.Rand) *fleet {
	f := &fleet{model: c.Engine, random: random}
	for range c.Prefill {
		f.prefills = append(f.prefills, newPrefiller(&f.clock, c.Engine, f.prefilled))
		f.index = append(f.index, f.prefills[len(f.prefills)-1].index)
	}
	for range c.Decode {
		f.decodes = append(f.decodes, newDecoder(&f.clock, c.Engine, c.LocalTokens, f.first, f.done))
	}
	return f
}

// bind sends a request to its endpoints: to prefill first, or (prefill -1) to decode alone.
func (f *fleet) bind(j *job, prefill, decode int) {
	j.prefill, j.decode, j.alone = prefill, decode, prefill < 0
	if j.alone {
		f.decodes[decode].add(j)
		return
	}
	f.index[prefill].add(j.Blocks)
	f.prefills[prefill].add(j)
}

func (f *fleet) prefilled(j *job) {
	j.decode = f.policy.prefilled(j)
	f.decodes[j.decode].add(j)
}

func (f *fleet) first(j *job) {
	j.firstAt = f.now
	f.policy.first(j)
}

func (f *fleet) done(j *job) {
	j.endAt = f.now
	f.ended++
	f.policy.done(j)
}
