package replay

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	"tandem/picker"
)

// rolePlan is the size of the suite of fleets whose engines may serve both legs.
type rolePlan struct {
	engines  []int
	shifting []string
	steady   []string
	loads    []float64
	seeds    []uint64
	requests int // of a steady trace
}

// rolesPlan returns the plan of two seeds, the first of which is given.
func rolesPlan(seed uint64) rolePlan {
	return rolePlan{
		engines: []int{8}, loads: []float64{.5, .8, .95}, seeds: []uint64{seed, seed + 1}, requests: 4000,
		shifting: []string{"seq:agent:reasoning:mixed", "wave:rag:reasoning", "seq:rag:reasoning:rag", "day:mixed"},
		steady:   []string{"mooncake", "conversation", "agent", "mixed", "hot", "reasoning"},
	}
}

// roleFigures are the means of a contender's results over seeds.
type roleFigures struct {
	name                             string
	goodput, ttft, ttft99, tpot99, e float64
	stuck                            int
}

func (x *roleFigures) add(r *Result, of float64) {
	x.goodput += r.Goodput / of
	x.ttft += r.TTFT.Mean / of
	x.ttft99 += r.TTFT.P99 / of
	x.tpot99 += 1000 * r.TPOT.P99 / of
	x.e += r.EndToEnd.Mean / of
	x.stuck += r.Stuck
}

// cost is what a request takes if a second of its answer counts half, s.
func (x *roleFigures) cost() float64 { return x.ttft + .5*(x.e-x.ttft) }

func (x *roleFigures) String() string {
	s := fmt.Sprintf("%.3f, %.2f (%.0f) s, %.0f ms, %.1f s", x.goodput, x.ttft, x.ttft99, x.tpot99, x.e)
	if x.stuck > 0 {
		s += fmt.Sprintf(", %d never ended", x.stuck)
	}
	return s
}

// roleRow has the contenders of one trace at one load. Of ratios and routers those with the highest goodput are kept.
type roleRow struct {
	trace                            string
	load                             float64
	ratio, half, router, price, auto roleFigures
	planner, smg                     roleFigures
	cheapest                         float64 // least cost of all ratios
}

func (x *roleRow) String() string {
	return fmt.Sprintf("%s: %s | %s | %s: %s | %s | %s | %s | %s |", x.ratio.name, &x.ratio, &x.half, x.router.name,
		&x.router, &x.planner, &x.smg, &x.price, &x.auto)
}

// summary says how roles: auto compares with ratios that are known in hindsight, over the rows of a load.
func summary(w io.Writer, load float64, rows []roleRow) {
	if len(rows) == 0 {
		return
	}
	byGoodput := func(a, b roleRow) int {
		return cmp.Compare(a.auto.goodput-a.ratio.goodput, b.auto.goodput-b.ratio.goodput)
	}
	byCost := func(a, b roleRow) int { return cmp.Compare(a.auto.cost()/a.cheapest, b.auto.cost()/b.cheapest) }
	var gain, cost float64
	for i := range rows {
		gain += (rows[i].auto.goodput - rows[i].ratio.goodput) / float64(len(rows))
		cost += rows[i].auto.cost() / rows[i].cheapest / float64(len(rows))
	}
	least, dearest := slices.MinFunc(rows, byGoodput), slices.MaxFunc(rows, byCost)
	slowest := slices.MaxFunc(rows, func(a, b roleRow) int { return cmp.Compare(a.auto.tpot99, b.auto.tpot99) })
	fmt.Fprintf(w, "- %.0f %%: goodput of `roles: auto` less the best ratio's %+.3f (least %+.3f, %s); first token "+
		"and half of the rest %.2f times the cheapest ratio's (most %.2f, %s); p99 per token at most %.0f ms (%s).\n",
		100*load, gain, least.auto.goodput-least.ratio.goodput, least.trace, cost,
		dearest.auto.cost()/dearest.cheapest, dearest.trace,
		slowest.auto.tpot99, slowest.trace)
}

// rolesSuite compares words with every ratio of fixed roles, and with aggregated fleets of the same engines.
func rolesSuite(ctx context.Context, p rolePlan, stdout, stderr io.Writer) error {
	fmt.Fprintf(stdout, "Fleets of engines that may serve both legs: goodput, mean (p99) time to the first token, p99 "+
		"per token, mean from end to end; %d seeds. The best ratio of fixed roles and the best aggregated router are "+
		"known in hindsight only, by goodput.\n\n| trace, engines, load | best ratio of fixed roles | half and half | "+
		"best aggregated router | Dynamo's planner | smg 1.13, half and half | price alone | roles: auto |\n"+
		"|---|---|---|---|---|---|---|---|\n", len(p.seeds))
	bar, done := NewBar(stderr, "suite"), 0
	var rows []roleRow
	for _, n := range p.engines {
		for _, trace := range slices.Concat(p.steady, p.shifting) {
			for _, load := range p.loads {
				row, err := p.row(ctx, trace, n, load)
				if err != nil {
					return err
				}
				fmt.Fprintf(stdout, "| %s, %d, %.0f %% | %s\n", trace, n, 100*load, &row)
				rows = append(rows, row)
				done++
				bar.Show(done, len(p.engines)*len(p.loads)*(len(p.steady)+len(p.shifting)))
			}
		}
	}
	for _, of := range []struct {
		what   string
		traces []string
	}{{"steady", p.steady}, {"shifting", p.shifting}} {
		fmt.Fprintf(stdout, "\nOver the %s traces:\n\n", of.what)
		for _, load := range p.loads {
			summary(stdout, load, slices.DeleteFunc(slices.Clone(rows), func(x roleRow) bool {
				return x.load != load || !slices.Contains(of.traces, x.trace)
			}))
		}
	}
	return nil
}

// row plays one trace under all contenders.
func (p *rolePlan) row(ctx context.Context, trace string, n int, load float64) (roleRow, error) {
	type entry struct {
		name   string
		policy string
		config func(*Config)
	}
	var all []entry
	for ratio := 1; ratio < n; ratio++ {
		all = append(all, entry{fmt.Sprintf("%d+%d", ratio, n-ratio), "tandem", func(c *Config) {
			c.Both, c.Prefill, c.Decode = 0, ratio, n-ratio
		}})
	}
	fixed := len(all)
	for _, peer := range aggregated() {
		all = append(all, entry{peer, peer, func(*Config) {}})
	}
	all = append(all, entry{"tandem/never", "tandem", func(c *Config) { c.Split = picker.SplitNever }})
	routers := len(all)
	all = append(all, entry{"dynamo-planner", "dynamo-planner", func(*Config) {}}, entry{"smg-1.13", "smg-1.13",
		func(c *Config) { c.Both, c.Prefill, c.Decode = 0, n/2, n-n/2 }}, entry{"price", "tandem", func(*Config) {}},
		entry{"auto", "tandem", func(c *Config) { c.Roles = true }})
	figures := make([]roleFigures, len(all))
	for _, seed := range p.seeds {
		c := DefaultConfig()
		c.Seed, c.Both = seed, n
		t, err := Prepare(trace, p.requests, 1, load, c)
		if err != nil {
			return roleRow{}, err
		}
		results := make([]*Result, len(all))
		group, running := errgroup.WithContext(ctx)
		group.SetLimit(runtime.GOMAXPROCS(0))
		for i, who := range all {
			group.Go(func() (err error) {
				c := c
				who.config(&c)
				results[i], err = Run(running, t, who.policy, c)
				return err
			})
		}
		if err := group.Wait(); err != nil {
			return roleRow{}, err
		}
		for i, r := range results {
			figures[i].name = all[i].name
			figures[i].add(r, float64(len(p.seeds)))
		}
	}
	byGoodput := func(a, b roleFigures) int { return cmp.Compare(a.goodput, b.goodput) }
	byCost := func(a, b roleFigures) int { return cmp.Compare(a.cost(), b.cost()) }
	cheapest := slices.MinFunc(figures[:fixed], byCost)
	return roleRow{
		trace: trace, load: load, ratio: slices.MaxFunc(figures[:fixed], byGoodput), half: figures[n/2-1],
		router: slices.MaxFunc(figures[fixed:routers], byGoodput), planner: figures[routers], smg: figures[routers+1],
		price: figures[routers+2], auto: figures[routers+3],
		cheapest: cheapest.cost(),
	}, nil
}
