package extproc

import (
	"errors"
	"math"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"

	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// Objectives are what a pool's requests may want: to go before others, and times to keep to. Requests say it in headers,
// which count only where the pool takes them, or where a gateway speaks (the Endpoint Picker protocol): whoever may set them
// can put others behind.
type Objectives struct {
	FromHeaders bool
	Default     Objective   // of requests that say nothing
	Named       []Objective // what the header may name, beside the cluster's InferenceObjectives
	Miss        picker.Miss // what becomes of a request whose times nothing can keep to
}

// Objective is what a request wants. Zero is nothing in particular.
type Objective struct {
	Name       string
	Priority   int32 // higher goes first; below 0: refused where there is too much to do
	TTFT, TPOT time.Duration
}

// longestTarget bounds what a header may ask for; more is a mistake.
const longestTarget = time.Hour

// aim fills in what a request wants.
func (x *planning) aim(pool *kvstate.Pool, policy *Policy, r *picker.Request) error {
	o := &policy.Objectives
	h := &x.msg.Headers
	want := o.Default
	headers := o.FromHeaders || x.s.Picker != nil
	if headers && len(h.Objective) > 0 {
		want = o.named(string(h.Objective), want)
		if p, known := x.s.State.Priority(pool.Spec.Name, string(h.Objective)); known {
			want.Priority = p
		}
	}
	r.Priority, r.Miss = want.Priority, o.Miss
	r.Targets = picker.Targets{TTFT: want.TTFT.Seconds(), TPOT: want.TPOT.Seconds()}
	x.labels = x.labelsOf(policy)
	r.Labels = x.labels
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

// labelsOf are those that the request's endpoints must bear.
func (x *planning) labelsOf(policy *Policy) []string {
	if policy.LabelHeader == "" {
		return nil
	}
	return envoywire.Addresses(nil, string(x.msg.Headers.Extra(policy.LabelHeader)))
}

// named is the objective of a name; one that nobody knows is the default one.
func (o *Objectives) named(name string, otherwise Objective) Objective {
	for _, n := range o.Named {
		if n.Name == name {
			return n
		}
	}
	return otherwise
}

// target reads a header with a time in milliseconds, if it is there.
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

func overloaded() error {
	return openai.Overloaded("the pool is full, and this request gives way to others", time.Second)
}

// missed turns a choice that misses the request's targets, and that the pool refuses for it, into what the client is told.
// It may come again when the work before it that is too much will be done.
func missed(r *picker.Request, c *picker.Choice, err error) error {
	if !errors.Is(err, picker.ErrMissed) {
		return err
	}
	after := time.Second
	if r.TTFT > 0 {
		after = max(after, kvstate.Seconds(r.Waited+c.FirstToken-r.TTFT))
	}
	return openai.TargetMissed(min(after, time.Minute))
}

// namedModel is the model that pass 2 has to name again; "" where no endpoint says what it serves.
func (x *planning) namedModel(c *picker.Choice) string {
	if c.Named {
		return x.req.Model()
	}
	return ""
}
