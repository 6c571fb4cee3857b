package main

import (
	"fmt"
	"strings"
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
