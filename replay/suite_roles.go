package replay

import (
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

func rolesPlan() rolePlan {
	return rolePlan{
		engines: []int{8}, loads: []float64{.5, .8, .95}, seeds: []uint64{1, 2}, requests: 4000,
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

func (x *roleFigures) String() string {
	s := fmt.Sprintf("%.3f, %.2f (%.0f) s, %.0f ms, %.1f s", x.goodput, x.ttft, x.ttft99, x.tpot99, x.e)
	if x.stuck > 0 {
		s += fmt.Sprintf(", %d never ended", x.stuck)
	}
	return s
}

// rolesSuite compares words with every ratio of fixed roles, and with aggregated fleets of the same engines.
func rolesSuite(ctx context.Context, p rolePlan, stdout, stderr io.Writer) error {
	fmt.Fprintf(stdout, "Fleets of engines that may serve both legs: goodput, mean (p99) time to the first token, p99 "+
		"per token, mean from end to end; %d seeds. The best ratio of fixed roles and the best aggregated router are "+
		"known in hindsight only, by goodput.\n\n| trace, engines, load | best ratio of fixed roles | half and half | "+
		"best aggregated router | price alone | roles: auto |\n|---|---|---|---|---|---|\n", len(p.seeds))
	bar, done := NewBar(stderr, "suite"), 0
	for _, n := range p.engines {
		for _, trace := range append(slices.Clip(p.steady), p.shifting...) {
			for _, load := range p.loads {
				row, err := p.row(ctx, trace, n, load)
				if err != nil {
					return err
				}
				fmt.Fprintf(stdout, "| %s, %d, %.0f %% | %s\n", trace, n, 100*load, row)
				done++
				bar.Show(done, len(p.engines)*len(p.loads)*(len(p.steady)+len(p.shifting)))
			}
		}
	}
	return nil
}

// row plays one trace under all contenders.
func (p *rolePlan) row(ctx context.Context, trace string, n int, load float64) (string, error) {
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
	all = append(all, entry{"price", "tandem", func(*Config) {}},
		entry{"auto", "tandem", func(c *Config) { c.Roles = true }})
	figures := make([]roleFigures, len(all))
	for _, seed := range p.seeds {
		c := DefaultConfig()
		c.Seed, c.Both = seed, n
		t, err := Prepare(trace, p.requests, 1, load, c)
		if err != nil {
			return "", err
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
			return "", err
		}
		for i, r := range results {
			figures[i].name = all[i].name
			figures[i].add(r, float64(len(p.seeds)))
		}
	}
	best := func(of []roleFigures) string {
		at := 0
		for i := range of {
			if of[i].goodput > of[at].goodput {
				at = i
			}
		}
		return of[at].name + ": " + of[at].String()
	}
	half := figures[n/2-1]
	return fmt.Sprintf("%s | %s | %s | %s | %s |", best(figures[:fixed]), half.String(), best(figures[fixed:routers]),
		figures[routers].String(), figures[routers+1].String()), nil
}
