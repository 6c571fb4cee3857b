package openai

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCutEcho(t *testing.T) {
	const python = `1 validation error:\n  {'type': 'missing', 'loc': ('body', 'messages'), 'msg': 'Field required', 'input': `
	for _, c := range []struct{ name, in, want string }{
		{"nothing of ours", `{"error":{"message":"it's {'a': 1}, isn't it","param":null}}`, `{"error":{"message":"it's {'a': 1}, isn't it","param":null}}`},
		{
			"SGLang 0.5.23, as recorded",
			`{"object":"error","message":"` + python + `{'bootstrap_host': '127.0.0.1', 'bootstrap_port': 27101, 'bootstrap_room': 8160190829573498302, 'max_tokens': 4, 'model': 'tiny', 'temperature': 0}}\n\n  File \"/x/http_server.py\"","type":"Bad Request","param":null,"code":400}`,
			`{"object":"error","message":"` + python + `{'max_tokens': 4, 'model': 'tiny', 'temperature': 0}}\n\n  File \"/x/http_server.py\"","type":"Bad Request","param":null,"code":400}`,
		},
		{
			"vLLM up to some release: an object with a list", `{"message":"{'model': 'm', 'kv_transfer_params': {'do_remote_decode': True, 'remote_block_ids': [[1, 2], []], 'x': None}}, 'a'"}`,
			`{"message":"{'model': 'm'}, 'a'"}`,
		},
		{
			"FastAPI's own: JSON", `{"detail":[{"type":"missing","loc":["body","messages"],"input":{"disaggregated_params":{"request_type":"context_only","a":[{}]}, "model":"m"}}]}`,
			`{"detail":[{"type":"missing","loc":["body","messages"],"input":{"model":"m"}}]}`,
		},
		{"JSON, the last", `{"input":{"model":"m" , "bootstrap_room":[1,2]}}`, `{"input":{"model":"m" }}`},
		{"JSON in a string", `{"message":"got {\"bootstrap_host\": \"10.0.0.5\", \"model\": \"m\"}"}`, `{"message":"got {\"model\": \"m\"}"}`},
		{"double quotes around an apostrophe", `{"message":"{\"bootstrap_host\": \"it's\", 'model': 'm'}"}`, `{"message":"{'model': 'm'}"}`},
		{"shortened by the engine", `{"message":"{'model': 'm', 'kv_transfer_params': {'remote_host': '10.0...[truncated]"}`, `{"message":"{'model': 'm'"}`},
		{"an apostrophe before", `{"message":"can't parse {'bootstrap_room': 7, 'model': 'm'}"}`, `{"message":"can't parse {'model': 'm'}"}`},
		{"no JSON", `<html>'bootstrap_room': 7</html>`, `<html>'bootstrap_room': 7</html>`},
		{"cut off", `{"message":"{'bootstrap_room': 7`, `{"message":"{'bootstrap_room': 7`},
		{"empty", ``, ``},
	} {
		require.Equal(t, c.want, string(CutEcho(nil, []byte(c.in))), c.name)
	}
}

// TestCutEchoIsLinear: the text contains a client's input, which may be hostile.
func TestCutEchoIsLinear(t *testing.T) {
	for _, piece := range []string{`\\'`, `'bootstrap_room': [`, `'bootstrap_room': 'x`, `'`, `"bootstrap_room": {`, `[[[[`} {
		text, err := json.Marshal(map[string]string{"message": "': " + strings.Repeat(piece, 1<<21/len(piece))})
		require.NoError(t, err)
		began := time.Now()
		CutEcho(nil, text)
		require.Less(t, time.Since(began), 20*time.Second, piece)
	}
}

func FuzzCutEcho(f *testing.F) {
	f.Add(`{"message":"{'bootstrap_room': 7, 'model': 'm'}"}`)
	f.Add(`{"detail":[{"input":{"kv_transfer_params":{"a":1},"model":"m"}}]}`)
	f.Add(`{"message":"{\"bootstrap_room\": 7}"}`)
	f.Fuzz(func(t *testing.T, body string) {
		out := CutEcho(nil, []byte(body))
		require.LessOrEqual(t, len(out), 6*len(body)+8)
		if json.Valid([]byte(body)) {
			require.True(t, json.Valid(out), "%s", out)
		}
		require.Equal(t, string(out), string(CutEcho(nil, out)), "twice is once")
	})
}
