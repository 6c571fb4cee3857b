package docs

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A measured line is one of figures/*.json, as e2e/bench writes them (its type figures). CPU and times
// are milliseconds.
type measured struct {
	Shape, Beside, Stack, Date, Machine, Versions                string
	Clients, Replicas                                            int
	Pinned                                                       bool
	Rate, CPUXFloor, P50XFloor, P99XFloor, CPUXTandem, P50MsMore float64
	EnvoyMs, RouterMs, P50Ms, P99Ms, P999Ms, FirstByteMs         float64
	Fleet                                                        *fleetLine
	More                                                         moreLine
}

type moreLine struct {
	Engines, FirstByteP99Ms, AddedMs, PerSecond, IdlePercent, PeakMiB float64
	Size                                                              struct{ Endpoints, Streams int }
	LowP99Ms, Doubles, EnvoyMiB, RouterMiB                            float64
	Cores                                                             struct{ Envoy, Router, Engines, Client float64 }
}

type fleetLine struct {
	EnvoyMs, TandemMs, RedisMs, XOne, LogEntries, RedisCommands, Wakeups, IdleMs float64
}

// figuresOf reads what was measured of a table.
func figuresOf(t *testing.T, table string) (out []measured) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("figures", table+".json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &out))
	slices.SortStableFunc(out, func(a, b measured) int {
		return slices.Compare(a.order(), b.order())
	})
	return out
}

// order is where a line belongs in its table.
func (m *measured) order() []string {
	shape := fmt.Sprint(slices.Index([]string{"json1k", "json220k", "json1m", "sse256"}, m.Shape))
	number := func(n int) string { return fmt.Sprintf("%9d", n) }
	return []string{shape, m.Beside, number(int(m.Rate)), number(m.Clients), number(m.Replicas), number(m.More.Size.Endpoints),
		number(m.More.Size.Streams)}
}

// pick returns the lines that a condition holds for.
func pick(lines []measured, is func(*measured) bool) (out []measured) {
	for i := range lines {
		if is(&lines[i]) {
			out = append(out, lines[i])
		}
	}
	return out
}

// of returns the line of another stack that was measured beside a line; the zero value if there is none.
func (m *measured) of(lines []measured, stack string) measured {
	for _, o := range lines {
		if o.Shape == m.Shape && o.Clients == m.Clients && o.Beside == m.Beside && o.Rate == m.Rate && o.Stack == stack {
			return o
		}
	}
	return measured{}
}

// Formats of values. A value that was not measured is an empty cell.
func ratioText(v float64) string { return format(v, "%.1f") }

func format(v float64, with string) string {
	if v == 0 {
		return ""
	}
	return fmt.Sprintf(with, v)
}

// cpuText has two digits below 10 ms, one above.
func cpuText(v float64) string {
	if v < 9.995 {
		return format(v, "%.2f")
	}
	return format(v, "%.1f")
}

// timeText has two digits of what is below 1 ms, none from 100 ms on.
func timeText(v float64) string {
	switch {
	case v < 0.995:
		return format(v, "%.2f")
	case v < 99.5:
		return format(v, "%.1f")
	}
	return figure(v, 0)
}

// span is the least and the most of some values: "4.7 to 4.8".
func span(lines []measured, with string, of func(*measured) float64) (text string, most float64) {
	var all []float64
	for i := range lines {
		all = append(all, of(&lines[i]))
	}
	low, high := format(slices.Min(all), with), format(slices.Max(all), with)
	if low == high {
		return high, slices.Max(all)
	}
	return low + " to " + high, slices.Max(all)
}

// rows writes a table after one sentence: what it shows, and when and where that was measured.
func rows(result string, of []measured, head string, lines [][]string) string {
	var b strings.Builder
	columns := strings.Count(head, "|") - 1
	fmt.Fprintf(&b, "%s\n%s\n|%s\n", wrap(result+" "+when(of)+".", ""), head, strings.Repeat("---|", columns))
	for _, l := range lines {
		fmt.Fprintf(&b, "| %s |\n", strings.ReplaceAll(strings.Join(l, " | "), "|  |", "| |"))
	}
	return b.String()
}

// when says when and where lines were measured.
func when(lines []measured) string {
	var days, places []string
	for _, l := range lines {
		days = append(days, l.Date)
		for _, p := range []string{l.Machine, l.Versions} {
			if p != "" && !slices.Contains(places, p) {
				places = append(places, p)
			}
		}
	}
	from, to := slices.Min(days), slices.Max(days)
	if from != to {
		from += " to " + to
	}
	return "(" + from + ", " + strings.Join(places, ", ") + ")"
}

// goal marks a value above its goal, if it has one.
func goal(value float64, text, limit string) string {
	var at float64
	_, _ = fmt.Sscan(limit, &at)
	if limit != "" && value > at {
		return text + ": **missed**"
	}
	return text
}

func shapeName(shape string) string {
	return map[string]string{
		"json1k": "1 KB", "json220k": "220 KB", "json1m": "1 MB", "sse256": "stream of 256 tokens",
	}[shape]
}

// atOnce holds for clients that each send when they have their answer, and for no rate.
func atOnce(m *measured) bool { return plain(m) && m.Rate == 0 }

func plain(m *measured) bool  { return m.Stack == "tandem" && strings.HasPrefix(m.Shape, "json") }
func stream(m *measured) bool { return m.Stack == "tandem" && m.Shape == "sse256" }

func floorTable(t *testing.T) string {
	all := figuresOf(t, "floor")
	lines := pick(all, atOnce)
	var out [][]string
	for _, l := range lines {
		floor, before := l.of(all, "floor"), l.of(all, "before")
		out = append(out, []string{
			shapeName(l.Shape), fmt.Sprint(l.Clients), cpuText(floor.EnvoyMs), cpuText(l.EnvoyMs), cpuText(l.RouterMs),
			ratioText(l.CPUXFloor), ratioText(l.P50XFloor), ratioText(before.CPUXFloor),
		})
	}
	cpu, _ := span(lines, "%.1f", cpuXFloor)
	return rows(fmt.Sprintf("Envoy and Tandem take %s times the CPU of the floor, a plain Envoy whose client makes both "+
		"requests itself", cpu), lines,
		"| body | clients | floor, ms | Envoy, ms | Tandem, ms | x floor | p50 x floor | before, x floor |", out)
}

func redisTable(t *testing.T) string {
	lines := pick(figuresOf(t, "floor"), func(m *measured) bool { return m.Stack == "redis" && m.Shape == "json1k" })
	var out [][]string
	for _, l := range lines {
		rate := "as many as they can"
		if l.Rate > 0 {
			rate = figure(l.Rate, 0) + " a second"
		}
		out = append(out, []string{
			fmt.Sprint(l.Clients), rate, goal(l.CPUXTandem, format(l.CPUXTandem, "%.2f"), "1.3"),
			goal(l.P50MsMore, format(l.P50MsMore, "%.2f"), "0.3"),
		})
	}
	_, cpu := span(lines, "%.2f", func(m *measured) float64 { return m.CPUXTandem })
	_, wait := span(lines, "%.2f", func(m *measured) float64 { return m.P50MsMore })
	return rows(fmt.Sprintf("With a Redis and one replica, a request of 1 KB takes at most %.2f times the CPU that it takes "+
		"without, and its p50 is at most %.2f ms longer", cpu, wait), lines,
		"| clients | requests | CPU, x without Redis (goal 1.3) | p50, ms more (goal 0.3) |", out)
}

func streamTable(t *testing.T) string {
	all := figuresOf(t, "floor")
	lines := pick(all, stream)
	var out [][]string
	for _, l := range lines {
		floor := l.of(all, "floor")
		out = append(out, []string{
			fmt.Sprint(l.Clients), cpuText(floor.EnvoyMs), cpuText(l.EnvoyMs), cpuText(l.RouterMs),
			format(l.CPUXFloor, "%.2f"),
		})
	}
	cpu, _ := span(lines, "%.0f", func(m *measured) float64 { return 100 * (m.CPUXFloor - 1) })
	return rows(fmt.Sprintf("A stream of 256 tokens, one every 5 ms, takes %s %% more CPU than the floor", cpu), lines,
		"| clients | floor, ms | Envoy, ms | Tandem, ms | x floor |", out)
}

func tailsTable(t *testing.T) string {
	all := figuresOf(t, "tails")
	lines := pick(all, plain)
	var out [][]string
	for _, l := range lines {
		floor, beside := l.of(all, "floor"), "alone"
		if l.Beside != "" {
			beside = "with 10 of " + shapeName(l.Beside) + " a second"
		}
		out = append(out, []string{
			beside, fmt.Sprint(l.Clients), timeText(floor.P50Ms), timeText(floor.P99Ms), timeText(floor.P999Ms),
			timeText(l.P50Ms), timeText(l.P99Ms), timeText(l.P999Ms), ratioText(l.P99XFloor),
		})
	}
	p99 := func(m *measured) float64 { return m.P99XFloor }
	alone, _ := span(pick(lines, func(m *measured) bool { return m.Beside == "" }), "%.1f", p99)
	beside, _ := span(pick(lines, func(m *measured) bool { return m.Beside != "" }), "%.1f", p99)
	return rows(fmt.Sprintf("At %.0f requests of 1 KB a second p99 is %s times the floor's, and %s times with large bodies "+
		"beside them", lines[0].Rate, alone, beside), lines,
		"| load | clients | floor p50 | floor p99 | floor p99.9 | Tandem p50 | Tandem p99 | Tandem p99.9 | p99 x floor |",
		out)
}

// peers are the stacks of the tables beside other routers, in their order.
var peers = []struct{ stack, head string }{
	{"tandem", "Envoy + Tandem"}, {"redis", "Tandem with Redis"},
	{"vllm-router", "vllm-router"}, {"smg", "smg"},
	{"envoy+vllm-router", "Envoy + vllm-router"}, {"envoy+smg", "Envoy + smg"},
	{"llm-d", "Envoy + llm-d"}, {"dynamo-select", "Envoy + Dynamo's selection service"},
}

// firstTable is of what each router adds to the first token.
func firstTable(t *testing.T) string {
	all := figuresOf(t, "first")
	var out [][]string
	line := func(name, stack string) {
		one := pick(all, func(m *measured) bool { return m.Stack == stack && m.Clients == 1 })
		half := pick(all, func(m *measured) bool { return m.Stack == stack && m.Clients > 1 })
		if len(one) == 0 || len(half) == 0 {
			return
		}
		added := func(l *measured) string { return cmp.Or(timeText(max(l.More.AddedMs, 0)), "0") }
		out = append(out, []string{
			name, added(&one[0]), timeText(one[0].FirstByteMs), timeText(one[0].More.FirstByteP99Ms),
			figure(half[0].More.PerSecond/2, 0), added(&half[0]), timeText(half[0].FirstByteMs),
			timeText(half[0].More.FirstByteP99Ms),
		})
	}
	line("none: the client asks both engines", "direct")
	line("plain Envoy whose client makes both hops", "floor")
	for _, p := range peers {
		line(p.head, p.stack)
	}
	tandem := pick(all, func(m *measured) bool { return m.Stack == "tandem" })
	return rows(fmt.Sprintf("Envoy and Tandem add %s ms to the first token with one client, and %s ms at half of what they "+
		"serve", timeText(tandem[0].More.AddedMs), timeText(tandem[1].More.AddedMs)), all,
		"| router | one client: added, ms | p50 | p99 | half load: requests a second | added, ms | p50 | p99 |", out) +
		"\n![Bars: time added to the first token.](plots/first.svg)\n"
}

// longTable is of long prompts over many engines with KV events.
func longTable(t *testing.T) string {
	all := figuresOf(t, "long")
	var out [][]string
	stacks := append([]struct{ stack, head string }{{"floor", "plain Envoy whose client makes both hops"}}, peers...)
	for _, p := range stacks {
		paced := pick(all, func(m *measured) bool { return m.Stack == p.stack && m.Rate > 0 })
		most := pick(all, func(m *measured) bool { return m.Stack == p.stack && m.Rate == 0 })
		if len(paced) == 0 || len(most) == 0 {
			continue
		}
		l := paced[0]
		cpu := cpuText(l.EnvoyMs)
		if l.RouterMs > 0 {
			cpu = strings.TrimPrefix(cpu+" + "+cpuText(l.RouterMs), " + ")
		}
		out = append(out, []string{
			p.head, cpu, format((l.EnvoyMs+l.RouterMs)/10, "%.2f"), timeText(l.P50Ms), timeText(l.P99Ms),
			figure(most[0].More.PerSecond, 0), format(l.More.IdlePercent, "%.1f %%"), figure(l.More.PeakMiB, 0),
		})
	}
	tandem := pick(all, func(m *measured) bool { return m.Stack == "tandem" && m.Rate > 0 })[0]
	return rows(fmt.Sprintf("With %.0f prompts of 100k tokens a second over %.0f engines, Envoy and Tandem take %.1f ms of CPU "+
		"for each", tandem.Rate, tandem.More.Engines, tandem.EnvoyMs+tandem.RouterMs), all,
		"| router | CPU, ms | cores for 100 a second | p50, ms | p99, ms | most a second | idle, of a core | memory, MiB |",
		out) + "\n![Bars: CPU of a long prompt.](plots/long.svg)\n"
}

// capacities are the stacks of the next two tables, in their order.
var capacities = []struct{ stack, head string }{
	{"floor", "plain Envoy"}, {"tandem", "Envoy + Tandem"}, {"inside", "Tandem inside"},
}

// capacityTable is of what one replica serves with so many endpoints. CPU is of the most clients, what is added of one.
func capacityTable(t *testing.T) string {
	all := pick(figuresOf(t, "capacity"), func(m *measured) bool { return m.More.Size.Endpoints > 0 })
	var out [][]string
	var first, last measured
	for _, full := range pick(all, func(m *measured) bool { return m.More.Doubles > 0 && m.Stack == "floor" }) {
		for _, c := range capacities {
			of := func(stack string) []measured {
				return pick(all, func(m *measured) bool { return m.More.Size == full.More.Size && m.Stack == stack })
			}
			lines, floor := of(c.stack), of("floor")
			if len(lines) == 0 {
				continue
			}
			l := lines[len(lines)-1]
			if c.stack == "tandem" {
				first, last = cmp.Or(first, l), l
			}
			line := []string{figure(float64(l.More.Size.Endpoints), 0), c.head}
			for _, m := range []measured{lines[0], l} {
				line = append(line, figure(m.More.PerSecond, 0))
			}
			added := func(ms, floor float64) string {
				if c.stack == "floor" {
					return ""
				}
				return timeText(max(ms-floor, 0))
			}
			cpu := cpuText(l.EnvoyMs)
			if l.RouterMs > 0 {
				cpu += " + " + cpuText(l.RouterMs)
			}
			out = append(out, append(line, figure(l.More.Doubles, 0), added(lines[0].P50Ms, floor[0].P50Ms),
				added(lines[0].P99Ms, floor[0].P99Ms), cpu, format(l.More.IdlePercent, "%.1f %%"),
				figure(l.More.EnvoyMiB+l.More.RouterMiB, 0)))
		}
	}
	return rows(fmt.Sprintf("One replica serves %s requests of 1 KB a second with %s endpoints and %s with %s, where %s",
		figure(first.More.PerSecond, 0), figure(float64(first.More.Size.Endpoints), 0), figure(last.More.PerSecond, 0),
		figure(float64(last.More.Size.Endpoints), 0), last.limit()), all, "| endpoints | router | 1 client | 64 clients | p99 doubles | added to p50, ms | p99 | CPU, ms | idle | MiB |", out) +
		"\n![Bars: requests a second by endpoints.](plots/capacity.svg)\n"
}

// limit is who takes what of the machine's cores.
func (m *measured) limit() string {
	of := func(used float64) string { return fmt.Sprintf("%.0f %%", 100*used) }
	c := m.More.Cores
	return fmt.Sprintf("Envoy takes %s of a core, Tandem %s, the engines %s and the client %s", of(c.Envoy), of(c.Router),
		of(c.Engines), of(c.Client))
}

// openTable is of requests beside open streams.
func openTable(t *testing.T) string {
	all := pick(figuresOf(t, "capacity"), func(m *measured) bool { return m.More.Size.Endpoints == 0 })
	var out [][]string
	var alone, most measured
	for _, c := range capacities {
		lines := pick(all, func(m *measured) bool { return m.Stack == c.stack })
		for _, l := range lines {
			n := l.More.Size.Streams
			if n == 64 {
				continue // as without streams
			}
			memory := func(m *measured) float64 { return m.More.EnvoyMiB + m.More.RouterMiB }
			out = append(out, []string{
				figure(float64(n), 0), c.head, timeText(l.P50Ms), timeText(l.P99Ms),
				format(100*(l.More.Cores.Envoy+l.More.Cores.Router), "%.0f %%"), figure(memory(&l), 0),
				figure(max(memory(&l)-memory(&lines[0]), 0)*1024/float64(max(n, 1)), 0),
			})
			if c.stack == "tandem" {
				alone, most = lines[0], l
			}
		}
	}
	each := (most.More.RouterMiB - alone.More.RouterMiB) * 1024 / float64(most.More.Size.Streams)
	return rows(fmt.Sprintf("Beside %s open streams p99 of %.0f requests a second is %s ms, and %s ms without them; a stream "+
		"takes %.1f KiB of Tandem's memory", figure(float64(most.More.Size.Streams), 0), most.Rate, timeText(most.P99Ms),
		timeText(alone.P99Ms), each), all, "| open streams | router | p50, ms | p99, ms | CPU | MiB | KiB a stream |", out) +
		"\n![Bars: p99 beside open streams.](plots/open-streams.svg)\n"
}

func peersTable(t *testing.T) string {
	all := figuresOf(t, "peers")
	peers := slices.DeleteFunc(slices.Clone(peers), func(p struct{ stack, head string }) bool {
		return !slices.ContainsFunc(all, func(m measured) bool { return m.Stack == p.stack })
	})
	head := "| request |"
	for _, p := range peers {
		head += " " + p.head + " |"
	}
	var out, first [][]string
	for _, l := range pick(all, func(m *measured) bool { return m.Stack == "tandem" && m.FirstByteMs > 0 }) {
		line := []string{"first byte of a stream (p50)"}
		if l.Clients == 1 {
			line[0] = "first byte, one client (p50)"
		}
		for _, p := range peers {
			line = append(line, timeText(l.of(all, p.stack).FirstByteMs))
		}
		first = append(first, line)
	}
	lines := pick(all, func(m *measured) bool { return m.Stack == "tandem" && m.Clients == 16 })
	for _, l := range lines {
		line := []string{shapeName(l.Shape)}
		for _, p := range peers {
			m := l.of(all, p.stack)
			cell := cpuText(m.RouterMs)
			if m.EnvoyMs > 0 {
				cell = cpuText(m.EnvoyMs) + " + " + cell
			}
			line = append(line, cell)
		}
		out = append(out, line)
	}
	cpu, _ := span(lines, "%.1f", func(m *measured) float64 {
		return (m.EnvoyMs + m.RouterMs) / m.of(all, "vllm-router").RouterMs
	})
	return rows(fmt.Sprintf("With 16 clients, Envoy and Tandem take %s times the CPU of vllm-router alone", cpu), all,
		head, append(out, first...))
}

// fleetTable is of processes that run where the system puts them; the column "pinned" is of those with one processor for
// Envoy and one for all replicas.
func fleetTable(t *testing.T) string {
	all := figuresOf(t, "fleet")
	lines := pick(all, func(m *measured) bool { return !m.Pinned })
	goals := map[int]string{4: "1.15", 16: "1.3"}
	xOne := func(l *measured) string {
		return goal(l.Fleet.XOne, ratioText(l.Fleet.XOne), goals[l.Replicas])
	}
	var out [][]string
	for _, l := range lines {
		f, pinned := l.Fleet, ""
		for _, m := range pick(all, func(m *measured) bool { return m.Pinned && m.Replicas == l.Replicas }) {
			pinned = xOne(&m)
		}
		out = append(out, []string{
			fmt.Sprint(l.Replicas), cpuText(f.EnvoyMs), cpuText(f.TandemMs), cpuText(f.RedisMs), xOne(&l), pinned,
			ratioText(f.LogEntries), ratioText(f.RedisCommands), format(f.Wakeups, "%.0f"), format(f.IdleMs/10, "%.1f %%"),
		})
	}
	last := lines[len(lines)-1]
	return rows(fmt.Sprintf("At %.0f requests of 1 KB a second in all, Envoy, Redis and %d replicas take %.1f times the CPU "+
		"of Envoy, Redis and one", last.Rate, last.Replicas, last.Fleet.XOne), all,
		"| replicas | Envoy, ms | Tandem, ms | Redis, ms | x one | pinned | log entries | Redis commands | wake-ups | "+
			"idle |", out)
}

// The tables of benchmarks.md that measurements write, each between two comments.
var tables = map[string]func(*testing.T) string{
	"floor": floorTable, "redis": redisTable, "streams": streamTable, "tails": tailsTable, "peers": peersTable,
	"fleet": fleetTable, "first": firstTable, "long": longTable, "capacity": capacityTable, "open": openTable,
}

// results sets the answers of the first table, and of README's, that measurements write; the other rows have other
// sources.
func results(t *testing.T, page, readme string) (newPage, newReadme string) {
	t.Helper()
	all, tails := figuresOf(t, "floor"), figuresOf(t, "tails")
	set := func(page *string, question, cells string) {
		if question == "" {
			return
		}
		at := regexp.MustCompile(`(?m)^\| ` + regexp.QuoteMeta(question) + ` \| [^|]* \| [^|]* \|$`)
		require.Regexp(t, at, *page)
		*page = at.ReplaceAllLiteralString(*page, fmt.Sprintf("| %s | %s |", question, cells))
	}
	for _, r := range []struct {
		question, short, with, limit string
		lines                        []measured
		of                           func(*measured) float64
	}{
		{"CPU of Envoy and Tandem, 1 KB", "CPU, 1 KB", "%.1f", "4",
			pick(all, func(m *measured) bool { return atOnce(m) && m.Shape == "json1k" }), cpuXFloor},
		{"CPU, 220 KB", "CPU, 220 KB", "%.1f", "6",
			pick(all, func(m *measured) bool { return atOnce(m) && m.Shape == "json220k" }), cpuXFloor},
		{"CPU, stream of 256 tokens", "CPU, streams", "%.2f", "1.2", pick(all, stream), cpuXFloor},
		{"p99, 1 KB, 64 clients, 200 a second", "", "%.1f", "3",
			pick(tails, func(m *measured) bool { return plain(m) && m.Clients == 64 && m.Beside == "" }),
			func(m *measured) float64 { return m.P99XFloor }},
	} {
		text, most := span(r.lines, r.with, r.of)
		set(&page, r.question, text+" x floor | "+goal(most, r.limit, r.limit))
		ms, _ := span(r.lines, "%.2f", func(m *measured) float64 { return m.EnvoyMs + m.RouterMs })
		second, _ := span(r.lines, "%.0f", func(m *measured) float64 { return 1000 / (m.EnvoyMs + m.RouterMs) })
		set(&readme, r.short, fmt.Sprintf("%s ms: %s requests a second of a core; %s times plain Envoy | `make bench`", ms, second, text))
	}
	beside := regexp.MustCompile(`(?m)(^\| (CPU of |added to the first token|prompts of 100k)[^\n]*\n)+`)
	require.Regexp(t, beside, readme)
	return page, beside.ReplaceAllLiteralString(readme, strings.Join(besideRows(t), ""))
}

// besideRows are README's rows beside other routers.
func besideRows(t *testing.T) (out []string) {
	row := func(question, result, command string) {
		out = append(out, fmt.Sprintf("| %s | %s | `make %s` |\n", question, result, command))
	}
	all := figuresOf(t, "peers")
	versions, _, _ := strings.Cut(all[0].Versions, ", llm-d")
	share := func(is func(stack string) bool) string {
		text, _ := span(pick(all, func(m *measured) bool { return is(m.Stack) && m.Clients == 16 }), "%.2f",
			func(m *measured) float64 { return m.CPUXTandem })
		return text
	}
	row("CPU of "+versions, share(func(s string) bool { return strings.HasSuffix(s, "-router") && s[0] != 'e' || s == "smg" })+
		" times ours; behind an Envoy "+share(func(s string) bool { return strings.HasPrefix(s, "envoy+") })+" times", "bench-peers")
	row("CPU of llm-d: Envoy, picker and sidecar", share(func(s string) bool { return s == "llm-d" })+" times ours", "bench-peers")
	others := func(lines []measured, value func(*measured) string) string {
		var texts []string
		for _, p := range peers {
			for i := range lines {
				if lines[i].Stack == p.stack && !strings.HasPrefix(p.stack, "envoy+") && p.stack != "redis" {
					name := strings.TrimSuffix(strings.TrimPrefix(p.head, "Envoy + "), "'s selection service")
					texts = append(texts, name+" "+value(&lines[i]))
				}
			}
		}
		return strings.Join(texts, ", ")
	}
	if first := pick(figuresOf(t, "first"), func(m *measured) bool { return m.Clients == 1 }); first != nil {
		row("added to the first token, one client, ms", others(first, func(m *measured) string { return timeText(m.More.AddedMs) }),
			"bench-peers")
	}
	if long := pick(figuresOf(t, "long"), func(m *measured) bool { return m.Rate > 0 }); long != nil {
		row(fmt.Sprintf("prompts of 100k tokens over %.0f engines: CPU, ms", long[0].More.Engines),
			others(long, func(m *measured) string { return cpuText(m.EnvoyMs + m.RouterMs) }), "bench-long")
	}
	return out
}

func cpuXFloor(m *measured) float64 { return m.CPUXFloor }

// The page, and the rows of README that it gives, show what figures/*.json have.
func TestFigures(t *testing.T) {
	page, readme := read(t, "benchmarks.md"), read(t, "../README.md")
	want, wantReadme := results(t, page, readme)
	for name, table := range tables {
		begins, ends := "<!-- figures: "+name+" -->\n", "<!-- end of figures -->\n"
		before, rest, ok := strings.Cut(want, begins)
		require.True(t, ok, "benchmarks.md has no place for %s", name)
		_, after, ok := strings.Cut(rest, ends)
		require.True(t, ok, name)
		want = before + begins + "\n" + table(t) + "\n" + ends + after
	}
	if *update {
		require.NoError(t, os.WriteFile("benchmarks.md", []byte(want), 0o600))
		if wantReadme != readme {
			require.NoError(t, os.WriteFile("../README.md", []byte(wantReadme), 0o600))
		}
		return
	}
	require.Equal(t, want, page, "run go test ./docs -update")
	require.Equal(t, wantReadme, readme, "run go test ./docs -update")
}
