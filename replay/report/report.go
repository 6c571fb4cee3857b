// Package report writes the results of replays for people: a table, and a page with plots.
//
// Arrows: it imports replay for the results.
package report

import (
	"fmt"
	"html/template"
	"io"
	"strings"

	"tandem/replay"
)

// Report is the content of an HTML report.
type Report struct {
	Title   string
	About   []string // the trace and the fleet, a line each
	Results []*replay.Result
}

const page = `<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{.Title}}</title>
<style>{{style}}</style>
<h1>{{.Title}}</h1>
<p>{{range .About}}{{.}}<br>{{end}}</p>
<table><tr><th>policy<th>TTFT mean, s<th>p50<th>p90<th>p99<th>TPOT mean, ms<th>p99<th>end to end, s<th>hit share
<th>max/mean load<th>goodput<th>decode alone</tr>
{{range $i, $r := .Results}}<tr><td><i style="background:{{colour $i}}"></i>{{.Policy}}
<td>{{s .TTFT.Mean}}<td>{{s .TTFT.P50}}<td>{{s .TTFT.P90}}<td>{{s .TTFT.P99}}<td>{{ms .TPOT.Mean}}<td>{{ms .TPOT.P99}}
<td>{{s .EndToEnd.Mean}}<td>{{s .HitShare}}<td>{{s .MaxMeanLoad}}<td>{{s .Goodput}}<td>{{s .Alone}}</tr>
{{end}}</table>
<h2>Time to the first token: share of requests served within</h2>{{distribution .Results}}
<h2>Mean time to the first token</h2>{{bars .Results "mean"}}
<h2>99th percentile of the time to the first token</h2>{{bars .Results "p99"}}
<h2>Share of prompt tokens found in a cache</h2>{{bars .Results "hit"}}
<p>Times are virtual: the engines are a model (package replay), the decisions of "tandem" are those of the
server's own picker.</p>
</html>
`

// Write writes the report: one self-contained page.
func (r *Report) Write(w io.Writer) error {
	t, err := template.New("report").Funcs(template.FuncMap{
		"colour":       func(i int) template.CSS { return template.CSS(palette(i)) }, //nolint:gosec // ours
		"style":        func() template.CSS { return style },
		"s":            func(x float64) string { return fmt.Sprintf("%.3g", x) },
		"ms":           func(x float64) string { return fmt.Sprintf("%.1f", 1000*x) },
		"distribution": distribution,
		"bars":         bars,
	}).Parse(page)
	if err != nil {
		return err
	}
	return t.Execute(w, r)
}

// distribution plots the share of requests with a time to the first token of at most x.
func distribution(results []*replay.Result) template.HTML {
	p := plot{y: percent(1, "share of requests", 0, .25, .5, .75, .9, 1)}
	most := .1
	for i, r := range results {
		times, c := r.FirstTokens(), curve{name: r.Policy, colour: i}
		most = max(most, times[len(times)-1])
		for step := range 201 {
			q := float64(step) / 200
			c.x, c.y = append(c.x, times[min(int(q*float64(len(times))), len(times)-1)]), append(c.y, q)
		}
		p.curves = append(p.curves, c)
	}
	p.x = seconds(.01, most, "time to the first token")
	return p.svg()
}

// bars plots one number of each policy.
func bars(results []*replay.Result, what string) template.HTML {
	value := func(r *replay.Result) float64 {
		switch what {
		case "mean":
			return r.TTFT.Mean
		case "p99":
			return r.TTFT.P99
		}
		return r.HitShare
	}
	most := 0.0
	for _, r := range results {
		most = max(most, value(r))
	}
	var b strings.Builder
	const row = 24.0
	fmt.Fprintf(&b, `<svg viewBox="0 0 %g %g" role="img">`, width, row*float64(len(results)))
	for i, r := range results {
		at := row * float64(i)
		fmt.Fprintf(&b, `<text x="%g" y="%g" text-anchor="end">%s</text><rect x="%g" y="%g" `+
			`width="%.1f" height="%g" style="fill:%s"/><text x="%.1f" y="%g">%.3g</text>`,
			left-8, at+16, template.HTMLEscapeString(r.Policy), left, at+3, (width-left-80)*value(r)/max(most, 1e-9),
			row-6, palette(i),
			left+(width-left-80)*value(r)/max(most, 1e-9)+6, at+16, value(r))
	}
	b.WriteString("</svg>")
	return template.HTML(b.String()) //nolint:gosec // numbers, and names that are escaped
}
