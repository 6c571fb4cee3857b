package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"tandem/e2e/process"
)

// Many endpoints with KV events (-endpoints 100 -kv-events -idle 10s) show what a fleet costs that a pair does not:
// what each stack takes of the processor without requests, and that the engines' events arrived.

// idle prints and returns what every stack takes of a core, in percent, while no requests come. All are measured at
// once, for they do nothing.
func (l *lab) idle(ctx context.Context, d time.Duration, stdout io.Writer) (all []float64, err error) {
	var before []round
	for _, s := range l.stacks {
		used, err := s.used()
		if err != nil {
			return nil, err
		}
		before = append(before, used)
	}
	if err := pause(ctx, d); err != nil {
		return nil, err
	}
	var texts []string
	for i, s := range l.stacks {
		now, err := s.used()
		if err != nil {
			return nil, err
		}
		share := func(used time.Duration) float64 { return 100 * used.Seconds() / d.Seconds() }
		text := fmt.Sprintf("%s: %.1f", s.name, share(now.tandem-before[i].tandem))
		if s.envoy != nil {
			text += fmt.Sprintf(" and its Envoy %.1f", share(now.envoy-before[i].envoy))
		}
		texts, all = append(texts, text), append(all, share(now.cpu()-before[i].cpu()))
	}
	fmt.Fprintf(stdout, "Without requests, %% of a core: %s.\n\n", strings.Join(texts, "; "))
	return all, nil
}

// used is the CPU time of a stack's processes up to now, of all engines, and of this program.
func (l *lab) used(s *stack) (r round, err error) {
	if r, err = s.used(); err == nil {
		r.engines, err = cpuOf(l.simulators...)
	}
	r.client = process.OwnCPU()
	return r, err
}

// used is the CPU time of a stack's processes up to now.
func (s *stack) used() (r round, err error) {
	if r.envoy, err = s.envoy.CPU(); err != nil {
		return r, err
	}
	r.tandem, err = cpuOf(slices.Concat(s.routers, s.tandems)...)
	return r, err
}

// checkEvents checks that KV events reached every Tandem, and prints how many.
func (l *lab) checkEvents(ctx context.Context, stdout io.Writer) error {
	for _, s := range l.stacks {
		if s.tandem == nil {
			continue
		}
		text, err := process.Get(ctx, s.admin+"/metrics")
		if err != nil {
			return err
		}
		counts := map[string]float64{} // by metric, over all endpoints
		for line := range strings.Lines(string(text)) {
			name, ok := strings.CutPrefix(line, "tandem_kv_events_")
			if !ok {
				continue
			}
			name, _, _ = strings.Cut(name, "{")
			v, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' ')+1:]), 64)
			if err != nil {
				return fmt.Errorf("%q: %w", line, err)
			}
			counts[name] += v
		}
		if counts["batches_total"] == 0 {
			return fmt.Errorf("%s took no KV events", s.name)
		}
		fmt.Fprintf(stdout, "KV events that %s took: %.0f engines, %.0f batches, %.0f blocks held, %.0f gaps, "+
			"%.0f lost.\n\n", s.name, counts["connected"], counts["batches_total"], counts["blocks"],
			counts["gaps_total"], counts["lost_total"])
	}
	return nil
}
