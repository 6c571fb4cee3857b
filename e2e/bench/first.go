package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"tandem/e2e/bench/ledger"
)

// The mode -first measures what a user feels of a router: how much later the first token comes than if the client sent
// both requests straight to the engines, which answer at once. Of every stack, in rounds by turns: one client; how many
// requests a second firstFull clients get; and half of these, from halfClients clients at equal intervals, with the
// same rate sent straight to the engines beside it, in the same round.

const (
	directName  = "direct" // the client sends both requests straight to the engines
	firstFull   = 16
	halfClients = 64
	halfTime    = 4 * time.Second
)

// firstRounds are the rounds of one stack. base are those of the client that goes straight to the engines, at the rate
// of half.
type firstRounds struct {
	stack                 *stack
	one, full, half, base []round
}

func (l *lab) firstTokens(ctx context.Context, o options, stdout io.Writer) error {
	sh := o.shapes[0]
	b := newBody(sh, o.documents)
	direct := &stack{name: directName, addr: l.pairs[sh.model][0].decode, pairs: l.pairs}
	var all []*firstRounds
	for _, s := range append([]*stack{direct}, l.stacks...) {
		all = append(all, &firstRounds{stack: s})
	}
	n := max(o.requests, sh.requests)
	rounds := func(what string, do func(f *firstRounds) error) error {
		for i := range o.rounds {
			err := inTurn(len(all), i, func(at int) error {
				if err := do(all[at]); err != nil {
					return fmt.Errorf("%s: %w", all[at].stack.name, err)
				}
				return nil
			})
			if err != nil {
				return err
			}
			fmt.Fprintf(l.log, "first token, %s: round %d of %d\n", what, i+1, o.rounds)
		}
		return nil
	}
	load := func(into *[]round, rate float64, s *stack, clients, n int) error {
		at := *l
		at.rate = rate
		// reconnecting and warming up are not part of it
		if _, err := at.load(ctx, s, sh, b, clients, 2*clients); err != nil {
			return err
		}
		r, err := at.load(ctx, s, sh, b, clients, n)
		*into = append(*into, r)
		return err
	}
	err := rounds("one client", func(f *firstRounds) error { return load(&f.one, 0, f.stack, 1, n) })
	if err == nil {
		err = rounds("capacity", func(f *firstRounds) error { return load(&f.full, 0, f.stack, firstFull, 4*n) })
	}
	if err == nil {
		err = rounds("half of it", func(f *firstRounds) error {
			rate := f.rate() / 2
			requests := int(rate * halfTime.Seconds())
			if err := load(&f.base, rate, direct, halfClients, requests); err != nil {
				return err
			}
			return load(&f.half, rate, f.stack, halfClients, requests)
		})
	}
	if err != nil {
		return err
	}
	var lines []figures
	for _, f := range all {
		lines = append(lines, f.figures(key{Shape: sh.name, Clients: 1}, f.one, all[0].one),
			f.figures(key{Shape: sh.name, Clients: halfClients}, f.half, f.base))
	}
	writeFirst(stdout, lines)
	ledgers, err := ledger.Check(ctx, l.engines, o.profiles != "")
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, "\n%s\n", ledgers)
	if o.last == "" {
		return nil
	}
	return publish(stdout, o.last, l.origin(ctx, o), lines)
}

// rate is how many requests a second a stack serves at most.
func (f *firstRounds) rate() float64 {
	return median(each(f.full, func(r *round) float64 { return r.rate }))
}

// figures returns a line: the first byte's p50 as the median of the rounds, its p99 over all rounds.
func (f *firstRounds) figures(k key, rounds, base []round) figures {
	ms := func(d time.Duration) float64 { return round3(d.Seconds() * 1e3) }
	k.Stack = f.stack.name
	var added []time.Duration
	var all []time.Duration
	for i := range rounds {
		added = append(added, first(&rounds[i])-first(&base[i]))
		all = append(all, rounds[i].first...)
	}
	slices.Sort(all)
	rest := &moreFigures{First99: ms(quantile(all, .99)), PerSecond: round3(f.rate())}
	if k.Stack != directName {
		rest.Added = ms(median(added))
	}
	return figures{key: k, FirstMs: ms(median(each(rounds, first))), Rest: rest}
}

func writeFirst(w io.Writer, lines []figures) {
	fmt.Fprint(w, "First token, ms. Added: to that of a client which sends both requests straight to the engines "+
		"(p50).\n\n| stack | one client, p50 | p99 | added | most requests/s | at half of them, p50 | p99 | added |\n"+
		"|"+strings.Repeat("---|", 8)+"\n")
	for i := 0; i < len(lines); i += 2 {
		one, half := lines[i], lines[i+1]
		fmt.Fprintf(w, "| %s | %.2f | %.2f | %.2f | %.0f | %.2f | %.2f | %.2f |\n", one.Stack, one.FirstMs,
			one.Rest.First99, one.Rest.Added, one.Rest.PerSecond, half.FirstMs, half.Rest.First99, half.Rest.Added)
	}
}
