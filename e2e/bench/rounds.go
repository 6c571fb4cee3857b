package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tandem/e2e/bench/http1"
	"tandem/e2e/process"
)

// round is the result of one round of one stack.
type round struct {
	envoy, tandem time.Duration   // CPU per request
	engines       time.Duration   // that of all engines
	client        time.Duration   // that of this program
	took          []time.Duration // of every request, sorted
	first         []time.Duration // until the answer's first byte, sorted
	rate          float64         // requests per second
}

func (r *round) cpu() time.Duration { return r.envoy + r.tandem }

// quantile of sorted durations.
func quantile(sorted []time.Duration, q float64) time.Duration {
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// settleTime is the time after its last request for which a round still counts CPU: Envoy's access log comes 50 ms
// late.
const settleTime = 150 * time.Millisecond

// besideClients send besideRate requests of the shape -beside a second: few, so that small requests wait for them on
// the way and not for the processor.
const (
	besideClients = 2
	besideRate    = 10
)

// with runs requests of another shape beside do, if there is one.
func (l *lab) with(ctx context.Context, s *stack, o options, do func() error) error {
	if o.beside.name == "" {
		return do()
	}
	loaded, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		slow := *l
		slow.rate = besideRate
		_, err := slow.load(loaded, s, o.beside, newBody(o.beside, o.documents), besideClients, 1<<40)
		ended <- err
	}()
	err := do()
	cancel()
	if failed := <-ended; failed != nil && !errors.Is(failed, context.Canceled) {
		err = errors.Join(err, fmt.Errorf("beside: %w", failed))
	}
	return err
}

// measure runs the rounds of one shape and number of clients on all stacks. The result is by stack, then by round.
func (l *lab) measure(ctx context.Context, o options, sh shape, clients int) ([][]round, error) {
	n := sh.requests
	if o.requests > 0 {
		n = o.requests
	}
	if sh.model == paced && o.requests == 0 {
		n = 2 * clients // each takes more than a second
	}
	b := newBody(sh, o.documents)
	for _, s := range l.stacks { // warm: connections, pools, caches
		if _, err := l.load(ctx, s, sh, b, clients, max(n/5, clients)); err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
	}
	results := make([][]round, len(l.stacks))
	for i := range o.rounds {
		order := inTurn
		// shorter intervals leave no idle time for the other stacks
		if sh.model == paced && o.tokenTime >= time.Millisecond {
			order = together
		}
		err := order(len(l.stacks), i, func(at int) error {
			var r round
			err := l.with(ctx, l.stacks[at], o, func() (err error) {
				r, err = l.round(ctx, l.stacks[at], sh, b, clients, n)
				return err
			})
			if err != nil {
				return fmt.Errorf("%s: %w", l.stacks[at].name, err)
			}
			results[at] = append(results[at], r)
			return nil
		})
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(l.log, "%s, %d clients: round %d of %d\n", sh.name, clients, i+1, o.rounds)
	}
	if o.profiles != "" {
		if err := l.profile(ctx, o.profiles, sh, b, clients); err != nil {
			return nil, err
		}
	}
	return results, nil
}

// inTurn runs a round of each of n stacks by itself, in another order each time, so that none always comes first.
func inTurn(n, round int, do func(at int) error) error {
	for k := range n {
		if err := do((k + round) % n); err != nil {
			return err
		}
	}
	return nil
}

// together runs a round of all stacks at the same time. Streams whose tokens take their time leave the machine idle,
// so no stack takes CPU from the others. But the cost of a token depends on scheduling and on the load of the
// machine's host: it varies by a factor of 1.5 to 1.8 from one second to the next, with the same system calls. A
// variation that hits all stacks at once does not change a ratio. (Two floors, one of which begins 7 ms after the
// other: 1.00 over 24 rounds.)
func together(n, _ int, do func(at int) error) error {
	errs := make([]error, n)
	var group sync.WaitGroup
	for at := range n {
		group.Go(func() { errs[at] = do(at) })
	}
	group.Wait()
	return errors.Join(errs...)
}

func (l *lab) round(ctx context.Context, s *stack, sh shape, b *body, clients, n int) (r round, err error) {
	// Reconnecting after the other stacks' rounds is not part of a request's cost.
	if _, err := l.load(ctx, s, sh, b, clients, clients); err != nil {
		return r, err
	}
	time.Sleep(settleTime)
	before, err := l.used(s)
	if err != nil {
		return r, err
	}
	if r, err = l.load(ctx, s, sh, b, clients, n); err != nil {
		return r, err
	}
	time.Sleep(settleTime)
	now, err := l.used(s)
	r.envoy, r.tandem = (now.envoy-before.envoy)/time.Duration(n), (now.tandem-before.tandem)/time.Duration(n)
	r.engines, r.client = (now.engines-before.engines)/time.Duration(n), (now.client-before.client)/time.Duration(n)
	return r, err
}

// ids are request numbers, unique in a run of this program.
var ids atomic.Uint64

// load sends n requests from clients connections at once, and stops at the first failure.
func (l *lab) load(ctx context.Context, s *stack, sh shape, b *body, clients, n int) (r round, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var left atomic.Int64
	left.Store(int64(n))
	var mu sync.Mutex
	var group sync.WaitGroup
	began := time.Now()
	for i := range clients {
		group.Go(func() {
			took, first, err := l.requests(ctx, s, sh, b.clone(), &left, i, clients)
			if err != nil {
				cancel(err)
			}
			mu.Lock()
			defer mu.Unlock()
			r.took, r.first = append(r.took, took...), append(r.first, first...)
		})
	}
	group.Wait()
	if ctx.Err() != nil {
		return r, context.Cause(ctx)
	}
	r.rate = float64(n) / time.Since(began).Seconds()
	slices.Sort(r.took)
	slices.Sort(r.first)
	return r, nil
}

// requests sends the share of client i. At a rate, clients send in turn, at equal intervals.
func (l *lab) requests(ctx context.Context, s *stack, sh shape, b *body, left *atomic.Int64,
	i, clients int) (took, first []time.Duration, err error) {
	conn, err := http1.Dial(s.address(sh.model))
	if err != nil {
		return nil, nil, err
	}
	defer conn.Close()
	c := client{conn}
	next := time.Now()
	if l.rate > 0 {
		next = next.Add(time.Duration(float64(i) / l.rate * float64(time.Second)))
	}
	for left.Add(-1) >= 0 && ctx.Err() == nil {
		if l.rate > 0 {
			time.Sleep(time.Until(next))
			next = next.Add(time.Duration(float64(clients) / l.rate * float64(time.Second)))
		}
		began := time.Now()
		firstByte, err := c.ask(s, sh, b, ids.Add(1))
		if err != nil {
			return nil, nil, err
		}
		took, first = append(took, time.Since(began)), append(first, firstByte.Sub(began))
	}
	return took, first, nil
}

// profileTime is the duration of a CPU profile.
const profileTime = 5 * time.Second

// profile fetches a CPU profile of every Tandem, each under load, after the rounds: profiling takes time itself.
func (l *lab) profile(ctx context.Context, dir string, sh shape, b *body, clients int) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, s := range l.stacks {
		if s.tandem == nil {
			continue
		}
		loaded, cancel := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = l.load(loaded, s, sh, b, clients, 1<<40)
		}()
		err := fetch(ctx, fmt.Sprintf("%s/debug/pprof/profile?seconds=%d", s.admin, int(profileTime.Seconds())),
			filepath.Join(dir, fmt.Sprintf("%s-%s-%d.pprof", s.name, sh.name, clients)))
		cancel()
		<-ended
		if err != nil {
			return fmt.Errorf("profiling %s: %w", s.name, err)
		}
	}
	return nil
}

// fetch writes the answer of url to a file.
func fetch(ctx context.Context, url, file string) error {
	text, err := process.Get(ctx, url)
	if err != nil {
		return fmt.Errorf("%s: %w", url, err)
	}
	return os.WriteFile(file, text, 0o644)
}
