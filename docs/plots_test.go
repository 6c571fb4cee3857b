package docs

import (
	"cmp"
	"encoding/csv"
	"encoding/xml"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// A plot draws a table of benchmarks.md as bars. Figures come from the table alone, so the two cannot differ.
type plot struct {
	file, title, unit string
	one               bool     // mark the value 1
	some              bool     // leave out bars whose column the table lacks
	digits            int      // after the point; -1: as few as there are; -3: three that count
	labels            []string // columns that name a group of bars ...
	label             string   // ... and how, if not by the first one alone
	bars              []bar
}

// A bar is one column of the table, or its ratio to another one. A row without that other one has no bars.
type bar struct {
	name, column string
	over         string // the column to divide by; empty: none
}

// toFirstToken are the bars of tables of times to the first token.
var toFirstToken = []bar{
	{"immediate", "immediate", "best that splits"},
	{"late", "late", "best that splits"},
	{"immediate or decode alone", "immediate or alone", "best with decode alone"},
	{"late or decode alone", "late or alone", "best with decode alone"},
}

const (
	xFloor   = "as a multiple of the floor's; lower is better"
	xPolicy  = "1 is the best other policy with the same choice; lower is better"
	nClients = "%s, %s clients"
)

// plots has the plots of all tables, in their order.
var plots = []plot{
	{
		file: "summary.svg", title: "Results compared with their goals", one: true, digits: 2,
		unit: "as a multiple of the goal, which is 1; lower is better", labels: []string{"question"},
		bars: []bar{{"result", "result", "goal"}},
	},
	{
		file: "floor.svg", title: "CPU per request of Envoy and Tandem", unit: xFloor, digits: 1,
		labels: []string{"body", "clients"}, label: nClients,
		bars: []bar{{"before (2026-11-22)", "before, x floor", ""}, {"this release", "x floor", ""}},
	},
	{
		file: "with-redis.svg", title: "CPU per request of 1 KB with a Redis", one: true, digits: 2,
		unit:   "as a multiple of that without a Redis; lower is better",
		labels: []string{"clients", "requests"}, label: "%s clients, %s",
		bars: []bar{{"with a Redis", "CPU, x without Redis (goal 1.3)", ""}},
	},
	{
		file: "streams.svg", title: "CPU of a stream of 256 tokens", unit: xFloor, one: true, digits: 2,
		labels: []string{"clients"}, label: "%s clients", bars: []bar{{"Envoy and Tandem", "x floor", ""}},
	},
	{
		file: "tails.svg", title: "p99 of requests of 1 KB", unit: "milliseconds; lower is better", digits: 1,
		labels: []string{"load", "clients"}, label: nClients,
		bars: []bar{{"floor", "floor p99", ""}, {"Envoy and Tandem", "Tandem p99", ""}},
	},
	{
		file: "traces.svg", title: "Mean time to the first token at 80 % load", unit: xPolicy, one: true, digits: 2,
		labels: []string{"trace, engines"}, bars: toFirstToken,
	},
	{
		file: "loads.svg", title: "Mean time to the first token by load", unit: xPolicy, one: true, digits: 2,
		labels: []string{"load"}, label: "%s load",
		bars: []bar{
			{"immediate", "immediate", ""}, {"late", "late", ""},
			{"immediate or decode alone", "immediate or alone", ""}, {"late or decode alone", "late or alone", ""},
		},
	},
	{
		file: "shared.svg", title: "Mean time to the first token, shared prefixes", unit: xPolicy, one: true, digits: 2,
		labels: []string{"trace"}, bars: toFirstToken,
	},
	{
		file: "shifting.svg", title: "Goodput while traffic shifts", unit: "share of all requests; higher is better", digits: 3,
		labels: []string{"trace"},
		bars:   []bar{{"published", "goodput, published", ""}, {"2026-11-29", "goodput, 2026-11-29", ""}},
	},
	{
		file: "peers.svg", title: "CPU per request, and the first byte of a stream", digits: 2, some: true,
		unit: "as a multiple of vllm-router's; lower is better", labels: []string{"request"},
		bars: []bar{
			{"Envoy and Tandem", "Envoy + Tandem", "vllm-router"},
			{"vllm-router", "vllm-router", "vllm-router"},
			{"sglang-router", "sglang-router", "vllm-router"},
			{"smg", "smg", "vllm-router"},
			{"Envoy and vllm-router", "Envoy + vllm-router", "vllm-router"},
			{"Envoy and llm-d", "Envoy + llm-d", "vllm-router"},
		},
	},
	{
		file: "first.svg", title: "Added to the first token", unit: "milliseconds; lower is better", digits: 1,
		labels: []string{"router"},
		bars:   []bar{{"one client", "one client: added, ms", ""}, {"half load", "added, ms", ""}},
	},
	{
		file: "long.svg", title: "CPU of a prompt of 100k tokens over many engines", unit: "milliseconds; lower is better",
		labels: []string{"router"}, bars: []bar{{"CPU", "CPU, ms", ""}},
	},
	{
		file: "capacity.svg", title: "What one replica serves on two cores with 64 clients", unit: "requests a second",
		labels: []string{"endpoints", "router"}, label: "%s endpoints, %s",
		bars: []bar{{"64 clients", "64 clients", ""}, {"until p99 doubles", "p99 doubles", ""}},
	},
	{
		file: "failures.svg", title: "What fails while engines are killed", unit: "of 10,000 requests",
		labels: []string{"policy"},
		bars: []bar{
			{"streams cut", "streams cut", ""}, {"error events", "error events", ""}, {"other errors", "other errors", ""},
		},
	},
	{
		file: "soak.svg", title: "Memory under 30 minutes of load and churn", unit: "MiB",
		labels: []string{"minutes"}, label: "after %s minutes",
		bars: []bar{{"Envoy", "Envoy's memory, MiB", ""}, {"Tandem", "memory, MiB", ""}},
	},
	{
		file: "open-streams.svg", title: "p99 of requests beside open streams", unit: "milliseconds; lower is better",
		digits: 1, labels: []string{"open streams", "router"}, label: "%s streams, %s", bars: []bar{{"p99", "p99, ms", ""}},
	},
	{
		file: "speeds.svg", title: "Expected times of engines that differ from the model", one: true, digits: 2,
		unit: "as a multiple of the true ones, which are 1", labels: []string{"engines", "prompt tokens"},
		label: "%s, %s tokens",
		bars:  []bar{{"prefill", "prefill expected, ms", "took, ms"}, {"pace of decode", "pace learned", "true pace"}},
	},
	{
		file: "steps.svg", title: "Time of the steps of a request", unit: "microseconds; lower is better", digits: -1,
		labels: []string{"step"}, bars: []bar{{"time", "time, µs", ""}},
	},
	{
		file: "index.svg", title: "Look-up of 8,192 blocks in the prefix index", unit: "microseconds; lower is better",
		digits: -1, labels: []string{"endpoints"}, label: "%s endpoints", bars: []bar{{"look-up", "look-up, µs", ""}},
	},
	{
		file: "redis.svg", title: "Traffic with Redis by replicas", unit: "bytes per request; lower is better",
		labels: []string{"replicas"}, label: "%s replicas",
		bars: []bar{{"sent", "bytes sent per request", ""}, {"read", "bytes read per request", ""}},
	},
	{
		file: "replicas.svg", title: "CPU per request of Envoy, all replicas and Redis", one: true, digits: 1,
		unit: "as a multiple of that with one replica; lower is better", labels: []string{"replicas"}, label: "%s replicas",
		bars: []bar{{"on two shared cores", "x one", ""}, {"one core for Envoy, one for all replicas", "pinned", ""}},
	},
}

// prices has the plots of the terms of the price in decision.md: of the files of package picker's TestTerms, whose first
// column names a group of bars and the others one each.
var prices = []plot{
	{file: "work.svg", title: "Time of a prefill (e)", unit: "seconds, by tokens of the prompt"},
	{file: "others.svg", title: "Delay of others (w rho/(1-rho))", unit: "seconds for each second of work, by utilisation of prefill"},
	{file: "shared.svg", title: "What is charged of a miss on a shared prefix",
		unit: "share of its work, by requests in a minute that have it (8 engines, mean prefill .6 s)"},
	{file: "load.svg", title: "Loading KV, and computing it (load)", unit: "seconds, by tokens of the prompt that a tier holds"},
	{file: "late.svg", title: "A first token that comes too late (late)", unit: "seconds, by when it comes, where it is promised in 5 s"},
	{file: "beside.svg", title: "What answers lose to a prompt beside them", unit: "seconds at a = .5, by answers that run there"},
	{file: "step.svg", title: "A step of D (step)", unit: "milliseconds, by answers in the batch, and the KV of each"},
	{file: "share.svg", title: "Time of a token where prompts are computed, too (token)", unit: "milliseconds, by the share of the last 10 s that prompts took"},
	{file: "overflow.svg", title: "KV that does not fit (overflow)", unit: "seconds, by KV as a share of what fits (100,000 tokens; steps of 30 ms)"},
	{file: "transfer.svg", title: "Transfer of KV (transfer)", unit: "seconds, by tokens that D does not hold"},
	{file: "evicts.svg", title: "Conversations that lose their KV (evicts)",
		unit: "seconds, by tokens that need room: 100,000 are free, then three conversations of 200,000 go"},
	{file: "returns.svg", title: "Conversations that wait (returns)", unit: "seconds, by the time to compute the prompt"},
}

// agents has the plot of decision.md's table of coding agents.
var agents = plot{file: "plots/agents.svg", title: "Good turns of coding agents", unit: "in an hour; higher is better",
	labels: []string{"policy"}, bars: []bar{{"96 sessions", "96", ""}, {"128 sessions", "128", ""}}}

// drawDecision draws the pictures of decision.md, and returns the files.
func drawDecision(t *testing.T) (files []string) {
	t.Helper()
	page := read(t, "decision.md")
	for _, p := range prices {
		from, err := os.Open(filepath.Join("figures/price", strings.TrimSuffix(p.file, ".svg")+".csv"))
		require.NoError(t, err)
		rows, err := csv.NewReader(from).ReadAll()
		require.NoError(t, errors.Join(err, from.Close()))
		p.labels, p.digits = rows[0][:1], -3
		for _, column := range rows[0][1:] {
			p.bars = append(p.bars, bar{column, column, ""})
		}
		file := "plots/price-" + p.file
		require.Regexp(t, `\n\n!\[[^\]]{20,}\]\(`+regexp.QuoteMeta(file)+`\)\n`, page, "decision.md does not show it")
		keep(t, file, p.draw(t, rows))
		files = append(files, file)
	}
	table, _, shown := strings.Cut(page, "\n\n![Bars: good turns an hour")
	require.True(t, shown)
	keep(t, agents.file, agents.draw(t, cells(t, table[strings.LastIndex(table, "\n\n")+2:])))
	return append(files, agents.file)
}

// keep holds a file to its plot, or writes it.
func keep(t *testing.T, file, plot string) {
	t.Helper()
	require.NoError(t, xml.Unmarshal([]byte(plot), new(struct{})), file)
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(plot), 0o600))
		return
	}
	require.Equal(t, plot, read(t, file), "run go test ./docs -update")
}

// Each table of benchmarks.md comes after one sentence that says what it shows, and before its plot. The plots show the
// tables as they are now.
func TestPlots(t *testing.T) {
	page := regexp.MustCompile(`<!--.*-->\n\n?`).ReplaceAllString(read(t, "benchmarks.md"), "")
	blocks := strings.Split(page, "\n\n")
	var tables []int
	for i, block := range blocks {
		if strings.HasPrefix(block, "|") {
			tables = append(tables, i)
		}
	}
	require.Len(t, tables, len(plots), "each table has a plot")
	var files []string
	for i, p := range plots {
		file, at := filepath.Join("plots", p.file), tables[i]
		files = append(files, file)
		require.Regexp(t, `^[^#].*\S[.:]$`, strings.Join(strings.Fields(blocks[at-1]), " "), "before the table of %s", file)
		require.NotRegexp(t, `\.\s`, blocks[at-1], "more than one sentence before the table of %s", file)
		require.Regexp(t, `^!\[[^\]]{20,}\]\(`+regexp.QuoteMeta(file)+`\)\n?$`, blocks[at+1],
			"benchmarks.md does not show %s after its table, with a text for those who cannot see it", file)
		table := cells(t, blocks[at])
		p.bars = slices.DeleteFunc(slices.Clone(p.bars), func(b bar) bool { // of a peer that was not measured
			return p.some && !slices.Contains(table[0], b.column)
		})
		keep(t, file, p.draw(t, table))
	}
	files = append(files, drawDecision(t)...)
	there, err := filepath.Glob("plots/*")
	require.NoError(t, err)
	require.ElementsMatch(t, files, there)
}

// cells returns the rows of a table, the header first.
func cells(t *testing.T, table string) (rows [][]string) {
	t.Helper()
	for line := range strings.Lines(table) {
		line = strings.TrimSpace(line)
		require.LessOrEqual(t, utf8.RuneCountInString(line), lineWidth, line)
		if strings.HasPrefix(line, "|---") {
			continue
		}
		row := strings.Split(strings.Trim(strings.ReplaceAll(line, "`", ""), "|"), "|")
		for i := range row {
			row[i] = strings.TrimSpace(row[i])
		}
		rows = append(rows, row)
	}
	return rows
}

// value returns the figure that a cell begins with, of "4.0 to 5.0" the second. Figures joined by a plus sign are added.
func value(t *testing.T, cell string) (sum float64) {
	t.Helper()
	number := regexp.MustCompile(`^(?:[\d.,]+ to )?([\d.,]+)`)
	for part := range strings.SplitSeq(cell, "+") {
		found := number.FindStringSubmatch(strings.TrimSpace(part))
		require.NotNil(t, found, cell)
		v, err := strconv.ParseFloat(strings.ReplaceAll(found[1], ",", ""), 64)
		require.NoError(t, err, cell)
		sum += v
	}
	return sum
}

// The sizes of a plot, in pixels.
const (
	plotWidth    = 760
	letter       = 7  // the width of a letter
	valueWidth   = 60 // of the figures at the bars' ends
	barHeight    = 15
	groupGap     = 12
	plotTop      = 88 // title, unit and legend
	legendHeight = 24
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
	var b, desc strings.Builder
	colour, top := 0, plotTop
	if len(p.bars) == 1 { // without a legend; grey is for what others are compared with
		colour, top = 1, plotTop-legendHeight
	} else {
		p.legend(&b)
	}
	step := len(p.bars)*barHeight + groupGap
	height := top + len(values)*step + 4
	labelWidth := 120
	for _, l := range labels {
		labelWidth = max(labelWidth, 16+letter*utf8.RuneCountInString(l))
	}
	perUnit := float64(plotWidth-labelWidth-valueWidth-16) / most
	if p.one {
		fmt.Fprintf(&b, "  <line class=\"one\" x1=\"%.1[1]f\" y1=\"%[2]d\" x2=\"%.1[1]f\" y2=\"%[3]d\"/>\n",
			float64(labelWidth+8)+perUnit, top-6, height-8)
	}
	for i, group := range values {
		y := top + i*step
		text(&b, "label", float64(labelWidth), y+len(group)*barHeight/2+4, labels[i])
		var figures []string
		for j, v := range group {
			at, figure := y+j*barHeight, figure(v, p.digits)
			rect(&b, colour+j, float64(labelWidth+8), at, v*perUnit, barHeight-2)
			text(&b, "figure", float64(labelWidth+13)+v*perUnit, at+barHeight-4, figure)
			figures = append(figures, p.bars[j].name+" "+figure)
		}
		fmt.Fprintf(&desc, " %s: %s.", labels[i], strings.Join(figures, ", "))
	}
	return fmt.Sprintf(picture, plotWidth, height, p.title, p.unit, desc.String(), b.String())
}

// legend names the bars.
func (p *plot) legend(b *strings.Builder) {
	at := 16
	for i, bar := range p.bars {
		rect(b, i, float64(at), 57, 12, 12)
		text(b, "legend", float64(at+17), 67, bar.name)
		at += 45 + letter*len(bar.name)
	}
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
		var names []any
		for _, l := range p.labels {
			names = append(names, cell(l))
		}
		label := regexp.MustCompile(`\b1 (client|replica)s`).
			ReplaceAllString(fmt.Sprintf(cmp.Or(p.label, "%s"), names...), "1 $1")
		var group []float64
		for _, b := range p.bars {
			v := value(t, cell(b.column))
			if b.over != "" {
				over := cell(b.over)
				if over == "" || over == "0" {
					continue
				}
				v /= value(t, over)
			}
			group = append(group, v)
			most = max(most, v)
		}
		if group != nil {
			labels, values = append(labels, label), append(values, group)
		}
	}
	return labels, values, most
}

// figure formats a value, with commas.
func figure(v float64, digits int) string {
	if digits == -3 {
		return strconv.FormatFloat(v, 'g', 3, 64)
	}
	text := strconv.FormatFloat(v, 'f', digits, 64)
	if whole, _, _ := strings.Cut(text, "."); len(whole) > 3 {
		text = text[:len(whole)-3] + "," + text[len(whole)-3:]
	}
	return text
}
