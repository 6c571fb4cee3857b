package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// apis are the five request shapes that can use two hops.
var apis = []struct{ name, path, body string }{
	{"chat", "/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"Two hops, please."}],"max_tokens":12}`},
	{"completions", "/v1/completions", `{"model":"tiny","prompt":"Two hops, please.","max_tokens":12}`},
	{"responses", "/v1/responses", `{"model":"tiny","input":"Two hops, please.","max_output_tokens":12}`},
	{"messages", "/v1/messages", `{"model":"tiny","max_tokens":12,"messages":[{"role":"user","content":"Two hops, please."}]}`},
	{"generate", "/inference/v1/generate", `{"model":"tiny","token_ids":[1,2,3,4,5,6,7,8],"sampling_params":{"max_tokens":12}}`},
}

// Every API uses two hops, with the client's own request id on both, a single engine's text, and nothing computed
// twice.
func TestEveryAPIGoesOverTwoHops(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	for _, api := range apis {
		t.Run(api.name, func(t *testing.T) {
			id := "two-hops-" + api.name
			got := f.post(api.path, api.body, "x-request-id", id)
			require.Equal(t, 200, got.status, got.body)
			require.NotContains(t, got.body, `"kv_transfer_params":{`, "not the client's business")
			require.Empty(t, got.header.Get("x-tandem-ticket"))

			p, d := f.hops(id)
			require.Equal(t, "prefill", p.Leg)
			require.Equal(t, "decode", d.Leg)
			require.Equal(t, 1, p.CompletionTokens, "prefill makes one token")
			require.Positive(t, d.ExternalTokens, "decode fetched the prompt's blocks")
			require.Equal(t, alone(t, f, api.path, api.body), text(t, got.body), "the text of an engine that did all by itself")
		})
	}
}

// alone asks a decode engine directly, without Tandem.
func alone(t *testing.T, f *fleet, path, body string) string {
	t.Helper()
	resp, err := client.Post("http://"+f.decodes[0].addr+path, "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer resp.Body.Close()
	var b bytes.Buffer
	_, err = b.ReadFrom(resp.Body)
	require.NoError(t, err)
	return text(t, b.String())
}

// text returns the text of an answer of any API.
func text(t *testing.T, body string) string {
	t.Helper()
	var a struct {
		Choices []struct {
			Text     string
			TokenIDs []int `json:"token_ids"`
			Message  struct{ Content string }
		}
		Content []struct{ Text string }
		Output  []struct{ Content []struct{ Text string } }
	}
	require.NoError(t, json.Unmarshal([]byte(body), &a), body)
	var b strings.Builder
	for _, c := range a.Choices {
		fmt.Fprint(&b, c.Text, c.Message.Content)
		if len(c.TokenIDs) > 0 {
			fmt.Fprint(&b, c.TokenIDs)
		}
	}
	for _, c := range a.Content {
		b.WriteString(c.Text)
	}
	for _, o := range a.Output {
		for _, c := range o.Content {
			b.WriteString(c.Text)
		}
	}
	require.NotEmpty(t, b.String(), body)
	return b.String()
}

// Streams reach the client as the decode engine wrote them.
func TestStreams(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	for _, api := range apis[:4] {
		t.Run(api.name, func(t *testing.T) {
			id := "stream-" + api.name
			got := f.post(api.path, strings.Replace(api.body, "{", `{"stream":true,`, 1), "x-request-id", id)
			require.Equal(t, 200, got.status, got.body)
			require.Contains(t, got.header.Get("content-type"), "text/event-stream")
			require.Greater(t, len(got.events()), 5)
			p, d := f.hops(id)
			require.NotContains(t, p.Body, `"stream":true`)
			require.Contains(t, d.Body, `"stream":true`)
		})
	}
}

// The client's body arrives byte for byte at the decode engine, with only the KV parameters added.
func TestBodiesAreExact(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	body := "{ \"zeta\": [1e3, 1E+2, -0, 9223372036854775807, 18446744073709551615, 0.1000],\n\t\"model\" : \"tiny\",\"messages\":" +
		`[{"content":"\u00e9\/\ud83d\ude00 <&>","role":"user","weird":{"b":1,"a":2}}],"stream_options":null , "max_tokens": 7,"seed":9007199254740993,` +
		`"stop":["\n\n###"],"logit_bias":{"50256":-100},"metadata":{"k":"v"},"temperature":0.0,"n":1,"unknown_field":{"x":[]} }`
	got := f.post("/v1/chat/completions", body, "x-request-id", "exact")
	require.Equal(t, 200, got.status, got.body)
	p, d := f.hops("exact")
	kv, rest := cutMember(t, d.Body)
	require.Equal(t, body, rest)
	require.Contains(t, kv, `"do_remote_prefill":true`)
	for _, member := range []string{`"zeta": [1e3, 1E+2, -0, 9223372036854775807, 18446744073709551615, 0.1000]`, `"seed":9007199254740993`,
		`"\u00e9\/\ud83d\ude00 <&>"`, `"unknown_field":{"x":[]}`, `"max_tokens": 1`} {
		require.Contains(t, p.Body, member)
	}
	require.NotContains(t, p.Body, "###", "a stop would end the prefill before its KV is kept")
}

// cutMember cuts the KV parameters from a decode body, right after the opening brace.
func cutMember(t *testing.T, body string) (kv, rest string) {
	t.Helper()
	const name = `{"kv_transfer_params":`
	require.True(t, strings.HasPrefix(body, name), "%.200s", body)
	d := json.NewDecoder(strings.NewReader(body[len(name):]))
	var raw json.RawMessage
	require.NoError(t, d.Decode(&raw))
	return string(raw), "{" + strings.TrimPrefix(body[len(name)+int(d.InputOffset()):], ",")
}

// Bodies of 100 bytes to 8 MB, over HTTP/1.1 with and without a length, and over HTTP/2, in both of Envoy's body
// modes.
func TestSizesAndProtocols(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"duplex", "auto", "buffered"} {
		t.Run(mode, func(t *testing.T) { sizesAndProtocols(t, mode) })
	}
}

func sizesAndProtocols(t *testing.T, mode string) {
	f := start(t, options{envoyFields: ", bodyMode: " + mode, engineArgs: []string{"--max-model-len", "4000000", "--blocks", "1000000"}})
	h2 := &http.Client{Transport: &http.Transport{Protocols: new(http.Protocols)}}
	h2.Transport.(*http.Transport).Protocols.SetUnencryptedHTTP2(true)
	for _, size := range []int{100, 10_000, 65_000, 70_000, 1_000_000, 8_000_000} {
		body := fmt.Sprintf(`{"model":"tiny","max_tokens":3,"messages":[{"role":"user","content":%q}]}`, strings.Repeat("abcdefgh ", size/9))
		for _, how := range []string{"h1", "chunked", "h2"} {
			id := fmt.Sprintf("size-%d-%s", size, how)
			var reader interface{ Read([]byte) (int, error) } = strings.NewReader(body)
			if how == "chunked" {
				reader = struct{ *strings.Reader }{strings.NewReader(body)} // a type that the client does not know the length of
			}
			req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, f.url+"/v1/chat/completions", reader)
			require.NoError(t, err)
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("X-Request-Id", id)
			c := client
			if how == "h2" {
				c = h2
			}
			resp, err := c.Do(req)
			require.NoError(t, err, id)
			_ = resp.Body.Close()
			require.Equal(t, 200, resp.StatusCode, id)
			p, d := f.hops(id)
			require.Positive(t, d.ExternalTokens, id)
			require.Equal(t, p.PromptTokens, d.PromptTokens, id)
		}
	}
}

// Requests that one engine has to answer, and bodies too long to be replayed, go to decode alone, unchanged.
func TestDecodeAlone(t *testing.T) {
	t.Parallel()
	f := start(t, options{envoyFields: ", maxBodyBytes: 100000"})
	for name, tt := range map[string]struct{ path, body string }{
		"several choices": {"/v1/chat/completions", `{"model":"tiny","n":2,"messages":[{"role":"user","content":"x"}],"max_tokens":3}`},
		"list of prompts": {"/v1/completions", `{"model":"tiny","prompt":["a b c","d e f"],"max_tokens":3}`},
		"echo":            {"/v1/completions", `{"model":"tiny","prompt":"a b c","echo":true,"max_tokens":3}`},
		"prompt logprobs": {"/v1/completions", `{"model":"tiny","prompt":"a b c","prompt_logprobs":1,"max_tokens":3}`},
		"undo too large":  {"/v1/completions", `{"model":"tiny","prompt":"a b c","max_tokens":3,"stop":["` + strings.Repeat("s", 9000) + `"]}`},
		"too long":        {"/v1/completions", `{"model":"tiny","prompt":"` + strings.Repeat("word ", 25_000) + `","max_tokens":3}`},
	} {
		t.Run(name, func(t *testing.T) {
			id := "alone-" + strings.ReplaceAll(name, " ", "-")
			got := f.post(tt.path, tt.body, "x-request-id", id)
			require.Equal(t, 200, got.status, got.body)
			require.Empty(t, f.requests(id, f.prefills...))
			d := f.requests(id, f.decodes...)
			require.Len(t, d, 1)
			sum := sha256.Sum256([]byte(tt.body))
			require.Equal(t, hex.EncodeToString(sum[:]), d[0].BodySHA256, "the body is the client's own")
		})
	}
}

// Other paths than the five APIs go to one engine unchanged, whatever the size.
func TestOtherPathsPassThrough(t *testing.T) {
	t.Parallel()
	f := start(t, options{envoyFields: ", maxBodyBytes: 100000"})
	got := f.post("/tokenize", `{"model":"tiny","prompt":"a b c", "kv_transfer_params": 1}`, "x-request-id", "tokenize")
	require.Equal(t, 200, got.status, got.body)
	seen := f.requests("tokenize", f.decodes...)
	require.Len(t, seen, 1)
	require.Equal(t, `{"model":"tiny","prompt":"a b c"}`, seen[0].Body, "members that steer engines are cut on every path")

	got = f.post("/v1/embeddings", `{"model":"tiny","input":"a b c"}`)
	require.Equal(t, 200, got.status, got.body)

	var upload bytes.Buffer
	form := multipart.NewWriter(&upload)
	part, err := form.CreateFormFile("file", "speech.wav")
	require.NoError(t, err)
	_, _ = part.Write(bytes.Repeat([]byte{0, 1, 2, 0xff}, 1_000_000)) // 4 MB, forty times the limit of a split body
	require.NoError(t, form.WriteField("model", "tiny"))
	require.NoError(t, form.Close())
	sum := sha256.Sum256(upload.Bytes())
	got = f.post("/v1/audio/transcriptions", upload.String(), "content-type", form.FormDataContentType(), "x-request-id", "upload")
	require.Equal(t, 200, got.status, got.body)
	seen = f.requests("upload", f.decodes...)
	require.Len(t, seen, 1)
	require.Equal(t, hex.EncodeToString(sum[:]), seen[0].BodySHA256)

	models, err := f.try(context.Background(), http.MethodGet, "/v1/models", "")
	require.NoError(t, err)
	require.Equal(t, 200, models.status)
	require.Contains(t, models.body, `"id":"tiny"`)
}

// A stored response belongs to the engine that made it: requests that continue or ask for it go there.
func TestStoredResponsesStayWhereTheyAre(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	for i := range 6 {
		id := fmt.Sprintf("store-%d", i)
		got := f.post("/v1/responses", `{"model":"tiny","input":"remember this","store":true,"max_output_tokens":4}`, "x-request-id", id)
		require.Equal(t, 200, got.status, got.body)
		var r struct{ ID string }
		require.NoError(t, json.Unmarshal([]byte(got.body), &r))
		first := f.requests(id, f.decodes...)
		require.Len(t, first, 1)

		got = f.post("/v1/responses", fmt.Sprintf(`{"model":"tiny","input":"go on","previous_response_id":%q,"max_output_tokens":4}`, r.ID), "x-request-id", id+"-next")
		require.Equal(t, 200, got.status, got.body)
		next := f.requests(id+"-next", f.engines()...)
		require.Len(t, next, 1)
		require.Equal(t, first[0].Engine, next[0].Engine)
	}
}
