package replay

import (
	"context"
	"fmt"
	"io"
	"math"
	"runtime"

	"golang.org/x/sync/errgroup"

	"tandem/picker"
)

// extra is one more run of the suite: a row of a table.
type extra struct {
	name   string
	load   float64
	config func(*Config)
}

// extras prints tables of one number for each run: hits against balance without eviction, and several replicas.
func (s *played) extras(ctx context.Context, w io.Writer) error {
	wide := func(c *Config) {
		c.Prefill, c.Decode, c.Split = 8, 8, picker.SplitAlways
	}
	forever := func(c *Config) { wide(c); c.Engine.KVTokens = math.Inf(1) }
	var balance []extra
	for _, load := range []float64{.2, .5, .8, 1} {
		balance = append(balance,
			extra{fmt.Sprintf("%.0f %%, immediate", 100*load), load, func(c *Config) { forever(c); c.Late = false }},
			extra{fmt.Sprintf("%.0f %%, late", 100*load), load, forever})
	}
	fmt.Fprintf(w, "The public conversation trace on 8+8 endpoints whose caches never forget: hit share, as a share "+
		"of the bound, and the busiest endpoint's work over the mean.\n\n"+
		"| load, binding | hit share | of the bound | max/mean | mean TTFT |\n|---|---|---|---|---|\n")
	if err := s.rows(ctx, w, balance, true); err != nil {
		return err
	}
	var shared []extra
	for _, late := range []bool{false, true} {
		for _, r := range []struct {
			replicas int
			sharing  float64
		}{{1, 0}, {4, .005}, {4, .05}, {4, .5}, {4, -1}} {
			name := fmt.Sprintf("%d replicas, shared after %g ms", r.replicas, 1000*r.sharing)
			if r.sharing < 0 {
				name = fmt.Sprintf("%d replicas, not shared", r.replicas)
			} else if r.replicas == 1 {
				name = "1 replica"
			}
			if late {
				name += ", late"
			}
			shared = append(shared, extra{name, .8, func(c *Config) {
				wide(c)
				c.Late, c.Replicas, c.Sharing = late, r.replicas, r.sharing
			}})
		}
	}
	fmt.Fprintf(w, "\nThe same with caches that forget, at 80 %% load, by several replicas that take turns.\n\n| "+
		"replicas | hit share | max/mean | mean TTFT |\n|---|---|---|---|\n")
	return s.rows(ctx, w, shared, false)
}

// rows plays extras and prints a row of each, averaged over seeds.
func (s *played) rows(ctx context.Context, w io.Writer, all []extra, bound bool) error {
	lines := make([]string, len(all))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, x := range all {
		group.Go(func() error {
			var hit, balance, ttft, most float64
			for _, seed := range s.seeds {
				c := DefaultConfig()
				c.Seed = seed
				x.config(&c)
				t, err := Prepare("mooncake", 0, 1, x.load, c)
				if err != nil {
					return err
				}
				r, err := Run(ctx, t, "tandem", c)
				if err != nil {
					return err
				}
				n := float64(len(s.seeds))
				hit, balance, ttft, most = hit+r.HitShare/n, balance+r.MaxMeanLoad/n, ttft+r.TTFT.Mean/n, t.Bound()
			}
			lines[i] = fmt.Sprintf("| %s | %.3f | %.2f | %.3g s |\n", x.name, hit, balance, ttft)
			if bound {
				lines[i] = fmt.Sprintf("| %s | %.3f | %.3f | %.2f | %.3g s |\n", x.name, hit, hit/most, balance, ttft)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for _, line := range lines {
		fmt.Fprint(w, line)
	}
	return nil
}
