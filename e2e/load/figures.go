package main

import (
	"fmt"
	"time"

	"tandem/e2e/process"
)

// figureKey names a line of docs/benchmarks.md.
type figureKey struct {
	Bytes    int  `json:"bytes"`
	Stream   bool `json:"stream,omitempty"`
	Clients  int  `json:"clients"`
	Replicas int  `json:"replicas"`
	Redis    bool `json:"redis,omitempty"`
}

// figures are such a line. Times are milliseconds, of streams until the first token.
type figures struct {
	figureKey
	Date      string  `json:"date"`
	Machine   string  `json:"machine"`
	PerSecond float64 `json:"perSecond"`
	P50       float64 `json:"p50Ms"`
	P99       float64 `json:"p99Ms"`
}

// shownClients and shownEndpoints are those of the cases in docs/benchmarks.md.
const shownClients, shownEndpoints = 16, 4

// publish puts the closed loops of this run in the place of those in a file. What this run did not measure stays.
func (r *report) publish(file string) error {
	all, err := process.Figures[figures](file)
	if err != nil {
		return fmt.Errorf("reading the figures: %w", err)
	}
	var now []figures
	for i := range r.Results {
		c := &r.Results[i].Case
		if c.Share > 0 || c.Clients != shownClients || c.Endpoints != shownEndpoints || r.Results[i].Error != "" {
			continue
		}
		now = append(now, r.figures(&r.Results[i]))
	}
	return process.WriteFigures(file, all, now, func(f *figures) figureKey { return f.figureKey })
}

func (r *report) figures(of *result) figures {
	c, took := &of.Case, of.Latency
	if c.Stream {
		took = of.FirstToken
	}
	return figures{
		figureKey: figureKey{c.Size, c.Stream, c.Clients, c.Replicas, c.Redis},
		Date:      r.Began.Format(time.DateOnly), Machine: r.Machine,
		PerSecond: of.PerSecond, P50: took.P50, P99: took.P99,
	}
}
