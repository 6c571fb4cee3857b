package replay

import (
	"context"
	"fmt"
	"io"
	"math"
	"runtime"
	"strings"

	"golang.org/x/sync/errgroup"

	"tandem/replay/sessions"
)

// loop is a table of the suite of agents: sessions on eight engines, under contenders.
type loop struct {
	what string
	kv   float64 // tokens of KV memory of an engine
	host float64 // times the KV, in host memory
	play Closed
	who  []string
}

// agentLoops returns the tables of the suite.
func agentLoops(all []sessions.Session) (out []loop) {
	usual := append(Oracles(), "tandem/auto@8", "tandem/never@8", "tandem/roles@8", "tandem@4+4", "tandem@2+6",
		"tandem-no-events/auto@8", "tandem-no-events/never@8", "tandem-no-events@4+4", "tandem-no-events@2+6",
		"llm-d-in-flight/never@8", "llm-d/never@8", "dynamo/never@8", "thunderagent@8", "autellix@8", "continuum@8",
		"least-requests/never@8", "dynamo-planner@8")
	// those that split every prompt, or all but short ones, on the better of 2+6 and 4+4 and on engines that do both
	for _, name := range []string{"ppd@2+6", "deflection@2+6", "netkv@4+4", "kairos@4+4", "vllm-router/256@4+4",
		"trtllm/2048@4+4", "aibrix@4+4", "mooncake@4+4", "production-stack@4+4", "smg-1.13@4+4"} {
		policy, _, _ := strings.Cut(name, "@")
		usual = append(usual, policy+"@8", name)
	}
	few := append(Oracles(), "tandem/auto@8", "tandem/never@8", "tandem@2+6", "llm-d-in-flight/never@8",
		"thunderagent@8")
	hour := DefaultClosed()
	hour.Sessions = all
	add := func(what string, kv, host float64, active int, who []string, set func(*Closed)) {
		l := loop{what, kv, host, hour, who}
		if l.play.Active = active; set != nil {
			set(&l.play)
		}
		out = append(out, l)
	}
	for _, n := range []int{64, 96, 128} {
		add(fmt.Sprintf("%d sessions", n), 1e6, 0, n, usual, nil)
	}
	add("48 sessions, half of the KV", 5e5, 0, 48, few, nil)
	add("144 sessions, twice the KV", 2e6, 0, 144, few, nil)
	for _, n := range []int{128, 192} {
		add(fmt.Sprintf("%d sessions, host memory of ten times the KV", n), 1e6, 10, n, few, nil)
	}
	add("128 sessions whose users wait for a minute", 1e6, 0, 128, few, func(o *Closed) { o.Patience = 60 })
	add("A day of four hours from 32 to 128 sessions and back", 1e6, 0, 32, few, func(o *Closed) {
		o.Most, o.Day, o.Measured = 128, 4*3600, 4*3600
	})
	return out
}

// AgentsSuite plays sessions in closed loops with three seeds, from seed on, and prints the tables of docs/decision.md.
// It takes six minutes of CPU. When it is interrupted, it prints the tables that are complete.
func AgentsSuite(ctx context.Context, all []sessions.Session, seed uint64, stdout, stderr io.Writer) error {
	loops := agentLoops(all)
	bar := NewBar(stderr, "suite")
	for i, l := range loops {
		rows, err := l.run(ctx, []uint64{seed, seed + 1, seed + 2})
		if err != nil {
			return err
		}
		l.print(stdout, rows)
		bar.Show(i+1, len(loops))
	}
	return nil
}

// run returns the results by contender and seed.
func (l *loop) run(ctx context.Context, seeds []uint64) ([][]*ClosedResult, error) {
	rows := make([][]*ClosedResult, len(l.who))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, name := range l.who {
		who, err := ParseContender(name)
		if err != nil {
			return nil, err
		}
		group.Go(func() (err error) {
			c := DefaultConfig()
			c.Both, c.Engine.KVTokens = 8, l.kv
			play := l.play
			if l.host > 0 {
				play = play.Host(&c, l.host)
			}
			rows[i], err = who.run(ctx, seeds, c, play, io.Discard)
			return err
		})
	}
	return rows, group.Wait()
}

// print prints a line for each contender: means over seeds.
func (l *loop) print(w io.Writer, rows [][]*ClosedResult) {
	fmt.Fprintf(w,
		"%s, %d seeds.\n\n| policy | good turns/h (by seed) | of idle engines' | first token p95, p99 | "+
			"per token p99 | slowdown; of sessions: p95, worst | computed again: evicted, elsewhere, preempted "+
			"| wasted | misses: too long, evicted, elsewhere, waited, written |", l.what, len(rows[0]))
	if l.play.Patience > 0 {
		fmt.Fprint(w, " gave up |")
	}
	if l.play.Most > 0 {
		fmt.Fprint(w, " the hour before, after the peak |")
	}
	fmt.Fprintln(w, "\n"+strings.Repeat("|---", 9+min(int(l.play.Patience), 1)+min(l.play.Most, 1))+"|")
	idle := MeanOf(rows[0], goodPerHour)
	for _, row := range rows {
		least, most := math.Inf(1), 0.0
		for _, r := range row {
			least, most = min(least, r.GoodPerHour), max(most, r.GoodPerHour)
		}
		mean := func(f func(*ClosedResult) float64) float64 { return MeanOf(row, f) }
		fmt.Fprintf(w,
			"| %s | %.0f (%.0f-%.0f) | %.3f | %.1f, %.0f s | %.0f ms | %.2f; %.1f, %.0f | %.1f, %.1f, %.1f %% | "+
				"%.1f %% | %.0f, %.0f, %.0f, %.0f, %.0f |",
			row[0].Policy, mean(goodPerHour), least, most, mean(goodPerHour)/max(idle, 1),
			mean(func(r *ClosedResult) float64 { return r.TTFT.P95 }),
			mean(func(r *ClosedResult) float64 { return r.TTFT.P99 }),
			mean(func(r *ClosedResult) float64 { return 1000 * r.TPOT.P99 }),
			mean(func(r *ClosedResult) float64 { return r.Slowdown }),
			mean(func(r *ClosedResult) float64 { return r.Sessions.P95 }),
			mean(func(r *ClosedResult) float64 { return r.Sessions.Worst }),
			mean(func(r *ClosedResult) float64 { return 100 * r.Again.Evicted }),
			mean(func(r *ClosedResult) float64 { return 100 * r.Again.Elsewhere }),
			mean(func(r *ClosedResult) float64 { return 100 * r.Again.Preempted }),
			mean(func(r *ClosedResult) float64 { return 100 * r.Wasted }),
			mean(func(r *ClosedResult) float64 { return float64(r.Misses.Long) }),
			mean(func(r *ClosedResult) float64 { return float64(r.Misses.Evicted) }),
			mean(func(r *ClosedResult) float64 { return float64(r.Misses.Elsewhere) }),
			mean(func(r *ClosedResult) float64 { return float64(r.Misses.Waited) }),
			mean(func(r *ClosedResult) float64 { return float64(r.Misses.Written) }))
		if l.play.Patience > 0 {
			fmt.Fprintf(w, " %.0f |", mean(func(r *ClosedResult) float64 { return float64(r.GaveUp) }))
		}
		if l.play.Most > 0 {
			peak := int(l.play.Day / 2 / quarter)
			fmt.Fprintf(w, " %.0f, %.0f |", mean(func(r *ClosedResult) float64 {
				return sumOf(r.Quarters[peak-4 : peak])
			}),
				mean(func(r *ClosedResult) float64 { return sumOf(r.Quarters[peak : peak+4]) }))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
}

func goodPerHour(r *ClosedResult) float64 { return r.GoodPerHour }

func sumOf(counts []int) (sum float64) {
	for _, n := range counts {
		sum += float64(n)
	}
	return sum
}

// MeanOf returns the mean of a figure over results.
func MeanOf(results []*ClosedResult, of func(*ClosedResult) float64) (mean float64) {
	for _, r := range results {
		mean += of(r) / float64(len(results))
	}
	return mean
}
