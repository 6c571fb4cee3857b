package replay

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"

	"tandem/replay/traces"
)

// CheckPolicies returns an error if one of the names is not a policy.
func CheckPolicies(names []string) error {
	for _, name := range names {
		if !slices.Contains(Policies(), name) {
			return fmt.Errorf("%q is not a policy: one of %v", name, Policies())
		}
	}
	return nil
}

// Prepare opens a trace and sets its rate: rate times its own, or, if load is above 0, the rate that puts that load on
// the fleet. For endpoints that serve both legs, it is the highest rate that does so on as many endpoints of fixed
// roles.
func Prepare(name string, requests int, rate, load float64, c Config) (*traces.Trace, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	if shifts(name) {
		return shifting(name, requests, load, c)
	}
	if load > 0 && c.Both > 0 {
		_, t, err := BestRatio(name, requests, c.Both, load, c)
		return t, err
	}
	t, err := traces.Open(name, requests, c.Seed)
	switch {
	case err != nil:
		return nil, err
	case load > 0:
		return AtLoad(t, c, load)
	case !(rate > 0) || rate > 1e6:
		return nil, fmt.Errorf("a rate of %v times the trace's: must be above 0", rate)
	case rate != 1:
		return t.Faster(rate)
	}
	return t, nil
}

// RunAll plays a trace under several policies, one after the other, and shows its progress on w.
func RunAll(ctx context.Context, t *traces.Trace, names []string, c Config, w io.Writer) ([]*Result, error) {
	var out []*Result
	for _, name := range names {
		c.Progress = NewBar(w, name).Show
		r, err := Run(ctx, t, name, c)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

// About describes a trace and a fleet in a few lines.
func About(t *traces.Trace, c Config) []string {
	lines := []string{fmt.Sprintf("%d requests in %.0f s; caches that never forget would serve %.3f of the prompts' "+
		"tokens", len(t.Requests), t.Duration(), t.Bound())}
	fleet := fmt.Sprintf("%d endpoints that prefill, %d that decode", c.Prefill, c.Decode)
	if c.Both > 0 {
		fleet = fmt.Sprintf("%d endpoints that serve both legs", c.Both)
	}
	lines = append(lines, fmt.Sprintf("%s, %s tokens of KV each; seed %d", fleet, thousands(c.Engine.KVTokens), c.Seed))
	if p, d, err := Load(t, c); err == nil && c.Both == 0 {
		lines = append(lines, fmt.Sprintf("load %.2f on prefill, %.2f on decode: 1 is saturation with one pooled cache",
			p, d))
	}
	return append(lines, fmt.Sprintf("goodput: first token within %g s and a token each %g ms", c.TTFT, 1000*c.TPOT))
}

// thousands writes a whole number as people do, 1,000,000; infinity is a number without end.
func thousands(x float64) string {
	if math.IsInf(x, 1) {
		return "endless"
	}
	text := strconv.FormatFloat(x, 'f', 0, 64)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
