package report

import (
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"

	"tandem/replay"
)

const answerPage = `<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>What to run</title>
<style>{{style}}</style>
<h1>{{if .Advice}}What to run{{else}}What if{{end}}</h1>
{{with .Off}}<div class="off"><p><b>{{warning}}</b></p><ul>{{range .}}<li>{{.}}{{end}}</ul></div>{{end}}
{{with .Advice}}<div class="answer">{{range .Sentences}}<p>{{.}}</p>{{end}}</div>{{end}}
<p>{{range .About}}{{.}}<br>{{end}}</p>
{{with .Notes}}<ul class="soft">{{range .}}<li>{{.}}{{end}}</ul>{{end}}
<h2>How right is the replay?</h2>
<p class="soft">What happened beside what the replay says of the same fleet. What it says of others is worth as much.</p>
<table><tr><th><th>measured<th>replayed</tr>
{{range .Compared}}<tr><td>{{.What}}<td>{{.Measured}}<td>{{.Replayed}}</tr>{{end}}</table>
{{range tables .}}<h2>{{.Title}}</h2>
<div class="scroll"><table><tr><th><th>promise kept<th>first token p50<th>p95<th>per token, mean<th>p95<th>cached<th>computed again<th>queue, p95
{{if .Needed}}<th>engines that keep it{{end}}</tr>
{{$needed := .Needed}}{{range .Rows}}<tr><td>{{.Name}}<td>{{percent .Kept}}<td>{{s .TTFT.P50}}<td>{{s .TTFT.P95}}<td>{{ms .TPOT.Mean}}<td>{{ms .TPOT.P95}}
<td>{{percent .Cached}}<td>{{percent .Again}}<td>{{s .Waits.P95}}{{if $needed}}<td>{{.NeededWords}}{{end}}</tr>
{{end}}</table></div>{{end}}
{{if .Curves}}<h2>Goodput over load</h2>
<p class="soft">The share of requests that keep both targets, when so many times as many conversations come. The dashed line is the
share at which a fleet is said to keep its promise.</p>{{goodput .}}
<h2>First tokens</h2><p class="soft">The share of requests that have their first token within a time.</p>{{first .}}
<h2>KV memory</h2><p class="soft">The share that running requests take, mean of all engines, as replayed. What is cached beside them may go at any
time, and does not count.</p>{{memory .}}{{end}}
<p class="soft">Times of the replay are virtual: engines are a model that was calibrated by what Tandem had learned of yours, or by
their profile. The decisions are those of Tandem's own code.</p>
</html>
`

// answerTable is one table of fleets.
type answerTable struct {
	Title  string
	Rows   []replay.Row
	Needed bool
}

// WriteAnswer writes what the replay of a recording says as one page, which needs nothing else.
func WriteAnswer(w io.Writer, a *replay.Answer) error {
	t, err := template.New("answer").Funcs(template.FuncMap{
		"style":   func() template.CSS { return style },
		"warning": func() string { return replay.OffWarning },
		"s":       func(x float64) string { return fmt.Sprintf("%.3g s", x) },
		"ms":      func(x float64) string { return fmt.Sprintf("%.1f ms", 1000*x) },
		"percent": func(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) },
		"tables":  answerTables, "goodput": goodput, "first": answerFirst, "memory": kvMemory,
	}).Parse(answerPage)
	if err != nil {
		return err
	}
	return t.Execute(w, a)
}

func answerTables(a *replay.Answer) (out []answerTable) {
	was := a.Now
	was.Name += " (as it was)"
	if len(a.Rows) > 0 {
		out = append(out, answerTable{"What if", append([]replay.Row{was}, a.Rows...), was.Needed != 0})
	}
	if len(a.Fleets) > 0 {
		out = append(out, answerTable{Title: "Fleets that were searched", Rows: a.Fleets})
	}
	return out
}

// goodput plots how much of the promise each fleet keeps as load grows.
func goodput(a *replay.Answer) template.HTML {
	loads := replay.Loads()
	p := plot{y: percent(1, "promise kept", 0, .25, .5, .75, 1), lines: []float64{replay.Keeps},
		x: axis{from: loads[0], to: loads[len(loads)-1], marks: loads, title: "load, times what was recorded",
			label: func(v float64) string { return fmt.Sprintf("%g", v) }}}
	for i := range a.Curves {
		p.curves = append(p.curves, curve{a.Curves[i].Of.Name, i, loads, a.Curves[i].Kept})
	}
	return p.svg()
}

// measuredColour is that of what happened.
const measuredColour = 6

func answerFirst(a *replay.Answer) template.HTML {
	p := plot{y: percent(1, "share of requests", 0, .25, .5, .75, .95)}
	least, most := 1e9, 0.0
	add := func(name string, colour int, times []float64) {
		if len(times) == 0 {
			return
		}
		c := curve{name: name, colour: colour, x: times}
		least, most = min(least, max(times[0], .001)), max(most, times[len(times)-1])
		for i := range times {
			c.y = append(c.y, float64(i)/float64(len(times)-1))
		}
		p.curves = append(p.curves, c)
	}
	add("measured", measuredColour, a.Measured.FirstTokens)
	for i := range a.Curves {
		add(a.Curves[i].Of.Name, i, a.Curves[i].Of.FirstTokens)
	}
	p.x = seconds(least, most, "time to the first token")
	return p.svg()
}

// kvMemory plots the use of KV memory over the time of the recording.
func kvMemory(a *replay.Answer) template.HTML {
	unit, name := 1.0, "s"
	switch {
	case a.Load.Seconds > 3*3600:
		unit, name = 3600, "hours"
	case a.Load.Seconds > 300:
		unit, name = 60, "minutes"
	}
	p := plot{x: axis{to: a.Load.Seconds / unit, title: name + " since the first request",
		label: func(v float64) string { return fmt.Sprintf("%.3g", v) }}}
	most := 0.0
	for i := range a.Curves {
		c := curve{name: a.Curves[i].Of.Name, colour: i, y: a.Curves[i].Of.KV}
		for j := range c.y {
			c.x = append(c.x, float64(j)/float64(len(c.y)-1)*p.x.to)
		}
		most = max(most, slices.Max(c.y))
		p.curves = append(p.curves, c)
	}
	step := math.Pow(10, math.Floor(math.Log10(p.x.to)))
	for p.x.to/step < 5 {
		step /= 2
	}
	for at := 0.0; at <= p.x.to; at += step {
		p.x.marks = append(p.x.marks, at)
	}
	to := 1.0
	for _, less := range []float64{.5, .2, .1, .05, .02, .01} {
		if most <= less {
			to = less
		}
	}
	p.y = percent(to, "KV memory", 0, to/4, to/2, to*3/4, to)
	return p.svg()
}
