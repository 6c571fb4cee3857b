package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// figures are one line of the report for the next run. Ratios to the floor of the same run can be compared between
// runs; times and CPU belong to a machine and an hour.
type figures struct {
	Shape   string  `json:"shape"`
	Clients int     `json:"clients"`
	Stack   string  `json:"stack"`
	CPU     float64 `json:"cpuXFloor"`
	P50     float64 `json:"p50XFloor"`
	P99     float64 `json:"p99XFloor"`
	CPUms   float64 `json:"cpuMs"` // per request, of Envoy and Tandem
	P99ms   float64 `json:"p99Ms"`
	P999ms  float64 `json:"p999Ms"`
}

// lastRun is the file of -json.
type lastRun struct {
	At      time.Time `json:"at"`
	Figures []figures `json:"figures"`
}

func figuresOf(sh shape, clients int, stack string, rounds, floor []round) figures {
	ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
	return figures{
		Shape: sh.name, Clients: clients, Stack: stack,
		CPU: ratio(rounds, floor, (*round).cpu), P50: ratio(rounds, floor, p50),
		P99:   float64(tail(rounds, .99)) / float64(tail(floor, .99)),
		CPUms: ms(median(each(rounds, (*round).cpu))), P99ms: ms(tail(rounds, .99)), P999ms: ms(tail(rounds, .999)),
	}
}

// compare prints this run's ratios beside those of the run that a file has, and replaces that.
func (r *report) compare(w io.Writer, file string) error {
	var last lastRun
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &last)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("reading the last run's figures: %w", err)
	}
	if err == nil {
		r.writeChanges(w, &last)
	}
	text, err = json.MarshalIndent(lastRun{time.Now().UTC(), r.figures}, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o600)
}

func (r *report) writeChanges(w io.Writer, last *lastRun) {
	fmt.Fprintf(w, "\nMultiples of the floor, and those of the run of %s:\n\n"+
		"| shape | clients | stack | CPU | p50 | p99 |\n|---|---|---|---|---|---|\n",
		last.At.Format("2006-01-02 15:04 UTC"))
	for _, now := range r.figures {
		for _, f := range last.Figures {
			if f.Shape == now.Shape && f.Clients == now.Clients && f.Stack == now.Stack {
				fmt.Fprintf(w, "| %s | %d | %s | %.2f (%.2f) | %.2f (%.2f) | %.2f (%.2f) |\n", now.Shape, now.Clients,
					now.Stack, now.CPU, f.CPU, now.P50, f.P50, now.P99, f.P99)
			}
		}
	}
}
