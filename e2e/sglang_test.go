package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Dialects whose legs run at once, over the real Envoy's mirrored leg. Every test ends with the fleet's account: no
// engine holds a block, no key was used twice, no request still runs, nothing is booked.

// sglangAPIs are requests of every kind that can use two SGLang engines.
var sglangAPIs = []struct{ name, path, body string }{
	{"chat", "/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"Both at once, please."}],"max_tokens":12}`},
	{"completions", "/v1/completions", `{"model":"tiny","prompt":"Both at once, please.","max_tokens":12}`},
	{"generate", "/generate", `{"text":"Both at once, please.","sampling_params":{"max_new_tokens":12}}`},
	{"generate ids", "/generate", `{"input_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"sampling_params":{"max_new_tokens":12}}`},
	{"generate batch", "/generate", `{"text":["one prompt","and another","and a third"],"sampling_params":{"max_new_tokens":5}}`},
	{"completions batch", "/v1/completions", `{"model":"tiny","prompt":["one prompt","and another"],"max_tokens":5}`},
	{"responses", "/v1/responses", `{"model":"tiny","input":"Both at once, please.","max_output_tokens":12}`},
	{"messages", "/v1/messages", `{"model":"tiny","max_tokens":12,"messages":[{"role":"user","content":"Both at once, please."}]}`},
}

func TestSGLangPairs(t *testing.T) {
	t.Parallel()
	for _, shape := range []struct{ prefills, decodes int }{{2, 2}, {3, 1}} {
		t.Run(fmt.Sprintf("%dP%dD", shape.prefills, shape.decodes), func(t *testing.T) {
			f := start(t, options{dialect: "sglang", prefills: shape.prefills, decodes: shape.decodes})
			for _, api := range sglangAPIs {
				for _, stream := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s stream=%t", api.name, stream), func(t *testing.T) {
						body := api.body
						if stream {
							body = strings.Replace(body, "{", `{"stream":true,`, 1)
						}
						id := fmt.Sprintf("pair-%s-%t", strings.ReplaceAll(api.name, " ", "-"), stream)
						got := f.post(api.path, body, "x-request-id", id)
						require.Equal(t, 200, got.status, got.body)
						require.NotContains(t, got.body, "Violation")
						require.Empty(t, got.header.Get("x-tandem-ticket"))
						p, d := f.hops(id)
						require.Positive(t, d.ExternalTokens, "decode got the prompt's blocks from prefill")
						require.Equal(t, stream, strings.Contains(d.Body, `"stream":true`))
						require.NotContains(t, p.Body, `"stream":true`)
						room := member(t, d.Body, "bootstrap_room")
						require.Equal(t, room, member(t, p.Body, "bootstrap_room"), "one room")
						if stream {
							require.Greater(t, len(got.events()), 2)
							return
						}
						require.Equal(t, body, without(t, d.Body, "bootstrap_host", "bootstrap_port", "bootstrap_room"), "the client's own bytes")
					})
				}
			}
			require.Eventually(t, func() bool {
				return metric(t, f.admins[0], "tandem_hop_duration_seconds_count", `hop="prefill"`, `result="ok"`) == float64(2*len(sglangAPIs)) &&
					metric(t, f.admins[0], "tandem_hop_duration_seconds_count", `hop="decode"`, `result="ok"`) == float64(2*len(sglangAPIs))
			}, patience, 20*time.Millisecond, "both hops are counted and timed")
		})
	}
}

// return_logprob of /generate: the prompt's log probabilities are prefill's, and come in front of decode's answer, in
// each of a batch and in each event. With two replicas the answer may pass through the one that does not have them.
func TestSGLangLogprobs(t *testing.T) {
	t.Parallel()
	type result struct {
		Index int
		Meta  struct {
			PromptTokens int     `json:"prompt_tokens"`
			Completion   int     `json:"completion_tokens"`
			Input        [][]any `json:"input_token_logprobs"`
			Output       [][]any `json:"output_token_logprobs"`
		} `json:"meta_info"`
	}
	for _, replicas := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d replicas", replicas), func(t *testing.T) {
			o := options{dialect: "sglang", replicas: replicas}
			if replicas > 1 {
				o.top = startRedis(t).yaml()
			}
			f := start(t, o)
			check := func(text string) (index int) {
				var r result
				require.NoError(t, json.Unmarshal([]byte(text), &r), text)
				require.Positive(t, r.Meta.PromptTokens)
				require.Len(t, r.Meta.Input, r.Meta.PromptTokens, "one for each token of the prompt")
				require.Len(t, r.Meta.Output, r.Meta.Completion)
				return r.Index
			}
			for i := range 12 {
				prompt := fmt.Sprintf(`"Request %d of prompts that differ."`, i)
				if i%3 == 2 {
					prompt = "[" + prompt + `,"And another, which is longer than that one."]`
				}
				body := fmt.Sprintf(`{"text":%s,"return_logprob":true,"logprob_start_len":0,"sampling_params":{"max_new_tokens":6}}`, prompt)
				if i%2 == 1 {
					body = streamed(body)
				}
				got := f.post("/generate", body)
				require.Equal(t, 200, got.status, got.body)
				if i%2 == 1 {
					events, last := got.events(), map[int]bool{}
					require.Greater(t, len(events), 6)
					for _, e := range events[:len(events)-1] {
						last[check(e)] = true
					}
					require.Equal(t, i%3 == 2, len(last) == 2)
					continue
				}
				var all []json.RawMessage
				if json.Unmarshal([]byte(got.body), &all) != nil {
					all = []json.RawMessage{json.RawMessage(got.body)}
				}
				for _, one := range all {
					check(string(one))
				}
			}
			// Without it answers do not pass through Tandem.
			require.Equal(t, 200, f.post("/generate", `{"text":"plain","sampling_params":{"max_new_tokens":6}}`).status)
			if runsInside() { // inside Envoy there is no leg for that
				return
			}
			soon(t, "twelve answers passed by Tandem", func() bool { return sum(t, f, "tandem_ext_proc_duration_seconds_count", `role="answer-leg"`) >= 12 })
			require.InDelta(t, 12, sum(t, f, "tandem_ext_proc_duration_seconds_count", `role="answer-leg"`), 0)
		})
	}
}

// sum adds up a metric of all replicas.
func sum(t *testing.T, f *fleet, name string, labels ...string) (total float64) {
	for _, admin := range f.admins {
		total += metric(t, admin, name, labels...)
	}
	return total
}

// member returns the JSON text of a member of a body.
func member(t *testing.T, body, name string) string {
	t.Helper()
	var members map[string]json.RawMessage
	require.NoError(t, json.Unmarshal([]byte(body), &members), body)
	return string(members[name])
}

// without cuts members that stand right after the opening brace.
func without(t *testing.T, body string, names ...string) string {
	t.Helper()
	for _, name := range names {
		head := `{"` + name + `":`
		require.True(t, strings.HasPrefix(body, head), "%.200s", body)
		d := json.NewDecoder(strings.NewReader(body[len(head):]))
		var raw json.RawMessage
		require.NoError(t, d.Decode(&raw))
		body = "{" + strings.TrimPrefix(body[len(head)+int(d.InputOffset()):], ",")
	}
	return body
}

const pairBody = `{"model":"tiny","messages":[{"role":"user","content":"A prompt that is long enough to fill a few blocks of KV cache, for both legs."}],"max_tokens":8}`

func streamed(body string) string { return strings.Replace(body, "{", `{"stream":true,`, 1) }

// If a leg fails before the answer began, D is cancelled, and another pair answers with another room.
func TestSGLangFailures(t *testing.T) {
	t.Parallel()
	for _, replicas := range []int{1, 2} { // with two, the legs of a request are often served by different ones
		t.Run(fmt.Sprintf("%d replicas", replicas), func(t *testing.T) {
			t.Parallel() // mostly waits
			sglangFailures(t, replicas)
		})
	}
}

func sglangFailures(t *testing.T, replicas int) {
	fleet := func() *fleet {
		return start(t, options{dialect: "sglang", replicas: replicas, pool: "  prefillTimeout: {base: 4s}\n"})
	}
	f := fleet()
	replans := func(leg string) (sum float64) {
		for _, admin := range f.admins {
			sum += metric(t, admin, "tandem_replans_total", `cause="`+leg+`"`)
		}
		return sum
	}
	for _, failure := range []struct{ leg, rule string }{
		{"prefill", `{"mode":"status","status":500}`}, {"prefill", `{"mode":"status","status":503}`}, {"prefill", `{"mode":"reset-before-headers"}`},
		{"prefill", `{"mode":"hang"}`}, {"prefill", `{"mode":"garbage-body"}`}, {"prefill", `{"mode":"refuse","delay":"2s"}`},
		{"decode", `{"mode":"status","status":500}`}, {"decode", `{"mode":"reset-before-headers"}`}, {"decode", `{"mode":"refuse","delay":"2s"}`},
	} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s %s stream=%t", failure.leg, failure.rule, stream), func(t *testing.T) {
				body, bad := pairBody, f.prefills[0]
				if stream {
					body = streamed(body)
				}
				if failure.leg == "decode" {
					f = fleet() // pairs that failed before are avoided
					bad = f.decodes[0]
				}
				before := replans(failure.leg)
				// A refused scrape may exclude the endpoint before a request meets it.
				refused := func() bool { return strings.Contains(failure.rule, `"refuse"`) && !f.inUse(bad) }
				// Chance may keep all requests away from the failing endpoint.
				for round := 0; replans(failure.leg) == before && !refused(); round++ {
					require.Less(t, round, 10, "no request met the failure")
					f.breaks(bad, failure.rule)
					for i := range 8 {
						got := f.post("/v1/chat/completions", body, "x-request-id", fmt.Sprintf("fails-%d-%d", round, i))
						require.Equal(t, 200, got.status, got.body)
						require.NotContains(t, got.body, "error")
					}
				}
				f.heal(bad)
			})
		}
	}
}

// One of two prefill engines is killed again and again while requests run: none fails, because there is always a
// healthy pair, and no decode engine is blamed. (A decode engine answers 5xx as soon as its prefill engine is gone,
// before Envoy reports the end of the mirrored leg.)
func TestSGLangPrefillIsKilled(t *testing.T) {
	t.Parallel()
	f := start(t, options{dialect: "sglang", prefills: 2, decodes: 2, engineArgs: []string{"--decode-step", "2ms", "--prefill-speed", "400", "--record=false"}})
	f.lenient = true // a killed engine has lost its counts
	rounds := fromEnv("TANDEM_KILLS", 4)
	for round := range rounds {
		victim := f.prefills[round%2]
		var clients sync.WaitGroup
		wrong := make(chan string, 64)
		begun := make(chan struct{}, 64)
		for c := range 6 {
			clients.Go(func() {
				for i := range 8 {
					body := pairBody
					if i%2 == 0 {
						body = streamed(body)
					}
					begun <- struct{}{}
					got, err := f.try(t.Context(), http.MethodPost, "/v1/chat/completions", body, "x-request-id", fmt.Sprintf("kill-%d-%d-%d", round, c, i))
					if err != nil || got.status != 200 || strings.Contains(got.body, "error") {
						wrong <- fmt.Sprintf("%d-%d-%d: %v %d %.300s", round, c, i, err, got.status, got.body)
					}
				}
			})
		}
		for range 12 {
			<-begun
		}
		_ = victim.cmd.Process.Signal(syscall.SIGKILL)
		<-victim.exited
		clients.Wait()
		close(wrong)
		for text := range wrong {
			require.Fail(t, text)
		}
		for _, d := range f.decodes {
			require.Zero(t, metric(t, f.admins[0], "tandem_endpoint_health_changes_total", `to="out"`, `endpoint="`+d.addr+`"`), "decode is not to blame")
		}
		f.restart(victim)
		soon(t, "it is used again", func() bool { return f.inUse(victim) })
	}
}

// When a prefill engine dies, its decode engine often answers 5xx first. Here it is certain: the prefill engine hangs
// until its decode engine has failed, and then resets its connection. Tandem waits for it, blames only prefill, and
// another pair answers.
func TestSGLangDecodeFailsBeforeItsPrefill(t *testing.T) {
	t.Parallel()
	f := start(t, options{dialect: "sglang", prefills: 2, decodes: 2, engineArgs: []string{"--record=false"}})
	f.lenient = true // the decode engine that failed never asks for its blocks
	for _, e := range f.prefills {
		f.inject(e, `{"mode":"hang","count":1}`)
	}
	for _, e := range f.decodes {
		f.inject(e, `{"mode":"status","status":500,"count":1}`)
	}
	answers := make(chan answer, 1)
	go func() {
		got, err := f.try(t.Context(), http.MethodPost, "/v1/chat/completions", pairBody)
		if err != nil {
			got.body = err.Error()
		}
		answers <- got
	}()
	soon(t, "a decode engine has failed", func() bool {
		return slices.ContainsFunc(f.decodes, func(e *engine) bool {
			var rules []any
			require.NoError(t, getJSON("http://"+e.addr+"/sim/fail", &rules))
			return len(rules) == 0
		})
	})
	for _, e := range f.decodes {
		f.clear(e)
	}
	time.Sleep(100 * time.Millisecond) // Tandem has received its 5xx by now
	for _, e := range f.prefills {
		f.clear(e)
	}
	got := <-answers
	require.Equal(t, 200, got.status, got.body)
	for _, d := range f.decodes {
		require.Zero(t, metric(t, f.admins[0], "tandem_endpoint_health_changes_total", `to="out"`, `endpoint="`+d.addr+`"`), "decode is not to blame")
	}
	require.InDelta(t, 1, sum(t, f, "tandem_replans_total", `cause="prefill"`), 0)
	require.Zero(t, sum(t, f, "tandem_replans_total", `cause="decode"`))
}

// breaks makes an engine fail by a rule. If it is to refuse connections for a while, a missed attempt is repeated.
func (f *fleet) breaks(e *engine, rule string) {
	f.t.Helper()
	if !strings.Contains(rule, `"refuse"`) {
		f.inject(e, rule)
		return
	}
	soon(f.t, "it takes connections, and so a rule", func() bool { return healthy(e) })
	f.inject(e, rule)
	for tries := 1; healthy(e); tries++ {
		require.Less(f.t, tries, 10_000, "it does not refuse")
		if time.Sleep(5 * time.Millisecond); tries%1000 == 0 {
			f.inject(e, rule)
		}
	}
}

func healthy(e *engine) bool {
	resp, err := http.Get("http://" + e.addr + "/health")
	return err == nil && resp.Body.Close() == nil && resp.StatusCode == 200
}

// heal removes an engine's failures, and waits until Tandem uses it again.
func (f *fleet) heal(e *engine) {
	f.t.Helper()
	require.Eventually(f.t, func() bool { return healthy(e) }, patience, 10*time.Millisecond)
	f.clear(e)
	require.Eventually(f.t, func() bool {
		for _, admin := range f.admins {
			var state struct {
				Pools []struct{ Endpoints []struct{ Failed bool } }
			}
			if err := getJSON(admin+"/debug/state", &state); err != nil {
				return false
			}
			for _, p := range state.Pools {
				for _, e := range p.Endpoints {
					if e.Failed {
						return false
					}
				}
			}
		}
		return true
	}, patience, 20*time.Millisecond, "an endpoint stays marked as failed")
}

// Without a working pair the answer is an error, in OpenAI's shape.
func TestSGLangWithoutPrefill(t *testing.T) {
	t.Parallel()
	f := start(t, options{dialect: "sglang", pool: "  prefillTimeout: {base: 30s}\n"})
	for _, p := range f.prefills {
		f.inject(p, `{"mode":"status","status":500}`)
	}
	got := f.post("/v1/chat/completions", pairBody)
	require.Equal(t, 503, got.status, got.body)
	require.Contains(t, got.body, `"endpoint_failed"`)
}

// An engine's refusal of a request is the client's answer, whichever engine refuses first. The quoted request is the
// client's own.
func TestSGLangRefusals(t *testing.T) {
	t.Parallel()
	for name, slow := range map[string]string{"either": "", "decode first": "prefill", "prefill first": "decode"} {
		t.Run(name, func(t *testing.T) {
			f := start(t, options{dialect: "sglang"})
			for _, e := range f.engines() {
				if e.role == slow {
					f.inject(e, `{"mode":"slow","delay":"500ms"}`)
				}
			}
			for i := range 10 {
				body := `{"model":"tiny","max_tokens":3}`
				if i%2 == 1 {
					body = streamed(body)
				}
				got := f.post("/v1/chat/completions", body)
				require.Equal(t, 400, got.status, got.body)
				require.Contains(t, got.body, "BadRequest")
				require.Contains(t, got.body, `'model': 'tiny', 'max_tokens': 3}`)
				require.NotContains(t, got.body, "bootstrap")
				if !runsInside() { // there it has gone out in pieces
					require.Equal(t, strconv.Itoa(len(got.body)), got.header.Get("content-length"))
				}
			}
			require.Zero(t, metric(t, f.admins[0], "tandem_replans_total"))
		})
	}
}

// Real engines give all choices of one prompt the same bootstrap_room, so decode would wait for ever. Only an engine of
// both roles answers them.
func TestSGLangChoices(t *testing.T) {
	t.Parallel()
	requests := map[string]string{
		`{"model":"tiny","messages":[{"role":"user","content":"x y z"}],"max_tokens":5,"n":3}`: "/v1/chat/completions",
		`{"model":"tiny","prompt":["one prompt","and another"],"max_tokens":5,"n":2}`:          "/v1/completions",
		`{"text":"one prompt","sampling_params":{"max_new_tokens":5,"n":2}}`:                   "/generate",
	}
	f := start(t, options{dialect: "sglang", engine: func(role string, i int, free func() string) ([]string, string) {
		args := []string{"--connector", "sglang", "--transfer-timeout", "20s"}
		if i == 3 {
			return append(args, "--role", "both"), ""
		}
		if role == "prefill" {
			bootstrap := free()
			return append(args, "--bootstrap", bootstrap), ", transfer: {bootstrapPort: " + portOf(bootstrap) + "}"
		}
		return args, ""
	}, pools: `pools:
- name: chat
  models: ["*"]
  kvTransfer: sglang
  split: always
  decodeAlone: fallback
  endpoints:
  - {address: %P, role: prefill}
  - {address: %P, role: prefill}
  - {address: %D, role: decode}
  - {address: %D, role: both}
`})
	for body, path := range requests {
		for _, b := range []string{body, streamed(body)} {
			id := fmt.Sprintf("choices-%d", len(b))
			got := f.post(path, b, "x-request-id", id)
			require.Equal(t, 200, got.status, got.body)
			require.Len(t, f.requests(id, f.engines()...), 1)
			require.Len(t, f.requests(id, f.decodes[1]), 1, "the one that does both")
		}
	}
	f = start(t, options{dialect: "sglang"})
	for body, path := range requests {
		got := f.post(path, body)
		require.Equal(t, 400, got.status, got.body)
		require.Contains(t, got.body, "several_choices")
	}
}

// If a client leaves, both legs are cancelled: P waits for D, D for P, and neither learns of the other's end.
func TestSGLangClientLeaves(t *testing.T) {
	t.Parallel()
	for name, rule := range map[string]string{"while prefill is slow": "prefill", "while decode is slow": "decode"} {
		for _, replicas := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s, %d replicas", name, replicas), func(t *testing.T) {
				f := start(t, options{dialect: "sglang", replicas: replicas})
				engines := f.prefills
				if rule == "decode" {
					engines = f.decodes
				}
				for _, e := range engines {
					f.inject(e, `{"mode":"slow","delay":"15s"}`)
				}
				var all sync.WaitGroup
				for i := range 6 {
					all.Go(func() {
						ctx, cancel := context.WithTimeout(t.Context(), time.Duration(300+100*i)*time.Millisecond)
						defer cancel()
						body := pairBody
						if i%2 == 0 {
							body = streamed(body)
						}
						_, err := f.try(ctx, http.MethodPost, "/v1/chat/completions", body)
						require.ErrorIs(t, err, context.DeadlineExceeded)
					})
				}
				all.Wait()
				require.Eventually(t, func() bool {
					held := 0.0
					for _, e := range f.engines() {
						held += metric(t, "http://"+e.addr, "enginesim_blocks_held") + metric(t, "http://"+e.addr, "vllm:num_requests_running")
					}
					return held == 0
				}, patience, 20*time.Millisecond, "a leg is still under way")
			})
		}
	}
}

// A replica that dies breaks no answer, whether it has begun or not.
func TestSGLangReplicaDies(t *testing.T) {
	t.Parallel()
	f := start(t, options{dialect: "sglang", replicas: 2, engineArgs: []string{"--decode-step", "40ms", "--prefill-speed", "200"}})
	var all sync.WaitGroup
	errs := make(chan error, 64)
	for i := range 16 {
		all.Go(func() {
			time.Sleep(time.Duration(i) * 40 * time.Millisecond) // the answers are at every stage when the replica dies
			body := strings.Replace(pairBody, `"max_tokens":8`, `"max_tokens":40`, 1)
			if i%2 == 0 {
				body = streamed(body)
			}
			got, err := f.try(t.Context(), http.MethodPost, "/v1/chat/completions", body)
			switch {
			case err != nil:
				errs <- err
			case got.status != 200 || strings.Contains(got.body, "error"):
				errs <- fmt.Errorf("%d %s", got.status, got.body)
			case i%2 == 0 && len(got.events()) < 40:
				errs <- errors.New("a stream was cut")
			}
		})
	}
	time.Sleep(400 * time.Millisecond)
	require.NoError(t, f.tandems[0].cmd.Process.Kill())
	all.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
}

// Many requests at once, streamed and not; some clients leave: all others are answered, and nothing is left anywhere.
func TestSGLangCrowd(t *testing.T) {
	t.Parallel()
	f := start(t, options{dialect: "sglang", prefills: 3, decodes: 2, replicas: 2})
	var all sync.WaitGroup
	errs := make(chan error, 400)
	for c := range 16 {
		all.Go(func() {
			for i := range 25 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				leaves := (c+i)%7 == 0
				if leaves {
					cancel()
					ctx, cancel = context.WithTimeout(t.Context(), time.Duration(1+i%5)*time.Millisecond)
				}
				body := strings.Replace(pairBody, "A prompt", fmt.Sprintf("Client %d request %d", c, i), 1)
				if i%2 == 0 {
					body = streamed(body)
				}
				got, err := f.try(ctx, http.MethodPost, "/v1/chat/completions", body)
				cancel()
				if leaves {
					continue
				}
				if err != nil || got.status != 200 {
					errs <- fmt.Errorf("%w %d %s", err, got.status, got.body)
				}
			}
		})
	}
	all.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
}
