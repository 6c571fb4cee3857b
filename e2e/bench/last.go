package main

import (
	"fmt"
	"io"
	"math"
	"time"

	"tandem/e2e/process"
)

// key names a measurement. A new one replaces the last one with the same key.
type key struct {
	Shape    string  `json:"shape,omitempty"`
	Clients  int     `json:"clients,omitempty"`
	Beside   string  `json:"beside,omitempty"` // shape of the requests beside
	Stack    string  `json:"stack,omitempty"`
	Replicas int     `json:"replicas,omitempty"` // in the fleet mode
	Rate     float64 `json:"rate,omitempty"`     // requests a second of all clients; 0: as fast as possible
	Pinned   bool    `json:"pinned,omitempty"`   // in the fleet mode: -pin
}

// size belongs to the key in the mode -capacity: how many endpoints, or open streams, there are.
type size struct {
	Endpoints int `json:"endpoints"`
	Streams   int `json:"streams"`
}

// origin says when and where a line was measured.
type origin struct {
	Date     string `json:"date"`               // UTC
	Machine  string `json:"machine"`            // processor and cores
	Versions string `json:"versions,omitempty"` // of peers
}

// figures are one line of the report, for the next run and for docs/benchmarks.md. CPU is per request, p50 and p99 are
// until the answer's end. Ratios to the floor of the same run can be compared between runs; times and CPU belong to a
// machine and an hour.
type figures struct {
	key
	origin
	CPU     float64 `json:"cpuXFloor,omitempty"`
	P50     float64 `json:"p50XFloor,omitempty"`
	P99     float64 `json:"p99XFloor,omitempty"`
	Tandem  float64 `json:"cpuXTandem,omitempty"` // of the stacks after the first Tandem
	More    float64 `json:"p50MsMore,omitempty"`  // than the first Tandem's, ms
	Envoy   float64 `json:"envoyMs,omitempty"`    // CPU
	Router  float64 `json:"routerMs,omitempty"`   // CPU of Tandem and its Redis, or of a peer
	P50ms   float64 `json:"p50Ms,omitempty"`
	P99ms   float64 `json:"p99Ms,omitempty"`
	P999ms  float64 `json:"p999Ms,omitempty"`
	FirstMs float64 `json:"firstByteMs,omitempty"` // p50, of streams

	Fleet *fleetCost   `json:"fleet,omitempty"`
	Rest  *moreFigures `json:"more,omitempty"` // with -first, and with many engines
}

// moreFigures are those of the mode -first (the first byte's p99, ms; what the stack adds to FirstMs of a client that
// asks the engines itself; the most requests a second), and of many engines (their number; requests a second; percent
// of a core without requests, and most memory, Envoy included), and of -capacity: p99 at the lowest rate (ms), the
// highest rate at which it is less than twice that, and memory.
type moreFigures struct {
	Engines   int     `json:"engines,omitempty"`
	First99   float64 `json:"firstByteP99Ms,omitempty"`
	Added     float64 `json:"addedMs,omitempty"`
	PerSecond float64 `json:"perSecond,omitempty"`
	Idle      float64 `json:"idlePercent,omitempty"`
	Peak      int64   `json:"peakMiB,omitempty"`
	Size      size    `json:"size,omitzero"`
	Low99     float64 `json:"lowP99Ms,omitempty"`
	Doubles   float64 `json:"doubles,omitempty"`
	Cores     *cores  `json:"cores,omitempty"`
	EnvoyMiB  float64 `json:"envoyMiB,omitempty"`
	RouterMiB float64 `json:"routerMiB,omitempty"`
}

// fleetCost is a line of the fleet mode: CPU (ms) and counts per request, and CPU of a second without requests (ms).
type fleetCost struct {
	Envoy    float64 `json:"envoyMs"`
	Tandem   float64 `json:"tandemMs"`
	Redis    float64 `json:"redisMs"`
	One      float64 `json:"xOne"` // CPU, as a multiple of the smallest fleet's
	Logs     float64 `json:"logEntries"`
	Commands float64 `json:"redisCommands"`
	Wakeups  float64 `json:"wakeups"`
	Idle     float64 `json:"idleMs"`
}

// figuresOf returns the figures of a stack; tandem are the rounds of the first Tandem, nil for itself and the floor.
func figuresOf(k key, sh shape, rounds, floor, tandem []round) figures {
	ms := func(d time.Duration) float64 { return round3(d.Seconds() * 1e3) }
	f := figures{
		key:    k,
		Envoy:  ms(median(each(rounds, func(r *round) time.Duration { return r.envoy }))),
		Router: ms(median(each(rounds, func(r *round) time.Duration { return r.tandem }))),
		P50ms:  ms(median(each(rounds, p50))), P99ms: ms(tail(rounds, .99)), P999ms: ms(tail(rounds, .999)),
	}
	if sh.stream {
		f.FirstMs = ms(median(each(rounds, first)))
	}
	if k.Stack != floorName {
		f.CPU, f.P50 = round3(ratio(rounds, floor, (*round).cpu)), round3(ratio(rounds, floor, p50))
		f.P99 = round3(float64(tail(rounds, .99)) / float64(tail(floor, .99)))
	}
	if tandem != nil {
		f.Tandem = round3(ratio(rounds, tandem, (*round).cpu))
		f.More = round3(f.P50ms - ms(median(each(tandem, p50))))
	}
	return f
}

func round3(v float64) float64 { return math.Round(v*1e3) / 1e3 }

type fullKey struct {
	key
	size
}

func (f *figures) fullKey() fullKey {
	if f.Rest == nil {
		return fullKey{key: f.key}
	}
	return fullKey{f.key, f.Rest.Size}
}

// publish prints this run's ratios beside those that a file has of earlier runs, and puts this run's lines in the place
// of those with the same key. What this run did not measure stays.
func publish(w io.Writer, file string, from origin, now []figures) error {
	all, err := process.Figures[figures](file)
	if err != nil {
		return fmt.Errorf("reading the last run's figures: %w", err)
	}
	writeChanges(w, all, now)
	for i := range now {
		now[i].origin = from
	}
	return process.WriteFigures(file, all, now, (*figures).fullKey)
}

func writeChanges(w io.Writer, last, now []figures) {
	fmt.Fprint(w, "\nMultiples of the floor (with `fleet`: of the smallest fleet), and those of the last run:\n\n"+
		"| shape | clients | stack | CPU | p50 | p99 | last run |\n|---|---|---|---|---|---|---|\n")
	for _, n := range now {
		for _, f := range last {
			switch {
			case f.fullKey() != n.fullKey():
			case f.Fleet != nil && n.Fleet != nil:
				fmt.Fprintf(w, "| fleet | | %d replicas | %.2f (%.2f) | | | %s |\n", n.Replicas, n.Fleet.One,
					f.Fleet.One, f.Date)
			case n.CPU > 0:
				fmt.Fprintf(w, "| %s | %d | %s | %.2f (%s) | %.2f (%s) | %.2f (%s) | %s |\n", n.Shape, n.Clients,
					n.Stack, n.CPU, was(f.CPU), n.P50, was(f.P50), n.P99, was(f.P99), f.Date)
			}
		}
	}
}

// was formats a figure of an earlier run, which may lack it.
func was(v float64) string {
	if v == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", v)
}
