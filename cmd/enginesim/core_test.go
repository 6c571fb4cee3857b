package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/engineclock"
)

func (e *simulator) heal(t testing.TB) {
	t.Helper()
	_, err := e.do(http.MethodDelete, "/sim/fail", "", "")
	require.NoError(t, err)
}

// counters returns the lines of /metrics, without ours.
func (e *simulator) counters(t *testing.T) string {
	t.Helper()
	lines := strings.Split(e.get(t, "/metrics").String(), "\n")
	return regexp.MustCompile(`(?m)^enginesim_.*\n`).ReplaceAllString(strings.Join(lines, "\n"), "")
}

// later sends a request and returns a channel for its answer.
func (e *simulator) later(t *testing.T, id, body string) <-chan reply {
	t.Helper()
	got := make(chan reply, 1)
	go func() {
		r, err := e.do(http.MethodPost, chatPath, id, body)
		if err != nil {
			r.body = []byte(err.Error())
		}
		got <- r
	}()
	require.Eventually(t, func() bool { return len(e.Records.Last(0, id)) > 0 }, patience, time.Millisecond)
	return got
}

// TestCoreStands: while the core stands, /health and /metrics answer, streams have their headers and nothing else, no
// count changes, and when it goes on everything is answered.
func TestCoreStands(t *testing.T) {
	e := startEngine(t, "-decode-step", "1ms")
	running := e.later(t, "running", chat("x", `"max_tokens":400`))
	require.Eventually(t, func() bool { return e.State().Running == 1 }, patience, time.Millisecond)
	e.failWith(t, `{"mode":"stall"}`)
	whole := e.later(t, "whole", chat("y", `"max_tokens":4`))
	req, _ := http.NewRequest(http.MethodPost, e.url+chatPath, strings.NewReader(chat("z", `"max_tokens":4,"stream":true`)))
	req.Header.Set("Content-Type", "application/json")
	stream, err := client.Do(req)
	require.NoError(t, err)
	defer stream.Body.Close()
	require.Equal(t, 200, stream.StatusCode)
	require.Equal(t, 200, e.get(t, "/health").status)
	ctx, leave := context.WithCancel(t.Context())
	leaving, _ := http.NewRequestWithContext(ctx, http.MethodPost, e.url+chatPath, strings.NewReader(chat("left", `"max_tokens":4`)))
	leaving.Header.Set("Content-Type", "application/json")
	leaving.Header.Set("X-Request-Id", "left")
	gone := make(chan error, 1)
	go func() { _, err := client.Do(leaving); gone <- err }()
	require.Eventually(t, func() bool { return len(e.Records.Last(0, "left")) > 0 }, patience, time.Millisecond)

	before := e.counters(t)
	require.Eventually(t, func() bool { // a step that had begun takes 250 ms at most
		last := before
		before = e.counters(t)
		return before == last
	}, patience, 300*time.Millisecond)
	leave()
	require.Error(t, <-gone)
	require.Never(t, func() bool { return e.counters(t) != before }, 50*time.Millisecond, 10*time.Millisecond, "frozen, with requests")
	require.Contains(t, before, `vllm:num_requests_running{engine="0",model_name="tiny"} 1`)
	select {
	case <-whole:
		require.Fail(t, "answered by a core that stands")
	case <-running:
		require.Fail(t, "went on in a core that stands")
	default:
	}
	e.heal(t)
	require.Equal(t, 200, (<-whole).status)
	require.Equal(t, 200, (<-running).status)
	events, err := io.ReadAll(stream.Body)
	require.NoError(t, err)
	require.Contains(t, string(events), "[DONE]")
	e.quiet(t)

	e.failWith(t, `{"mode":"stall","delay":"50ms"}`)
	require.Equal(t, 200, e.post(t, chatPath, "r", chat("by itself")).status)
}

// TestLeaseEndsWhileDecodeStands: a decode engine whose core stood for longer than P's lease reads another request's
// KV. Strictly that is an error; faithfully it is a 200 with the wrong text, and counted.
func TestLeaseEndsWhileDecodeStands(t *testing.T) {
	for _, mode := range []string{"strict", "faithful"} {
		t.Run(mode, func(t *testing.T) {
			p := startEngine(t, "-role", "prefill", "-lease", "500ms", "-blocks", "65")
			d := startEngine(t, "-role", "decode", fmt.Sprintf("-faithful=%t", mode == "faithful"))
			want := d.post(t, chatPath, "w", chat(longPrompt, `"max_tokens":8,"cache_salt":"w"`)).content()
			params := p.prefill(t, "r", longPrompt)
			d.failWith(t, `{"mode":"stall"}`)
			got := d.later(t, "r", chat(longPrompt, `"max_tokens":8`, decodeMembers(params)))
			require.Eventually(t, func() bool { return p.Ledger.Expired.Load() == 1 }, patience, time.Millisecond)
			for i := range 8 { // these get the freed blocks
				p.post(t, chatPath, "f", chat(string(rune('a'+i))+strings.Repeat("fill", 150), `"max_tokens":1`))
			}
			d.heal(t)
			r := <-got
			require.Equal(t, map[string]int64{"expired": 1}, d.State().ViolationsBy)
			if mode == "strict" {
				require.Equal(t, 500, r.status, r)
				return
			}
			require.Equal(t, 200, r.status, r)
			require.NotEqual(t, want, r.content())
		})
	}
}

// TestHeartbeats: a request that waits for blocks at D renews P's lease, unless D's core stands.
func TestHeartbeats(t *testing.T) {
	t.Parallel() // mostly waits
	p := startEngine(t, "-role", "prefill", "-lease", "6s")
	d := startEngine(t, "-role", "decode", "-lease", "6s", "-blocks", "40", "-decode-step", "30ms")
	busy := d.later(t, "busy", chat(longPrompt, `"max_tokens":280`)) // 8.4 s
	require.Eventually(t, func() bool { return d.State().Running == 1 }, patience, time.Millisecond)
	waits := d.later(t, "r", chat(longPrompt+"?", `"max_tokens":280`, decodeMembers(p.prefill(t, "r", longPrompt+"?"))))
	require.Eventually(t, func() bool { return d.State().Waiting == 1 }, patience, time.Millisecond)
	require.Equal(t, 200, (<-busy).status)
	held := <-waits
	require.Equal(t, 200, held.status, "held for longer than a lease: %s", held)
	require.Zero(t, p.Ledger.Expired.Load())

	busy = d.later(t, "busy2", chat(longPrompt+"2", `"max_tokens":280`))
	require.Eventually(t, func() bool { return d.State().Running == 1 }, patience, time.Millisecond)
	waits = d.later(t, "r2", chat(longPrompt+"!", `"max_tokens":280`, decodeMembers(p.prefill(t, "r2", longPrompt+"!"))))
	require.Eventually(t, func() bool { return d.State().Waiting == 1 }, patience, time.Millisecond)
	d.failWith(t, `{"mode":"stall"}`)
	require.Eventually(t, func() bool { return p.Ledger.Expired.Load() == 1 }, patience, time.Millisecond)
	d.heal(t)
	require.Equal(t, 200, (<-busy).status)
	require.Equal(t, 500, (<-waits).status)
	require.Equal(t, map[string]int64{"expired": 1}, d.State().ViolationsBy)
}

// TestAFetchTakesSteps: where the parts of steps are modelled, a request is scheduled at a step's beginning, its KV is
// looked for in the next one, and its first token comes at the end of the one after that, as with vLLM 0.32.
func TestAFetchTakesSteps(t *testing.T) {
	t.Parallel() // mostly waits
	p := startEngine(t, "-role", "prefill")
	d := startEngine(t, "-role", "decode", "-chunk", "2048", "-decode-step", "100ms")
	busy := d.later(t, "busy", chat("Hi", `"max_tokens":40,"stream":true`))
	require.Eventually(t, func() bool {
		return !strings.Contains(d.counters(t), `vllm:generation_tokens_total{engine="0",model_name="tiny"} 0`)
	}, patience, time.Millisecond)
	leg := chat(longPrompt, `"max_tokens":1`, decodeMembers(p.prefill(t, "r", longPrompt)))
	began := time.Now()
	require.Equal(t, 200, d.post(t, chatPath, "r", leg).status)
	require.GreaterOrEqual(t, time.Since(began), 300*time.Millisecond)
	require.Equal(t, 200, (<-busy).status)
}

// TestExpiryClock: a bidirectional engine tells its clock, and declines a read for which the hand-over tells too little
// time by P's clock.
func TestExpiryClock(t *testing.T) {
	p := startEngine(t, "-role", "prefill", "-bidirectional", "-decoder-ttl", "1s")
	d := startEngine(t, "-role", "decode", "-bidirectional", "-decoder-ttl", "1s", "-kv-load-failure", "recompute")
	clock := func(e *simulator) float64 {
		r := e.post(t, "/v1/completions", "c", `{"model":"tiny","prompt":[5,6,7],"max_tokens":1,"kv_transfer_params":{"clock":1}}`)
		var at float64
		_, err := fmt.Sscan(string(edit(t, r.params(), nil)[strings.Index(string(edit(t, r.params(), nil)), `expiry_time":`)+len(`expiry_time":`):]), &at)
		require.NoError(t, err, r)
		return at - 1
	}
	require.InDelta(t, p.Clock().Seconds(), clock(p), 10)
	require.Greater(t, max(clock(p)-clock(d), clock(d)-clock(p)), 0.5, "each has its own")
	host, port := p.Side.Addr().(*net.TCPAddr).IP.String(), p.SidePort
	require.Eventually(t, func() bool { // its side channel answers with the clock, as vLLM's
		told, ok := engineclock.New().Now(t.Context(), p.EngineID, host, port)
		return ok && told > clock(p)-10 && told < clock(p)+10
	}, patience, time.Millisecond)
	for i, left := range []float64{4, -1, 60} {
		prompt := longPrompt + fmt.Sprint(i)
		params := edit(t, p.prefill(t, fmt.Sprint(i), prompt), map[string]string{"remote_blocks_expiry_time": fmt.Sprint(clock(p) + left)})
		fetched := p.Ledger.Fetched.Load()
		r := d.post(t, chatPath, fmt.Sprint(i), chat(prompt, `"max_tokens":8`, decodeMembers(params)))
		require.Equal(t, 200, r.status, r)
		require.Equal(t, d.post(t, chatPath, "w", chat(prompt, `"max_tokens":8,"cache_salt":"w"`)).content(), r.content())
		require.Equal(t, left == 60, p.Ledger.Fetched.Load() > fetched)
		require.NotEqual(t, "null", string(r.params()), "D's answers tell where it keeps them")
	}
	require.Contains(t, d.counters(t), `vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="tiny"} 2`)
	require.EqualValues(t, 2, p.Ledger.Held.Load()/int64(len(longPrompt)/64+1), "declined ones stay until their lease ends")
	p.Ledger.ReleaseAll()
}

// TestBothDeadlock: two engines of both roles that hold prompts for each other, and have no blocks left to fetch, wait
// for ever, because heartbeats renew the leases; clients that leave end it.
func TestBothDeadlock(t *testing.T) {
	args := []string{"-blocks", "33", "-lease", "200ms"}
	a, b := startEngine(t, args...), startEngine(t, args...)
	prompt := func(n int) string { return strings.Repeat(fmt.Sprint(n), 64*18) }
	forB, forA := a.prefill(t, "1", prompt(1)), b.prefill(t, "2", prompt(2))
	ctx, leave := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for id, leg := range map[string]struct {
		at   *simulator
		body string
	}{
		"1": {b, chat(prompt(1), `"max_tokens":8`, decodeMembers(forB))}, "2": {a, chat(prompt(2), `"max_tokens":8`, decodeMembers(forA))},
	} {
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, leg.at.url+chatPath, strings.NewReader(leg.body))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", id)
		wg.Go(func() { _, _ = client.Do(req) })
	}
	for _, e := range []*simulator{a, b} {
		require.Eventually(t, func() bool { return e.State().Waiting == 1 }, patience, time.Millisecond)
	}
	require.Never(t, func() bool { // for five leases
		return a.State().Waiting != 1 || b.State().Waiting != 1 || a.State().Running+b.State().Running > 0
	}, time.Second, 50*time.Millisecond)
	leave()
	wg.Wait()
	a.quiet(t)
	b.quiet(t)
}

// TestFailChoice: rules for bodies with a text, for a time, for a full engine.
func TestFailChoice(t *testing.T) {
	e := startEngine(t, "-decode-step", "5ms")
	e.failWith(t, `{"mode":"status","status":500,"contains":"poison"}`)
	require.Equal(t, 200, e.post(t, chatPath, "r", chat("bread")).status)
	for range 2 {
		require.Equal(t, 500, e.post(t, chatPath, "r", chat("poison")).status)
	}
	e.heal(t)

	e.failWith(t, `{"mode":"status","status":429,"retry_after":1,"busy":1}`)
	first := e.later(t, "first", chat("x", `"max_tokens":2000`))
	require.Eventually(t, func() bool { return e.State().Running == 1 }, patience, time.Millisecond)
	full := e.post(t, chatPath, "r", chat("y"))
	require.Equal(t, []any{429, "1"}, []any{full.status, full.header.Get("Retry-After")})
	require.Equal(t, 200, (<-first).status)
	require.Equal(t, 200, e.post(t, chatPath, "r", chat("y")).status)
	e.heal(t)

	e.failWith(t, `{"mode":"status","for":"300ms"}`)
	require.Equal(t, 503, e.post(t, chatPath, "r", chat("y")).status)
	require.Eventually(t, func() bool { return e.post(t, chatPath, "r", chat("y")).status == 200 }, patience, 10*time.Millisecond)
	require.Equal(t, "[]", e.get(t, "/sim/fail").String())
	require.Equal(t, 400, e.post(t, "/sim/fail", "", `{"mode":"status","for":"-1s"}`).status)
}

// TestFailKeepAliveRace: the engine closes a connection that was idle, as a request arrives on it; never a new one.
func TestFailKeepAliveRace(t *testing.T) {
	e := startEngine(t)
	own := &http.Client{Transport: &http.Transport{}}
	ask := func() error {
		req, err := http.NewRequest(http.MethodPost, e.url+chatPath, strings.NewReader(chat("x")))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.GetBody = nil // or Go's client tries again
		resp, err := own.Do(req)
		if err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			err = resp.Body.Close()
		}
		return err
	}
	e.failWith(t, `{"mode":"keep-alive-race","leg":"plain"}`)
	require.NoError(t, ask(), "the first of its connection")
	require.Error(t, ask())
	require.NoError(t, ask())
	e.quiet(t)
}

// TestFailRestart: the engine loses its KV and its id, keeps its ports, and answers 503 until it is warm.
func TestFailRestart(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	log := &readyLog{ready: make(chan string, 4)}
	ended := make(chan int, 1)
	go func() {
		ended <- run(ctx, []string{"-listen", "127.0.0.1:0", "-side-channel", "127.0.0.1:0", "-role", "prefill"}, io.Discard, log)
	}()
	first := <-log.ready
	url := "http://" + regexp.MustCompile(`listen=(\S+)`).FindStringSubmatch(first)[1]
	post := func(path, body string) (int, error) {
		resp, err := http.Post(url+path, "application/json", strings.NewReader(body))
		if err != nil {
			return 0, err
		}
		return resp.StatusCode, resp.Body.Close()
	}
	status, err := post("/sim/fail", `{"mode":"restart","delay":"100ms","warmup":"2s"}`)
	require.NoError(t, err)
	require.Equal(t, 200, status)
	second := <-log.ready
	require.Contains(t, second, strings.TrimPrefix(url, "http://"))
	_, before, _ := strings.Cut(first, "engine=")
	_, after, _ := strings.Cut(second, "engine=")
	require.NotEqual(t, before, after)
	warming := false
	require.Eventually(t, func() bool {
		status, err := post(chatPath, chat("x"))
		warming = warming || status == 503
		return err == nil && status == 200
	}, patience, 20*time.Millisecond)
	require.True(t, warming)
	stop()
	require.Zero(t, <-ended)
}

// readyLog picks the lines that tell that an engine is ready.
type readyLog struct{ ready chan string }

func (l *readyLog) Write(b []byte) (int, error) {
	if strings.Contains(string(b), "enginesim ready") {
		l.ready <- string(b)
	}
	return len(b), nil
}
