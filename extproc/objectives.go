package extproc

import (
	"errors"
	"math"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"

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
func (x *exchange) aim(pool *kvstate.Pool, policy *Policy, r *picker.Request) error {
	o := &policy.Objectives
	h := &x.msg.headers
	want := o.Default
	headers := o.FromHeaders || x.s.Picker != nil
	if headers && len(h.objective) > 0 {
		want = o.named(string(h.objective), want)
		if p, known := x.s.State.Priority(pool.Spec.Name, string(h.objective)); known {
			want.Priority = p
		}
	}
	r.Priority, r.Miss = want.Priority, o.Miss
	r.Targets = picker.Targets{TTFT: want.TTFT.Seconds(), TPOT: want.TPOT.Seconds()}
	x.wanted = x.labels(policy)
	r.Labels = x.wanted
	if !headers {
		return nil
	}
	if len(h.fairness) > 0 {
		r.Flow = xxhash.Sum64(h.fairness) | 1
	}
	if err := target(h.ttft, headerTTFT, &r.TTFT); err != nil {
		return err
	}
	return target(h.tpot, headerTPOT, &r.TPOT)
}

// labels are those that the request's endpoints must bear.
func (x *exchange) labels(policy *Policy) []string {
	if policy.LabelHeader == "" {
		return nil
	}
	return addresses(nil, string(x.msg.headers.extra(policy.LabelHeader)))
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
func (x *exchange) namedModel(c *picker.Choice) string {
	if c.Named {
		return x.req.Model()
	}
	return ""
}
