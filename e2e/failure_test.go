package e2e

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "rewrite what the scripts in testdata/failures expect")

// Every failure on both hops, as scripts: testdata/failures/*.txtar. A script starts a fleet, lets requests meet a
// failure, and compares the table of the results. The columns:
//
//	client    status, and whether the text is the one an engine alone gives to the prompt ("whole"), or the error's code
//	legs      what engines recorded, in order: engine, leg (plain: without KV parameters), status or how it ended
//	left out  endpoints that Tandem has marked as failed
//	KV        hand-overs: given by prefill engines; fetched or released by decode engines, or expired with their lease
//	left      what is still booked, held or running a while later; it should be nothing
//
// In legs, P1 and D1 are the endpoints that were made to fail; P, D are any, as are P2 and D2.
//
// Commands:
//
//	fleet [stranded=lease|cleanupDecode] [prefills=N] [decodes=N] [replicas=N] [engine=ARGS] [timeout=DURATION, of a prefill, and of a stream to begin]
//	      [answer=DURATION, of an answer] [patience=DURATION, of the client]
//	matrix MODE [KEY=VALUE...]         the failure on one and on all of the prefill and decode endpoints, for answers whole and streamed
//	fail P1|D1|prefills|decodes MODE [KEY=VALUE...]   as cmd/enginesim takes it
//	ask [stream] [tokens=N]            send a request
//	hold before|between                send requests until the first replica, paused, holds one before or between its hops
//	at prefill|decode|plain            wait until an engine has the request on that leg
//	ended prefill                      wait until an engine is done with it
//	fetched                            wait until decode has fetched prefill's blocks
//	events N                           wait until that many events of the stream have arrived
//	leave                              the client disconnects
//	sigstop|sigcont|sigkill|sigterm WHO   tandem, tandem2, envoy, P1, D1, or prefill, decode: the engine that has that leg
//	start WHO                          a new process in place of one that has ended
//	excluded prefill|decode            wait until Tandem has excluded the stopped engine that has that leg
//	sleep DURATION
//	answered                           wait until the answer is there, or the client's patience is at its end
//	report LABEL [timed]                       await the answer and quiet, and write a row
//	rows                               wait until no goroutine is left over, and print the table
//
// Times in scripts allow the machine to stall for two seconds at any moment. Slow engines take 3 s, or longer if they
// are cut; time limits are longer than that, and leases twice as long.
func TestFailures(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir:           "testdata/failures",
		UpdateScripts: *update,
		Setup: func(env *testscript.Env) error {
			env.Values[stageKey{}] = &stage{t: env.T().(testing.TB)}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"fleet": onStage((*stage).fleet), "matrix": onStage((*stage).matrix), "fail": onStage((*stage).fail),
			"ask": onStage((*stage).ask), "at": onStage((*stage).at), "ended": onStage((*stage).ended), "fetched": onStage((*stage).fetched), "events": onStage((*stage).events), "leave": onStage((*stage).leave), "hold": onStage((*stage).hold),
			"sigstop": onStage(signal(syscall.SIGSTOP)), "sigcont": onStage(signal(syscall.SIGCONT)),
			"sigkill": onStage(signal(syscall.SIGKILL)), "sigterm": onStage(signal(syscall.SIGTERM)), "start": onStage((*stage).start),
			"sleep": onStage((*stage).wait), "excluded": onStage((*stage).excluded), "report": onStage((*stage).report),
			"answered": onStage(func(s *stage, _ []string) { s.await() }),
			"rows": func(ts *testscript.TestScript, _ bool, _ []string) {
				s := ts.Value(stageKey{}).(*stage)
				s.goroutinesEnd()
				_, err := ts.Stdout().Write([]byte(s.table()))
				ts.Check(err)
			},
		},
	})
}

type stageKey struct{}

func onStage(do func(*stage, []string)) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		if neg {
			ts.Fatalf("not with !")
		}
		do(ts.Value(stageKey{}).(*stage), args)
	}
}

// stage is one script's fleet and its state.
type stage struct {
	t      testing.TB
	f      *fleet
	o      options
	rows   [][]string
	asked  int
	play   *play
	struck string             // role of the endpoints that were made to fail
	all    bool               // all of them were
	gone   map[string]*engine // by leg: killed
	before *ledgers
	began  float64 // goroutines of the first replica

	limit, patience time.Duration     // Tandem's limit for an engine, and the client's
	stopped         map[*process]bool // by SIGSTOP
}

// play is one request and the counts before it.
type play struct {
	id, prompt, body string
	tokens           int
	stream           bool
	leave            context.CancelFunc
	answer           *response
	before           *ledgers
}

// ledgers are the counts before a play.
type ledgers struct {
	given map[*process]map[string]float64 // hand-overs by outcome
	log   map[string]int64                // length of Tandem's logs
}

// response is a client's side of a request, readable while it arrives.
type response struct {
	done   chan struct{}
	events chan struct{} // one for each that has arrived
	status int
	header http.Header
	body   strings.Builder
	err    error
	took   time.Duration
}

func keyValues(args []string) map[string]string {
	out := map[string]string{}
	for _, a := range args {
		k, v, _ := strings.Cut(a, "=")
		out[k] = v
	}
	return out
}

func (s *stage) fleet(args []string) {
	kv := keyValues(args)
	number := func(key string, d int) int {
		if n, err := strconv.Atoi(kv[key]); err == nil {
			return n
		}
		return d
	}
	s.o = options{prefills: number("prefills", 2), decodes: number("decodes", 2), replicas: number("replicas", 1)}
	duration := func(key, d string) time.Duration {
		value, err := time.ParseDuration(or(kv[key], d))
		require.NoError(s.t, err)
		return value
	}
	// A lease that a test can wait for.
	s.o.engineArgs = append([]string{"--lease", "8s", "--load-timeout", "5s"}, strings.Fields(kv["engine"])...)
	s.limit, s.patience, s.stopped = duration("timeout", "30s"), duration("patience", patience.String()), map[*process]bool{}
	limit := s.limit.String()
	s.o.pool = fmt.Sprintf("  prefillTimeout: {base: %s}\n  streamStartTimeout: %s\n  strandedBlocks: %s\n", limit, limit, or(kv["stranded"], "lease"))
	if kv["answer"] != "" {
		s.o.pool += "  answerTimeout: " + kv["answer"] + "\n"
	}
	s.f, s.gone = start(s.t, s.o), map[string]*engine{}
	s.f.lenient = true // rows list what is left
	s.began = metric(s.t, s.f.admins[0], "go_goroutines")
}

// matrix runs one failure on both legs, on one endpoint and on all of them, for both kinds of answers.
func (s *stage) matrix(args []string) {
	roles := []string{"prefill", "decode"}
	if args[0] == "empty-params" {
		roles = roles[:1] // a decode endpoint hands nothing over
	}
	for _, role := range roles {
		for _, who := range []string{"one of two", "both"} {
			for _, stream := range []bool{false, true} {
				label := role + ", " + who
				if stream {
					label += ", stream"
				}
				s.meet(role, who == "both", stream, args)
				s.row(label)
				if args[0] == "status" {
					s.forget()
				}
			}
		}
	}
}

// goroutinesEnd waits until the running replicas have no more goroutines than one of them had at the start, except for
// some of persistent connections.
func (s *stage) goroutinesEnd() {
	for i, admin := range s.f.admins {
		if s.f.tandems[i].running() {
			require.Eventually(s.t, func() bool { return metric(s.t, admin, "go_goroutines") <= s.began+32 }, patience, 50*time.Millisecond,
				"goroutines are left in replica %d: %v at the start", i, s.began)
		}
	}
}

// meet sends requests until one has met the failure.
func (s *stage) meet(role string, all, stream bool, rule []string) {
	first := strings.ToUpper(role[:1]) + "1"
	who := first
	if all {
		who = role + "s"
	}
	for range 40 {
		s.before = s.count()
		s.fail(append([]string{who}, rule...))
		var ask []string
		if stream {
			ask = append(ask, "stream")
		}
		s.ask(ask)
		s.await()
		legs := s.legs()
		if slices.ContainsFunc(legs, func(l leg) bool { return l.Injected != "" }) {
			return
		}
		// A refused connection leaves no record. A decode that a check found out before the request came makes no second
		// prefill; a prefill makes the same row either way.
		repeated := len(slices.DeleteFunc(legs, func(l leg) bool { return l.Leg != "prefill" })) > 1
		if rule[0] == "refuse" && s.out(s.engine(first).addr) && (repeated || role == "prefill") {
			return
		}
		s.quiet()
		s.heal()
	}
	require.Fail(s.t, "no request came to "+who)
}

// out reports whether Tandem excludes an endpoint now.
func (s *stage) out(addr string) bool { return slices.Contains(s.outNow(), addr) }

func (s *stage) outNow() (out []string) {
	for i, admin := range s.f.admins {
		var state struct {
			Pools []struct {
				Endpoints []struct {
					Address string
					Failed  bool
				}
			}
		}
		if !s.f.tandems[i].running() || getJSON(admin+"/debug/state", &state) != nil {
			continue
		}
		for _, e := range state.Pools[0].Endpoints {
			if e.Failed {
				out = append(out, e.Address)
			}
		}
	}
	return out
}

func (s *stage) engine(name string) *engine {
	i, err := strconv.Atoi(name[1:])
	require.NoError(s.t, err, name)
	if name[0] == 'P' {
		return s.f.prefills[i-1]
	}
	return s.f.decodes[i-1]
}

func (s *stage) fail(args []string) {
	var on []*engine
	switch args[0] {
	case "prefills":
		on = s.f.prefills
	case "decodes":
		on = s.f.decodes
	default:
		on = []*engine{s.engine(args[0])}
	}
	s.struck, s.all = on[0].role, len(on) > 1
	rule := map[string]any{"mode": args[1]}
	for k, v := range keyValues(args[2:]) {
		rule[k] = v
		if n, err := strconv.Atoi(v); err == nil {
			rule[k] = n
		}
	}
	text, err := json.Marshal(rule)
	require.NoError(s.t, err)
	for _, e := range on {
		s.f.breaks(e, string(text))
	}
}

func (s *stage) ask(args []string) {
	s.asked++
	p := &play{id: fmt.Sprintf("ask-%d", s.asked), tokens: 12}
	for k, v := range keyValues(args) {
		switch k {
		case "stream":
			p.stream = true
		case "tokens":
			p.tokens, _ = strconv.Atoi(v)
		}
	}
	p.prompt = fmt.Sprintf("%d %s", s.asked, strings.Repeat("nothing is lost. ", 20))
	p.body = fmt.Sprintf(`{"model":"tiny","stream":%t,"ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":%q}]}`, p.stream, p.tokens, p.prompt)
	if p.before = s.before; p.before == nil {
		p.before = s.count()
	}
	s.before = nil
	var ctx context.Context
	ctx, p.leave = context.WithCancel(context.Background())
	p.answer = send(ctx, s.f.url, p.id, p.body)
	s.play = p
}

// count records the current ledgers and logs.
func (s *stage) count() *ledgers {
	l := &ledgers{given: map[*process]map[string]float64{}, log: map[string]int64{}}
	for _, e := range s.f.prefills {
		if e.running() && s.reachable(e) {
			l.given[e.process] = s.handOvers(e)
		}
	}
	for _, x := range s.f.tandems {
		if info, err := os.Stat(x.log); err == nil {
			l.log[x.log] = info.Size()
		}
	}
	return l
}
