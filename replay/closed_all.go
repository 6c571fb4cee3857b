package replay

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"tandem/picker"
)

// Contender is a policy on a fleet.
type Contender struct {
	Name   string // as it was written
	policy string
	config func(*Config)
}

// ParseContender reads the name of a policy or an oracle. tandem/never, tandem/always and tandem/auto say when it
// splits requests, tandem/roles that it gives engines their roles; tandem-no-events guesses what engines hold by what
// it sent there, as it does without their KV events. A fleet may follow: tandem@2+6 has two engines that prefill and
// six that decode, tandem@8 eight that serve both legs.
func ParseContender(name string) (Contender, error) {
	out := Contender{Name: name}
	var set []func(*Config)
	policy, fleet, has := strings.Cut(name, "@")
	if has {
		of, err := parseFleet(fleet)
		if err != nil {
			return out, fmt.Errorf("%q: %w", name, err)
		}
		set = append(set, of)
	}
	if how, ok := strings.CutPrefix(policy, "tandem-no-events"); ok {
		policy = "tandem" + how
		set = append(set, func(c *Config) { c.Routed = true })
	}
	if how, ok := strings.CutPrefix(policy, "tandem/"); ok {
		policy = "tandem"
		split, ok := map[string]picker.Split{"never": picker.SplitNever, "always": picker.SplitAlways,
			"auto": picker.SplitAuto, "roles": picker.SplitAuto}[how]
		if !ok {
			return out, fmt.Errorf("%q: tandem/%s is not always, auto, never or roles", name, how)
		}
		set = append(set, func(c *Config) { c.Split, c.Roles = split, how == "roles" })
	}
	out.policy = policy
	out.config = func(c *Config) {
		for _, f := range set {
			f(c)
		}
	}
	return out, nil
}

// parseFleet reads 2+6, engines that prefill and engines that decode, or 8, engines that serve both legs.
func parseFleet(text string) (func(*Config), error) {
	prefill, decode, split := strings.Cut(text, "+")
	p, err := strconv.Atoi(prefill)
	d := 0
	if split && err == nil {
		d, err = strconv.Atoi(decode)
	}
	if err != nil {
		return nil, fmt.Errorf("%s is not a fleet such as 2+6 or 8", text)
	}
	return func(c *Config) {
		if c.Both = p; split {
			c.Both, c.Prefill, c.Decode = 0, p, d
		}
	}, nil
}

// RunContenders plays sessions under each contender with each of the seeds, and shows its progress on w.
func RunContenders(ctx context.Context, who []Contender, seeds []uint64, c Config, o Closed,
	w io.Writer) ([][]*ClosedResult, error) {
	var out [][]*ClosedResult
	for _, x := range who {
		row, err := x.run(ctx, seeds, c, o, w)
		if err != nil {
			return nil, err
		}
		out = append(out, row)
	}
	return out, nil
}

// run plays sessions with each of the seeds.
func (x *Contender) run(ctx context.Context, seeds []uint64, c Config, o Closed, w io.Writer) ([]*ClosedResult, error) {
	x.config(&c)
	var out []*ClosedResult
	for _, seed := range seeds {
		c.Seed, c.Progress = seed, NewBar(w, x.Name).Show
		r, err := RunClosed(ctx, x.policy, c, o)
		if err != nil {
			return nil, err
		}
		r.Policy = x.Name
		out = append(out, r)
	}
	return out, nil
}
