package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// configText is the configuration of the processes in some cases, exactly as they ran.
type configText struct {
	Of       string   // endpoints, replicas and kind of answers
	YAML     string   // of Tandem's first replica
	Others   []string // of each other replica, the lines in which it differs from the first
	Envoy    string   // Envoy's bootstrap
	Commands []string // command lines of all processes
}

// keepConfig stores the configuration of a stand, once.
func (r *report) keepConfig(s *stand) {
	of := fmt.Sprintf("%d endpoints, %s, %s", s.of.Endpoints, s.of.fleet(), s.of.kind())
	for i := range r.Configs {
		if r.Configs[i].Of == of {
			return
		}
	}
	c := configText{Of: of, YAML: s.configs[0], Envoy: s.bootstrap, Commands: s.Commands()}
	for _, other := range s.configs[1:] {
		c.Others = append(c.Others, differing(c.YAML, other))
	}
	r.Configs = append(r.Configs, c)
}

// differing returns the lines of a text that another does not have at the same place.
func differing(from, text string) string {
	before := strings.Split(from, "\n")
	var out strings.Builder
	for i, line := range strings.Split(text, "\n") {
		if i >= len(before) || line != before[i] {
			out.WriteString(line + "\n")
		}
	}
	return out.String()
}

// readPrevious reads the report of the last run in a directory; nil: there is none.
func readPrevious(dir string) (*report, error) {
	text, err := os.ReadFile(filepath.Join(dir, "report.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("reading the last run's report.json: %w", err)
	}
	return &r, nil
}

// summary returns the run's results in a few sentences.
func (r *report) summary() []string {
	var requests, failed, broken int
	var fastest, cheapest *result
	for i := range r.Results {
		c := &r.Results[i]
		requests += c.Requests + c.Errors
		failed += c.Errors
		if c.Error != "" {
			broken++
		}
		if c.Case.Stream || c.Error != "" {
			continue
		}
		if fastest == nil || c.PerSecond > fastest.PerSecond {
			fastest = c
		}
		if cheapest == nil || c.PerCore > cheapest.PerCore {
			cheapest = c
		}
	}
	out := []string{fmt.Sprintf("%d requests in %s; %d failed.", requests, count(len(r.Results), "case"), failed)}
	if broken > 0 {
		out = append(out, fmt.Sprintf("%s could not be run: the table says why.", count(broken, "case")))
	}
	if fastest != nil {
		out = append(out, fmt.Sprintf("The highest rate was %s requests a second over two hops, with a p99 of %s ms "+
			"(%s). Engines and the load tool share the machine.",
			number(fastest.PerSecond), number(fastest.Latency.P99), fastest.Name))
		out = append(out, fmt.Sprintf("At best, one core of Envoy and Tandem together carries %s requests a second "+
			"(%s).", number(cheapest.PerCore), cheapest.Name))
	}
	for _, c := range r.Results {
		if c.Case.Stream && c.Error == "" {
			out = append(out, fmt.Sprintf("Streams: first token after %s ms (p50) and %s ms (p99), then one each %s "+
				"ms (p50); the engine makes one each 5 ms (%s).",
				number(c.FirstToken.P50), number(c.FirstToken.P99), number(c.BetweenTokens.P50), c.Name))
			break
		}
	}
	return out
}

// change compares one case with the same case of the last run, in percent of the latter.
type change struct {
	Name                    string
	PerSecond, P99, CPU     float64 // CPU of Envoy and Tandem per request
	ErrorsBefore, ErrorsNow int
}

// Significant reports whether the CPU changed by more than the noise.
func (c change) Significant() bool { return math.Abs(c.CPU) > noise }

// Worse reports whether the CPU rose by more than the noise.
func (c change) Worse() bool { return c.CPU > noise }

// noise is the difference between two runs of the same programs on a busy machine, in percent.
const noise = 10

// notCompared says why the report has no comparison with the last run; "" if it has one.
func (r *report) notCompared() string {
	switch {
	case r.previous == nil:
		return "Not compared: there is no last run in this directory."
	case r.previous.Machine != r.Machine:
		return fmt.Sprintf("Not compared: the last run, of %s, was on another machine (%s).",
			r.previous.Began.Format(minute), r.previous.Machine)
	case len(r.changes()) == 0:
		return fmt.Sprintf("Not compared: the last run, of %s, measured none of these cases.",
			r.previous.Began.Format(minute))
	}
	return ""
}

// minute is how the report writes times.
const minute = time.DateOnly + " 15:04 UTC"

// changes compares with the last run; none if it ran on another machine.
func (r *report) changes() []change {
	if r.previous == nil || r.previous.Machine != r.Machine {
		return nil
	}
	before := map[string]*result{}
	for i := range r.previous.Results {
		before[r.previous.Results[i].Name] = &r.previous.Results[i]
	}
	percent := func(now, then float64) float64 {
		if then == 0 {
			return 0
		}
		return 100 * (now/then - 1)
	}
	var out []change
	for i := range r.Results {
		now, then := &r.Results[i], before[r.Results[i].Name]
		if then == nil || now.Error != "" || then.Error != "" {
			continue
		}
		out = append(out, change{
			Name: now.Name, ErrorsBefore: then.Errors, ErrorsNow: now.Errors,
			PerSecond: percent(now.PerSecond, then.PerSecond), P99: percent(now.Latency.P99, then.Latency.P99),
			CPU: percent(now.EnvoyCPU+now.TandemCPU, then.EnvoyCPU+then.TandemCPU),
		})
	}
	return out
}
