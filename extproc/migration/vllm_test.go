//go:build vllm

package migration

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

// TestRealContinue cuts real streams of one vLLM behind every event, continues them on another one, and requires what
// the first would have answered. It runs in e2e/vllm/run.sh, which sets the addresses:
//
//	ENGINES=1 REFERENCE=prefill e2e/vllm/run.sh go test -tags vllm -count=1 -v -run TestRealContinue ./extproc/migration
func TestRealContinue(t *testing.T) {
	first, next := os.Getenv("TANDEM_VLLM_REFERENCE"), os.Getenv("TANDEM_VLLM_DECODE")
	next, _, _ = strings.Cut(next, ",")
	if first == "" || next == "" {
		t.Skip("TANDEM_VLLM_REFERENCE and TANDEM_VLLM_DECODE are not set")
	}
	const text = "quiet river stone lamp engine harbour winter violin copper ladder meadow signal"
	for _, test := range []struct{ name, members string }{
		{"greedy", `"ignore_eos":true`},
		{"until the end", `"stream_options":{"include_usage":true}`},
		{"usage in every event", `"ignore_eos":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`},
		{"own ids", `"ignore_eos":true,"return_token_ids":true`},
		{"min_tokens", `"min_tokens":30`},
		{"stop", `"ignore_eos":true,"stop":["%STOP%","never in it"]`},
		{"stop included", `"ignore_eos":true,"include_stop_str_in_output":true,"stop":["%STOP%","never in it"]`},
		{"logprobs", `"ignore_eos":true,"logprobs":true,"top_logprobs":2`},
		{"repetition_penalty", `"ignore_eos":true,"repetition_penalty":1.3`},
		{"logit_bias", `"ignore_eos":true,"logit_bias":{"500":3}`},
	} {
		for _, api := range []openai.API{openai.Chat, openai.Completions} {
			if api == openai.Completions && test.name == "logprobs" {
				continue
			}
			t.Run(test.name+" "+api.String(), func(t *testing.T) {
				path, prompt := "/v1/chat/completions", `"messages":[{"role":"user","content":"%s %s"}]`
				if api == openai.Completions {
					path, prompt = "/v1/completions", `"prompt":"%s %s"`
				}
				for seed := range 3 {
					body := fmt.Sprintf(`{"model":"tiny","stream":true,"temperature":0,"max_tokens":40,%s,`+prompt+`}`,
						test.members, strings.Repeat("again ", seed), text)
					if strings.Contains(body, "%STOP%") { // characters 20 to 25 of the answer without it
						whole := read(t, post(t, first, path, strings.ReplaceAll(body, "%STOP%", "never")))
						runes := []rune(whole.Text)
						stop := fmt.Sprintf("%q", string(runes[len(runes)-30:len(runes)-24]))
						body = strings.Replace(body, `"%STOP%"`, stop, 1)
					}
					cutEverywhere(t, api, first, next, path, body)
				}
			})
		}
	}
}

func cutEverywhere(t *testing.T, api openai.API, first, next, path, body string) {
	t.Helper()
	plain := post(t, first, path, body)
	want := read(t, plain)
	r := scan(t, api, body)
	require.Empty(t, Refusal(r, Policy{}), body)
	s := NewStream(r, Policy{})
	raw := post(t, first, path, string(asked(r, &s)))
	passed := s.End(s.Feed(nil, raw))
	if !strings.Contains(body, "return_token_ids") {
		require.Equal(t, ids.ReplaceAllString(string(raw), `"$1":null`), string(passed))
		require.Equal(t, shapes(plain), shapes(passed), "an event in another form than without the ids")
	}
	requireSame(t, want, read(t, passed))
	require.True(t, s.Done())
	cuts, equal := 0, 0
	for at := 0; at < len(raw); {
		at += bytes.Index(raw[at:], []byte("\n\n")) + 2
		for _, cut := range []int{at, at + 20} {
			if cut > len(raw) || cut > at && cuts%5 > 0 {
				continue
			}
			s := NewStream(r, Policy{})
			got := s.Feed(nil, raw[:cut])
			if s.Done() {
				continue
			}
			cuts++
			again, reason := continued(r, &s)
			if reason != "" {
				require.Equal(t, Complete, reason)
				got = s.Finish(got)
			} else {
				got = s.End(s.Feed(got, post(t, next, path, string(again))))
			}
			require.Empty(t, s.Broken(), "cut at %d of %d: %s", cut, len(raw), again)
			requireSame(t, want, read(t, got), "cut at %d of %d\n%s\n%s", cut, len(raw), again, got)
			equal++
		}
	}
	t.Logf("%d of %d cuts of %q equal", equal, cuts, want.Text)
}

// TestRealRepeat cuts real streams with tool calls, reasoning and grammars behind every event, and has another engine
// repeat them:
//
//	AGENT=1 ENGINES=1 REFERENCE=prefill e2e/vllm/run.sh go test -tags vllm -count=1 -v -run TestRealRepeat ./extproc/migration
func TestRealRepeat(t *testing.T) {
	first, next := os.Getenv("TANDEM_VLLM_REFERENCE"), os.Getenv("TANDEM_VLLM_DECODE")
	next, _, _ = strings.Cut(next, ",")
	if os.Getenv("TANDEM_VLLM_AGENT") == "" || first == "" || next == "" {
		t.Skip("TANDEM_VLLM_AGENT, TANDEM_VLLM_REFERENCE and TANDEM_VLLM_DECODE are not set")
	}
	const (
		schema = `{"type":"object","properties":{"path":{"type":"string","maxLength":20},"n":{"type":"integer"}},"required":["path","n"]}`
		tools  = `"tools":[{"type":"function","function":{"name":"read","parameters":` + schema + `}},{"type":"function","function":{"name":"write","parameters":` + schema + `}}]`
		one    = `<tool_call>\\n\\{\"name\": \"(read|write)\", \"arguments\": \\{\"path\": \"[a-zA-Zé ]{5,25}\", \"n\": [0-9]{1,4}\\}\\}\\n</tool_call>`
		calls  = tools + `,"structured_outputs":{"regex":"[a-z <]{10,40}(` + one + `\\n){2}"}`
		thinks = `,"logit_bias":{"7":%d}` // of </think>
	)
	for _, test := range []struct {
		name, members string
		calls         bool
	}{
		{"two calls", calls + fmt.Sprintf(thinks, 100), true},
		{"reasoning and two calls", calls + fmt.Sprintf(thinks, 6), false},
		{"reasoning, no tools", `"ignore_eos":true`, false},
		{"required", tools + `,"tool_choice":"required"` + fmt.Sprintf(thinks, 100), true},
		{"named", tools + `,"tool_choice":{"type":"function","function":{"name":"write"}}` + fmt.Sprintf(thinks, 100), true},
		{"seeded, two calls", calls + `,"temperature":1,"seed":77` + fmt.Sprintf(thinks, 100), true},
		{"seeded, required", tools + `,"tool_choice":"required","temperature":1,"seed":78` + fmt.Sprintf(thinks, 100), true},
		{"a schema", `"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":` + schema + `}}` + fmt.Sprintf(thinks, 100), false},
		{"penalties", `"presence_penalty":1,"frequency_penalty":0.5,"ignore_eos":true`, false},
		{"cut short", calls + fmt.Sprintf(thinks, 100) + `,"max_tokens":30`, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			for seed := range 3 {
				repeatEverywhere(t, openai.Chat, first, next, test.members, seed, test.calls)
			}
		})
	}
	anthropic := `"tools":[{"name":"read","input_schema":` + schema + `},{"name":"write","input_schema":` + schema + `}]`
	for name, members := range map[string]string{
		"messages": "", "messages, any": anthropic + `,"tool_choice":{"type":"any"}`,
		"messages, a tool": anthropic + `,"tool_choice":{"type":"tool","name":"read"}`, "messages, auto": anthropic,
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range 2 {
				repeatEverywhere(t, openai.Messages, first, next, members, seed, false)
			}
		})
	}
	flat := `"tools":[{"type":"function","name":"read","parameters":` + schema + `},{"type":"function","name":"write","parameters":` + schema + `}]`
	for name, members := range map[string]string{
		"responses": `"ignore_eos":true`, "responses, required": flat + `,"tool_choice":"required"` + fmt.Sprintf(thinks, 100),
		"responses, two calls": strings.Replace(calls, tools, flat, 1) + fmt.Sprintf(thinks, 100), "responses, cut short": flat + `,"max_output_tokens":20`,
		"responses, seeded": flat + `,"tool_choice":"required","temperature":1,"seed":79` + fmt.Sprintf(thinks, 100),
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range 2 {
				repeatEverywhere(t, openai.Responses, first, next, members, seed, false)
			}
		})
	}
	t.Run("a completion with a grammar", func(t *testing.T) {
		repeatEverywhere(t, openai.Completions, first, next, `"structured_outputs":{"regex":"[a-z]{5} [A-Z]{30}"}`, 1, false)
	})
}

func repeatEverywhere(t *testing.T, api openai.API, first, next, members string, seed int, calls bool) {
	t.Helper()
	text := strings.Repeat("again ", seed) + "quiet river stone lamp engine harbour"
	path, prompt := "/v1/chat/completions", fmt.Sprintf(`"messages":[{"role":"user","content":%q}]`, text)
	switch api {
	case openai.Messages:
		path = "/v1/messages"
	case openai.Completions:
		path, prompt = "/v1/completions", fmt.Sprintf(`"prompt":%q`, text)
	}
	limit := "max_tokens"
	if api == openai.Responses {
		path, prompt, limit = "/v1/responses", fmt.Sprintf(`"input":%q`, text), "max_output_tokens"
	}
	parts := []string{`"model":"tiny","stream":true`, prompt}
	for name, member := range map[string]string{"temperature": `"temperature":0`, limit: `"` + limit + `":160`} {
		if !strings.Contains(members, `"`+name+`"`) {
			parts = append(parts, member)
		}
	}
	if api == openai.Chat || api == openai.Completions {
		parts = append(parts, `"stream_options":{"include_usage":true}`)
	}
	if members != "" {
		parts = append(parts, members)
	}
	body := "{" + strings.Join(parts, ",") + "}"
	r := scan(t, api, body)
	require.Empty(t, Refusal(r, Policy{}), body)
	plain := post(t, first, path, body)
	read := readAgent
	if api == openai.Completions {
		read = func(t testing.TB, stream []byte) agentAnswer {
			return readAgent(t, bytes.ReplaceAll(bytes.ReplaceAll(stream, []byte(`"text":`), []byte(`"delta":{"content":`)),
				[]byte(`,"logprobs"`), []byte(`},"logprobs"`)))
		}
	}
	want := read(t, plain)
	if calls {
		require.NotEmpty(t, want.calls, "%s\n%s", body, plain)
	}
	s := NewStream(r, Policy{})
	raw := post(t, first, path, string(asked(r, &s)))
	passed := s.End(s.Feed(nil, raw))
	requireSameAgent(t, want, read(t, passed), "%s", passed)
	answers, cuts := map[string][]byte{}, 0
	for at := 0; at < len(raw); {
		at += bytes.Index(raw[at:], []byte("\n\n")) + 2
		s := NewStream(r, Policy{})
		got := s.Feed(nil, raw[:at])
		if s.Done() {
			continue
		}
		again, reason := continued(r, &s)
		if cuts++; reason != "" {
			require.Equal(t, Complete, reason)
			got = s.Finish(got)
		} else {
			if answers[string(again)] == nil || cuts%10 == 0 {
				answers[string(again)] = post(t, next, path, string(again))
			}
			got = s.End(s.Feed(got, answers[string(again)]))
		}
		require.Empty(t, s.Broken(), "cut at %d of\n%s\n%s\n%s", at, raw, again, answers[string(again)])
		requireSameAgent(t, want, read(t, got), "cut at %d of %d\n%s\n%s", at, len(raw), again, got)
	}
	t.Logf("%d cuts equal: %+v, %v", cuts, want.parts, want.finish)
}

// ids are the members that are asked for; an engine that is not asked writes null.
var ids = regexp.MustCompile(`"((?:prompt_)?token_ids)":\[[0-9,]*\]`)

// shapes returns the events in all their forms, without numbers and texts: how many tokens an event has is chance.
func shapes(stream []byte) map[string]bool {
	out := map[string]bool{}
	values := regexp.MustCompile(`("(?:id|text|content)":)"(?:[^"\\]|\\.)*"|(-?[0-9.]+)`)
	for event := range strings.SplitSeq(string(stream), "\n\n") {
		if !strings.Contains(event, `"logprobs":{`) {
			out[values.ReplaceAllString(event, `$1`)] = true
		}
	}
	return out
}

func post(t *testing.T, addr, path, body string) []byte {
	t.Helper()
	answer, err := http.Post("http://"+addr+path, "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer func() { _ = answer.Body.Close() }()
	got, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.Equal(t, 200, answer.StatusCode, "%s\n%s", got, body)
	return got
}
