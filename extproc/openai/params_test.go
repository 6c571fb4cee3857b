package openai

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

const keptObject = `{"do_remote_decode":true,"remote_block_ids":[[1]],"remote_host":"10.0.0.1"}`

// What D says of its own blocks does not reach the client, wherever engines write it. The rest stays as it is.
func TestCutParams(t *testing.T) {
	for name, c := range map[string]struct{ answer, want string }{
		"a chat":    {`{"id":"x","choices":[{"message":{"content":"a"},"token_ids":[3]}],"kv_transfer_params":` + keptObject + `}`, `{"id":"x","choices":[{"message":{"content":"a"},"token_ids":[3]}],"kv_transfer_params":null}`},
		"none":      {`{"id": "x",  "choices":[]}`, `{"id": "x",  "choices":[]}`},
		"none kept": {`{"id":"x","kv_transfer_params":null}`, `{"id":"x","kv_transfer_params":null}`},
		"a quote":   {`{"text":"\"kv_transfer_params\": 1"}`, `{"text":"\"kv_transfer_params\": 1"}`},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := CutParams{}.Whole(nil, []byte(c.answer))
			require.NoError(t, err)
			require.Equal(t, c.want, string(got))
		})
	}
	_, err := CutParams{}.Whole(nil, []byte(`{"kv_transfer_params":`))
	require.Error(t, err)

	for event, want := range map[string]string{
		`data: {"choices":[{"delta":{},"finish_reason":"stop"}],"kv_transfer_params":` + keptObject + `}`: `data: {"choices":[{"delta":{},"finish_reason":"stop"}]}`,
		"event: response.completed\ndata: {\"response\":{\"id\":\"r\",\"kv_transfer_params\":" + keptObject + "}}": "event: response.completed\n" +
			`data: {"response":{"id":"r","kv_transfer_params":null}}`,
		"event: ping\ndata: x": "event: ping\ndata: x",
		"data: [DONE]":         "data: [DONE]",
	} {
		require.Equal(t, want+"\n\n", string(CutParams{}.Event(nil, []byte(event))))
	}
}

// TestBoth: an answer through two rewriters.
func TestBoth(t *testing.T) {
	b := Both{CutParams{}, CachedTokens{N: 7, Written: -1}}
	require.Empty(t, b.Begin(nil))
	require.Equal(t, `data: {"usage":{"prompt_tokens_details":{"cached_tokens":7}}}`+"\n\n",
		string(b.Event(nil, []byte(`data: {"usage":{"prompt_tokens_details":{"cached_tokens":99}},"kv_transfer_params":{}}`))))
	out, err := b.Whole(nil, []byte(`{"usage":{"prompt_tokens_details":{"cached_tokens":99}},"kv_transfer_params":{}}`))
	require.NoError(t, err)
	require.JSONEq(t, `{"usage":{"prompt_tokens_details":{"cached_tokens":7}},"kv_transfer_params":null}`, string(out))
	_, err = b.Whole(nil, []byte(`{"kv_transfer_params":`))
	require.Error(t, err)
}

// FuzzCutParams: whatever an engine answers, JSON stays JSON, and no parameters get through.
func FuzzCutParams(f *testing.F) {
	f.Add([]byte(`{"choices":[{"token_ids":[3]}],"kv_transfer_params":` + keptObject + `}`))
	f.Add([]byte(`{"response":{"kv_transfer_params":` + keptObject + `},"choices":[1,null,{}]}`))
	f.Fuzz(func(t *testing.T, answer []byte) {
		CutParams{}.Event(nil, append([]byte("data: "), answer...))
		if !json.Valid(answer) {
			return
		}
		out, err := CutParams{}.Whole(nil, answer)
		if err != nil {
			return
		}
		require.True(t, json.Valid(out), "%q became %q", answer, out)
		var v map[string]json.RawMessage
		if json.Unmarshal(out, &v) == nil {
			require.Contains(t, []string{"", "null"}, string(v["kv_transfer_params"]))
		}
	})
}
