// Package report writes the results of replays for people: a table, and a page with plots.
//
// Arrows: it imports replay for the results.
package report

import (
	"fmt"
	"html/template"
	"io"
	"math"
	"strings"

	"tandem/replay"
)

// Report is the content of an HTML report.
type Report struct {
	Title   string
	About   []string // the trace and the fleet, a line each
	Results []*replay.Result
}

// palette returns colours that people with colour vision deficiency can distinguish (Okabe and Ito, 2008).
func palette(i int) string {
	colours := [...]string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999",
		"#8b4513", "#6a3d9a"}
	return colours[i%len(colours)]
}

const page = `<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{.Title}}</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%;margin:1rem 0}
td,th{padding:.25rem .5rem;text-align:right;border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}
td:first-child,th:first-child{text-align:left}
svg{width:100%;height:auto;margin:.5rem 0 1.5rem}
i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
</style>
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
		"colour":       palette,
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

// The plots' size, and the position of their axes.
const (
	width, height = 900.0, 340.0
	left, bottom  = 120.0, 30.0
)

// distribution plots the share of requests with a time to the first token of at most x, x on a logarithmic axis.
func distribution(results []*replay.Result) template.HTML {
	least, most := 0.01, 0.1
	for _, r := range results {
		most = max(most, r.FirstTokens()[len(r.FirstTokens())-1])
	}
	x := func(seconds float64) float64 {
		return left + (width-left-10)*math.Log(max(seconds, least)/least)/math.Log(most/least)
	}
	y := func(share float64) float64 { return (height - bottom) * (1 - share) }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg viewBox="0 0 %g %g" role="img">`, width, height)
	for seconds := least; seconds <= most; seconds *= 10 {
		fmt.Fprintf(&b, `<path d="M%.1f 0V%.1f" stroke="#ddd"/><text x="%.1f" y="%.1f" font-size="13" `+
			`text-anchor="middle">%g s</text>`,
			x(seconds), y(0), x(seconds), height-8, seconds)
	}
	for _, share := range []float64{0, .25, .5, .75, .9, 1} {
		fmt.Fprintf(&b, `<path d="M%g %.1fH%g" stroke="#ddd"/><text x="%g" y="%.1f" font-size="13" `+
			`text-anchor="end">%g %%</text>`,
			left, y(share), width, left-8, y(share)+12*share, 100*share)
	}
	for i, r := range results {
		fmt.Fprintf(&b, `<path fill="none" stroke-width="2" stroke="%s" d="M`, palette(i))
		for step := range 201 {
			q := float64(step) / 200
			times := r.FirstTokens()
			fmt.Fprintf(&b, "%.1f %.1f ", x(times[min(int(q*float64(len(times))), len(times)-1)]), y(q))
		}
		fmt.Fprintf(&b, `"><title>%s</title></path>`, template.HTMLEscapeString(r.Policy))
	}
	b.WriteString("</svg>")
	return template.HTML(b.String()) //nolint:gosec // numbers, and names that are escaped
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
		fmt.Fprintf(&b, `<text x="%g" y="%g" font-size="13" text-anchor="end">%s</text><rect x="%g" y="%g" `+
			`width="%.1f" height="%g" fill="%s"/><text x="%.1f" y="%g" font-size="13">%.3g</text>`,
			left-8, at+16, template.HTMLEscapeString(r.Policy), left, at+3, (width-left-80)*value(r)/max(most, 1e-9),
			row-6, palette(i),
			left+(width-left-80)*value(r)/max(most, 1e-9)+6, at+16, value(r))
	}
	b.WriteString("</svg>")
	return template.HTML(b.String()) //nolint:gosec // numbers, and names that are escaped
}
