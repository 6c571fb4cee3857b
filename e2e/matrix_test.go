package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The matrix of failures: rows are dialects and faults, columns are fleets, bindings and splits. What holds in each
// cell:
//
//   - the request that meets the fault is answered, if any engine could; else it gets the engine's own status, or a 5xx;
//   - nobody gets another text than an engine alone gives, and nobody a 4xx for what an engine did, but the 429 of a full
//     engine that no other can relieve;
//   - a second after the fault's end everybody is served;
//   - at the end nothing is booked, held or running, and no engine counted a violation.
//
// A stack of Tandem, Envoy and engines serves all faults of its cell in turn; it is built anew when one leaves the pool
// out of service. TestMatrix has all of it (make e2e-failures), TestMatrixInBrief the fleets and faults in which most
// was found (make test).

// fault is one kind of failure that an engine has.
type fault struct {
	name string
	rule string // of /sim/fail
	// poisoned: the fault concerns one request, whose body says poison, however often it comes.
	poisoned bool
	// lasts is the time of a fault that is not over with one request; asks that of its Retry-After.
	lasts, asks time.Duration
	status      int  // of the engine, where it answers one
	passes      bool // it is over before a request that waits is: late binding answers it
	mute        bool // streams whose 200 has gone out end in it: nobody can mend those
	halfway     bool // it comes once Envoy has an answer's headers: its router tries nothing again then
	only        string
	not         map[string]string // dialects that do not know it, and why
}

const stallBeyondLease = 15 * time.Second // matrixLease and a margin

// matrixLease is the engines' lease: within it, the engines' own clocks decide.
const matrixLease = "12s"

func faults() []fault {
	onChat := func(rule string) string { return `{"path":"/v1/chat/completions",` + rule + `}` }
	return []fault{
		{name: "429, retry after 1 s", rule: onChat(`"mode":"status","status":429,"retry_after":1`), status: 429, asks: time.Second},
		{name: "503", rule: onChat(`"mode":"status","status":503`), status: 503},
		{name: "503 twice", rule: onChat(`"mode":"status","status":503,"count":2`), status: 503, passes: true},
		{name: "503 once", rule: onChat(`"mode":"status","status":503,"count":1`), status: 503},
		{name: "500 of one request", rule: onChat(`"mode":"status","status":500,"contains":"poison"`), status: 500, poisoned: true},
		{name: "reset", rule: onChat(`"mode":"reset-before-headers"`)},
		{name: "reset in the answer", rule: onChat(`"mode":"reset-mid-body"`), mute: true, halfway: true},
		{name: "keep-alive race", rule: onChat(`"mode":"keep-alive-race","count":1`)},
		{name: "full for 8 s, 429", rule: onChat(`"mode":"status","status":429,"retry_after":1,"for":"8s"`), status: 429, lasts: 8 * time.Second, asks: time.Second},
		{name: "full for 8 s, 503", rule: onChat(`"mode":"status","status":503,"for":"8s"`), status: 503, lasts: 8 * time.Second},
		{name: "KV load failed", rule: `{"mode":"unreachable","for":"3s"}`, lasts: 3 * time.Second, mute: true, only: "prefill", not: map[string]string{
			"lmcache": "prefill writes, and decode computes what did not come"}},
		{name: "restart", mute: true, rule: `{"mode":"restart","delay":"1s"}`, lasts: time.Second},
		{name: "slow start", mute: true, rule: `{"mode":"restart","delay":"1s","warmup":"4s"}`, lasts: 5 * time.Second},
		{name: "core stands for 5 s", mute: true, rule: `{"mode":"stall","delay":"5s"}`, lasts: 5 * time.Second},
		{name: "core stands beyond the lease", rule: fmt.Sprintf(`{"mode":"stall","delay":"%s"}`, stallBeyondLease), lasts: stallBeyondLease, mute: true, only: "decode"},
	}
}

// shape is a fleet: engines of each role.
type shape struct{ prefills, decodes, both int }

func (s shape) String() string {
	if s.both > 0 {
		return fmt.Sprintf("%d both", s.both)
	}
	return fmt.Sprintf("%d+%d", s.prefills, s.decodes)
}

// cell is one stack's part of the matrix.
type cell struct {
	dialect string
	shape
	binding, split string
}

func (c cell) column() string { return fmt.Sprintf("%s %s %s", c.shape, c.binding, c.split) }

// options returns the cell's fleet.
func (c cell) options(notices string) options {
	o := options{prefills: c.prefills, decodes: c.decodes + c.both, dialect: c.dialect, split: c.split + "\n  binding: " + c.binding,
		engineArgs: []string{"--lease", matrixLease, "--load-timeout", "1s", "--transfer-timeout", "12s", "--prefill-speed", "40000"}}
	if c.both > 0 {
		o.decodeRole = "both"
	}
	if c.dialect == "nixl" { // the recommended settings: decode declines blocks whose lease ends
		o.engineArgs = append(o.engineArgs, "--bidirectional", "--decoder-ttl", "1s")
		o.pool = fmt.Sprintf("  nixl: {lease: %s, declineExpired: true}\n", matrixLease)
	}
	if c.dialect == "lmcache" {
		o = kind{engine: "lmcache", kv: "lmcache"}.setUp(o, notices, "tiny")
		o.top = fmt.Sprintf("notices: {listen: %q}\n", notices)
	}
	return o
}

// refused returns the reason for which Tandem takes no such configuration, "" if it does.
func (c cell) refused(t *testing.T) string {
	bin, err := binaries()
	require.NoError(t, err)
	var endpoints []string
	add := func(role string, n int) {
		for range n {
			host := fmt.Sprintf("10.0.0.%d", len(endpoints)+1)
			endpoints = append(endpoints, fmt.Sprintf(`{address: "%s:8000", role: %s}`, host, role))
		}
	}
	add("prefill", c.prefills)
	add("decode", c.decodes)
	add("both", c.both)
	text := fmt.Sprintf("notices: {listen: \"127.0.0.1:9009\"}\npools:\n- {name: chat, kvTransfer: %s, split: %s, binding: %s, endpoints: [%s]}\n",
		c.dialect, c.split, c.binding, strings.Join(endpoints, ", "))
	if c.dialect != "lmcache" {
		_, text, _ = strings.Cut(text, "\n")
	}
	file := filepath.Join(t.TempDir(), "check.yaml")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	out, err := exec.Command(filepath.Join(bin, "tandem"), "serve", "--check", "-f", file).CombinedOutput()
	if err != nil {
		_, why, _ := strings.Cut(string(out), file+":")
		return strings.TrimSpace(why)
	}
	return ""
}

// matrix is the results, by row and column.
type matrix struct {
	mu      sync.Mutex
	rows    []string
	columns []string
	cells   map[[2]string]string // ok, n/a, or hole
	notes   []string             // holes, and reasons of cells that are not there
	holes   int
}

func (m *matrix) put(row, column, mark, note string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !slices.Contains(m.rows, row) {
		m.rows = append(m.rows, row)
	}
	if m.cells[[2]string{row, column}] == hole {
		mark = hole // the end of another trial of this cell
	}
	m.cells[[2]string{row, column}] = mark
	if note != "" && !slices.Contains(m.notes, note) {
		m.notes = append(m.notes, note)
	}
	if mark == hole {
		m.holes++
	}
}

const (
	held          = "."
	hole          = "X"
	notApplicable = "-"
	notRun        = "?"
)

// table prints the matrix. Columns are numbered, for their names are long.
func (m *matrix) table() string {
	var b strings.Builder
	slices.Sort(m.rows)
	for i, c := range m.columns {
		fmt.Fprintf(&b, "column %2d: %s\n", i+1, c)
	}
	fmt.Fprintf(&b, "\n%-62s", "")
	for i := range m.columns {
		fmt.Fprintf(&b, "%3d", i+1)
	}
	for _, row := range m.rows {
		fmt.Fprintf(&b, "\n%-62s", row)
		for _, c := range m.columns {
			fmt.Fprintf(&b, "%3s", m.cells[[2]string{row, c}]) // empty: the fleet has no engine of that role
		}
	}
	fmt.Fprintf(&b, "\n\n%s held, %s hole, %s does not exist, %s was not run\n", held, hole, notApplicable, notRun)
	slices.Sort(m.notes)
	for _, n := range m.notes {
		fmt.Fprintf(&b, "%s\n", n)
	}
	fmt.Fprintf(&b, "%d holes\n", m.holes)
	return b.String()
}

// runMatrix runs the cells, at once, and prints the table. In brief, each role's faults have a stack of their own, and
// none waits for other tests to end (-parallel): stacks mostly wait.
func runMatrix(t *testing.T, cells []cell, brief bool, of func(cell, fault) bool) {
	m := &matrix{cells: map[[2]string]string{}}
	alone := startAlone(t)
	for _, c := range cells {
		if !slices.Contains(m.columns, c.column()) {
			m.columns = append(m.columns, c.column())
		}
	}
	t.Run("cells", func(t *testing.T) {
		var all sync.WaitGroup
		for _, c := range cells {
			if !brief {
				t.Run(c.dialect+" "+c.column(), func(t *testing.T) {
					t.Parallel()
					(&trial{t: t, cell: c, m: m, alone: alone}).run(c.roles(), of)
				})
				continue
			}
			for _, role := range c.roles() {
				all.Go(func() {
					t.Run(c.dialect+" "+c.column()+" "+role, func(t *testing.T) {
						(&trial{t: t, cell: c, m: m, alone: alone}).run([]string{role}, of)
					})
				})
			}
		}
		all.Wait()
	})
	t.Logf("\n%s", m.table())
	if file := os.Getenv("TANDEM_MATRIX"); file != "" {
		require.NoError(t, os.WriteFile(file, []byte(m.table()), 0o600))
	}
	require.Zero(t, m.holes, "holes")
}

// startAlone starts an engine that answers alone, and returns its URL.
func startAlone(t *testing.T) string {
	bin, err := binaries()
	require.NoError(t, err)
	addr := ports(t, 1)[0]
	p := startProcess(t, t.TempDir(), "alone", filepath.Join(bin, "enginesim"), "--listen", addr, "--side-channel", "127.0.0.1:0", "--connector", "none", "--model", "tiny")
	(&fleet{t: t}).waitFor(p, "http://"+addr+"/health")
	return "http://" + addr
}

// trial is a cell's run.
type trial struct {
	t     *testing.T
	cell  cell
	m     *matrix
	alone string
	f     *fleet
	n     int
	seen  float64 // violations that earlier faults have
}

func (r *trial) run(roles []string, of func(cell, fault) bool) {
	type strike struct {
		fault
		role, row string
	}
	var all []strike
	refused := r.cell.refused(r.t)
	for _, fa := range faults() {
		for _, role := range roles {
			if !of(r.cell, fa) || fa.only != "" && role != fa.only && role != "both" {
				continue
			}
			row := fmt.Sprintf("%s: %s, %s", r.cell.dialect, fa.name, role)
			switch why := fa.not[r.cell.dialect]; {
			case refused != "":
				r.m.put(row, r.cell.column(), notApplicable, fmt.Sprintf("- %s, %s: %s", r.cell.dialect, r.cell.column(), refused))
			case why != "":
				r.m.put(row, r.cell.column(), notApplicable, "- "+row+": "+why)
			case fa.only == "prefill" && r.cell.both == 1:
				r.m.put(row, r.cell.column(), notApplicable, "- "+row+": one engine takes no KV from itself")
			case fa.only == "prefill" && r.cell.dialect == "sglang" && r.cell.both > 0:
				r.m.put(row, r.cell.column(), notApplicable, "- "+row+": engines of both roles hand nothing over")
			default:
				r.m.put(row, r.cell.column(), notRun, "")
				all = append(all, strike{fa, role, row})
			}
		}
	}
	if refused != "" {
		return
	}
	r.build()
	for _, s := range all {
		r.strike(s.fault, s.role, s.row)
	}
	r.balance()
}

// build starts a stack, and ends the one before.
func (r *trial) build() {
	if r.f != nil {
		r.f.end()
	}
	r.f = start(r.t, r.cell.options(ports(r.t, 1)[0]))
	r.f.lenient, r.seen = true, 0
}

// end stops a fleet before the test ends.
func (f *fleet) end() {
	f.t.Cleanup(func() { f.envoy = &process{exited: make(chan struct{})} }) // account only checks that it had not died before
	for _, p := range slices.Concat([]*process{f.envoy}, f.tandems) {
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
	for _, e := range f.engines() {
		_ = e.cmd.Process.Kill()
		<-e.exited
	}
}

// roles returns the roles of which an engine gets each fault.
func (c cell) roles() []string {
	if c.both > 0 {
		return []string{"both"}
	}
	return []string{"prefill", "decode"}
}

// relieved reports whether another engine, or one without the struck one, can answer what the struck one cannot.
func (r *trial) relieved(e *engine) bool {
	c := r.cell
	switch {
	case c.both > 0:
		return c.both > 1
	case e.role == "decode":
		return c.decodes > 1
	case c.prefills > 1:
		return true
	}
	return c.split == "auto" && c.dialect != "sglang" // decode alone: never with split always, and not with rooms
}

// strike puts a fault on an engine of a role, sends requests, ends it, and judges.
func (r *trial) strike(fa fault, role, row string) {
	at := fmt.Sprintf("X %s | %s: ", row, r.cell.column())
	fail := func(format string, args ...any) {
		note := at + fmt.Sprintf(format, args...)
		said, _ := os.ReadFile(r.f.tandems[0].log)
		r.t.Logf("%s\n%s", note, said[max(len(said)-6000, 0):])
		r.m.put(row, r.cell.column(), hole, note)
	}
	if got := r.steady(); got != "" {
		fail("the pool does not serve before the fault: %s", got)
		r.build()
		return
	}
	e := r.latest(role)
	time.Sleep(settled)
	r.f.inject(e, fa.rule)
	began := time.Now()
	var wrong []string
	met := true
	if fa.lasts > 0 {
		wrong = r.during(fa, e, began)
	} else {
		met, wrong = r.meet(fa, e)
	}
	time.Sleep(fa.asks)
	if fa.lasts > 0 {
		r.backUp(e)
	}
	r.f.clear(e)
	broken := false
	time.Sleep(time.Second) // the fault is over: within this time everybody is served
	for _, stream := range []bool{false, true} {
		if got := r.ask("", stream).fault(true, fault{}); got != "" {
			wrong, broken = append(wrong, fmt.Sprintf("1 s after the end: %s; %s", got, r.back())), true
			break
		}
	}
	if v := r.violations(); v > r.seen {
		wrong = append(wrong, fmt.Sprintf("%v violations: %s", v-r.seen, r.violationKinds()))
		r.seen = v
	}
	if !met && r.cell.split != "auto" {
		wrong = append(wrong, "no request met the fault")
	}
	if len(wrong) > 0 {
		fail("%s", strings.Join(wrong, "; "))
		if broken && r.steady() != "" {
			r.build()
		}
		return
	}
	if !met { // auto may do without an engine
		r.m.put(row, r.cell.column(), notApplicable, at[2:]+"the pool had no use for the engine, so no request met the fault")
		return
	}
	r.m.put(row, r.cell.column(), held, "")
}

// latest returns the engine of a role that the last request came to, or any.
func (r *trial) latest(role string) (last *engine) {
	var at time.Time
	for _, e := range r.f.engines() {
		if e.role != role {
			continue
		}
		var list []leg
		_ = getJSON("http://"+e.addr+"/sim/requests?n=1", &list)
		if last == nil || len(list) > 0 && list[0].Time.After(at) {
			last = e
			if len(list) > 0 {
				at = list[0].Time
			}
		}
	}
	return last
}

// meet sends requests, one by one and then a few at once, until one has met the fault, and reports whether one did. The fault lasts until they
// have ended, as often as they are tried, unless the rule says otherwise. Of poisoned requests there is one.
func (r *trial) meet(fa fault, e *engine) (met bool, wrong []string) {
	struck := func() float64 { return metric(r.t, "http://"+e.addr, "enginesim_injected_failures_total") }
	before := struck()
	for try := range 16 {
		var wave sync.WaitGroup
		var mu sync.Mutex
		for i := range 1 + 3*(try/4) { // 1, 4, 7, 10
			n, text := r.next(), ""
			if fa.poisoned && i == 0 {
				text = "poison"
			}
			wave.Go(func() {
				others := fa.poisoned && text == ""
				waits := fa.passes && r.cell.binding == "late"
				bad := r.askAs(n, text, n%2 == 1).fault(r.relieved(e) || others || waits, fa)
				if bad == "" {
					return
				}
				if others {
					bad = "another request: " + bad
				}
				mu.Lock()
				defer mu.Unlock()
				wrong = append(wrong, bad)
			})
		}
		wave.Wait()
		if struck() > before || len(wrong) > 0 {
			break
		}
	}
	slices.Sort(wrong)
	return struck() > before, slices.Compact(wrong)
}

// during sends requests for as long as the fault lasts, and waits for their answers.
func (r *trial) during(fa fault, e *engine, began time.Time) (wrong []string) {
	var asked sync.WaitGroup
	var mu sync.Mutex
	first := map[string]time.Duration{} // when it was asked
	for time.Since(began) < fa.lasts {
		n := r.next()
		asked.Go(func() {
			got := r.askAs(n, "", n%2 == 1)
			bad, at := got.fault(r.relieved(e), fa), got.at.Sub(began).Round(100*time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			if was, seen := first[bad]; !seen || at < was {
				first[bad] = at
			}
		})
		time.Sleep(min(fa.lasts/6, fa.lasts-time.Since(began)))
	}
	asked.Wait()
	for bad, at := range first {
		if bad != "" {
			wrong = append(wrong, fmt.Sprintf("at %v: %s", at, bad))
		}
	}
	slices.Sort(wrong)
	return wrong
}

// backUp waits until an engine that was to start again has done so: the fault's end.
func (r *trial) backUp(e *engine) {
	soon(r.t, "the engine answers", func() bool { return answers("http://" + e.addr + "/ping") })
}

// steady waits for a while until two requests in a row are answered, and returns what they got instead.
func (r *trial) steady() (last string) {
	for deadline := time.Now().Add(8 * time.Second); ; time.Sleep(500 * time.Millisecond) {
		ok := 0
		for i := range 2 {
			if last = r.ask("", i == 1).fault(true, fault{}); last == "" {
				ok++
			}
		}
		if ok == 2 || time.Now().After(deadline) {
			return last
		}
	}
}

// back returns how long it takes until requests are answered again.
func (r *trial) back() string {
	began := time.Now()
	if got := r.steady(); got != "" {
		return "not back 8 s later"
	}
	return fmt.Sprintf("back %v later", time.Since(began).Round(time.Second))
}

func (r *trial) violations() (n float64) {
	for _, e := range r.f.engines() {
		n += metric(r.t, "http://"+e.addr, "enginesim_violations_total")
	}
	return n
}

func (r *trial) violationKinds() string {
	all := map[string]int{}
	for _, e := range r.f.engines() {
		var state struct {
			By map[string]int `json:"violations_by"`
		}
		if getJSON("http://"+e.addr+"/sim/state", &state) == nil {
			for kind, n := range state.By {
				all[kind] += n
			}
		}
	}
	text, _ := json.Marshal(all)
	return string(text)
}

// balance checks at the end that nothing is booked, held or running.
func (r *trial) balance() {
	row := r.cell.dialect + ": the end: nothing booked, held, running"
	left := (&stage{t: r.t, f: r.f, stopped: map[*process]bool{}}).quiet()
	if left = strings.ReplaceAll(left, "VIOLATIONS", ""); strings.Trim(left, " ,") == "" || left == "nothing" {
		r.m.put(row, r.cell.column(), held, "")
		return
	}
	var whose []string
	for _, e := range r.f.engines() {
		var state struct {
			HeldFor []string `json:"held_for"`
		}
		if getJSON("http://"+e.addr+"/sim/state", &state) == nil {
			whose = append(whose, state.HeldFor...)
		}
	}
	r.m.put(row, r.cell.column(), hole, fmt.Sprintf("X %s | %s: %s %v", row, r.cell.column(), left, whose))
}

// got is what a client got.
type got struct {
	*response
	at     time.Time
	want   string
	stream bool
}

func (r *trial) next() int {
	r.n++
	return r.n
}

// ask sends a request whose prompt contains text, and waits for its answer.
func (r *trial) ask(text string, stream bool) got { return r.askAs(r.next(), text, stream) }

// askAs is ask for request n of this trial.
func (r *trial) askAs(n int, text string, stream bool) got {
	prompt := fmt.Sprintf("%d %s %s", n, text, strings.Repeat("nothing is lost, whatever an engine does. ", 400))
	body := fmt.Sprintf(`{"model":"tiny","stream":%t,"ignore_eos":true,"max_tokens":9,"messages":[{"role":"user","content":%q}]}`, stream, prompt)
	ctx, cancel := context.WithTimeout(context.Background(), 40*time.Second)
	defer cancel()
	a := got{at: time.Now(), stream: stream}
	a.response = send(ctx, r.f.url, fmt.Sprintf("ask-%d", n), body)
	<-a.done
	if a.status == http.StatusOK {
		a.want, _ = whole(context.Background(), r.alone, body)
	}
	return a
}

// fault returns what is wrong with an answer, "" if it is right. relieved: another engine could have given it.
func (a got) fault(relieved bool, fa fault) string {
	kind := a.kind(a.want)
	if a.status != 0 && a.status != http.StatusOK {
		var e struct{ Error struct{ Message string } }
		_ = json.Unmarshal([]byte(a.body.String()), &e)
		kind += fmt.Sprintf(" (%.90s)", e.Error.Message)
	}
	if _, event, found := strings.Cut(a.body.String(), `data: {"error"`); found && a.status == http.StatusOK {
		kind += fmt.Sprintf(" (%.160s)", event)
	}
	broken := a.status == http.StatusOK && (strings.HasPrefix(kind, "200 and") || kind == "200 but not an answer")
	switch {
	case kind == "200 whole":
		return ""
	case strings.HasPrefix(kind, "200 OTHER"):
		return kind
	case broken && fa.mute:
		return ""
	case fa.halfway && !a.stream && a.status == http.StatusBadGateway: // Envoy held the answer, to cut its KV parameters
		return ""
	case broken && fa.lasts > 0 && !relieved: // a stream's 200 had gone out
		return ""
	case relieved, a.status == 0:
		return kind
	case fa.status == http.StatusTooManyRequests: // the engine's own answer
		if a.status != fa.status || a.header.Get("Retry-After") == "" {
			return kind + ", not the engine's 429 with Retry-After"
		}
		return ""
	case a.status >= 500:
		return ""
	}
	return kind
}

// settled is the time after which Tandem knows how a request went: Envoy's access log is a second late.
const settled = 1500 * time.Millisecond

func always(cell, fault) bool { return true }

// TestMatrix is the whole matrix.
func TestMatrix(t *testing.T) {
	if os.Getenv("TANDEM_FAILURES") == "" {
		t.Skip("takes minutes: make e2e-failures, or set TANDEM_FAILURES=1")
	}
	var cells []cell
	for _, dialect := range []string{"nixl", "nixl-push", "mooncake", "sglang", "lmcache"} {
		for _, s := range []shape{{1, 1, 0}, {1, 2, 0}, {2, 1, 0}, {2, 2, 0}, {0, 0, 1}, {0, 0, 3}} {
			for _, binding := range []string{"late", "immediate"} {
				for _, split := range []string{"auto", "always"} {
					cells = append(cells, cell{dialect, s, binding, split})
				}
			}
		}
	}
	runMatrix(t, cells, false, always)
}

// TestMatrixInBrief is the part of the matrix in which most faults were found: small fleets, and faults of one request.
func TestMatrixInBrief(t *testing.T) {
	t.Parallel()
	cells := []cell{
		{"nixl", shape{1, 1, 0}, "late", "always"}, {"nixl", shape{1, 1, 0}, "immediate", "auto"},
		{"nixl", shape{1, 2, 0}, "late", "always"}, {"nixl", shape{0, 0, 3}, "late", "auto"},
		{"sglang", shape{1, 1, 0}, "late", "auto"}, {"sglang", shape{1, 2, 0}, "immediate", "always"},
		{"mooncake", shape{1, 1, 0}, "late", "always"}, {"lmcache", shape{1, 1, 0}, "late", "auto"},
	}
	runMatrix(t, cells, true, func(c cell, f fault) bool {
		late := c.binding == "late" && c.both == 0 // it tries again for seconds before the client gets a refusal: one cell each
		switch f.name {
		case "503":
			return !late || c == cells[0]
		case "429, retry after 1 s":
			return !late || c == cells[2]
		case "503 once", "reset in the answer":
			return false
		}
		return f.lasts == 0
	})
}
