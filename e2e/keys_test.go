package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"mime/multipart"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// card is a model of GET /v1/models.
type card struct {
	ID, Root, Owner string
	Parent          *string
	Length          int64 `json:"max_model_len"`
}

func (f *fleet) models() map[string]card {
	var list struct{ Data []card }
	require.NoError(f.t, json.Unmarshal([]byte(f.get("/v1/models").body), &list))
	out := map[string]card{}
	for _, c := range list.Data {
		out[c.ID] = c
	}
	return out
}

func (f *fleet) get(path string, headers ...string) answer {
	f.t.Helper()
	got, err := f.try(f.t.Context(), "GET", path, "", headers...)
	require.NoError(f.t, err)
	return got
}

// Engines that want a key list their models to Tandem, which has it from a file; a new one counts at once. Clients
// need their own. A model's card has what engines report, and a name with slashes is found.
func TestKeys(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(file, []byte("another\n"), 0o600))
	f := start(t, options{
		prefills: 1, decodes: 1, engineArgs: []string{"--api-key", "s3cret", "--max-model-len", "100000"},
		engine: func(string, int, func() string) ([]string, string) {
			return []string{"--model", "org/tiny"}, ""
		},
		pool: "  apiKeyFile: " + file + "\n",
	})
	require.NotContains(t, f.models(), "org/tiny")
	require.NoError(t, os.WriteFile(file, []byte("s3cret\n"), 0o600))
	soon(t, "the engines' models are known", func() bool { return f.models()["org/tiny"].Length == 100000 })
	require.Equal(t, "org/tiny", f.models()["org/tiny"].Root)
	for _, path := range []string{"/v1/models/org/tiny", "/v1/models/org%2Ftiny", "/v1/models/org%2ftiny?x=1"} {
		var c card
		got := f.get(path)
		require.Equal(t, 200, got.status, got.body)
		require.NoError(t, json.Unmarshal([]byte(got.body), &c))
		require.Equal(t, "org/tiny", c.ID)
	}
	body := strings.Replace(pairBody, `"tiny"`, `"org/tiny"`, 1)
	require.Equal(t, 401, f.post("/v1/chat/completions", body).status, "a client without a key")
	require.Equal(t, 200, f.post("/v1/chat/completions", body, "authorization", "Bearer s3cret").status)
	log, err := os.ReadFile(f.tandems[0].log)
	require.NoError(t, err)
	require.NotContains(t, string(log), "s3cret")
}

// TensorRT-LLM's context servers want the key for what D must know of them, too. Without it the legs go one after the
// other.
func TestKeysOfTRTLLM(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(file, []byte("s3cret\n"), 0o600))
	for name, tt := range map[string]struct {
		kv, pool string
		pairs    int // requests whose legs ran at once, and the one without a key
	}{
		"context first":             {"trtllm", "", 0},
		"generation first":          {"trtllm-generation-first", "  apiKeyFile: " + file + "\n", 2},
		"generation first, no file": {"trtllm-generation-first", "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := startKind(t, kind{engine: "trtllm", kv: tt.kv, pool: tt.pool, more: []string{
				"--transfer-timeout", "8s", "--api-key", "s3cret"}}, 1, 1)
			a := ask("tiny", 0)
			require.Equal(t, 401, f.post(a.path, a.body).status, "a client without a key")
			got := f.post(a.path, a.body, "x-request-id", "keyed", "authorization", "Bearer s3cret")
			require.Equal(t, 200, got.status, got.body)
			_, d := f.hops("keyed")
			require.Positive(t, d.ExternalTokens)
			require.InDelta(t, tt.pairs, metric(t, f.admins[0], "tandem_decisions_total", `route="pair"`), 0)
		})
	}
}

// upload writes a form, the file before the model.
func upload(t *testing.T, model string, size int) (contentType, body string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	part, err := w.CreateFormFile("file", "speech.wav")
	require.NoError(t, err)
	_, err = part.Write(bytes.Repeat([]byte("0123456789abcdef"), size/16))
	require.NoError(t, err)
	require.NoError(t, w.WriteField("model", model))
	require.NoError(t, w.Close())
	return w.FormDataContentType(), b.String()
}

// An upload goes to the pool that its form's model names, an adapter to the pool whose endpoints have it.
func TestPoolsByFormAndAdapter(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"duplex", "buffered", "auto"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			f := start(t, options{prefills: 2, decodes: 2, envoyFields: ", bodyMode: " + mode,
				engineArgs: []string{"--model", "llama", "--model", "whisper", "--model", "sql"},
				pools: `pools:
- {name: chat, models: [llama], kvTransfer: nixl, split: always, endpoints: [{address: %P, role: prefill, loras: [sql]}, {address: %D, role: decode, loras: [sql]}]}
- {name: speech, models: [whisper], kvTransfer: nixl, endpoints: [{address: %P, role: prefill}, {address: %D, role: decode}]}
`})
			for _, size := range []int{100, 100_000, 17 << 20} {
				for model, at := range map[string]int{"llama": 0, "whisper": 1} {
					id := fmt.Sprintf("upload-%s-%d", model, size)
					kind, body := upload(t, model, size)
					got := f.post("/v1/audio/transcriptions", body, "content-type", kind, "x-request-id", id)
					require.Equal(t, 200, got.status, got.body)
					require.Contains(t, got.body, fmt.Sprintf(`"body_bytes":%d`, len(body)))
					require.Len(t, f.requests(id, f.decodes[at]), 1, "%s of %d bytes", model, size)
				}
			}
			kind, body := upload(t, "nobody", 100)
			got := f.post("/v1/audio/transcriptions", body, "content-type", kind)
			require.Equal(t, 404, got.status, got.body)
			requireError(t, got, "model_not_found")

			got = f.post("/v1/chat/completions", strings.Replace(pairBody, `"tiny"`, `"sql"`, 1), "x-request-id", "adapter")
			require.Equal(t, 200, got.status, got.body)
			require.Len(t, f.requests("adapter", f.prefills[0]), 1)
			require.Contains(t, f.models(), "sql")
		})
	}
}

// With envoy.cors Envoy answers preflights on every path, and every answer has the headers: engines', Tandem's own,
// and errors of both. Without, a preflight goes to an engine.
func TestCORS(t *testing.T) {
	t.Parallel()
	const origin = "https://chat.example.com"
	preflight := []string{"origin", origin, "access-control-request-method", "POST", "access-control-request-headers", "content-type"}
	f := start(t, options{prefills: 1, decodes: 1, engineArgs: []string{"--cors"},
		envoyFields: ", cors: {allowOrigins: [" + origin + "], allowCredentials: true}"})
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models",
		"/v1/models/tiny", "/inference/v1/generate", "/v1/embeddings", "/nope"} {
		got, err := f.try(t.Context(), "OPTIONS", path, "", preflight...)
		require.NoError(t, err)
		require.Equal(t, 200, got.status, path)
		require.Equal(t, []string{origin}, got.header["Access-Control-Allow-Origin"], path)
		require.Equal(t, "authorization, content-type", got.header.Get("Access-Control-Allow-Headers"), path)
		got, err = f.try(t.Context(), "OPTIONS", path, "", append([]string{"origin", "https://evil.example.com"}, preflight[2:]...)...)
		require.NoError(t, err)
		require.Empty(t, got.header["Access-Control-Allow-Origin"], path)
	}
	for want, got := range map[int]answer{
		200: f.post("/v1/chat/completions", pairBody, "origin", origin),
		400: f.post("/v1/chat/completions", "{", "origin", origin),
		404: f.post("/nope", "{}", "origin", origin),
		415: f.post("/v1/chat/completions", "{}", "origin", origin, "content-type", "text/plain"),
	} {
		require.Equal(t, want, got.status, got.body)
		require.Equal(t, []string{origin}, got.header["Access-Control-Allow-Origin"], got.body)
	}
	require.Equal(t, []string{origin}, f.get("/v1/models", "origin", origin).header["Access-Control-Allow-Origin"])
	got := f.post("/v1/chat/completions", pairBody, "origin", "https://evil.example.com")
	require.Empty(t, got.header["Access-Control-Allow-Origin"], "the engine allows any")

	f = start(t, options{prefills: 1, decodes: 1, engineArgs: []string{"--cors"}})
	got, err := f.try(t.Context(), "OPTIONS", "/v1/chat/completions", "", preflight...)
	require.NoError(t, err)
	require.Equal(t, "*", got.header.Get("Access-Control-Allow-Origin"))
}
