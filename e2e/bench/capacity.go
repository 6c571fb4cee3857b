package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"tandem/e2e/bench/capacity"
	"tandem/e2e/bench/ledger"
)

// The mode -capacity 10,100,1000 measures what one replica serves with so many endpoints, all of which are simulated by
// two processes: rounds as in the other tables, and the rate at which p99 is twice that at capacityRate. Then, with
// streamEndpoints of the measured ones and as many of other engines, -streams are held open, each with a token a
// second, beside capacityRate requests a second. Every line says what each program takes of the processor, which tells
// what the limit is.

const (
	capacityRate    = 100.
	capacityClients = 64
	lowTime         = 6 * time.Second // at the lowest rate
	stepTime        = 2 * time.Second // at least, for at least stepRequests
	stepRequests    = 400
	streamEndpoints = 100
	streamTokens    = 900
)

// capacities is the program in this mode.
func capacities(ctx context.Context, o options, stdout, stderr io.Writer) error {
	var lines []figures
	var from origin
	on := func(endpoints int, shapes []shape, do func(*lab, options) ([]figures, error)) error {
		l := &lab{log: stderr, tokenTime: time.Second}
		defer l.stop()
		o := o
		o.endpoints, o.shapes, o.documents = endpoints, shapes, endpoints
		if err := l.start(ctx, o); err != nil {
			return fmt.Errorf("%d endpoints: %w", endpoints, err)
		}
		from = l.origin(ctx, o)
		more, err := do(l, o)
		if err == nil {
			_, err = ledger.Check(ctx, l.engines, o.profiles != "")
		}
		lines = append(lines, more...)
		return err
	}
	for _, n := range o.mode.capacity {
		err := on(n, o.shapes, func(l *lab, o options) ([]figures, error) { return l.capacity(ctx, o) })
		if err != nil {
			return err
		}
	}
	slow := shape{"slow", "a token a second", paced, 1 << 10, streamTokens, true, 0}
	err := on(streamEndpoints, append(slices.Clone(o.shapes), slow), func(l *lab, o options) ([]figures, error) {
		return l.openStreams(ctx, o, slow)
	})
	if err != nil {
		return err
	}
	for i := range lines {
		text, err := json.Marshal(&lines[i])
		if err != nil {
			return err
		}
		fmt.Fprintf(stdout, "%s\n", text)
	}
	if o.last == "" {
		return nil
	}
	return publish(stdout, o.last, from, lines)
}

// capacity measures one number of endpoints.
func (l *lab) capacity(ctx context.Context, o options) (lines []figures, err error) {
	idle, err := l.idle(ctx, o.idle, l.log)
	if err != nil {
		return nil, err
	}
	sh := o.shapes[0]
	for _, s := range l.stacks { // the first connections to every engine
		if _, err := l.load(ctx, s, sh, newBody(sh, o.documents), 16, 2*o.endpoints); err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
	}
	for _, clients := range o.clients {
		results, err := l.measure(ctx, o, sh, clients)
		if err != nil {
			return nil, err
		}
		for i, rounds := range results {
			k := key{Shape: sh.name, Clients: clients, Stack: l.stacks[i].name}
			f := figuresOf(k, sh, rounds, results[0], nil)
			f.Rest = &moreFigures{Size: size{Endpoints: o.endpoints}, Idle: round3(idle[i]), Cores: coresOf(rounds),
				PerSecond: round3(median(each(rounds, func(r *round) float64 { return r.rate })))}
			lines = append(lines, f)
		}
	}
	for i, s := range l.stacks {
		low, held, err := capacity.Doubles(capacityRate, func(rate float64) (time.Duration, error) {
			d := max(stepTime, time.Duration(stepRequests/rate*float64(time.Second)))
			if rate == capacityRate {
				d = lowTime
			}
			r, err := l.at(ctx, rate, s, sh, newBody(sh, o.documents), capacityClients, d)
			if err != nil {
				return 0, err
			}
			p99 := quantile(r.took, .99)
			fmt.Fprintf(l.log, "%d endpoints, %s: %.0f a second, p99 %s ms\n", o.endpoints, s.name, r.rate, millis(p99))
			if rate > capacityRate && r.rate < .9*rate { // at the lowest rate it would make every higher one hold
				p99 = time.Hour // it is not served
			}
			return p99, nil
		})
		if err != nil {
			return nil, err
		}
		last := lines[len(lines)-len(l.stacks)+i].Rest
		last.Low99, last.Doubles = round3(low.Seconds()*1e3), round3(held)
		last.memory(s)
	}
	return lines, nil
}

// at is a round at a rate.
func (l *lab) at(
	ctx context.Context, rate float64, s *stack, sh shape, b *body, clients int, d time.Duration,
) (round, error) {
	paced := *l
	paced.rate = rate
	return paced.round(ctx, s, sh, b, clients, int(rate*d.Seconds()))
}

// openStreams measures requests beside open streams, through every Tandem.
func (l *lab) openStreams(ctx context.Context, o options, slow shape) (lines []figures, err error) {
	sh := o.shapes[0]
	for _, s := range l.stacks[1:] {
		b, asked := newBody(sh, o.documents), newBody(slow, o.documents)
		held := capacity.NewStreams(s.addr, func() []byte {
			asked.number(ids.Add(1))
			return bytes.Clone(asked.client)
		})
		for _, n := range append([]int{0}, o.mode.streams...) {
			began := time.Now()
			if err := held.Open(ctx, n); err != nil {
				return nil, fmt.Errorf("%s: %w", s.name, err)
			}
			rounds := make([]round, 1)
			if rounds[0], err = l.at(ctx, capacityRate, s, sh, b, 16, lowTime); err != nil {
				return nil, fmt.Errorf("%s: %w", s.name, err)
			}
			fmt.Fprintf(l.log, "%s: %d streams, %.1f s\n", s.name, n, time.Since(began).Seconds())
			k := key{Shape: sh.name, Clients: 16, Stack: s.name, Rate: capacityRate}
			f := figuresOf(k, sh, rounds, rounds, nil)
			f.Rest = &moreFigures{Size: size{Streams: n}, Cores: coresOf(rounds)}
			f.Rest.memory(s)
			lines = append(lines, f)
		}
		if n := held.Ended(); n > 0 {
			return nil, fmt.Errorf("%s: %d streams ended too soon", s.name, n)
		}
		held.Close()
		if err := pause(ctx, 2*time.Second); err != nil {
			return nil, err
		}
	}
	return lines, nil
}

// cores are what programs take of the processor, in cores.
type cores struct {
	Envoy   float64 `json:"envoy"`
	Router  float64 `json:"router"`
	Engines float64 `json:"engines"`
	Client  float64 `json:"client"`
}

func coresOf(rounds []round) *cores {
	of := func(cpu func(r *round) time.Duration) float64 {
		return round3(median(each(rounds, func(r *round) float64 { return cpu(r).Seconds() * r.rate })))
	}
	return &cores{
		of(func(r *round) time.Duration { return r.envoy }), of(func(r *round) time.Duration { return r.tandem }),
		of(func(r *round) time.Duration { return r.engines }), of(func(r *round) time.Duration { return r.client }),
	}
}

func (m *moreFigures) memory(s *stack) {
	m.EnvoyMiB = round3(float64(s.envoy.Resident()) / (1 << 20))
	if s.tandem != nil {
		m.RouterMiB = round3(float64(s.tandem.Resident()) / (1 << 20))
	}
}
