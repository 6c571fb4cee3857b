package extproc

import (
	"math"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"

	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
	"tandem/picker"
)

// Objectives are priorities and latency targets of a pool's requests. Requests state them in headers. These count
// only if the pool accepts them, or if a gateway sets them (the Endpoint Picker protocol), because whoever sets
// them can delay others.
type Objectives struct {
	FromHeaders bool
	Default     Objective     // of requests without headers
	Named       []Objective   // names that the header may use, in addition to the cluster's InferenceObjectives
	Miss        picker.OnMiss // what to do with a request whose targets cannot be met
}

// Objective is the priority and targets of a request. Zero means none.
type Objective struct {
	Name       string
	Priority   int32 // higher goes first; below 0: refused under overload
	TTFT, TPOT time.Duration
}

// longestTarget bounds the target in a header; larger values are invalid.
const longestTarget = time.Hour

// applyObjectives sets the priority and targets of a request.
func (x *planning) applyObjectives(policy *Policy, r *picker.Request) error {
	o := &policy.Objectives
	h := &x.msg.Headers
	want := o.Default
	headers := o.FromHeaders || x.s.Picker != nil
	if headers && len(h.Objective) > 0 {
		want = o.named(string(h.Objective), want)
		if p, known := x.s.State.Priority(x.req.Pool.Spec.Name, string(h.Objective)); known {
			want.Priority = p
		}
	}
	r.Priority, r.OnMiss = want.Priority, o.Miss
	r.Targets = picker.Targets{TTFT: want.TTFT.Seconds(), TPOT: want.TPOT.Seconds()}
	x.req.Labels = x.labelsOf(policy)
	r.Labels = x.req.Labels
	if !headers {
		return nil
	}
	if len(h.Fairness) > 0 {
		r.Flow = xxhash.Sum64(h.Fairness) | 1
	}
	if err := target(h.TTFT, envoywire.HeaderTTFT, &r.TTFT); err != nil {
		return err
	}
	return target(h.TPOT, envoywire.HeaderTPOT, &r.TPOT)
}

// labelsOf returns the labels that the request's endpoints must have.
func (x *planning) labelsOf(policy *Policy) []string {
	if policy.LabelHeader == "" {
		return nil
	}
	return envoywire.Addresses(nil, string(x.msg.Headers.Extra(policy.LabelHeader)))
}

// named returns the objective with a name; the default one if it is unknown.
func (o *Objectives) named(name string, otherwise Objective) Objective {
	for _, n := range o.Named {
		if n.Name == name {
			return n
		}
	}
	return otherwise
}

// target parses a header with a time in milliseconds, if it is present.
func target(value []byte, header string, seconds *float64) error {
	if len(value) == 0 {
		return nil
	}
	ms, err := strconv.ParseFloat(string(value), 64)
	if err != nil || math.IsNaN(ms) || ms <= 0 || ms > longestTarget.Seconds()*1000 {
		return openai.BadRequest("invalid_target", header, header+" must be a number of milliseconds above 0 and at most "+strconv.FormatInt(longestTarget.Milliseconds(), 10))
	}
	*seconds = ms / 1000
	return nil
}
