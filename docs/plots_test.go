package docs

import (
	"encoding/xml"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A plot draws a table of benchmarks.md as bars. Figures come from the table alone, so the two cannot differ.
type plot struct {
	file, title, unit string
	one               bool     // mark the value 1
	some              bool     // leave out bars whose column the table lacks
	digits            int      // after the point
	labels            []string // columns that name a group of bars ...
	suffix            string   // ... and what stands after them
	bars              []bar
}

// A bar is one column of the table, or its ratio to another one.
type bar struct {
	name, column string
	over         string // the column to divide by; empty: none
}

var plots = []plot{
	{
		file: "floor.svg", title: "CPU per request of Envoy and Tandem",
		unit: "as a multiple of plain Envoy's", digits: 1,
		labels: []string{"body", "clients"}, suffix: " clients",
		bars: []bar{{"before (2026-11-22)", "before, x floor", ""}, {"this release", "x floor", ""}},
	},
	{
		file: "traces.svg", title: "Mean time to the first token at 80 % load",
		unit: "1 is the best other policy with the same choice; lower is better", one: true, digits: 2,
		labels: []string{"trace, engines"},
		bars: []bar{
			{"immediate", "immediate", "best that splits"},
			{"late", "late", "best that splits"},
			{"immediate or decode alone", "immediate or alone", "best that may decode alone"},
			{"late or decode alone", "late or alone", "best that may decode alone"},
		},
	},
	{
		file: "loads.svg", title: "Mean time to the first token by load",
		unit: "1 is the best other policy with the same choice; lower is better", one: true, digits: 2,
		labels: []string{"load"}, suffix: " load",
		bars: []bar{
			{"immediate", "immediate", ""}, {"late", "late", ""},
			{"immediate or decode alone", "immediate or alone", ""}, {"late or decode alone", "late or alone", ""},
		},
	},
	{
		file: "shared.svg", title: "Mean time to the first token, shared prefixes",
		unit: "1 is the best other policy with the same choice; lower is better", one: true, digits: 2,
		labels: []string{"trace"},
		bars: []bar{
			{"immediate", "immediate", "best that splits"},
			{"late", "late", "best that splits"},
			{"immediate or decode alone", "immediate or alone", "best that may decode alone"},
			{"late or decode alone", "late or alone", "best that may decode alone"},
		},
	},
	{
		file: "peers.svg", title: "CPU per request", unit: "as a multiple of vllm-router's", digits: 2, some: true,
		labels: []string{"request"},
		bars: []bar{
			{"Envoy and Tandem", "Envoy + Tandem", "vllm-router"},
			{"vllm-router", "vllm-router", "vllm-router"},
			{"sglang-router", "sglang-router", "vllm-router"},
			{"Envoy and vllm-router", "Envoy + vllm-router", "vllm-router"},
			{"Envoy and llm-d", "Envoy + llm-d", "vllm-router"},
		},
	},
	{
		file: "redis.svg", title: "Traffic with Redis by replicas", unit: "bytes per request",
		labels: []string{"replicas"}, suffix: " replicas",
		bars: []bar{{"sent", "bytes sent per request", ""}, {"read", "bytes read per request", ""}},
	},
}

// The plots of benchmarks.md show its tables as they are now.
func TestPlots(t *testing.T) {
	page := read(t, "benchmarks.md")
	var files []string
	for _, p := range plots {
		file := filepath.Join("plots", p.file)
		files = append(files, file)
		shown := regexp.MustCompile(`!\[[^\]]{20,}\]\(` + regexp.QuoteMeta(file) + `\)`).FindStringIndex(page)
		require.NotNil(t, shown, "benchmarks.md does not show %s with a text for those who cannot see it", file)
		table := lastTable(t, page[:shown[0]])
		p.bars = slices.DeleteFunc(slices.Clone(p.bars), func(b bar) bool { // of a peer that was not measured
			return p.some && !slices.Contains(table[0], b.column)
		})
		want := p.draw(t, table)
		require.NoError(t, xml.Unmarshal([]byte(want), new(struct{})), file)
		if *update {
			require.NoError(t, os.WriteFile(file, []byte(want), 0o600))
			continue
		}
		require.Equal(t, want, read(t, file), "run go test ./docs -update")
	}
	there, err := filepath.Glob("plots/*")
	require.NoError(t, err)
	require.ElementsMatch(t, files, there)
}

// lastTable returns the rows of the last table in text, the header first.
func lastTable(t *testing.T, text string) (rows [][]string) {
	t.Helper()
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "<!--"):
		case !strings.HasPrefix(line, "|") && line != "":
			rows = nil
		case strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "|---"):
			cells := strings.Split(strings.Trim(line, "|"), "|")
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			rows = append(rows, cells)
		}
	}
	require.Greater(t, len(rows), 1, "a plot has no table before it")
	return rows
}

// value returns the figure that a cell begins with; figures joined by a plus sign are added.
func value(t *testing.T, cell string) (sum float64) {
	t.Helper()
	number := regexp.MustCompile(`^[\d.,]+`)
	for part := range strings.SplitSeq(cell, "+") {
		text := number.FindString(strings.TrimSpace(part))
		v, err := strconv.ParseFloat(strings.ReplaceAll(text, ",", ""), 64)
		require.NoError(t, err, cell)
		sum += v
	}
	return sum
}

// The sizes of a plot, in pixels.
const (
	plotWidth  = 760
	labelWidth = 170 // of the names on the left
	valueWidth = 60  // of the figures at the bars' ends
	barHeight  = 15
	groupGap   = 12
	plotTop    = 88 // title, unit and legend
)

// picture frames a plot. It has colours for light and for dark pages, told apart by those who do not see all colours.
const picture = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]d %[2]d" width="%[1]d" height="%[2]d"
  role="img" aria-labelledby="title desc">
  <title id="title">%[3]s</title>
  <desc id="desc">%[4]s.%[5]s</desc>
  <style>
    text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2933; }
    .page { fill: #ffffff; }
    .title { font-size: 15px; font-weight: 600; }
    .label { text-anchor: end; }
    .figure { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
    .one { stroke: #52637a; stroke-dasharray: 4 4; }
    .bar0 { fill: #8a94a0; } .bar1 { fill: #0069a8; } .bar2 { fill: #c75100; } .bar3 { fill: #00805d; }
    .bar4 { fill: #8250c4; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .page { fill: #0d1117; }
      .figure { stroke: #0d1117; }
      .one { stroke: #a9b6c4; }
      .bar0 { fill: #8b97a5; } .bar1 { fill: #58a6ff; } .bar2 { fill: #f0883e; } .bar3 { fill: #3fb98a; }
      .bar4 { fill: #b78af0; }
    }
  </style>
  <rect class="page" width="%[1]d" height="%[2]d"/>
  <text class="title" x="16" y="25">%[3]s</text>
  <text x="16" y="44">%[4]s</text>
%[6]s</svg>
`

// draw returns the plot of a table as SVG.
func (p *plot) draw(t *testing.T, rows [][]string) string {
	t.Helper()
	labels, values, most := p.read(t, rows)
	step := len(p.bars)*barHeight + groupGap
	height := plotTop + len(values)*step + 4
	perUnit := (plotWidth - labelWidth - valueWidth - 16) / most
	var b, desc strings.Builder
	at := 16
	for i, bar := range p.bars {
		rect(&b, i, float64(at), 57, 12, 12)
		text(&b, "legend", float64(at+17), 67, bar.name)
		at += 45 + 7*len(bar.name)
	}
	if p.one {
		fmt.Fprintf(&b, "  <line class=\"one\" x1=\"%.1[1]f\" y1=\"%[2]d\" x2=\"%.1[1]f\" y2=\"%[3]d\"/>\n",
			labelWidth+8+perUnit, plotTop-6, height-8)
	}
	for i, group := range values {
		y := plotTop + i*step
		text(&b, "label", labelWidth, y+len(group)*barHeight/2+4, labels[i])
		var figures []string
		for j, v := range group {
			top, figure := y+j*barHeight, figure(v, p.digits)
			rect(&b, j, labelWidth+8, top, v*perUnit, barHeight-2)
			text(&b, "figure", labelWidth+13+v*perUnit, top+barHeight-4, figure)
			figures = append(figures, p.bars[j].name+" "+figure)
		}
		fmt.Fprintf(&desc, " %s: %s.", labels[i], strings.Join(figures, ", "))
	}
	return fmt.Sprintf(picture, plotWidth, height, p.title, p.unit, desc.String(), b.String())
}

func rect(b *strings.Builder, bar int, x float64, y int, width float64, height int) {
	fmt.Fprintf(b, "  <rect class=\"bar%d\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>\n",
		bar, x, y, width, height)
}

func text(b *strings.Builder, class string, x float64, y int, text string) {
	fmt.Fprintf(b, "  <text class=\"%s\" x=\"%.1f\" y=\"%d\">%s</text>\n", class, x, y, text)
}

// read returns a table's groups of bars, and the largest value of all.
func (p *plot) read(t *testing.T, rows [][]string) (labels []string, values [][]float64, most float64) {
	t.Helper()
	if p.one {
		most = 1
	}
	for _, row := range rows[1:] {
		cell := func(column string) string {
			i := slices.Index(rows[0], column)
			require.GreaterOrEqual(t, i, 0, "%s: the table has no column %q", p.file, column)
			return row[i]
		}
		var names []string
		for _, l := range p.labels {
			names = append(names, cell(l))
		}
		label := strings.Join(names, ", ") + p.suffix
		if names[len(names)-1] == "1" {
			label = strings.TrimSuffix(label, "s")
		}
		var group []float64
		for _, b := range p.bars {
			v := value(t, cell(b.column))
			if b.over != "" {
				v /= value(t, cell(b.over))
			}
			group = append(group, v)
			most = max(most, v)
		}
		labels, values = append(labels, label), append(values, group)
	}
	return labels, values, most
}

// figure formats a value, with commas.
func figure(v float64, digits int) string {
	text := strconv.FormatFloat(v, 'f', digits, 64)
	if whole, _, _ := strings.Cut(text, "."); len(whole) > 3 {
		text = text[:len(whole)-3] + "," + text[len(whole)-3:]
	}
	return text
}
