package openai

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What one token may not have the form of: engines may fail over it when they are asked for one token.
func TestShaped(t *testing.T) {
	const chat, messages = `"model":"m","messages":[{"role":"user","content":"x"}]`, `"model":"m","max_tokens":9,"messages":[]`
	for body, want := range map[string]bool{
		`{` + chat + `}`: false,
		`{` + chat + `,"tools":[{"type":"function"}]}`:                                               false,
		`{` + chat + `,"tool_choice":"auto"}`:                                                        false,
		`{` + chat + `,"tool_choice":"none"}`:                                                        false,
		`{` + chat + `,"tool_choice":null}`:                                                          false,
		`{` + chat + `,"tool_choice":"required"}`:                                                    true,
		`{` + chat + `,"tool_choice":{"type":"function","function":{"name":"now"}}}`:                 true,
		`{` + messages + `,"tool_choice":{"type":"any"}}`:                                            true,
		`{` + messages + `,"tool_choice":{"type":"auto"}}`:                                           false,
		`{` + messages + `,"thinking":{"type":"enabled","budget_tokens":8}}`:                         true,
		`{` + chat + `,"response_format":{"type":"text"}}`:                                           false,
		`{` + chat + `,"response_format":{"type":"json_schema","json_schema":{"name":"a"}}}`:         true,
		`{` + chat + `,"structured_outputs":{"regex":"a+"}}`:                                         true,
		`{` + chat + `,"guided_json":{}}`:                                                            true,
		`{` + chat + `,"min_tokens":0}`:                                                              false,
		`{` + chat + `,"min_tokens":1}`:                                                              false,
		`{` + chat + `,"min_tokens":20}`:                                                             true,
		`{"model":"m","input":"x","text":{"format":{"type":"text"}}}`:                                false,
		`{"model":"m","input":"x","text":{"verbosity":"low"}}`:                                       false,
		`{"model":"m","input":"x","text":{"format":{"type":"json_object"}}}`:                         true,
		`{"model":"m","text":"a prompt"}`:                                                            false,
		`{"model":"m","token_ids":[1],"sampling_params":{"structured_outputs":{"json":"{}"}}}`:       true,
		`{"model":"m","token_ids":[1],"sampling_params":{"max_tokens":3,"structured_outputs":null}}`: false,
	} {
		api := Chat
		if !want && body[len(body)-2] == '"' {
			api = Completions
		}
		var r Request
		if err := r.Scan(api, []byte(body), Limits{}); err != nil {
			require.NoError(t, r.Scan(PassThrough, []byte(body), Limits{}), body)
		}
		require.Equal(t, want, r.Shaped(), body)
	}
}
