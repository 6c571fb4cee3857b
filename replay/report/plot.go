package report

import (
	"fmt"
	"html/template"
	"math"
	"strings"
)

// style is that of all pages. Colours are distinct for people with colour vision deficiency (Okabe and Ito, 2008), a
// little darker on white and lighter on black than theirs.
const style = `
:root{color-scheme:light dark;--text:light-dark(#1a2029,#e6e9ee);--soft:light-dark(#5d6775,#97a1b0);--line:light-dark(#dde1e7,#2e3541);
--bg:light-dark(#fff,#12151a);--card:light-dark(#f6f7f9,#1b2028);--bad:light-dark(#b3261e,#ff8a80);
--c0:light-dark(#0072b2,#56a8e0);--c1:light-dark(#c24e00,#ff8a47);--c2:light-dark(#00805c,#2fc79a);--c3:light-dark(#a8508a,#e095c2);
--c4:light-dark(#9a6a00,#f0b429);--c5:light-dark(#3a87ad,#8fd0f5);--c6:light-dark(#444,#ddd);--c7:light-dark(#888,#999);
--c8:light-dark(#8b4513,#d08b5b);--c9:light-dark(#6a3d9a,#b08be0)}
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:var(--text);background:var(--bg)}
h1{font-size:1.6rem;line-height:1.25}h2{font-size:1.15rem;margin:2rem 0 .25rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;margin:1rem 0}
td,th{padding:.25rem .5rem;text-align:right;border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums;white-space:nowrap}
th{color:var(--soft);font-weight:500;white-space:normal;vertical-align:bottom}
td:first-child,th:first-child{text-align:left}
svg{width:100%;height:auto;margin:.5rem 0 0}svg text{fill:var(--soft);font:13px system-ui,sans-serif}
.grid{stroke:var(--line);fill:none}.mark{stroke:var(--soft);stroke-dasharray:4 4;fill:none}.curve{fill:none;stroke-width:2;stroke-linejoin:round}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1.2rem;margin:.2rem 0 1.5rem;color:var(--text)}
i{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
.soft{color:var(--soft)}.answer{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.5rem 1.2rem;font-size:1.05rem}
.off{border-left:5px solid var(--bad);background:var(--card);padding:.4rem 1rem;margin:1rem 0}
`

// palette returns the colour of a series.
func palette(i int) string { return fmt.Sprintf("var(--c%d)", i%10) }

// The plots' size, and the position of their axes.
const (
	width, height = 900.0, 340.0
	left, bottom  = 120.0, 46.0
	top, right    = 10.0, 24.0
)

// axis is a linear or logarithmic axis, with marks at some values.
type axis struct {
	from, to float64
	log      bool
	marks    []float64
	label    func(float64) string
	title    string
}

// at returns where a value is on the axis, from 0 to 1.
func (a *axis) at(v float64) float64 {
	v = min(max(v, a.from), a.to)
	if a.log {
		return math.Log(v/a.from) / math.Log(a.to/a.from)
	}
	return (v - a.from) / (a.to - a.from)
}

// curve is one series.
type curve struct {
	name   string
	colour int
	x, y   []float64
}

// plot is curves over two axes.
type plot struct {
	x, y   axis
	curves []curve
	lines  []float64 // of y: marked across the plot
}

// svg draws the plot, and a legend if there are several curves.
func (p *plot) svg() template.HTML {
	x := func(v float64) float64 { return left + (width-left-right)*p.x.at(v) }
	y := func(v float64) float64 { return top + (height-bottom-top)*(1-p.y.at(v)) }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg viewBox="0 0 %g %g" role="img">`, width, height)
	for _, m := range p.x.marks {
		fmt.Fprintf(&b, `<path class="grid" d="M%.1f %gV%.1f"/><text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`,
			x(m), top, height-bottom, x(m), height-bottom+18, p.x.label(m))
	}
	for _, m := range p.y.marks {
		fmt.Fprintf(&b, `<path class="grid" d="M%g %.1fH%g"/><text x="%g" y="%.1f" text-anchor="end">%s</text>`,
			left, y(m), width-right, left-8, y(m)+4, p.y.label(m))
	}
	fmt.Fprintf(&b, `<text x="%g" y="%g" text-anchor="middle">%s</text>`, (left+width-right)/2, height-6,
		template.HTMLEscapeString(p.x.title))
	fmt.Fprintf(&b, `<text transform="translate(16 %g) rotate(-90)" text-anchor="middle">%s</text>`, (top+height-bottom)/2,
		template.HTMLEscapeString(p.y.title))
	for _, m := range p.lines {
		fmt.Fprintf(&b, `<path class="mark" d="M%g %.1fH%g"/>`, left, y(m), width-right)
	}
	for _, c := range p.curves {
		fmt.Fprintf(&b, `<path class="curve" style="stroke:%s" d="M`, palette(c.colour))
		for i := range c.x {
			fmt.Fprintf(&b, "%.1f %.1f ", x(c.x[i]), y(c.y[i]))
		}
		fmt.Fprintf(&b, `"><title>%s</title></path>`, template.HTMLEscapeString(c.name))
	}
	b.WriteString("</svg>")
	if len(p.curves) > 1 {
		b.WriteString(`<div class="legend">`)
		for _, c := range p.curves {
			fmt.Fprintf(&b, `<span><i style="background:%s"></i>%s</span>`, palette(c.colour), template.HTMLEscapeString(c.name))
		}
		b.WriteString("</div>")
	}
	return template.HTML(b.String()) //nolint:gosec // numbers, and names that are escaped
}

// seconds returns a logarithmic axis of times, from 10 ms at least up to a most.
func seconds(least, most float64, title string) axis {
	a := axis{from: max(least, .01), to: max(most, 10*max(least, .01)), log: true, title: title,
		label: func(s float64) string { return fmt.Sprintf("%g s", s) }}
	for s := .01; s <= a.to; s *= 10 {
		for _, of := range []float64{1, 2, 5} {
			if v := s * of; v >= a.from*.999 && v <= a.to {
				a.marks = append(a.marks, math.Round(v*1000)/1000)
			}
		}
	}
	return a
}

// percent returns an axis of shares.
func percent(to float64, title string, marks ...float64) axis {
	return axis{to: to, marks: marks, title: title, label: func(x float64) string { return fmt.Sprintf("%.3g %%", 100*x) }}
}
