package replay

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"tandem/picker"
)

// scenario is a trace on a fleet.
type scenario struct {
	trace           string
	prefill, decode int
	kv              float64 // tokens of an endpoint's KV; 0: the default
	slow            float64 // factor on the engines' times; 0: as Tandem assumes at the start
	bytes, speed    float64 // KV bytes per token, and bytes/s of their transfer; 0: the defaults
	local           int     // tokens in a step of a decode engine; 0: the default
}

func (s scenario) String() string {
	name := fmt.Sprintf("%s %d+%d", s.trace, s.prefill, s.decode)
	if s.kv > 0 {
		name += fmt.Sprintf(", %.1fM KV", s.kv/1e6)
	}
	if s.slow > 0 {
		name += fmt.Sprintf(", %g times as slow", s.slow)
	}
	if s.bytes > 0 {
		name += fmt.Sprintf(", %.0f KB at %.0f GB/s", s.bytes/1e3, s.speed/1e9)
	}
	if s.local > 0 {
		name += fmt.Sprintf(", decode steps of %d tokens", s.local)
	}
	return name
}

// on returns the configuration of the scenario.
func (s scenario) on(c Config) Config {
	c.Prefill, c.Decode = s.prefill, s.decode
	if s.kv > 0 {
		c.Engine.KVTokens = s.kv
	}
	if s.slow > 0 {
		c.Engine = Slower(c.Engine, s.slow)
	}
	if s.bytes > 0 {
		c.Engine.TokenBytes, c.Engine.Bandwidth = s.bytes, s.speed
	}
	if s.local > 0 {
		c.LocalTokens = s.local
	}
	return c
}

// contender is a policy with its settings.
type contender struct {
	name, policy string
	late         bool
	split        picker.Split
}

// rivals returns the policies that a setting of Tandem's is compared with. Policies that may decode alone are included
// only if Tandem may too. Policies that never win (random, longest prefix) are left out.
func rivals(split picker.Split) (out []contender) {
	names := twoHops()
	if split == picker.SplitAuto {
		names = append(names, mayBypass()...)
	}
	for _, name := range names {
		out = append(out, contender{name: name, policy: name})
	}
	return out
}

// everybody returns all rivals and Tandem's own settings.
func everybody() []contender { return append(rivals(picker.SplitAuto), ours()...) }

// ours returns Tandem's settings: pairs bound at once, pairs bound late, and both of these with decode alone if its
// price is lower.
func ours() []contender {
	return []contender{
		{"immediate", "tandem", false, picker.SplitAlways},
		{"late", "tandem", true, picker.SplitAlways},
		{"immediate, auto", "tandem", false, picker.SplitAuto},
		{"late, auto", "tandem", true, picker.SplitAuto},
	}
}

// plan is the size of a suite.
type plan struct {
	scenarios []scenario
	loads     []float64
	seeds     []uint64
	requests  int // of generated traces
}

func newPlan(size string) (plan, error) {
	var all []scenario
	for _, trace := range []string{"mooncake", "conversation", "agent", "mixed"} {
		for _, fleet := range [][2]int{{2, 2}, {4, 4}, {6, 2}} {
			all = append(all, scenario{trace: trace, prefill: fleet[0], decode: fleet[1]})
		}
	}
	all = append(all, scenario{trace: "mooncake", prefill: 32, decode: 32})
	var popular []scenario
	for _, trace := range []string{"hot", "zipf", "apps", "rag"} {
		popular = append(popular, scenario{trace: trace, prefill: 4, decode: 4},
			scenario{trace: trace, prefill: 8, decode: 8})
	}
	engines := []scenario{
		{trace: "reasoning", prefill: 2, decode: 6}, {trace: "reasoning", prefill: 2, decode: 6, kv: 300_000},
		{trace: "conversation", prefill: 4, decode: 4, slow: 2},
		{trace: "conversation", prefill: 4, decode: 4, slow: .5},
		{trace: "mixed", prefill: 4, decode: 4, bytes: 320e3, speed: 6e9},
		{trace: "mixed", prefill: 4, decode: 4, bytes: 70e3, speed: 50e9},
		{trace: "mixed", prefill: 4, decode: 4, local: 2048},
	}
	switch size {
	case "engines":
		return plan{engines, []float64{.5, .8, .95}, []uint64{1, 2, 3}, 3000}, nil
	case "full":
		return plan{all, []float64{.2, .5, .8, 1.1}, []uint64{1, 2, 3}, 4000}, nil
	case "shared":
		return plan{popular, []float64{.5, .8, .95}, []uint64{1, 2, 3}, 3000}, nil
	case "quick":
		return plan{[]scenario{all[1], all[4], all[7], all[10]}, []float64{.5, .8}, []uint64{1}, 3000}, nil
	}
	return plan{}, fmt.Errorf("--suite: %q is not quick, full, shared, engines, roles or agents", size)
}

// played has the results of a suite, by scenario, load and contender: one for each seed.
type played struct {
	plan
	mu       sync.Mutex
	results  map[string][]*Result
	done     int
	complete int // seeds that were played to the end
}

func key(s scenario, load float64, c contender) string {
	return fmt.Sprintf("%v|%v|%s", s, load, c.name)
}

// Suite plays the scenarios of docs/benchmarks.md and prints its tables. On one core quick takes a minute; shared
// (prefixes that many prompts have) and engines (other engines, links and answers) take three, and full takes six. When
// it is interrupted, it prints the seeds that are complete. roles takes a quarter of an hour, with two seeds from seed
// on; the others always have the same three.
func Suite(ctx context.Context, size string, seed uint64, stdout, stderr io.Writer) error {
	if size == "roles" {
		return rolesSuite(ctx, rolesPlan(seed), stdout, stderr)
	}
	p, err := newPlan(size)
	if err != nil {
		return err
	}
	s := &played{plan: p, results: map[string][]*Result{}}
	contenders := everybody()
	of := len(p.scenarios) * len(p.loads) * len(p.seeds) * len(contenders)
	bar := NewBar(stderr, "suite")
	for _, seed := range p.seeds { // one after the other, so that the results of one key are in the order of seeds
		group, running := errgroup.WithContext(ctx)
		group.SetLimit(runtime.GOMAXPROCS(0))
		for _, sc := range p.scenarios {
			for _, load := range p.loads {
				group.Go(func() error {
					return s.play(running, sc, load, seed, contenders, func() { bar.Show(s.done, of) })
				})
			}
		}
		err := group.Wait()
		if err != nil && s.complete > 0 && ctx.Err() != nil {
			break // interrupted: print the complete seeds
		}
		if err != nil {
			return err
		}
		s.complete++
	}
	s.print(stdout)
	if size == "shared" || size == "engines" {
		return nil
	}
	return s.extras(ctx, stdout)
}

// play plays one scenario at one load under all contenders.
func (s *played) play(ctx context.Context, sc scenario, load float64, seed uint64, contenders []contender,
	shown func()) error {
	c := sc.on(DefaultConfig())
	c.Seed = seed
	t, err := Prepare(sc.trace, s.requests, 1, load, c)
	if err != nil {
		return err
	}
	_, decode, err := Load(t, c)
	if err != nil {
		return err
	}
	for _, who := range contenders {
		c.Late, c.Split = who.late, who.split
		r, err := Run(ctx, t, who.policy, c)
		if err != nil {
			return err
		}
		r.ttft = nil
		r.Demand = max(r.Demand, decode)
		s.mu.Lock()
		k := key(sc, load, who)
		s.results[k] = append(s.results[k], r)
		s.done++
		shown()
		s.mu.Unlock()
	}
	return nil
}

// over returns a figure of the results of one key, averaged over seeds.
func (s *played) over(sc scenario, load float64, who contender, what func(*Result) float64) float64 {
	sum := 0.0
	for _, r := range s.results[key(sc, load, who)][:s.complete] {
		sum += what(r)
	}
	return sum / float64(s.complete)
}

func meanTTFT(r *Result) float64 { return r.TTFT.Mean }
func p99TTFT(r *Result) float64  { return r.TTFT.P99 }
func endToEnd(r *Result) float64 { return r.EndToEnd.Mean }
func goodput(r *Result) float64  { return r.Goodput }
func demand(r *Result) float64   { return r.Demand }

// best returns the rival with the least mean time to the first token in a scenario, known only in hindsight.
func (s *played) best(sc scenario, load float64, split picker.Split) contender {
	return slices.MinFunc(rivals(split), func(a, b contender) int {
		return cmp.Compare(s.over(sc, load, a, meanTTFT), s.over(sc, load, b, meanTTFT))
	})
}

func (s *played) print(w io.Writer) {
	s.printScenarios(w)
	s.printLoads(w)
	s.printWorst(w)
	s.printCapacity(w)
}

// printScenarios prints mean (and p99) TTFT of the best rivals and of Tandem's settings, at each load.
func (s *played) printScenarios(w io.Writer) {
	fmt.Fprintf(w, "Mean TTFT in seconds (p99), mean of %d seeds. The best other policy that splits every request, "+
		"and the best one that may decode alone.\n\n| trace, fleet, load | best that splits | best that may decode "+
		"alone |", s.complete)
	for _, c := range ours() {
		fmt.Fprintf(w, " %s |", c.name)
	}
	fmt.Fprintf(w, "\n|---|---|---|---|---|---|---|\n")
	for _, sc := range s.scenarios {
		for _, load := range s.loads {
			fmt.Fprintf(w, "| %v, %.0f %% |", sc, 100*load)
			for _, split := range []picker.Split{picker.SplitAlways, picker.SplitAuto} {
				best := s.best(sc, load, split)
				fmt.Fprintf(w, " %s %s |", best.name, s.cell(sc, load, best))
			}
			for _, c := range ours() {
				fmt.Fprintf(w, " %s |", s.cell(sc, load, c))
			}
			fmt.Fprintln(w)
		}
	}
	fmt.Fprintln(w)
}

func (s *played) cell(sc scenario, load float64, c contender) string {
	return fmt.Sprintf("%.3g (%.3g)", s.over(sc, load, c, meanTTFT), s.over(sc, load, c, p99TTFT))
}

// printWorst prints every scenario in which a rival is more than 3 % better than a setting of Tandem's.
func (s *played) printWorst(w io.Writer) {
	fmt.Fprintf(w, "Where another policy has a mean TTFT more than 3 %% shorter.\n\n| setting | trace, fleet, load "+
		"| other policy | its mean TTFT | ours | ratio |\n|---|---|---|---|---|---|\n")
	for _, c := range ours() {
		for _, sc := range s.scenarios {
			for _, load := range s.loads {
				best := s.best(sc, load, c.split)
				theirs, mine := s.over(sc, load, best, meanTTFT), s.over(sc, load, c, meanTTFT)
				if mine > 1.03*theirs {
					fmt.Fprintf(w, "| %s | %v, %.0f %% | %s | %.3g | %.3g | %.2f |\n", c.name, sc, 100*load, best.name,
						theirs, mine, mine/theirs)
				}
			}
		}
	}
	fmt.Fprintln(w)
}

// printLoads compares Tandem with the best rival of each scenario, by load.
func (s *played) printLoads(w io.Writer) {
	fmt.Fprintf(w, "Against the best other policy of each scenario (auto: also those that may decode alone): mean "+
		"TTFT as a ratio (geometric mean / worst scenario), p99 TTFT and mean end-to-end time (geometric mean / "+
		"worst).\n\n| load |")
	for _, c := range ours() {
		fmt.Fprintf(w, " %s: mean | p99 | end to end |", c.name)
	}
	fmt.Fprintf(w, "\n|---|")
	for range ours() {
		fmt.Fprint(w, "---|---|---|")
	}
	fmt.Fprintln(w)
	for _, load := range s.loads {
		fmt.Fprintf(w, "| %.0f %% |", 100*load)
		for _, c := range ours() {
			for _, what := range []func(*Result) float64{meanTTFT, p99TTFT, endToEnd} {
				product, worst := 0.0, 0.0
				for _, sc := range s.scenarios {
					ratio := s.over(sc, load, c, what) / s.over(sc, load, s.best(sc, load, c.split), what)
					product += math.Log(ratio)
					worst = max(worst, ratio)
				}
				fmt.Fprintf(w, " %.2f / %.2f |", math.Exp(product/float64(len(s.scenarios))), worst)
			}
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
}

// printCapacity prints the highest load at which goodput is .9, and the load at which the busier side never idles. It
// interpolates linearly between the loads that were played.
func (s *played) printCapacity(w io.Writer) {
	fmt.Fprintf(w, "Highest load with a goodput of .9 (first token within 5 s, a token each 50 ms), and the load at "+
		"which the busier side is at work all the time with late binding's hits; >: more than was played, <: less.\n\n"+
		"| trace, fleet | best other |")
	for _, c := range ours() {
		fmt.Fprintf(w, " %s |", c.name)
	}
	fmt.Fprintf(w, " no time left |\n|---|---|---|")
	for range ours() {
		fmt.Fprint(w, "---|")
	}
	fmt.Fprintln(w)
	for _, sc := range s.scenarios {
		best, name := 0.0, ""
		for _, c := range rivals(picker.SplitAuto) {
			if load := s.capacity(sc, c); load > best {
				best, name = load, c.name
			}
		}
		fmt.Fprintf(w, "| %v | %s %s |", sc, s.shownLoad(best), name)
		for _, c := range ours() {
			fmt.Fprintf(w, " %s |", s.shownLoad(s.capacity(sc, c)))
		}
		fmt.Fprintf(w, " %s |\n", s.shownLoad(s.saturation(sc)))
	}
	fmt.Fprintln(w)
}

func (s *played) shownLoad(load float64) string {
	switch {
	case load <= 0:
		return fmt.Sprintf("< %.2f", s.loads[0])
	case load >= s.loads[len(s.loads)-1]:
		return fmt.Sprintf("> %.2f", s.loads[len(s.loads)-1])
	}
	return fmt.Sprintf("%.2f", load)
}

func (s *played) capacity(sc scenario, c contender) float64 {
	const enough = .9
	return s.crossing(func(load float64) float64 { return enough - s.over(sc, load, c, goodput) })
}

// saturation returns the load at which prefill (with the hits of late binding) or decode is busy all the time.
func (s *played) saturation(sc scenario) float64 {
	late := ours()[1]
	return s.crossing(func(load float64) float64 { return s.over(sc, load, late, demand) - 1 })
}

// crossing returns the first load at which f rises above 0: the last load played if it never does, and 0 if f is
// always above 0.
func (s *played) crossing(f func(load float64) float64) float64 {
	before, at := 0.0, 0.0
	for i, load := range s.loads {
		now := f(load)
		if now > 0 {
			if i == 0 {
				return 0
			}
			return at + (load-at)*before/(before-now)
		}
		before, at = now, load
	}
	return at
}
