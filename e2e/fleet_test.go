package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// patience is the maximum wait for an event, however slow the machine. Any other time that a test expects is either
// configured, and then far above the stalls of a slow machine, or a claim of speed (see [speed]).
const patience = 60 * time.Second

// speed checks a claim about speed that holds on an idle machine: only if TANDEM_SPEED is set (make speed), and never
// in CI.
func speed(t testing.TB, holds bool, claim string, args ...any) {
	t.Helper()
	if os.Getenv("TANDEM_SPEED") != "" {
		require.True(t, holds, append([]any{claim}, args...)...)
	}
}

// soon waits until is returns true.
func soon(t testing.TB, what string, is func() bool) {
	t.Helper()
	require.Eventually(t, is, patience, 20*time.Millisecond, what)
}

// binaries are built once for all tests.
var binaries = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "tandem-e2e-")
	if err != nil {
		return "", err
	}
	out, err := exec.Command("go", "build", "-o", dir, "../cmd/tandem", "../cmd/enginesim").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building: %w\n%s", err, out)
	}
	return dir, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if dir, err := binaries(); err == nil {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// long skips a test that takes a quarter of a minute or more by itself, beside no other, unless TANDEM_LONG is set: make
// test leaves these out, and make race runs them, as .ci/run does.
func long(t *testing.T) {
	t.Helper()
	if os.Getenv("TANDEM_LONG") == "" {
		t.Skip("it is long, and runs in make race and .ci/run (TANDEM_LONG=1)")
	}
}

// tool finds a program by its environment variable, on PATH, or in .tools/.
func tool(t testing.TB, env, name, fallback string) string {
	t.Helper()
	if path := os.Getenv(env); path != "" {
		return path
	}
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	if path, err := filepath.Abs(filepath.Join("..", fallback)); err == nil {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	if os.Getenv("TANDEM_REQUIRE_TOOLS") != "" {
		t.Fatalf("%s is missing: run scripts/tools.sh, or set %s", name, env)
	}
	t.Skipf("%s is missing: run scripts/tools.sh, or set %s", name, env)
	return ""
}

// process is a running program whose output goes to a file.
type process struct {
	cmd    *exec.Cmd
	log    string
	exited chan struct{}
}

func startProcess(t testing.TB, dir, name, path string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(path, args...), log: filepath.Join(dir, name+".log"), exited: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(t, err)
	defer out.Close()
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, p.cmd.Start())
	go func() { _ = p.cmd.Wait(); close(p.exited) }()
	t.Cleanup(func() {
		p.stop(syscall.SIGTERM)
		if t.Failed() {
			text, _ := os.ReadFile(p.log)
			t.Logf("---- %s ----\n%s", name, text[max(0, len(text)-6000):])
		}
	})
	return p
}

// stop sends a signal and waits for the end, by force after a minute.
func (p *process) stop(s os.Signal) {
	_ = p.cmd.Process.Signal(s)
	select {
	case <-p.exited:
	case <-time.After(patience):
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
}

func (p *process) running() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// engine is one simulator.
type engine struct {
	*process
	addr, role string
	dialect    string
	transfer   string // more of its configuration: how the other leg reaches it
	args       []string
	fields     string // more fields of it in the configuration
	events     string // more fields of its endpoint, where it publishes KV events
}

// fleet is Envoy, Tandem and engines.
type fleet struct {
	t         testing.TB
	dir       string
	url       string // of Envoy's listener
	envoy     *process
	envoyURL  string // of its admin port
	tandems   []*process
	admins    []string // URLs of Tandem's admin ports
	prefills  []*engine
	decodes   []*engine
	encodes   []*engine
	config    string // file
	serveArgs []string
	memory    string // GOMEMLIMIT of Tandem; "": none
	lenient   bool   // the test breaks engines on purpose: skip the account
	routed    bool   // the route is another's
}

// options describe a fleet. Zero values: one Tandem, 2 prefill and 2 decode engines.
type options struct {
	prefills, decodes int
	encodes           int
	decodeRole        string // of the decode engines; default decode
	replicas          int
	engineArgs        []string
	dialect           string                                                                      // kvTransfer; default nixl
	engine            func(role string, i int, free func() string) (args []string, fields string) // more of each engine: arguments, and fields of it in the configuration
	split             string                                                                      // the generated pools' split; default always, with decodeAlone fallback
	pool              string                                                                      // more lines of the pool, indented by two
	pools             string                                                                      // all pools, instead of the generated one; %P and %D are replaced by addresses in turn
	top               string                                                                      // more top-level YAML; %i is the replica's number
	poolOf            map[string]string                                                           // more fields of a dialect's pool
	envoyFields       string                                                                      // more fields of envoy:, as flow YAML
	extProcFields     string                                                                      // more fields of extProc:, likewise
	concurrency       int                                                                         // Envoy's workers; default 2
	madeKeys          bool                                                                        // no key file: replicas share generated keys
	mix               []string                                                                    // instead of dialect: a pool for each, with a model of that name, and engines of each role in turn
	kvEvents          string                                                                      // the pool's kvEvents, as flow YAML; "": the engines publish none
	adminFields       string                                                                      // more fields of admin:, likewise
	separateKeys      bool                                                                        // each replica has a ticket key file of its own, ticket-N.key, with the same key
	serveArgs         []string
	memory            string // GOMEMLIMIT of Tandem; "": none

	launch        func(f *fleet)          // starts the engines, in place of prefills and decodes
	bootstrap     func(f *fleet) string   // of a foreign gateway, in place of the output of `tandem envoy`
	untracedEnvoy bool                    // its bootstrap is written without tracing
	xds           bool                    // Envoy gets its configuration from Tandem
	envoyEnv      func(f *fleet) []string // more of Envoy's environment
	routed        bool                    // Envoy has Tandem loaded on another's route; TANDEM_ROUTE=another: in every such test
	inside        bool                    // Envoy has Tandem loaded; TANDEM_RUN=inside: in every test
}

func start(t testing.TB, o options) *fleet {
	t.Helper()
	envoyPath := tool(t, "ENVOY", "envoy", ".tools/bin/envoy")
	if o.inside = o.inside || runsInside(); o.inside {
		loadLibrary(t)
		if o.replicas > 1 {
			t.Skip("one Envoy has one replica inside: TestInsideSeveral")
		}
		o.envoyFields += ", run: inside"
	}
	bin, err := binaries()
	require.NoError(t, err)
	if o.prefills == 0 && o.decodes == 0 && o.launch == nil {
		o.prefills, o.decodes = 2, 2
	}
	replicas := max(o.replicas, 1)
	if len(o.mix) == 0 {
		o.mix = []string{cmp.Or(o.dialect, "nixl")}
	}
	p := ports(t, 2+3*replicas+9*(o.prefills+o.decodes+o.encodes))
	next := func() string { a := p[0]; p = p[1:]; return a }
	f := &fleet{t: t, dir: t.TempDir()}
	listen, envoyAdmin := next(), next()
	f.url, f.envoyURL = "http://"+listen, "http://"+envoyAdmin
	for i := range o.prefills + o.decodes + o.encodes {
		role, nth := "prefill", i
		if i >= o.prefills {
			role, nth = cmp.Or(o.decodeRole, "decode"), i-o.prefills
		}
		if nth >= o.decodes && i >= o.prefills {
			role, nth = "encode", nth-o.decodes
		}
		e := &engine{addr: next(), role: role, dialect: o.mix[nth%len(o.mix)]}
		side := next()
		e.args = append([]string{"--listen", e.addr, "--side-channel", side, "--role", role}, o.engineArgs...)
		if o.engine != nil {
			var more []string
			more, e.fields = o.engine(role, i, next)
			e.args = append(e.args, more...)
		} else {
			e.args = append(e.args, "--model", "tiny")
			if len(o.mix) > 1 {
				e.args = append(e.args, "--model", e.dialect)
			}
		}
		if o.engine == nil && e.dialect != "nixl" {
			e.speak(side, next())
		}
		if o.kvEvents != "" {
			events, replay := portOf(next()), portOf(next())
			e.args = append(e.args, "--kv-events", "tcp://*:"+events, "--kv-events-replay", "tcp://*:"+replay, "--kv-events-topic", "kv@"+e.addr+"@tiny")
			e.events = ", kvEventsPort: " + events + ", kvReplayPort: " + replay
		}
		e.process = startProcess(t, f.dir, role+"-"+strconv.Itoa(i), filepath.Join(bin, "enginesim"), e.args...)
		switch role {
		case "prefill":
			f.prefills = append(f.prefills, e)
		case "decode", "both":
			f.decodes = append(f.decodes, e)
		default:
			f.encodes = append(f.encodes, e)
		}
	}
	for _, e := range f.engines() {
		f.waitFor(e.process, "http://"+e.addr+"/health")
	}
	if o.launch != nil {
		o.launch(f)
	}

	var extProcs, replans, listens []string
	for range replicas {
		extProcs, replans, listens = append(extProcs, next()), append(replans, next()), append(listens, next())
	}
	key := filepath.Join(f.dir, "ticket.key")
	require.NoError(t, os.WriteFile(key, []byte(strings.Repeat("0123456789abcdef", 4)+"\n"), 0o600))
	f.serveArgs, f.memory = o.serveArgs, o.memory
	for i := range replicas {
		if o.separateKeys {
			key = filepath.Join(f.dir, fmt.Sprintf("ticket-%d.key", i))
			require.NoError(t, os.WriteFile(key, []byte(strings.Repeat("0123456789abcdef", 4)+"\n"), 0o600))
		}
		file := filepath.Join(f.dir, fmt.Sprintf("tandem-%d.yaml", i))
		require.NoError(t, os.WriteFile(file, []byte(f.yaml(o, listen, envoyAdmin, extProcs, replans, listens[i], i, key)), 0o600))
		f.config = file
		if o.inside {
			f.admins = append(f.admins, "http://"+listens[i])
			continue
		}
		f.startTandem(i, file, "http://"+listens[i])
	}
	if f.routed = o.inside && (o.routed || os.Getenv("TANDEM_ROUTE") == "another"); f.routed {
		if o.bootstrap == nil { // the policy has a name, and the operator's port is that of all
			f.admins[0] += policyName
		}
		routed(&o, func() string { return listens[0] })
	}
	f.startEnvoy(bin, envoyPath, o)
	if o.inside {
		f.tandems = []*process{f.envoy}
	}
	t.Cleanup(f.account)
	return f
}

// yaml returns the configuration of replica i.
func (f *fleet) yaml(o options, listen, envoyAdmin string, extProcs, replans []string, admin string, i int, key string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "extProc: {listen: %q%s}\nreplan: {listen: %q}\nadmin: {listen: %q%s}\n", extProcs[i], o.extProcFields, replans[i], admin, o.adminFields)
	fmt.Fprintf(&b, "envoy: {listen: %q, admin: %q, extProcs: [%s], replans: [%s]%s}\n", listen, envoyAdmin,
		strings.Join(quoted(extProcs), ", "), strings.Join(quoted(replans), ", "), o.envoyFields)
	if !o.madeKeys {
		fmt.Fprintf(&b, "tickets: {keyFile: %q}\n", key)
	}
	b.WriteString(strings.ReplaceAll(o.top, "%i", strconv.Itoa(i)))
	if o.pools != "" {
		pools := o.pools
		for _, e := range f.prefills {
			pools = strings.Replace(pools, "%P", strconv.Quote(e.addr)+e.fields, 1)
		}
		for _, e := range f.decodes {
			pools = strings.Replace(pools, "%D", strconv.Quote(e.addr)+e.fields, 1)
		}
		return b.String() + pools
	}
	b.WriteString("pools:\n")
	for _, dialect := range o.mix {
		name, models := dialect, dialect
		if len(o.mix) == 1 {
			name, models = "chat", "*"
		}
		fmt.Fprintf(&b, "- name: %s\n  models: [%q]\n  kvTransfer: %s\n  split: %s\n%s", name, models, dialect,
			cmp.Or(o.split, "always\n  decodeAlone: fallback"), o.pool+o.poolOf[dialect])
		if o.kvEvents != "" {
			fmt.Fprintf(&b, "  kvEvents: %s\n", o.kvEvents)
		}
		b.WriteString("  endpoints:\n")
		for _, e := range f.engines() {
			if e.dialect == dialect {
				fmt.Fprintf(&b, "  - {address: %q, role: %s%s}\n", e.addr, e.role, e.transfer+e.fields+e.events)
			}
		}
	}
	return b.String()
}

// speak configures an engine for another dialect than nixl. side is its side channel, extra a free address.
func (e *engine) speak(side, extra string) {
	e.args = append(e.args, "--connector", e.dialect)
	port := func(addr string) string { _, p, _ := net.SplitHostPort(addr); return p }
	switch {
	case strings.HasPrefix(e.dialect, "moriio"):
		e.transfer = ", transfer: {notifyPort: " + port(side) + "}"
	case e.role == "prefill" || e.role == "both" && e.dialect == "mooncake": // a bootstrap server
		e.args = append(e.args, "--bootstrap", extra)
		e.transfer = ", transfer: {bootstrapPort: " + port(extra) + "}"
	}
}

func portOf(addr string) string {
	_, port, _ := net.SplitHostPort(addr)
	return port
}

func quoted(in []string) (out []string) {
	for _, s := range in {
		out = append(out, strconv.Quote(s))
	}
	return out
}

func (f *fleet) startTandem(i int, file, admin string) {
	f.launchTandem(i, file, admin)
	f.waitFor(f.tandems[i], admin+"/readyz")
}

// launchTandem starts replica i without waiting until it is ready.
func (f *fleet) launchTandem(i int, file, admin string) {
	bin, _ := binaries()
	args := append([]string{"GOMEMLIMIT=" + cmp.Or(f.memory, "off"), filepath.Join(bin, "tandem"), "serve", "-f", file}, f.serveArgs...)
	p := startProcess(f.t, f.dir, "tandem-"+strconv.Itoa(i), "/usr/bin/env", args...)
	if i < len(f.tandems) {
		f.tandems[i] = p
	} else {
		f.tandems, f.admins = append(f.tandems, p), append(f.admins, admin)
	}
}

func (f *fleet) startEnvoy(bin, path string, o options) {
	t := f.t
	config := f.config
	if o.untracedEnvoy && !o.inside { // there it never traces
		text, err := os.ReadFile(config)
		require.NoError(t, err)
		config += ".untraced"
		require.NoError(t, os.WriteFile(config, regexp.MustCompile(`(?m)^tracing:.*$`).ReplaceAll(text, nil), 0o600))
	}
	args, envoyArgs := []string{"envoy", "-f", config}, []string{}
	if o.xds {
		args, envoyArgs = append(args, "--xds"), []string{"--service-node", "edge-1", "--drain-time-s", "3600"}
	}
	bootstrap, err := exec.Command(filepath.Join(bin, "tandem"), args...).Output()
	require.NoError(t, err)
	if o.bootstrap != nil {
		bootstrap = []byte(o.bootstrap(f))
	}
	file := filepath.Join(f.dir, "envoy.yaml")
	require.NoError(t, os.WriteFile(file, bootstrap, 0o600))
	workers := o.concurrency
	if workers == 0 {
		workers = 2
	}
	envoyArgs = append(envoyArgs, "-c", file, "-l", "warning", "--use-dynamic-base-id", "--concurrency", strconv.Itoa(workers))
	if o.envoyEnv != nil {
		path, envoyArgs = "/usr/bin/env", append(append(o.envoyEnv(f), path), envoyArgs...)
	}
	f.envoy = startProcess(t, f.dir, "envoy", path, envoyArgs...)
	f.waitFor(f.envoy, f.envoyURL+"/ready")
	// Ready means that listeners are up; the ext_proc cluster may still wait for its first health check.
	require.Eventually(t, func() bool {
		resp, err := http.Get(f.url + "/v1/models")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		return resp.StatusCode == 200
	}, patience, 20*time.Millisecond, "Envoy does not reach Tandem")
}

// waitFor waits until url answers 200.
func (f *fleet) waitFor(p *process, url string) {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		if !p.running() {
			return true
		}
		return answers(url)
	}, patience, 10*time.Millisecond, "%s does not answer", url)
	require.True(f.t, p.running(), "%s ended", p.cmd.Path)
}

func (f *fleet) engines() []*engine { return slices.Concat(f.prefills, f.decodes, f.encodes) }

// restart restarts an engine on its address.
func (f *fleet) restart(e *engine) {
	bin, _ := binaries()
	e.process = startProcess(f.t, f.dir, e.role+"-"+strings.ReplaceAll(e.addr, ":", "_"), filepath.Join(bin, "enginesim"), e.args...)
	f.waitFor(e.process, "http://"+e.addr+"/health")
}

// answer is a client's answer.
type answer struct {
	status int
	header http.Header
	body   string
	took   time.Duration
}

// events returns the data of an SSE answer.
func (a answer) events() (out []string) {
	for line := range strings.Lines(a.body) {
		if data, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "data: "); ok {
			out = append(out, data)
		}
	}
	return out
}

var client = &http.Client{Timeout: 90 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 512}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}

// post sends a JSON body. Headers are name, value, name, value, ...
func (f *fleet) post(path, body string, headers ...string) answer {
	f.t.Helper()
	a, err := f.try(context.Background(), http.MethodPost, path, body, headers...)
	require.NoError(f.t, err)
	return a
}

func (f *fleet) try(ctx context.Context, method, path, body string, headers ...string) (answer, error) {
	var reader io.Reader
	if body != "" {
		reader = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, f.url+path, reader)
	if err != nil {
		return answer{}, err
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(headers); i += 2 {
		if strings.EqualFold(headers[i], "host") {
			req.Host = headers[i+1]
		} else if headers[i+1] == "" {
			req.Header.Del(headers[i])
		} else {
			req.Header.Set(headers[i], headers[i+1])
		}
	}
	began := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return answer{}, err
	}
	got, err := readAnswer(resp)
	got.took = time.Since(began)
	return got, err
}

func readAnswer(resp *http.Response) (answer, error) {
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return answer{status: resp.StatusCode, header: resp.Header, body: string(text)}, err
}

// seen is an engine's record of a request.
type seen struct {
	Engine           string
	Method           string              `json:"method"`
	Path             string              `json:"path"`
	Host             string              `json:"host"`
	Headers          map[string][]string `json:"headers"`
	RequestID        string              `json:"request_id"`
	Rank             int                 `json:"rank"`
	Body             string              `json:"body"`
	BodyBytes        int                 `json:"body_bytes"`
	BodySHA256       string              `json:"body_sha256"`
	Leg              string              `json:"leg"`
	Status           int                 `json:"status"`
	Outcome          string              `json:"outcome"`
	PromptTokens     int                 `json:"prompt_tokens"`
	ExternalTokens   int                 `json:"external_tokens"`
	CachedTokens     int                 `json:"cached_tokens"`
	CompletionTokens int                 `json:"completion_tokens"`
	Encoded          int                 `json:"encoded"`
	EncodedHere      int                 `json:"encoded_here"`
}

// requests returns the engines' records of a request id, in no particular order; "" selects all.
func (f *fleet) requests(id string, of ...*engine) (out []seen) {
	f.t.Helper()
	for _, e := range of {
		var list []seen
		if err := getJSON("http://"+e.addr+"/sim/requests?id="+id, &list); err != nil {
			continue // it is down
		}
		for _, s := range list {
			if s.Path != "/health" && s.Path != "/v1/models" && s.Path != "/metrics" {
				s.Engine = e.addr
				out = append(out, s)
			}
		}
	}
	return out
}

// hops returns the one prefill and the one decode request under an id.
func (f *fleet) hops(id string) (prefill, decode seen) {
	f.t.Helper()
	p, d := f.requests(id, f.prefills...), f.requests(id, f.decodes...)
	require.Len(f.t, p, 1, "prefill requests of %s", id)
	require.Len(f.t, d, 1, "decode requests of %s", id)
	return p[0], d[0]
}

func getJSON(url string, into any) error {
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		return errors.New(resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// metricNames are those in docs/metrics.md, which has all of them.
var metricNames = sync.OnceValues(func() (map[string]bool, error) {
	text, err := os.ReadFile("../docs/metrics.md")
	names := map[string]bool{}
	for _, name := range regexp.MustCompile(`tandem_[a-z0-9_]+`).FindAllString(string(text), -1) {
		names[name] = true
	}
	return names, err
})

// metric sums the samples of a metric of this name whose labels contain all of the given text.
func metric(t testing.TB, url, name string, labels ...string) float64 {
	t.Helper()
	if strings.HasPrefix(name, "tandem_") { // an unknown one would be 0
		known, err := metricNames()
		require.NoError(t, err)
		base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_count"), "_sum"), "_bucket")
		require.True(t, known[base] || known[name], "%s is no metric of docs/metrics.md", name)
	}
	resp, err := client.Get(url + "/metrics")
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	sum := 0.0
	for line := range bytes.Lines(text) { // without a pattern: tests that wait look a hundred times a second
		series, found := bytes.CutPrefix(bytes.TrimSuffix(line, []byte("\n")), []byte(name))
		space := bytes.LastIndexByte(series, ' ')
		if !found || space < 0 || space > 0 && series[0] != '{' {
			continue
		}
		fits := true
		for _, l := range labels {
			fits = fits && bytes.Contains(series[:space], []byte(l))
		}
		if v, err := strconv.ParseFloat(string(series[space+1:]), 64); err == nil && fits {
			sum += v
		}
	}
	return sum
}

// inject makes an engine fail by a rule (cmd/enginesim, /sim/fail).
func (f *fleet) inject(e *engine, rule string) {
	f.t.Helper()
	resp, err := anew.Post("http://"+e.addr+"/sim/fail", "application/json", strings.NewReader(rule))
	require.NoError(f.t, err)
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	require.Less(f.t, resp.StatusCode, 300, "%s", text)
}

// clear removes the rules of inject.
func (f *fleet) clear(e *engine) {
	f.t.Helper()
	req, err := http.NewRequest(http.MethodDelete, "http://"+e.addr+"/sim/fail", nil)
	require.NoError(f.t, err)
	resp, err := anew.Do(req) // the engine may just have closed an idle connection
	require.NoError(f.t, err)
	_ = resp.Body.Close()
}

// account checks the fleet at the end of a test: nothing is booked, nothing is held, no violation was counted.
func (f *fleet) account() {
	if f.t.Failed() {
		return
	}
	for i, admin := range f.admins {
		if f.tandems[i].running() {
			require.Eventually(f.t, func() bool { return metric(f.t, admin, "tandem_reservations") == 0 }, patience, 20*time.Millisecond,
				"reservations are left on replica %d", i)
		}
	}
	require.True(f.t, f.envoy.running(), "Envoy has died")
	for _, e := range f.engines() {
		if f.lenient || !e.running() {
			require.True(f.t, f.lenient, "engine %s has died", e.addr)
			continue
		}
		url := "http://" + e.addr
		require.Eventually(f.t, func() bool { return metric(f.t, url, "enginesim_blocks_held") == 0 }, patience, 20*time.Millisecond,
			"KV blocks are left on %s", e.addr)
		require.Zero(f.t, metric(f.t, url, "enginesim_violations_total"), "violations on %s", e.addr)
		require.Zero(f.t, metric(f.t, url, "enginesim_role_mismatch_total", `kind="decode`), "legs on the wrong role on %s", e.addr)
		require.Eventually(f.t, func() bool { return metric(f.t, url, "vllm:num_requests_running") == 0 }, patience, 20*time.Millisecond,
			"requests still run on %s", e.addr)
	}
}
