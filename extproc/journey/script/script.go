// Package script reads scripts of journeys (testdata/*.txtar of package journey), and writes what happens in one. The
// tests of both transports play the same scripts, each with its own stand-in for Envoy, so a difference between them
// fails. A script has these parts:
//
//	setting   a dialect, its endpoints (p1 p2 d1 d2 e1), and words for the pool's policy; "only TRANSPORT";
//	          "unreported": engines have yet to say what they are
//	request   the client's body; a path before it if it is not that of chat completions
//	engines   what comes next, a line each: P, D or E (an endpoint that encodes), and its answer. Of two legs at once
//	          the next line says which one answers first.
//	             P 200 kv             what the dialect needs of a P that did well; "kv 6": its prompt has 6 tokens
//	             D 500 BODY           any status and body
//	             D unreached          no connection
//	             P cut                a 200 that breaks off
//	             D breaks BODY        the same of D's answer, of which the client has got the body
//	             D leaves             the client leaves while this leg works
//	             D stands 16s         time passes in which D does nothing that its engine reports, and then it answers
//	             D writes 3           D sends the next events of an insured stream; "D dies": its connection breaks;
//	                                  "D ends": it sends the rest
//	             full D               every D is full from now on, for a minute
//	             drain D1             that engine gets no more work, by order
//	             drain replica        the replica stops
//	             client leaves        while the body comes, or a pass waits
//	             wait 500ms
//	journey   what happens: what each engine is asked, in order of being asked (P1 is the first P), what the client
//	          gets, and what is counted
package script

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
	"golang.org/x/tools/txtar"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// Answer is what an engine does next.
type Answer struct {
	Role   byte   // P, D or E; C: the client, which leaves; 0: only time passes
	How    string // "", "unreached", "cut", "breaks", "leaves", "writes", "dies" or "ends"; of no role: "full", "drain"
	Status int
	Body   string
	Wait   time.Duration // before it; of D: it stands still for so long
}

// Script is one journey.
type Script struct {
	Policy    pass.Policy
	Endpoints []kvstate.EndpointSpec
	Facts     kvstate.FactSet // that engines report
	Path      string
	Body      string
	State     *kvstate.State // of the replica, which the transport sets

	t         testing.TB
	transport string
	only      string // the transport that has this journey; "": both
	answers   []Answer
	names     map[string]string // of the endpoints that were asked, by address
	said      strings.Builder
}

// Run plays all scripts of a folder over a transport. update writes what happened into them.
func Run(t *testing.T, dir, transport string, update bool, play func(t *testing.T, s *Script)) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.txtar"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			require.NoError(t, err)
			var got, want string
			synctest.Test(t, func(t *testing.T) {
				s := read(t, archive, transport)
				if want = part(archive, "journey"); s.only != "" && s.only != transport {
					got = want
					return
				}
				play(t, s)
				require.Empty(t, s.answers, "answers that nobody has asked for\n%s", s.said.String())
				got = s.said.String()
			})
			if update {
				set(archive, "journey", got)
				require.NoError(t, os.WriteFile(file, txtar.Format(archive), 0o644)) //nolint:gosec // a test's
				return
			}
			require.Equal(t, want, got)
		})
	}
}

func part(a *txtar.Archive, name string) string {
	for _, f := range a.Files {
		if f.Name == name {
			return string(f.Data)
		}
	}
	return ""
}

func set(a *txtar.Archive, name, text string) {
	for i := range a.Files {
		if a.Files[i].Name == name {
			a.Files[i].Data = []byte(text)
			return
		}
	}
	a.Files = append(a.Files, txtar.File{Name: name, Data: []byte(text)})
}

func read(t testing.TB, a *txtar.Archive, transport string) *Script {
	s := &Script{t: t, transport: transport, Path: "/v1/chat/completions", names: map[string]string{}}
	s.Policy = pass.Policy{Policy: plan.Policy{Split: true, PrefillTimeout: 30 * time.Second}}.WithDefaults()
	s.Policy.Place.Split = 1
	s.setting(strings.Fields(part(a, "setting")))
	s.Body = strings.TrimSuffix(part(a, "request"), "\n")
	if path, body, ok := strings.Cut(s.Body, "\n"); ok {
		s.Path, s.Body = path, body
	}
	for line := range strings.Lines(part(a, "engines")) {
		s.answers = append(s.answers, s.answer(strings.TrimSuffix(line, "\n")))
	}
	return s
}

var roles = map[byte]kvstate.Role{'p': kvstate.RolePrefill, 'd': kvstate.RoleDecode, 'e': kvstate.RoleEncode}

func (s *Script) setting(words []string) {
	for i, w := range words {
		switch {
		case i == 0:
			s.Policy.Dialect = kvtransfer.Named(w)
			if c := s.Policy.Dialect.Concurrent; c != nil && c.Peers != nil {
				source := kvtransfer.PeerSource{Ask: identity}
				s.Policy.Peers = source.NewPeers(slog.New(slog.DiscardHandler))
			}
		case w == "only":
			s.only = words[i+1]
			return
		case w == "decode-alone":
			s.Policy.Split = false
		case w == "never-alone":
			s.Policy.Alone = plan.AloneNever
		case w == "unreported":
			s.Facts = kvstate.FactsOf(kvstate.FactBlockSize)
		case w == "late-binding":
			s.Policy.Place.Late = true
		case w == "encode":
			s.Policy.EncodeTimeout = 7 * time.Second
		case w == "cached":
			s.Policy.Cached = plan.CachedByLeg
			if s.transport == "inside" {
				s.Policy.Cached = plan.CachedInPassing
			}
		case w == "insured":
			s.Policy.Streams.On = true
		case len(w) == 2 && roles[w[0]] != 0:
			at := fmt.Sprintf("10.0.%d.%c:8000", strings.IndexByte("pde", w[0])+1, w[1])
			s.Endpoints = append(s.Endpoints, kvstate.EndpointSpec{Name: w, Addr: at, Role: roles[w[0]]})
		default:
			require.Fail(s.t, "unknown setting", w)
		}
	}
}

// identity answers for an engine whose identity D's request needs.
func identity(_ context.Context, e *kvstate.Endpoint) (kvtransfer.Peer, error) {
	return kvtransfer.Peer{Ranks: []kvtransfer.Rank{{EngineID: "engine of " + e.Addr, Port: -1}}}, nil
}

// KV is the part of P's answer by which D of a dialect gets the blocks.
const (
	params = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":"e",` +
		`"remote_request_id":"r","remote_host":"h","remote_port":5600,"tp_size":1}`
	good = `{"id":"c","choices":[{"index":0,"message":{"content":" a"},"finish_reason":"length"}],` +
		`"usage":{"prompt_tokens":12,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}`
)

func (s *Script) answer(line string) Answer {
	word, rest, _ := strings.Cut(line, " ")
	how, body, _ := strings.Cut(rest, " ")
	switch word {
	case "wait":
		d, err := time.ParseDuration(how)
		require.NoError(s.t, err)
		return Answer{Wait: d}
	case "full":
		return Answer{How: "full"}
	case "drain":
		return Answer{How: "drain", Body: how}
	case "client":
		return Answer{Role: 'C', How: "leaves"}
	}
	a := Answer{Role: word[0], How: how, Status: 200, Body: body}
	switch how {
	case "unreached", "cut", "breaks", "leaves", "writes", "dies", "ends":
		return a
	case "stands":
		d, err := time.ParseDuration(body)
		require.NoError(s.t, err)
		return Answer{Role: a.Role, Status: 200, Body: `{"late":true}`, Wait: d}
	}
	var err error
	a.How = ""
	a.Status, err = strconv.Atoi(how)
	require.NoError(s.t, err, line)
	if tokens, ok := strings.CutPrefix(body, "kv"); ok {
		good := strings.Replace(good, "12", cmp.Or(strings.TrimSpace(tokens), "12"), 1)
		a.Body = good + "}"
		if s.Policy.Dialect.Concurrent == nil {
			a.Body = good + `,"kv_transfer_params":` + params + "}"
		}
	}
	return a
}

// Next returns what comes next, from one of the roles that were asked. Time passes before it, if the script says so. An
// answer without a role is an event while requests wait, on which a transport may have to act.
func (s *Script) Next(asked string) Answer {
	require.NotEmpty(s.t, s.answers, "%s: nothing more is said of engines\n%s", asked, s.said.String())
	a := s.answers[0]
	s.answers = s.answers[1:]
	switch a.Role {
	case 0:
		time.Sleep(a.Wait) //nolint:forbidigo // in a bubble of synctest
		switch {
		case a.How == "full":
			s.fill()
		case a.How == "drain" && a.Body != "replica":
			s.drain(a.Body)
		}
	case 'C':
	default:
		require.Contains(s.t, asked, string(a.Role), "who is to answer was not asked\n%s", s.said.String())
	}
	return a
}

// Leaves reports whether the client leaves next, before it or an engine has an answer.
func (s *Script) Leaves() bool {
	leaves := len(s.answers) > 0 && s.answers[0].Role == 'C'
	if leaves {
		s.answers = s.answers[1:]
	}
	return leaves
}

// fill makes every decode endpoint full.
func (s *Script) fill() {
	for _, e := range s.State.Pool("chat").Endpoints() {
		if e.Role == kvstate.RoleDecode {
			s.State.Health.MarkFull(e, 503, time.Minute)
		}
	}
}

// drain orders that an endpoint gets no more work.
func (s *Script) drain(name string) {
	for i, e := range s.Endpoints {
		s.Endpoints[i].Draining = e.Draining || s.names[e.Addr] == name
	}
	s.State.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, s.Endpoints)
}

// Stand has time pass in which an engine does nothing, and reports it.
func (a *Answer) Stand(state *kvstate.State, addr string) {
	d := state.Pool("chat").Endpoint(addr)
	scrape := func(work int64) { state.Observe(d, kvstate.Signals{Running: 1, Work: work, At: time.Now()}) }
	for n := range a.Wait / (2 * time.Second) {
		scrape(min(int64(n), 1))
		time.Sleep(2 * time.Second) //nolint:forbidigo // in a bubble of synctest
	}
}

// Asked writes that an engine was sent a leg.
func (s *Script) Asked(role byte, addr, body string) {
	if s.names[addr] == "" {
		n := 1
		for _, name := range s.names {
			if name[0] == role {
				n++
			}
		}
		s.names[addr] = string(role) + strconv.Itoa(n)
	}
	fmt.Fprintf(&s.said, "%s <- %s\n", s.names[addr], plain(s.named(body)))
}

var (
	room = regexp.MustCompile(`"(bootstrap_room|disagg_request_id|ctx_request_id)":[0-9]{6,}`)
	id   = regexp.MustCompile(`\b[0-9a-f]{32}\b`)
)

// plain hides ids that are drawn at random.
func plain(s string) string {
	return id.ReplaceAllString(room.ReplaceAllString(s, `"$1":(a room)`), "(an id)")
}

// Client writes what the client gets; 0: it has left.
func (s *Script) Client(status int, body string) {
	if status == 0 {
		s.said.WriteString("the client leaves\n")
		return
	}
	fmt.Fprintf(&s.said, "the client <- %d %s\n", status, s.named(body))
}

// named replaces addresses of endpoints by their names.
func (s *Script) named(text string) string {
	for addr, name := range s.names {
		host, _, _ := strings.Cut(addr, ":")
		text = strings.NewReplacer(addr, name, `"`+host+`"`, `"`+name+`"`, "//"+host+":", "//"+name+":").Replace(text)
	}
	return text
}

// ours are prefixes of the metrics that only one transport has.
var ours = []string{"ext_proc_", "ticket", "hook_"}

// Counted writes the totals of all counters, and the gauges of endpoints.
func (s *Script) Counted(g prometheus.Gatherer) {
	families, err := g.Gather()
	require.NoError(s.t, err)
	for _, f := range families {
		name := strings.TrimPrefix(f.GetName(), "tandem_")
		if slices.ContainsFunc(ours, func(begin string) bool { return strings.HasPrefix(name, begin) }) {
			continue
		}
		var lines []string
		for _, m := range f.GetMetric() {
			var v float64
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				v = m.GetCounter().GetValue()
			case dto.MetricType_HISTOGRAM:
				v = float64(m.GetHistogram().GetSampleCount())
			default:
				if v = m.GetGauge().GetValue(); name != "endpoint_up" || v != 0 {
					continue
				}
				v = -1
			}
			if v != 0 {
				lines = append(lines, s.series(name, m, v))
			}
		}
		slices.Sort(lines)
		s.said.WriteString(strings.Join(lines, ""))
	}
}

// series is a line about a metric; its value v is -1 for a gauge that shows 0.
func (s *Script) series(name string, m *dto.Metric, v float64) string {
	line := name
	for _, l := range m.GetLabel() {
		if value := s.named(l.GetValue()); value != "" && l.GetName() != "pool" {
			line += " " + value
		}
	}
	return fmt.Sprintf("%s %v\n", line, max(v, 0))
}
