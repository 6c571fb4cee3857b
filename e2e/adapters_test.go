package e2e

import (
	"bytes"
	"fmt"
	"mime/multipart"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// adapter loads an adapter into an engine, or unloads it.
func (f *fleet) adapter(e *engine, how, name string) {
	f.t.Helper()
	resp, err := anew.Post("http://"+e.addr+"/v1/"+how+"_lora_adapter", "application/json",
		strings.NewReader(fmt.Sprintf(`{"lora_name":%q,"lora_path":"/adapters/%s"}`, name, name)))
	require.NoError(f.t, err)
	defer resp.Body.Close()
	require.Equal(f.t, 200, resp.StatusCode)
}

// form is an upload that asks for a model.
func form(t *testing.T, model string) (body, kind string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	require.NoError(t, w.WriteField("model", model))
	part, err := w.CreateFormFile("file", "speech.wav")
	require.NoError(t, err)
	_, _ = part.Write(bytes.Repeat([]byte{0, 1, 2, 0xff}, 1000))
	require.NoError(t, w.Close())
	return b.String(), w.FormDataContentType()
}

// An adapter that one prefill and one decode engine have, of endpoints that a file lists: every request for it finds
// them, also after it has moved to the others, and nobody else gets it. A 404 is the client's only where no engine has it.
func TestAdaptersOfSomeEngines(t *testing.T) {
	t.Parallel()
	listed := filepath.Join(t.TempDir(), "endpoints.yaml")
	f := start(t, options{prefills: 2, decodes: 2, launch: func(f *fleet) {
		list := "endpoints:\n"
		for _, e := range f.engines() {
			list += fmt.Sprintf("- {address: %q, role: %s}\n", e.addr, e.role)
		}
		require.NoError(f.t, os.WriteFile(listed, []byte(list), 0o600))
		f.adapter(f.prefills[0], "load", "sql")
		f.adapter(f.decodes[0], "load", "sql")
	}, pools: fmt.Sprintf(`pools:
- {name: chat, models: ["*"], kvTransfer: nixl, split: always, decodeAlone: fallback, discovery: {file: {path: %q}}}
- {name: voices, models: ["voice-*"], kvTransfer: none, endpoints: [{address: "127.0.0.1:1", role: decode}]}
`, listed)})
	chat := strings.Replace(pairBody, `"model":"tiny"`, `"model":"sql"`, 1)
	require.Contains(t, chat, "sql")
	upload, kind := form(t, "sql")
	ask := func(phase string) {
		for i := range 8 {
			got := f.post("/v1/chat/completions", chat)
			require.Equal(t, 200, got.status, "%s, chat %d: %s", phase, i, got.body)
			got = f.post("/v1/embeddings", `{"model":"sql","input":"x"}`)
			require.Equal(t, 200, got.status, "%s, embeddings %d: %s", phase, i, got.body)
			got = f.post("/v1/audio/transcriptions", upload, "content-type", kind)
			require.Equal(t, 200, got.status, "%s, upload %d: %s", phase, i, got.body)
			require.Contains(t, got.body, `"model":"sql"`)
		}
	}
	ask("on the first engines")
	for _, e := range []*engine{f.prefills[1], f.decodes[1]} {
		f.adapter(e, "load", "sql")
	}
	for _, e := range []*engine{f.prefills[0], f.decodes[0]} {
		f.adapter(e, "unload", "sql")
	}
	ask("on the others")
	f.adapter(f.prefills[1], "unload", "sql")
	f.adapter(f.decodes[1], "unload", "sql")
	for path, of := range map[string][2]string{
		"/v1/chat/completions": {chat, "application/json"}, "/v1/embeddings": {`{"model":"sql","input":"x"}`, "application/json"},
		"/v1/audio/transcriptions": {upload, kind},
	} {
		got := f.post(path, of[0], "content-type", of[1])
		require.Equal(t, 404, got.status, "%s: %s", path, got.body)
	}
}
