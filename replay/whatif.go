package replay

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sync/errgroup"

	"tandem/picker"
)

// Variant is a fleet and settings with which a recording is played.
type Variant struct {
	Name   string
	Policy string
	Config Config
	Host   float64 // tokens of host memory at each engine
	Load   float64 // times as many conversations
}

// Variant returns what the recording was made with.
func (o *Recorded) Variant() (v Variant, notes []string) {
	c, host, notes := o.Fleet()
	v = Variant{Policy: "tandem", Config: c, Host: host, Load: 1}
	v.Name = v.Fleet()
	return v, notes
}

// Fleet returns the engines in words, as [Variant.With] reads them.
func (v *Variant) Fleet() string {
	if v.Config.Both > 0 {
		return strconv.Itoa(v.Config.Both)
	}
	return fmt.Sprintf("%d+%d", v.Config.Prefill, v.Config.Decode)
}

// With returns a variant of this one. Words of the text change it: 4+4 or 8 are the engines, and split:never,
// binding:immediate, roles:auto, host:2000000, kv:500000, load:2, policy:NAME settings.
func (v Variant) With(text string) (Variant, error) {
	v.Name = text
	c := &v.Config
	for word := range strings.FieldsSeq(text) {
		name, value, setting := strings.Cut(word, ":")
		if !setting {
			of, err := parseFleet(word)
			if err != nil {
				return v, fmt.Errorf("%q: %w", text, err)
			}
			if of(c); c.Both > 0 {
				c.Prefill, c.Decode = 1, 1
			}
			continue
		}
		number, err := strconv.ParseFloat(value, 64)
		bad := fmt.Errorf("%q: %s is not a setting such as split:never, binding:immediate, roles:auto, host:2000000, "+
			"kv:500000, load:2 or policy:NAME", text, word)
		numeric := name == "host" || name == "kv" || name == "load"
		if numeric && (err != nil || !(number >= 0) || math.IsInf(number, 1)) {
			return v, bad
		}
		switch name + ":" + value {
		case "split:auto", "split:always", "split:never":
			c.Split = map[string]picker.Split{"auto": picker.SplitAuto, "always": picker.SplitAlways,
				"never": picker.SplitNever}[value]
		case "binding:late", "binding:immediate":
			c.Late = value == "late"
		case "roles:auto", "roles:fixed":
			c.Roles = value == "auto"
		default:
			switch name {
			case "host":
				v.Host = number
			case "kv":
				c.Engine.KVTokens = number
			case "load":
				v.Load = number
			case "policy":
				v.Policy = value
				if err := CheckPolicies([]string{value}); err != nil {
					return v, err
				}
			default:
				return v, bad
			}
		}
	}
	if c.Roles && c.Both == 0 {
		return v, fmt.Errorf("%q: roles:auto needs engines that serve both legs, such as 8", text)
	}
	return v, c.Check()
}

// Play plays a recording with the variant, once: what it gave is known then.
func (v *Variant) Play(ctx context.Context, o *Recorded) (*RecordedResult, error) {
	is := v.Config
	is.Progress, is.Changed = nil, nil
	key := fmt.Sprint(v.Policy, is, v.Host, v.Load)
	o.mu.Lock()
	r := o.played[key]
	o.mu.Unlock()
	if r != nil {
		return r, nil
	}
	r, err := RunRecorded(ctx, v.Policy, v.Config, o, v.Host, v.Load)
	if err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.played == nil {
		o.played = map[string]*RecordedResult{}
	}
	o.played[key] = r
	return r, nil
}

// Loads are the loads that [Variant.OverLoad] plays, as shares of the recording's.
func Loads() []float64 { return []float64{.5, .75, 1, 1.25, 1.5, 2, 3} }

// OverLoad returns the share of requests that keep their targets at each of [Loads].
func (v *Variant) OverLoad(ctx context.Context, o *Recorded) ([]float64, error) {
	out := make([]float64, len(Loads()))
	plays, ctx := errgroup.WithContext(ctx)
	plays.SetLimit(max(runtime.GOMAXPROCS(0), 1))
	for i, load := range Loads() {
		plays.Go(func() error {
			x := *v
			x.Load *= load
			r, err := x.Play(ctx, o)
			if err == nil {
				out[i] = r.Kept
			}
			return err
		})
	}
	return out, plays.Wait()
}

// engines returns how many engines there are.
func (v *Variant) engines() int { return v.Config.endpoints() }

// sized returns the variant with another number of engines, in the same proportion; false: there is none.
func (v Variant) sized(n int) (Variant, bool) {
	c := &v.Config
	if c.Both > 0 {
		c.Both = n
		return v, n >= 2
	}
	share := float64(c.Prefill) / float64(c.Prefill+c.Decode)
	c.Prefill = min(max(int(math.Round(share*float64(n))), 1), n-1)
	c.Decode = n - c.Prefill
	return v, n >= 2
}

// Keeps is the share of requests that keep their targets with which a fleet is said to keep the promise.
const Keeps = .95

// Needed returns how many engines in the variant's proportion keep the promise for 95 of 100 requests; 0: not
// even most.
func (v *Variant) Needed(ctx context.Context, o *Recorded, most int) (int, error) {
	low, high := 2, most // keeps it from some number on, as far as chance allows
	if r, err := v.playSized(ctx, o, most); err != nil || r < Keeps {
		return 0, err
	}
	for low < high {
		n := (low + high) / 2
		r, err := v.playSized(ctx, o, n)
		if err != nil {
			return 0, err
		}
		if r >= Keeps {
			high = n
		} else {
			low = n + 1
		}
	}
	return high, nil
}

func (v *Variant) playSized(ctx context.Context, o *Recorded, n int) (float64, error) {
	x, ok := v.sized(n)
	if !ok {
		return 0, nil
	}
	r, err := x.Play(ctx, o)
	if err != nil {
		return 0, err
	}
	return r.Kept, nil
}

// Advice is which fleet of up to so many engines serves a recording best.
type Advice struct {
	Now       Row
	Split     Row  // the best fleet with roles
	Whole     Row  // the best one whose engines serve both legs
	Fewest    *Row // the smallest that keeps the promise; nil: none does
	Host      *Row // the smallest that does with host memory, if that is smaller
	Exhausted bool // not even all engines keep it
	Most      int  // engines of the fleets that were searched
}

// Row is a variant and how it did.
type Row struct {
	Variant
	*RecordedResult
	Needed int // engines in its proportion that keep the promise: 0 was not searched, below 0 more than mostNeeded
}

// Advise searches fleets of up to most engines. shown is called with each row that is played.
func Advise(ctx context.Context, o *Recorded, now Variant, most int, shown func(*Row)) (*Advice, error) {
	a, seen := &Advice{Most: most}, map[*RecordedResult]bool{}
	play := func(v Variant) (Row, error) {
		v.Name = v.Fleet()
		if v.Config.Roles {
			v.Name += " roles:auto"
		}
		if v.Host != now.Host {
			v.Name += fmt.Sprintf(" host:%.0f", v.Host)
		}
		r, err := v.Play(ctx, o)
		row := Row{Variant: v, RecordedResult: r}
		if err == nil && !seen[r] {
			seen[r] = true
			shown(&row)
		}
		return row, err
	}
	var err error
	if a.Now, err = play(now); err != nil {
		return nil, err
	}
	// at the size that there is, or at the most that may be, every ratio
	for n := 2; n <= most; n++ {
		if n != most && n != now.engines() {
			continue
		}
		for _, v := range fleetsOf(now, n) {
			row, err := play(v)
			if err != nil {
				return nil, err
			}
			best := &a.Split
			if v.Config.Both > 0 {
				best = &a.Whole
			}
			if n == min(now.engines(), most) && row.better(best) {
				*best = row
			}
			if row.Kept >= Keeps && (a.Fewest == nil || row.engines() < a.Fewest.engines()) {
				a.Fewest = &row
			}
		}
	}
	if a.Exhausted = a.Fewest == nil; a.Exhausted {
		return a, nil
	}
	if a.Fewest, err = fewest(a.Fewest, now, play); err != nil {
		return nil, err
	}
	with := now
	if with.Host = 2 * now.Config.Engine.KVTokens; !math.IsInf(with.Host, 1) && now.Host < with.Host {
		row, err := fewest(a.Fewest, with, play)
		if err != nil {
			return nil, err
		}
		if row.engines() < a.Fewest.engines() {
			a.Host = row
		}
	}
	return a, nil
}

// fewest looks for fleets that keep the promise with fewer engines than one that does.
func fewest(from *Row, like Variant, play func(Variant) (Row, error)) (*Row, error) {
	for n := from.engines() - 1; n >= 2; n-- {
		found := false
		for _, v := range fleetsOf(like, n) {
			row, err := play(v)
			if err != nil {
				return nil, err
			}
			if row.Kept >= Keeps && (!found || row.better(from)) {
				from, found = &row, true
			}
		}
		if !found {
			break
		}
	}
	return from, nil
}

// fleetsOf returns all fleets of so many engines.
func fleetsOf(like Variant, n int) (out []Variant) {
	for p := 1; p < n; p++ {
		v := like
		v.Config.Both, v.Config.Prefill, v.Config.Decode, v.Config.Roles = 0, p, n-p, false
		out = append(out, v)
	}
	both := like
	both.Config.Both, both.Config.Prefill, both.Config.Decode = n, 1, 1
	for _, roles := range []bool{false, true} {
		both.Config.Roles = roles
		out = append(out, both)
	}
	return out
}

// better reports whether a row is better than another one: more requests keep their targets, or as many do and first
// tokens come sooner, or as soon on engines that need neither roles nor KV transfer.
func (r *Row) better(than *Row) bool {
	if than.RecordedResult == nil {
		return true
	}
	if math.Abs(r.Kept-than.Kept) > .005 {
		return r.Kept > than.Kept
	}
	if sooner := than.TTFT.Mean / max(r.TTFT.Mean, 1e-9); math.Abs(sooner-1) > .02 {
		return sooner > 1
	}
	return r.plain() && !than.plain()
}

// plain reports whether every engine serves both legs, always.
func (r *Row) plain() bool { return r.Config.Both > 0 && !r.Config.Roles }

// pays reports whether roles serve more than a hundredth more of the requests.
func (a *Advice) pays() bool { return a.Split.Kept > a.Whole.Kept+.01 }

// Best returns the fleet that is advised, with as many engines as there are.
func (a *Advice) Best() *Row {
	if a.pays() {
		return &a.Split
	}
	return &a.Whole
}

// Sentences returns the advice in words.
func (a *Advice) Sentences() (out []string) {
	percent := func(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) }
	best, other := &a.Split, &a.Whole
	pays := a.pays()
	if !pays {
		best, other = other, best
	}
	same := ""
	if best.Name == a.Now.Name {
		same = ", which you run"
	}
	out = append(out, fmt.Sprintf("Run %s%s: %s of requests keep their targets; %s: %s.", words(&best.Variant), same,
		percent(best.Kept), words(&other.Variant), percent(other.Kept)))
	whole := a.Whole
	switch {
	case pays:
		out = append(out, fmt.Sprintf("P/D pays: on engines that serve both legs prompts run beside answers for %s "+
			"of the answers' time. A token takes %.0f ms in the p95 there, and %.0f ms with %s; a first token %.2f s "+
			"and %.2f s.",
			percent(whole.Lost), 1000*whole.TPOT.P95, 1000*a.Split.TPOT.P95, a.Split.Fleet(), whole.TTFT.P95,
			a.Split.TTFT.P95))
	case a.Split.Kept > a.Whole.Kept-.01:
		out = append(out, fmt.Sprintf("P/D does not pay for this traffic: engines that serve both legs do as well, "+
			"and need no KV transfer. Prompts run beside answers there for %s of the answers' time.",
			percent(whole.Lost)))
	default:
		out = append(out, fmt.Sprintf("P/D does not pay for this traffic: with roles, one of them is short while the "+
			"other idles, and memory holds less (cached %s, and %s with engines that serve both legs).",
			percent(a.Split.Cached), percent(whole.Cached)))
	}
	switch {
	case a.Exhausted:
		out = append(out, fmt.Sprintf("No fleet of up to %d engines keeps the promise for %.0f of 100 requests.",
			a.Most, 100*Keeps))
	case a.Fewest.engines() < a.Now.engines():
		out = append(out, fmt.Sprintf("%d engines would do (%s): they keep the promise for %s.", a.Fewest.engines(),
			words(&a.Fewest.Variant), percent(a.Fewest.Kept)))
	case a.Fewest.engines() > a.Now.engines():
		out = append(out, fmt.Sprintf("You have %d; the promise needs %d (%s): they keep it for %s.", a.Now.engines(),
			a.Fewest.engines(), words(&a.Fewest.Variant), percent(a.Fewest.Kept)))
	default:
		out = append(out, "No smaller fleet keeps the promise.")
	}
	if a.Host != nil {
		out = append(out, fmt.Sprintf("With host memory for %.0f tokens each, %d engines would do (%s).", a.Host.Host,
			a.Host.engines(), words(&a.Host.Variant)))
	}
	return out
}

// words names a fleet in a sentence.
func words(v *Variant) string {
	switch {
	case v.Config.Both > 0 && v.Config.Roles:
		return fmt.Sprintf("%d engines with roles: auto", v.Config.Both)
	case v.Config.Both > 0:
		return fmt.Sprintf("%d engines that serve both legs", v.Config.Both)
	}
	return fmt.Sprintf("%d + %d", v.Config.Prefill, v.Config.Decode)
}
