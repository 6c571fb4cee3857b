package pass

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"

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

// readObjectives reads the request's priority and targets.
func (x *Pass) readObjectives() error {
	o, h, w := &x.policy.Objectives, &x.Head, &x.want
	want := o.Default
	headers := o.FromHeaders || x.shared.Gateway != nil
	if headers && len(h.Objective) > 0 {
		want = o.named(string(h.Objective), want)
		if p, known := x.shared.State.Priority(x.Req.Pool.Spec.Name, string(h.Objective)); known {
			want.Priority = p
		}
	}
	w.priority, w.onMiss = want.Priority, o.Miss
	w.targets = picker.Targets{TTFT: want.TTFT.Seconds(), TPOT: want.TPOT.Seconds()}
	if !headers {
		return nil
	}
	if len(h.Fairness) > 0 {
		w.flow = xxhash.Sum64(h.Fairness) | 1
	}
	if err := h.TTFT.read(&w.targets.TTFT); err != nil {
		return err
	}
	return h.TPOT.read(&w.targets.TPOT)
}

// labels returns the labels in a header that a request's endpoints must have; "": there is no such header.
func (h *Head) labels(header string) (out []string) {
	if header == "" {
		return nil
	}
	for part := range strings.SplitSeq(string(h.extra(header)), ",") {
		if part = strings.TrimSpace(part); part != "" && len(out) < maxLabels {
			out = append(out, part)
		}
	}
	return out
}

// maxLabels bounds the labels of a request that are read.
const maxLabels = 4096

// named returns the objective with a name; the default one if it is unknown.
func (o *Objectives) named(name string, otherwise Objective) Objective {
	for _, n := range o.Named {
		if n.Name == name {
			return n
		}
	}
	return otherwise
}

// read parses a time in milliseconds, if it is present.
func (t *Target) read(seconds *float64) error {
	if len(t.Value) == 0 {
		return nil
	}
	ms, err := strconv.ParseFloat(string(t.Value), 64)
	if err != nil || math.IsNaN(ms) || ms <= 0 || ms > longestTarget.Seconds()*1000 {
		return openai.BadRequest("invalid_target", t.Name,
			t.Name+" must be a number of milliseconds above 0 and at most "+
				strconv.FormatInt(longestTarget.Milliseconds(), 10))
	}
	*seconds = ms / 1000
	return nil
}
