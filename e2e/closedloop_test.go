package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/replay/sessions"
)

// loop is what TestClosedLoops plays: sessions of coding agents, all their times a fifth and their tokens a quarter of
// what is recorded, on engines whose memory and speed are as much less.
var loop = struct {
	active, blocks         int
	faster                 float64
	fewer                  int
	speed                  float64 // tokens/s of prefill
	step                   time.Duration
	first, each            float64 // s, promised
	fetch                  float64 // bytes/s; a token has 512
	warm, measured, finish time.Duration
}{
	active: 48, blocks: 15_625, faster: 5, fewer: 4, speed: 10_000, step: 24 * time.Millisecond, first: 1, each: .060, fetch: 1e8,
	warm: time.Minute, measured: 4 * time.Minute, finish: 10 * time.Second,
}

// loopChunk is how many tokens a step of an engine has.
const loopChunk = 2048

// loopResult is how a policy served the sessions.
type loopResult struct {
	PerHour, GoodPerHour float64
	TTFT                 struct{ P50, P95 float64 }
	Again                struct{ All float64 }
}

// A closed loop in a real Envoy, with engines whose memory is the least recently used: policies have the order that they
// have in the replay, which plays the same sessions, and the default serves as many good turns. It prints the table of
// docs/decision.md.
func TestClosedLoops(t *testing.T) {
	seed, err := strconv.ParseUint(os.Getenv("TANDEM_TRUTH"), 10, 64)
	if err != nil {
		t.Skip("it takes six minutes: TANDEM_TRUTH=1, the seed (make truth)")
	}
	all, err := sessions.Generate("coding", 1000, 1)
	require.NoError(t, err)
	all = sessions.Within(all, sessions.Limits{Think: 600, Context: 200_000})
	for i := range all {
		all[i].PrefixTokens /= loop.fewer
		for j := range all[i].Turns {
			q := &all[i].Turns[j]
			q.Think, q.Service = q.Think/loop.faster, q.Service/loop.faster
			q.Input, q.Output, q.Had = max(q.Input/loop.fewer, 1), max(q.Output/loop.fewer, 1), q.Had/loop.fewer
		}
	}
	file := filepath.Join(t.TempDir(), "sessions.jsonl")
	writeSessions(t, file, all)
	all, err = sessions.Open(file) // as the replay reads them
	require.NoError(t, err)
	policies := []string{"tandem/auto@4", "tandem/never@4", "tandem/always@4", "tandem/auto@2+2", "least-requests/never@4"}
	measured, simulated := make([]loopResult, len(policies)), make([]loopResult, len(policies))
	t.Run("live", func(t *testing.T) {
		for i, policy := range policies {
			t.Run(policy, func(t *testing.T) {
				t.Parallel() // each needs a tenth of a core
				measured[i] = loopLive(t, policy, all, seed)
			})
		}
	})
	var table strings.Builder
	for i, policy := range policies {
		simulated[i] = loopReplayed(t, file, policy, seed)
		m, s := &measured[i], &simulated[i]
		fmt.Fprintf(&table, "| %s | %.0f | %.0f | %+.0f %% | %.0f, %.0f | %.2f, %.2f | %.1f, %.1f |\n", policy, m.GoodPerHour, s.GoodPerHour,
			100*(s.GoodPerHour/m.GoodPerHour-1), m.PerHour, s.PerHour, m.TTFT.P95, s.TTFT.P95, 100*m.Again.All, 100*s.Again.All)
	}
	t.Logf("policy, good turns an hour measured, replayed, off, turns, p95 of the first token, computed again:\n%s", &table)
	for i, policy := range policies {
		for j := range measured {
			if simulated[i].GoodPerHour > 1.15*simulated[j].GoodPerHour {
				require.Greater(t, measured[i].GoodPerHour, measured[j].GoodPerHour, "%s, and %s", policy, policies[j])
			}
		}
	}
	for i, policy := range policies {
		if policy != "tandem/always@4" && !strings.HasPrefix(policy, "least") { // the replay is too kind to these
			require.InEpsilon(t, measured[i].GoodPerHour, simulated[i].GoodPerHour, .15, policy)
		}
	}
}

// writeSessions writes sessions as package sessions reads them.
func writeSessions(t *testing.T, file string, all []sessions.Session) {
	t.Helper()
	var b bytes.Buffer
	for _, s := range all {
		rows := make([][]any, len(s.Turns))
		for i, q := range s.Turns {
			shared := q.Had
			if q.Back > 0 {
				shared = min(shared, s.Turns[i-q.Back].Input)
			}
			rows[i] = []any{0, q.Think, q.Back, shared, q.Input, q.Output, "t", q.Service}
		}
		text, err := json.Marshal(map[string]any{"session": 1, "tools": s.Prefix, "system": s.PrefixTokens, "turns": rows})
		require.NoError(t, err)
		b.Write(append(text, '\n'))
	}
	require.NoError(t, os.WriteFile(file, b.Bytes(), 0o600))
}

// loopReplayed plays the sessions against modelled engines.
func loopReplayed(t *testing.T, file, policy string, seed uint64) (r loopResult) {
	t.Helper()
	bin, err := binaries()
	require.NoError(t, err)
	profile := filepath.Join(t.TempDir(), "profile.json")
	text := fmt.Sprintf(`{"tandem_profile":1,"prefill":[{"tokens":1000,"s":%f},{"tokens":100000,"s":%f}],
		"steps":[{"answers":1,"kv":0,"s":%[3]f},{"answers":16,"kv":1000000,"s":%[3]f}],
		"transfers":[{"tokens":1000,"s":%f},{"tokens":100000,"s":%f}],"kv":%d}`, 1000/loop.speed, 1e5/loop.speed,
		loop.step.Seconds(), .003+512e3/loop.fetch, .003+512e5/loop.fetch, 16*loop.blocks)
	require.NoError(t, os.WriteFile(profile, []byte(text), 0o600))
	each, first := fmt.Sprint(loop.each), fmt.Sprint(loop.first)
	out, err := exec.Command(filepath.Join(bin, "tandem"), "replay", "--trace", file, "--profile", profile, "--policy", policy,
		"--sessions", strconv.Itoa(loop.active), "--seed", strconv.FormatUint(seed, 10), "--promise-ttft", first, "--ttft", first,
		"--decode-step-tokens", strconv.Itoa(loopChunk), "--promise-tpot", each, "--tpot", each, "--warm-up", fmt.Sprint(loop.warm.Seconds()), "--measured",
		fmt.Sprint(loop.measured.Seconds()), "--json").Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		t.Fatal(string(exit.Stderr))
	}
	require.NoError(t, json.Unmarshal(out, &r), "%s", out)
	return r
}

// loopLive plays the sessions against engines behind Envoy, in the order in which the replay draws them.
func loopLive(t *testing.T, policy string, all []sessions.Session, seed uint64) loopResult {
	t.Helper()
	name, fleet, _ := strings.Cut(policy, "@")
	o := options{decodeRole: "both", kvEvents: "{}", envoyFields: ", bodyMode: duplex", pool: fmt.Sprintf("  targets: {ttft: %gs, tpot: %gs}\n", loop.first, loop.each),
		engineArgs: []string{"--blocks", strconv.Itoa(loop.blocks), "--prefill-speed", fmt.Sprint(loop.speed), "--chunk", strconv.Itoa(loopChunk),
			"--decode-step", loop.step.String(), "--transfer-rate", fmt.Sprint(loop.fetch), "--record=false"}}
	if n, _ := fmt.Sscanf(fleet, "%d+%d", &o.prefills, &o.decodes); n == 2 {
		o.decodeRole = "decode"
	} else {
		o.decodes, o.prefills = o.prefills, 0
	}
	name, o.split, _ = strings.Cut(name, "/")
	l := &liveLoop{t: t, fleet: start(t, o), draw: sessions.NewDraw(all, seed), began: time.Now(), asked: map[string]int{}}
	if name == "least-requests" { // past Tandem
		for _, e := range l.fleet.engines() {
			l.urls = append(l.urls, "http://"+e.addr)
		}
	} else {
		l.urls = []string{l.fleet.url}
	}
	return l.play()
}

// liveLoop plays sessions.
type liveLoop struct {
	t     *testing.T
	fleet *fleet
	urls  []string // of which the one with the fewest requests is asked
	draw  *sessions.Draw
	began time.Time

	mu                         sync.Mutex
	turns                      []liveTurn
	begun                      int
	asked                      map[string]int // requests on their way
	had, more                  float64        // tokens of turns that ended in the measured time
	computedBefore, computedBy float64
}

type liveTurn struct{ came, first, end, each float64 } // s

func (l *liveLoop) now() float64 { return time.Since(l.began).Seconds() }

func (l *liveLoop) over() bool { return time.Since(l.began) > loop.warm+loop.measured+loop.finish }

func (l *liveLoop) computed() (sum float64) {
	for _, e := range l.fleet.engines() {
		sum += metric(l.t, "http://"+e.addr, "vllm:prompt_tokens_by_source_total", `source="local_compute"`)
	}
	return sum
}

func (l *liveLoop) play() (r loopResult) {
	var clients sync.WaitGroup
	for range loop.active {
		l.begun++
		session, first, wait := l.draw.Within()
		s := &liveSession{of: l, session: session, number: l.begun}
		for s.next < first {
			s.grow(nil)
		}
		clients.Go(func() {
			for s != nil {
				s.play(wait)
				s, wait = l.another()
			}
		})
	}
	time.Sleep(loop.warm)
	l.computedBefore = l.computed()
	time.Sleep(loop.measured)
	l.computedBy = l.computed()
	clients.Wait()
	return l.result()
}

// another returns the session that begins when one has ended, and when it does.
func (l *liveLoop) another() (*liveSession, float64) {
	if l.over() {
		return nil, 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begun++
	session, wait := l.draw.Anew(uint64(l.begun))
	return &liveSession{of: l, session: session, number: l.begun}, wait
}

// least returns the URL of which the fewest requests are on their way.
func (l *liveLoop) least() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	url := slices.MinFunc(l.urls, func(a, b string) int { return l.asked[a] - l.asked[b] })
	l.asked[url]++
	return url
}

func (l *liveLoop) result() (r loopResult) {
	scale := 3600 / loop.measured.Seconds()
	in := func(at float64) bool { return at >= loop.warm.Seconds() && at < (loop.warm+loop.measured).Seconds() }
	var first []float64
	for _, q := range l.turns {
		if in(q.end) {
			r.PerHour += scale
		}
		if !in(q.came) {
			continue
		}
		if first = append(first, q.first); q.end > 0 && q.first <= loop.first && q.each <= loop.each {
			r.GoodPerHour += scale
		}
	}
	slices.Sort(first)
	r.TTFT.P50, r.TTFT.P95 = first[len(first)/2], first[len(first)*95/100]
	r.Again.All = (l.computedBy - l.computedBefore - l.more) / l.had
	return r
}

// liveSession is a session that is played.
type liveSession struct {
	of      *liveLoop
	session *sessions.Session
	number  int
	next    int
	texts   [][]byte // the prompts so far with their answers
}

// play asks all turns that are left.
func (s *liveSession) play(wait float64) {
	for ; s.next < len(s.session.Turns) && !s.of.over(); wait = s.session.Turns[min(s.next, len(s.session.Turns)-1)].Think {
		time.Sleep(time.Duration(wait * float64(time.Second)))
		if s.of.over() {
			return
		}
		if !s.ask() {
			return
		}
	}
}

// grow appends the next turn to the texts, with its answer, which is text of the session's where nobody asks for it.
func (s *liveSession) grow(answer func(prompt []byte) []byte) {
	q := &s.session.Turns[s.next]
	var prompt []byte
	if q.Back > 0 {
		from := s.texts[s.next-q.Back]
		prompt = slices.Clone(from[:min(4*q.Had, len(from))])
	} else if s.next == 0 {
		prompt = words(nil, s.session.Prefix, 1<<40, min(s.session.PrefixTokens, q.Input-1))
	}
	prompt = words(prompt, uint64(s.number), uint64(s.next), q.Input-len(prompt)/4)
	var written []byte
	if answer != nil {
		written = answer(prompt)
	}
	prompt = append(prompt, written...)
	s.texts = append(s.texts, words(prompt, uint64(s.number), uint64(s.next)|1<<20, q.Input+q.Output-len(prompt)/4))
	s.next++
}

// words appends text of so many tokens, a token being four bytes, which nobody else has.
func words(b []byte, of, turn uint64, tokens int) []byte {
	random := rand.New(rand.NewPCG(of, turn))
	for range max(tokens, 0) {
		b = append(b, strconv.FormatUint(1<<16|uint64(random.Uint32N(1<<16)), 16)[1:]...)
	}
	return b
}

// ask makes the next request.
func (s *liveSession) ask() bool {
	l, q := s.of, &s.session.Turns[s.next]
	turn, ok := liveTurn{came: l.now()}, false
	s.grow(func(prompt []byte) (text []byte) {
		url := l.least()
		defer func() { l.mu.Lock(); l.asked[url]--; l.mu.Unlock() }()
		body, _ := json.Marshal(map[string]any{"model": "tiny", "prompt": string(prompt), "max_tokens": q.Output, "ignore_eos": true, "stream": true})
		resp, err := http.Post(url+"/v1/completions", "application/json", bytes.NewReader(body))
		if err != nil {
			l.t.Error(err)
			return nil
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			why, _ := io.ReadAll(resp.Body)
			l.t.Errorf("%s: %s", resp.Status, why)
			return nil
		}
		events := bufio.NewScanner(resp.Body)
		for events.Scan() {
			data, is := strings.CutPrefix(events.Text(), "data: ")
			if !is || data == "[DONE]" {
				continue
			}
			var e struct{ Choices []struct{ Text string } }
			if err := json.Unmarshal([]byte(data), &e); err != nil {
				l.t.Errorf("%v: %s", err, data)
				return nil
			}
			if turn.first == 0 {
				turn.first = l.now() - turn.came
			}
			if len(e.Choices) > 0 {
				text = append(text, e.Choices[0].Text...)
			}
		}
		ok = events.Err() == nil
		return text
	})
	turn.end = l.now()
	if turn.each = (turn.end - turn.came - turn.first) / math.Max(float64(q.Output-1), 1); q.Output == 1 {
		turn.each = 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if at := turn.end; at >= loop.warm.Seconds() && at < (loop.warm+loop.measured).Seconds() {
		l.had, l.more = l.had+float64(q.Had), l.more+float64(q.Input-q.Had)
	}
	l.turns = append(l.turns, turn)
	return ok
}
