package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// question returns a chat whose prompt has about that many tokens, no two alike.
func question(id string, tokens int) string {
	return fmt.Sprintf(`{"model":"tiny","max_tokens":3,"messages":[{"role":"user","content":%q}]}`, id+strings.Repeat(" "+id, 4*tokens/(len(id)+1)))
}

// burst sends requests at once and waits for their answers.
func (f *fleet) burst(n int, send func(i int) answer) []answer {
	answers := make([]answer, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { answers[i] = send(i) })
	}
	all.Wait()
	return answers
}

// A burst of prompts of half a second each, for two prefill endpoints: a few are bound at once and the others wait in
// Tandem, where engines do not see them. All are answered, no request loses its place when another leaves, and the
// wait is visible. The engines are stopped until all have arrived.
func TestABurstIsBoundLate(t *testing.T) {
	const burst = 13
	for mode, wait := range map[string]string{"duplex": "600s", "buffered": "20s"} { // the longest that Envoy allows
		t.Run(mode, func(t *testing.T) {
			f := start(t, options{
				pool:        "  binding: late\n  queue: {maxWait: " + wait + "}\n  prefillTimeout: {base: 60s}\n",
				envoyFields: ", bodyMode: " + mode, engineArgs: []string{"--prefill-speed", "16000"},
			})
			queued := func() float64 { return metric(t, f.admins[0], "tandem_queue_requests") }
			f.signalPrefills(syscall.SIGSTOP)
			ended := make(chan []answer, 1)
			go func() {
				ended <- f.burst(burst, func(i int) answer {
					id := fmt.Sprintf("burst-%d", i)
					return f.post("/v1/chat/completions", question(id, 8000), "x-request-id", id)
				})
			}()
			there := func() (n, most float64) { // bound or waiting; and the maximum at one engine
				state := f.state(0)
				for _, p := range f.prefills {
					own := float64(state[p.addr].Requests)
					n, most = n+own, max(most, own)
				}
				return n + queued(), most
			}
			come := func(want float64) func() bool { return func() bool { n, _ := there(); return n == want } }
			soon(t, "all have come", come(burst))

			ctx, leave := context.WithCancel(t.Context())
			left := make(chan error, 1)
			go func() { // a client that does not wait
				_, err := f.try(ctx, http.MethodPost, "/v1/chat/completions", question("leaves", 8000), "x-request-id", "leaves")
				left <- err
			}()
			soon(t, "it stands behind the others", come(burst+1))
			leave()
			require.ErrorIs(t, <-left, context.Canceled)
			soon(t, "its place is free", come(burst))

			_, most := there()
			require.LessOrEqual(t, most, 5., "prompts that one engine knows of; without a queue they are half of 13")
			waiting := queued()
			require.GreaterOrEqual(t, waiting, 3.)
			f.signalPrefills(syscall.SIGCONT)
			for _, a := range <-ended {
				require.Equal(t, 200, a.status, "%.300s", a.body)
			}
			require.GreaterOrEqual(t, metric(t, f.admins[0], "tandem_queue_wait_seconds_count", `end="bound"`), waiting)
			soon(t, "nobody waits", func() bool { return queued() == 0 })
			var traces []struct {
				Waited time.Duration `json:"waited_ns"`
			}
			require.NoError(t, getJSON(f.admins[0]+"/debug/requests?n=100", &traces))
			waited := 0.
			for _, trace := range traces {
				if trace.Waited > 0 {
					waited++
				}
			}
			require.GreaterOrEqual(t, waited, waiting)
			if os.Getenv("TANDEM_SPEED") != "" {
				f.fewAtOnce(t)
			}
		})
	}
}

// fewAtOnce checks a burst for running engines, as a claim of speed: Tandem's estimate of their work is right, and
// each sees only a few prompts at a time.
func (f *fleet) fewAtOnce(t *testing.T) {
	ended := make(chan []answer, 1)
	go func() {
		ended <- f.burst(13, func(i int) answer { return f.post("/v1/chat/completions", question(fmt.Sprintf("again-%d", i), 8000)) })
	}()
	most := 0.
	for {
		select {
		case <-ended:
			speed(t, most <= 3, "what an engine is thought to have done is done", most)
			return
		case <-time.After(20 * time.Millisecond):
			for _, p := range f.prefills {
				most = max(most, metric(t, "http://"+p.addr, "vllm:num_requests_running")+metric(t, "http://"+p.addr, "vllm:num_requests_waiting"))
			}
		}
	}
}

// signalPrefills sends all prefill engines a signal.
func (f *fleet) signalPrefills(s os.Signal) {
	f.t.Helper()
	for _, p := range f.prefills {
		require.NoError(f.t, p.cmd.Process.Signal(s))
	}
}

// Short prompts skip the hop by themselves, long ones do not, except if D holds their beginning.
func TestShortPromptsSkipTheHop(t *testing.T) {
	f := start(t, options{prefills: 1, decodes: 1, pools: `pools:
- name: chat
  kvTransfer: nixl
  split: auto
  endpoints:
  - {address: %P, role: prefill}
  - {address: %D, role: decode}
`})
	hops := func(id, body string) int {
		require.Equal(t, 200, f.post("/v1/chat/completions", body, "x-request-id", id).status)
		return len(f.requests(id, f.engines()...))
	}
	require.Equal(t, 1, hops("short", question("short", 30)))
	require.Equal(t, 2, hops("long", question("long", 2000)))
	longer := question("turns", 2000)
	require.Equal(t, 2, hops("turn-1", longer))
	require.Equal(t, 1, hops("turn-2", strings.Replace(longer, `"}]`, ` And then?"}]`, 1)), "D holds all but the last words")
}

// A session stays on its endpoint, and moves when that is overloaded.
func TestSessionAffinityYields(t *testing.T) {
	t.Parallel()
	f := start(t, options{pool: "  session: {header: x-session}\n", engineArgs: []string{"--prefill-speed", "16000", "--max-model-len", "1000000", "--blocks", "100000"}})
	where := func(id string) (p, d string) {
		require.Equal(t, 200, f.post("/v1/chat/completions", question(id, 60), "x-request-id", id, "x-session", "anna").status)
		prefill, decode := f.hops(id)
		return prefill.Engine, decode.Engine
	}
	p, d := where("first")
	for i := range 8 {
		samePrefill, sameDecode := where(fmt.Sprintf("again-%d", i))
		require.Equal(t, []string{p, d}, []string{samePrefill, sameDecode})
	}
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() { // half a minute, unless the client leaves
		defer close(left)
		_, _ = f.try(ctx, http.MethodPost, "/v1/chat/completions", question("slow", 480_000), "x-session", "anna", "x-request-id", "slow")
	}()
	require.Eventually(t, func() bool { return f.state(0)[p].Requests > 0 }, patience, 5*time.Millisecond)
	elsewhere, _ := where("yields")
	require.NotEqual(t, p, elsewhere, "much work is ahead of it there")
	leave()
	<-left
	soon(t, "it had come where the session was", func() bool {
		slow := f.requests("slow", f.prefills...)
		return len(slow) == 1 && slow[0].Engine == p
	})
}

// However uneven the load of the groups, a request's legs stay within one.
func TestGroupsAreNeverMixed(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 3, decodes: 3, engineArgs: []string{"--prefill-speed", "20000"}, pools: `pools:
- name: chat
  kvTransfer: nixl
  split: always
  decodeAlone: fallback
  binding: late
  endpoints:
  - {address: %P, role: prefill, group: a}
  - {address: %P, role: prefill, group: b}
  - {address: %P, role: prefill, group: b}
  - {address: %D, role: decode, group: a}
  - {address: %D, role: decode, group: a}
  - {address: %D, role: decode, group: b}
`})
	group := map[string]string{
		f.prefills[0].addr: "a", f.prefills[1].addr: "b", f.prefills[2].addr: "b",
		f.decodes[0].addr: "a", f.decodes[1].addr: "a", f.decodes[2].addr: "b",
	}
	used := map[string]int{}
	for _, a := range f.burst(40, func(i int) answer {
		id := fmt.Sprintf("group-%d", i)
		return f.post("/v1/chat/completions", question(id, 100+200*(i%7)), "x-request-id", id)
	}) {
		require.Equal(t, 200, a.status)
	}
	for i := range 40 {
		p, d := f.hops(fmt.Sprintf("group-%d", i))
		require.Equal(t, group[p.Engine], group[d.Engine])
		used[group[p.Engine]]++
	}
	require.Len(t, used, 2)
}

// Requests for an adapter go to the engines that hold it, on both legs, however busy these are.
func TestAdaptersAreFound(t *testing.T) {
	t.Parallel()
	f := start(t, options{engine: func(_ string, i int, _ func() string) ([]string, string) {
		if i%2 == 1 {
			return []string{"--model", "tiny", "--model", "sql"}, ", loras: [sql]"
		}
		return []string{"--model", "tiny"}, ""
	}})
	for i := range 12 {
		model, id := "tiny", fmt.Sprintf("lora-%d", i)
		if i%2 == 0 {
			model = "sql"
		}
		a := f.post("/v1/chat/completions", strings.Replace(question(id, 500), `"tiny"`, `"`+model+`"`, 1), "x-request-id", id)
		require.Equal(t, 200, a.status, "%.300s", a.body)
		p, d := f.hops(id)
		if model == "sql" {
			require.Equal(t, []string{f.prefills[1].addr, f.decodes[1].addr}, []string{p.Engine, d.Engine})
		}
	}
}

// A request that cannot be served in time is shed with 429 and Retry-After; waiting ones in a full queue give way to
// those that may not be refused; operators see the reason in a header, and no one else does.
func TestSheddingAndExplaining(t *testing.T) {
	t.Parallel()
	token := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(token, []byte("0123456789abcdef\n"), 0o600))
	f := start(t, options{
		prefills: 1, decodes: 1, engineArgs: []string{"--prefill-speed", "16000", "--max-model-len", "1000000", "--blocks", "100000"}, adminFields: ", tokenFile: " + token,
		pool: "  binding: late\n  queue: {maxWaiting: 2}\n  objectives: {fromHeaders: true, onMiss: shed, named: [{name: batch, priority: -1}]}\n",
	})
	const objective = "x-llm-d-inference-objective"
	answers := make(chan answer, 4)
	send := func(id string, headers ...string) {
		go func() {
			answers <- f.post("/v1/chat/completions", question(id, 16_000), append(headers, "x-request-id", id)...)
		}()
	}
	waiting := func(n float64) {
		t.Helper()
		require.Eventually(t, func() bool { return metric(t, f.admins[0], "tandem_queue_requests") == n }, patience, 5*time.Millisecond)
	}
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() { // half a minute, unless the client leaves
		defer close(left)
		_, _ = f.try(ctx, http.MethodPost, "/v1/chat/completions", question("running", 480_000), "x-request-id", "running")
	}()
	require.Eventually(t, func() bool { return metric(t, f.admins[0], "tandem_reservations") > 0 }, patience, 5*time.Millisecond)
	late := f.post("/v1/chat/completions", question("late", 4000), "x-llm-d-slo-ttft-ms", "300")
	require.Equal(t, 429, late.status, "%.300s", late.body)
	require.Contains(t, late.body, `"code":"target_missed"`)
	require.NotEmpty(t, late.header.Get("retry-after"))
	send("batch-1", objective, "batch")
	send("batch-2", objective, "batch")
	waiting(2)
	send("important")
	shed := <-answers
	require.Equal(t, 429, shed.status, "%.300s", shed.body)
	require.Contains(t, shed.body, `"code":"overloaded"`)
	require.Equal(t, "1", shed.header.Get("retry-after"))
	leave()
	<-left
	for range 2 {
		a := <-answers
		require.Equal(t, 200, a.status, "%.300s", a.body)
	}

	asked := f.post("/v1/chat/completions", question("asked", 900), "x-request-id", "asked", "tandem-explain", "0123456789abcdef")
	require.Equal(t, 200, asked.status)
	var e struct {
		Prefill, Decode string
		Candidates      []json.RawMessage
	}
	require.NoError(t, json.Unmarshal([]byte(asked.header.Get("x-tandem-explain")), &e), asked.header)
	p, d := f.hops("asked")
	require.Equal(t, []string{p.Engine, d.Engine}, []string{e.Prefill, e.Decode})
	require.Len(t, e.Candidates, 2)
	require.Empty(t, p.Headers["Tandem-Explain"], "the token goes no further")
	var past []struct {
		Prefill, Decode string
		Weighed         []json.RawMessage
	}
	require.NoError(t, getJSON(f.admins[0]+"/debug/requests?id=asked", &past))
	require.Len(t, past, 1)
	require.Equal(t, []string{p.Engine, d.Engine}, []string{past[0].Prefill, past[0].Decode})
	require.Len(t, past[0].Weighed, 2)
	for _, headers := range [][]string{{"tandem-explain", "guess"}, {"x-tandem-explain", "mine"}, {}} {
		a := f.post("/v1/chat/completions", question("not asked", 900), headers...)
		require.Equal(t, 200, a.status)
		require.NotContains(t, a.header, "X-Tandem-Explain", "%v", headers)
	}
}

// Decisions can be written to Envoy's access log.
func TestDecisionsInTheAccessLog(t *testing.T) {
	t.Parallel()
	var log string
	f := start(t, options{prefills: 1, decodes: 1, extProcFields: ", decisionMetadata: true", bootstrap: func(f *fleet) string {
		bin, err := binaries()
		require.NoError(t, err)
		text, err := exec.Command(filepath.Join(bin, "tandem"), "envoy", "-f", f.config).Output()
		require.NoError(t, err)
		log = filepath.Join(f.dir, "access.log")
		at, begins := "          access_log:\n", "          access_log:\n"
		if runsInside() { // no log tells Tandem anything
			at = "          http_filters:\n"
		}
		require.Contains(t, string(text), at)
		return strings.Replace(string(text), at, begins+`          - name: envoy.access_loggers.file
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog
              path: `+log+`
              log_format: {text_format_source: {inline_string: "%REQ(x-request-id)% %DYNAMIC_METADATA(tandem:route)% %DYNAMIC_METADATA(tandem:prefill)% %DYNAMIC_METADATA(tandem:prompt_tokens)%\n"}}
`+strings.TrimPrefix(at, begins), 1)
	}})
	require.Equal(t, 200, f.post("/v1/chat/completions", question("logged", 500), "x-request-id", "logged").status)
	require.Eventually(t, func() bool {
		text, _ := os.ReadFile(log)
		return strings.Contains(string(text), "logged split "+f.prefills[0].addr+" ")
	}, patience, 50*time.Millisecond)
}

// The purpose of late binding: when many requests arrive at once, short ones do not wait behind long ones. The
// engines' time is simulated, Envoy's and Tandem's are real.
func TestLateBindingIsWorthIt(t *testing.T) {
	t.Parallel()
	mean := map[string]time.Duration{}
	for _, binding := range []string{"immediate", "late"} {
		f := start(t, options{pool: "  binding: " + binding + "\n", engineArgs: []string{"--prefill-speed", "16000"}})
		answers := f.burst(36, func(i int) answer {
			tokens := 400
			if i%3 == 0 {
				tokens = 8000
			}
			id := fmt.Sprintf("%s-%d", binding, i)
			a := f.post("/v1/chat/completions", question(id, tokens), "x-request-id", id)
			require.Equal(t, 200, a.status)
			return a
		})
		for _, a := range answers {
			mean[binding] += a.took / time.Duration(len(answers))
		}
	}
	t.Logf("mean time to an answer: %v bound at once, %v bound late", mean["immediate"], mean["late"])
	speed(t, mean["late"] < mean["immediate"], "late binding is worth it")
}

// A replica that is killed while requests wait in it loses none of them: Envoy takes them to the other one.
func TestAKilledReplicasQueueGoesOn(t *testing.T) {
	t.Parallel()
	f := start(t, options{replicas: 2, pool: "  binding: late\n", engineArgs: []string{"--prefill-speed", "16000"}})
	for round := 0; f.tandems[0].running(); round++ { // a slow machine misses the moment
		require.Less(t, round, 10, "nobody waits in it")
		ended := make(chan []answer, 1)
		go func() {
			ended <- f.burst(12, func(i int) answer {
				id := fmt.Sprintf("queue-%d-%d", round, i)
				return f.post("/v1/chat/completions", question(id, 8000), "x-request-id", id)
			})
		}()
		var answers []answer
		for answers == nil {
			select {
			case answers = <-ended:
			case <-time.After(5 * time.Millisecond):
				if f.tandems[0].running() && metric(t, f.admins[0], "tandem_queue_requests") >= 2 {
					f.tandems[0].stop(syscall.SIGKILL)
				}
			}
		}
		for _, a := range answers {
			require.Equal(t, 200, a.status, "%.300s", a.body)
		}
	}
}
