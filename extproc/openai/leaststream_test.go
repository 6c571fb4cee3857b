package openai

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/tools/txtar"
)

// TestLeastStream: the shortest complete streams of real vLLM are not below the minimum, and those whose KV load
// failed are, except for the API in which they cannot be distinguished.
func TestLeastStream(t *testing.T) {
	recorded, err := txtar.ParseFile("../../cmd/enginesim/testdata/vllm-0.32.0/streams.txtar")
	require.NoError(t, err)
	apis := map[string]API{"chat": Chat, "completions": Completions, "responses": Responses, "messages": Messages, "generate": Generate}
	shorten := strings.NewReplacer(
		`"model":"tiny"`, `"model":"m"`, `"content":" greaf"`, `"content":""`, `"text":" fit"`, `"text":""`, `,"token_ids":null`, "",
		`,"system_fingerprint":"vllm-0.32.0-5366bc8b"`, "", `,"prompt_token_ids":null`, "", `,"prompt_text":null`, "",
		`,"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"default","start":0,"end":1}]`, "",
		`"usage":null,"output_mode":"tokens",`, "", `"stop_reason":null,"token_ids":[1177]`, `"token_ids":[1]`,
		`generate-tokens-`, "", `" me"`, `""`, `" 34"`, `""`,
	)
	for _, f := range recorded.Files {
		kind, name, _ := strings.Cut(f.Name, " ")
		stream, api := string(f.Data), apis[name]
		for _, id := range []string{"a", "req-17", "c3f1a8de-26a5-4a2f-9ab2-b6a1f2c0e5d4", strings.Repeat("x", 128)} {
			withID := strings.NewReplacer(`-a"`, "-"+id+`"`, `"request_id":"a"`, `"request_id":"`+id+`"`)
			least := LeastStream(api, id, true)
			if kind == "complete" {
				short := withID.Replace(shorten.Replace(stream))
				require.GreaterOrEqual(t, len(short), least, "%s is taken for a failed one, id %s:\n%s", f.Name, id, short)
				require.GreaterOrEqual(t, len(short), LeastStream(api, id, false))
				continue
			}
			failed := len(withID.Replace(stream))
			if detected := failed < least; name == "messages" || len(id) > 100 && name == "chat" || len(id) < 11 && name == "generate" {
				require.False(t, detected, f.Name)
			} else {
				require.True(t, detected, "%s is not told, id %s: %d bytes, %d at least", f.Name, id, failed, least)
			}
		}
	}
	require.Zero(t, LeastStream(PassThrough, "a", true))
}
