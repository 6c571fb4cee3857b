package replay

import (
	"math/rand/v2"

	"tandem/picker"
)

// job is a request on its way.
type job struct {
	*Request
	id       uint64
	prefill  int // endpoint; -1: the decode endpoint computes the prompt
	decode   int // -1: not chosen yet
	alone    bool
	started  bool // its prefill has started
	computed int  // tokens of the prompt that are computed or were cached
	cached   int
	ends     int // the step of its decode endpoint that completes the answer
	joined   int // its place in the order in which answers began there
	written  int // tokens of its answer when it was preempted; their KV has to be computed again

	firstAt, endAt float64
	hits           []int32 // blocks of the prompt on each endpoint, at the last lookup
	lookedAt       float64
	published      []int32 // hits, as published to the other replicas while the request waits
	arrived, work  float64 // in the queue: time of arrival, and its work there in seconds
	uncached       int     // as the policy estimated it when it bound the request
}

// fleet is the engines and the requests on their way to them.
type fleet struct {
	clock
	model    picker.Model
	prefills []*prefiller
	decodes  []*decoder
	index    []*index // of the prefill endpoints
	policy   policy
	random   *rand.Rand
	ended    int
}

// policy routes. It is called when a request arrives, and binds it with fleet.bind, then or later.
type policy interface {
	arrive(j *job)
	// prefilled is called at the end of a prefill, and returns the decode endpoint.
	prefilled(j *job) (decode int)
	first(j *job) // called at the first token of the answer
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

// bind sends a request to its endpoints: to prefill first, or to decode alone if prefill is -1.
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
