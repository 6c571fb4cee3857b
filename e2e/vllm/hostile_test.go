//go:build vllm

package vllm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/stretchr/testify/require"

	"tandem/e2e/realengines"
)

// hostileMembers finds the members that hostile adds, which the reference must not get (it has no KV transfer, but some are
// refused by the parser).
var hostileMembers = regexp.MustCompile(`,"(kv_transfer_params|\\u006bv_transfer_params|ec_transfer_params|vllm_xargs)":(\{.*\}|"[^"]*"|\[[^]]*\]|\d+)$`)

// deadly are parameters that make a vLLM 0.32.0 decode engine die, hang, or answer from another request's KV.
func (s *suite) deadly(t *testing.T) map[string]string {
	t.Helper()
	genuine := s.prefillByHand(t, s.prompts.words(40))
	edited := func(edit func(map[string]json.RawMessage)) string {
		members := map[string]json.RawMessage{}
		require.NoError(t, json.Unmarshal(genuine, &members))
		edit(members)
		out, err := json.Marshal(members)
		require.NoError(t, err)
		return string(out)
	}
	return map[string]string{
		"do_remote_prefill alone": `{"do_remote_prefill":true}`,
		"block ids as strings":    edited(func(m map[string]json.RawMessage) { m["remote_block_ids"] = []byte(`["a"]`) }),
		"no blocks":               edited(func(m map[string]json.RawMessage) { m["remote_block_ids"] = []byte(`[]`) }),
		"no host":                 edited(func(m map[string]json.RawMessage) { delete(m, "remote_host") }),
		"dead port":               edited(func(m map[string]json.RawMessage) { m["remote_port"] = []byte(`1`) }),
		"both flags":              edited(func(m map[string]json.RawMessage) { m["do_remote_decode"] = []byte(`true`) }),
		"another prompt's blocks": string(genuine),
		"a prefill leg":           `{"do_remote_decode":true}`,
		"a string":                `"do_remote_prefill"`,
		"a list":                  `[1]`,
		"a number":                `1`,
	}
}

// hostile: whatever members a client adds for the engines, the text is right, the KV still moves, and no engine dies.
func (s *suite) hostile(t *testing.T) {
	count := 0
	send := func(r request) {
		s.both(t, r)
		requireAlive(t, s.engines())
		count++
	}
	decode := promptTokens(t, s.decode...)
	for _, value := range s.deadly(t) {
		for i, api := range []api{chat, completions, responses, messages, generate} {
			member := `,"kv_transfer_params":` + value
			send(request{api: api, prompt: s.prompts.words(20), tokens: 8, stream: i%2 == 0, extra: member})
		}
		// not split: straight to a decode engine
		send(request{api: chat, prompt: s.prompts.words(20), tokens: 8, two: true, extra: `,"kv_transfer_params":` + value})
	}
	for _, member := range []string{
		`,"\u006bv_transfer_params":{"do_remote_prefill":true}`,
		`,"ec_transfer_params":{"do_remote_prefill":true}`,
		`,"vllm_xargs":{"kv_transfer_params":"do_remote_prefill"}`,
	} {
		send(request{api: chat, prompt: s.prompts.words(20), tokens: 8, extra: member})
	}
	for _, value := range []string{`{"do_remote_prefill":true}`, `"x"`} {
		send(request{api: generate, prompt: "in the sampling parameters", tokens: 8, sampling: `,"extra_args":{"kv_transfer_params":` + value + `}`})
	}
	for _, header := range s.hostileHeaders() {
		send(request{api: chat, prompt: s.prompts.words(20), tokens: 8, header: header})
	}
	s.requireRefused(t, `,"kv_transfer_params":null,"kv_transfer_params":{"do_remote_prefill":true}`)
	s.requireRefused(t, `,"kv_transfer_params":null,"\u006bv_transfer_params":{"do_remote_prefill":true}`)
	s.report.row("Client's own kv_transfer_params and headers", count+2, fmt.Sprintf(
		"every form that kills, hangs or misleads a bare vLLM 0.32.0: text right, all engines alive; duplicates refused; decode: %v",
		promptTokens(t, s.decode...).minus(decode)))
}

func (s *suite) hostileHeaders() []http.Header {
	return []http.Header{
		{"X-Tandem-Leg": {"decode"}, "X-Gateway-Destination-Endpoint": {s.prefill[0].addr}},
		{"X-Tandem-Leg": {"prefill"}, "X-Gateway-Destination-Endpoint": {s.reference.addr}},
		{"X-Tandem-Ticket": {strings.Repeat("A", 200)}},
		{"X-Tandem-Ticket": {"forged"}, "X-Tandem-Leg": {"decode"}},
		{"X-Data-Parallel-Rank": {"7"}},
		{"X-Request-Id": {strings.Repeat("x", 200)}},
		{"X-Request-Id": {"a client's own, with spaces"}},
	}
}

// requireRefused requires a 400 in OpenAI's shape.
func (s *suite) requireRefused(t *testing.T, extra string) {
	t.Helper()
	a, err := send(t.Context(), s.front.addr, request{api: chat, prompt: "x", tokens: 8, extra: extra}, 0)
	require.NoError(t, err)
	require.Equal(t, 400, a.status, "%s: %s", extra, a.raw)
	var body struct {
		Error struct{ Message, Type string }
	}
	require.NoError(t, json.Unmarshal(a.raw, &body), "%s", a.raw)
	require.NotEmpty(t, body.Error.Message, "%s", a.raw)
	requireAlive(t, s.engines())
}

// otherDoors: vLLM accepts the same members on paths that Tandem passes through, and reads JSON in other encodings.
// None of them may kill an engine.
func (s *suite) otherDoors(t *testing.T) {
	body := request{api: chat, prompt: "hello", tokens: 4, extra: `,"kv_transfer_params":{"do_remote_prefill":true}`}.body()
	tokens := `{"model":"tiny","token_ids":[11,12,13,14],"sampling_params":{"max_tokens":4,"temperature":0,"extra_args":{"kv_transfer_params":{"do_remote_prefill":true}}},"kv_transfer_params":{"do_remote_prefill":true}}`
	batch := strings.Replace(body, `"messages":[`, `"messages":[[`, 1)
	batch = strings.Replace(batch, `}],"max_tokens"`, `}]],"max_tokens"`, 1)
	count := 0
	for _, door := range []struct{ path, contentType, body string }{
		{"/v1/chat/%63ompletions", "application/json", body},
		{"/v1%2Fchat/completions", "application/json", body},
		{"/v1/chat/completions/", "application/json", body},
		{"//v1/chat/completions", "application/json", body},
		{"/v1/./chat/completions", "application/json", body},
		{"/v1/chat/completions?x=/y", "application/json", body},
		{"/v1/chat/completions", "", body},
		{"/v1/chat/completions", "text/plain", body},
		{"/v1/chat/completions", "application/vnd.api+json", body},
		{"/v1/chat/completions", "application/json; charset=utf-16", inUTF16(body)},
		{"/v1/chat/completions", "application/json", "\ufeff" + body},
		{"/v1/chat/completions/batch", "application/json", batch},
		{"/v1/chat/completions/batch", "application/json;charset=latin1", batch},
		{"/v1/chat/completions/render", "application/json", body},
		{"/cohere/v2/chat", "application/json", body},
		{"/invocations", "application/json", body},
		{"/invocations", "APPLICATION/JSON;x;y=;", body},
		{"/invocations", "application/json; charset=utf-16", inUTF16(body)},
		{"/invocations", "application/json", inUTF16(body)},
		{"/invocations", "application/json", "\ufeff" + body},
		{"/inference/v1/generate", "application/json", tokens},
		{"/inference/v1/generat%65", "application/json", tokens},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.front.addr+door.path, strings.NewReader(door.body))
		require.NoError(t, err)
		if door.contentType != "" {
			req.Header.Set("Content-Type", door.contentType)
		}
		res, err := http.DefaultClient.Do(req)
		require.NoError(t, err, door.path)
		answer, err := io.ReadAll(res.Body)
		require.NoError(t, err, door.path)
		_ = res.Body.Close()
		t.Logf("%-32s %-36s %d %.100q", door.path, door.contentType, res.StatusCode, answer)
		for _, e := range s.engines() {
			require.True(t, realengines.OK(e.addr, "/health"), "%s %s killed %s", door.path, door.contentType, e.addr)
		}
		count++
	}
	requireAlive(t, s.engines())
	s.report.row("The same through other paths and encodings", count, "escaped paths, UTF-16, /invocations, /v1/chat/completions/batch, ...: all engines alive")
}

func inUTF16(s string) string {
	var b bytes.Buffer
	b.WriteString("\xff\xfe")
	for _, unit := range utf16.Encode([]rune(s)) {
		b.Write([]byte{byte(unit), byte(unit >> 8)})
	}
	return b.String()
}

// prefillByHand makes the prefill request itself, and returns the answer's kv_transfer_params.
func (s *suite) prefillByHand(t *testing.T, prompt string) json.RawMessage {
	t.Helper()
	r := request{api: completions, prompt: prompt, tokens: 1, extra: `,"kv_transfer_params":{"do_remote_decode":true}`}
	a, err := send(t.Context(), s.prefill[0].addr, r, 0)
	require.NoError(t, err)
	require.Equal(t, 200, a.status, "%s", a.raw)
	var body struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	require.NoError(t, json.Unmarshal(a.raw, &body))
	require.NotEmpty(t, body.Params, "%s", a.raw)
	return body.Params
}

// twoHops does Tandem's work by the client.
func (s *suite) twoHops(t *testing.T, prompt string, n int) {
	t.Helper()
	params := s.prefillByHand(t, prompt)
	r := request{api: completions, prompt: prompt, tokens: n, extra: `,"kv_transfer_params":` + string(params)}
	a, err := send(t.Context(), s.decode[0].addr, r, 0)
	require.NoError(t, err)
	require.Equal(t, 200, a.status, "%s", a.raw)
}
