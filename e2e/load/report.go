package main

import (
	_ "embed" // the page
	"encoding/json"
	"fmt"
	"html/template"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// report is the result of a run.
type report struct {
	Began    time.Time
	Machine  string
	Versions string
	Missing  []string // tools, and the cases left out for them
	Results  []result
	Configs  []configText
}

// result is one case. CPU is milliseconds per request, memory MiB.
type result struct {
	Case      testCase
	Name      string
	Command   string // of the tool
	Error     string // why there is no result
	Seconds   float64
	Requests  int
	Errors    int
	PerSecond float64
	PerCore   float64 // requests per second of CPU of Envoy and Tandem together

	Latency       percentiles // until the answer's end
	FirstToken    percentiles
	BetweenTokens percentiles

	EnvoyCPU, TandemCPU, EnginesCPU, ToolCPU float64
	EnvoyMemory, TandemMemory                float64
	driver                                   time.Duration // CPU of the tool, its start included
	from, to                                 time.Time     // of the requests
}

// account computes the resources per request.
func (r *result) account(before, after usage) {
	per := func(d time.Duration) float64 { return d.Seconds() * 1000 / float64(max(r.Requests+r.Errors, 1)) }
	r.EnvoyCPU, r.TandemCPU, r.EnginesCPU, r.ToolCPU = per(after.envoy-before.envoy), per(after.tandem-before.tandem),
		per(after.engines-before.engines), per(r.driver)
	if used := (r.EnvoyCPU + r.TandemCPU) / 1000; used > 0 {
		r.PerCore = 1 / used
	}
	r.EnvoyMemory, r.TandemMemory = float64(after.envoyMemory)/mb, float64(after.tandemBytes)/mb
}

// write writes report.html and report.json into a directory.
func (r *report) write(dir string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	asJSON, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return "", fmt.Errorf("writing the report: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "report.json"), asJSON, 0o644); err != nil {
		return "", err
	}
	file := filepath.Join(dir, "report.html")
	out, err := os.Create(file)
	if err != nil {
		return "", err
	}
	defer out.Close()
	functions := template.FuncMap{"ms": number, "add": func(a, b int) int { return a + b }}
	page, err := template.New("report").Funcs(functions).Parse(pageText)
	if err != nil {
		return "", err
	}
	if err := page.Execute(out, map[string]any{"R": r, "Plots": r.plots(), "Summary": r.summary()}); err != nil {
		return "", fmt.Errorf("writing the report: %w", err)
	}
	return file, nil
}

func number(v float64) string {
	switch {
	case v == 0:
		return ""
	case v < 1:
		return fmt.Sprintf("%.3f", v)
	case v < 100:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// plot is a bar chart with a bar for every case, each of several parts.
type plot struct {
	Title, Unit string
	Parts       []string
	SVG         template.HTML
}

func (r *report) plots() []plot {
	chart := func(title, unit string, stacked bool, parts []string, of func(result) []float64) plot {
		return plot{title, unit, parts, draw(r.Results, stacked, parts, of)}
	}
	return []plot{
		chart("Time until the answer's end", "ms", false, []string{"p50", "p90", "p99"}, func(r result) []float64 {
			return []float64{r.Latency.P50, r.Latency.P90, r.Latency.P99}
		}),
		chart("Time to the first token (streams)", "ms", false, []string{"p50", "p90", "p99"},
			func(r result) []float64 {
				return []float64{r.FirstToken.P50, r.FirstToken.P90, r.FirstToken.P99}
			}),
		chart("Time between tokens (streams)", "ms", false, []string{"p50", "p90", "p99"}, func(r result) []float64 {
			return []float64{r.BetweenTokens.P50, r.BetweenTokens.P90, r.BetweenTokens.P99}
		}),
		chart("CPU per request", "ms", true, []string{"Envoy", "Tandem", "engines", "tool"}, func(r result) []float64 {
			return []float64{r.EnvoyCPU, r.TandemCPU, r.EnginesCPU, r.ToolCPU}
		}),
		chart("Requests per second and core of Envoy and Tandem", "1/s", false, []string{"per core"},
			func(r result) []float64 { return []float64{r.PerCore} }),
		chart("Requests per second", "1/s", false, []string{"rate"}, func(r result) []float64 {
			return []float64{r.PerSecond}
		}),
		chart("Memory, resident", "MiB", true, []string{"Envoy", "Tandem"}, func(r result) []float64 {
			return []float64{r.EnvoyMemory, r.TandemMemory}
		}),
		chart("Errors", "", false, []string{"errors"}, func(r result) []float64 {
			return []float64{float64(r.Errors)}
		}),
	}
}

// draw returns the chart as SVG: cases below each other, parts stacked in one bar or as bars below each other.
func draw(results []result, stacked bool, parts []string, of func(result) []float64) template.HTML {
	const width, left, thick = 900, 330, 12
	most := 0.0
	for _, r := range results {
		sum := 0.0
		for _, v := range of(r) {
			if stacked {
				sum += v
			} else {
				sum = max(sum, v)
			}
		}
		most = max(most, sum)
	}
	var b strings.Builder
	y := 4
	for _, r := range results {
		values, x := of(r), 0.0
		if most > 0 && slices.Max(values) == 0 {
			continue // this chart does not show the case
		}
		text := ""
		for i, v := range values {
			w := 0.0
			if most > 0 {
				w = v / most * (width - left - 90)
			}
			fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" class="p%d"><title>%s %s</title></rect>`,
				left+x, y, w, thick-2, i, parts[i], number(v))
			if stacked {
				x += w
				text += " " + number(v)
				continue
			}
			fmt.Fprintf(&b, `<text x="%.1f" y="%d">%s</text>`, left+w+4, y+thick-3, number(v))
			if i+1 < len(values) {
				y += thick
			}
		}
		if stacked {
			fmt.Fprintf(&b, `<text x="%.1f" y="%d">%s</text>`, left+x+4, y+thick-3,
				strings.Join(strings.Fields(text), " + "))
		}
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%s</text>`, left-6, y+thick-3,
			template.HTMLEscapeString(r.Name))
		y += thick + 8
	}
	return template.HTML(fmt.Sprintf(`<svg viewBox="0 0 %d %d" xmlns="http://www.w3.org/2000/svg">%s</svg>`, width, y,
		b.String()))
}

//go:embed report.html
var pageText string
