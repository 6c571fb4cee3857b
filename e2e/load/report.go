package main

import (
	_ "embed" // the page
	"encoding/json"
	"fmt"
	"html/template"
	"os"
	"path/filepath"
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
	if err := page.Execute(out, map[string]any{"R": r, "Summary": r.summary()}); err != nil {
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

//go:embed report.html
var pageText string
