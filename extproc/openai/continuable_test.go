package openai

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestUncontinuable(t *testing.T) {
	for body, want := range map[string]string{
		`{"messages":[{"role":"user","content":"Hi"}]}`:                                                                       "",
		`{"messages":[{"role":"user","content":[{"type":"text","text":"Hi"}]}],"max_tokens":2,"min_tokens":1}`:                "",
		`{"messages":[{"role":"user","content":[{"type":"text","text":"Hi"},{"type":"image_url","image_url":{"url":"u"}}]}]}`: "media",
		`{"messages":[],"tools":[{}]}`:                             "tools",
		`{"messages":[],"tools":null,"seed":null}`:                 "",
		`{"messages":[],"response_format":{"type":"text"}}`:        "",
		`{"messages":[],"response_format":{"type":"json_object"}}`: "grammar",
		`{"messages":[],"guided_regex":"a"}`:                       "grammar",
		`{"messages":[],"structured_outputs":{"regex":"a"}}`:       "grammar",
		`{"messages":[],"stop":"x"}`:                               "stop",
		`{"messages":[],"stop":[]}`:                                "",
		`{"messages":[],"logprobs":true}`:                          "logprobs",
		`{"messages":[],"logprobs":false}`:                         "",
		`{"messages":[],"presence_penalty":0.0}`:                   "",
		`{"messages":[],"frequency_penalty":-0.5}`:                 "penalty",
		`{"messages":[],"seed":1}`:                                 "seed",
		`{"messages":[],"truncate_prompt_tokens":9}`:               "prompt",
		`{"messages":[],"return_token_ids":true}`:                  "token_ids",
		`{"messages":[],"max_tokens":1}`:                           "limit",
		`{"messages":[],"max_tokens":9,"max_completion_tokens":1}`: "limit",
		`{"messages":[],"max_tokens":"9.5"}`:                       "limit",
		`{"messages":[],"min_tokens":1.5}`:                         "limit",
	} {
		var r Request
		require.NoError(t, r.Scan(Chat, []byte(body), Limits{}))
		require.Equal(t, want, r.Uncontinuable(), body)
	}
	var r Request
	require.NoError(t, r.Scan(Responses, []byte(`{"input":"Hi"}`), Limits{}))
	require.Equal(t, "api", r.Uncontinuable())
}

func TestTokenLimit(t *testing.T) {
	for body, want := range map[string]int64{
		`{}`: 16, `{"max_tokens":null}`: 0, `{"max_tokens":7}`: 7, `{"max_completion_tokens":7}`: 16, `{"max_tokens":0}`: -1,
	} {
		var r Request
		require.NoError(t, r.Scan(Completions, []byte(body), Limits{}))
		n, ok := r.TokenLimit()
		require.Equal(t, want >= 0, ok, body)
		if ok {
			require.Equal(t, want, n, body)
		}
	}
}

func TestAnswerTokens(t *testing.T) {
	for _, c := range []struct {
		api         API
		body        string
		least, most int64
	}{
		{Chat, `{"messages":[]}`, 0, 0},
		{Chat, `{"messages":[],"max_tokens":7,"min_tokens":3}`, 3, 7},
		{Chat, `{"messages":[],"max_tokens":7,"max_completion_tokens":9}`, 0, 9},
		{Chat, `{"messages":[],"max_tokens":7,"max_completion_tokens":null}`, 0, 7},
		{Completions, `{"prompt":"a","max_tokens":-1,"min_tokens":"x"}`, 0, 0},
		{Responses, `{"input":"a","max_tokens":7,"max_output_tokens":9}`, 0, 9},
		{Messages, `{"messages":[],"max_tokens":5}`, 0, 5},
		{Generate, `{"token_ids":[1],"max_tokens":1,"sampling_params":{"max_tokens":8,"min_tokens":2}}`, 2, 8},
	} {
		var r Request
		require.NoError(t, r.Scan(c.api, []byte(c.body), Limits{}), c.body)
		least, most := r.AnswerTokens()
		require.Equal(t, []int64{c.least, c.most}, []int64{least, most}, c.body)
	}
}

func TestRename(t *testing.T) {
	for body, want := range map[string]string{
		`{"prompt":"a","n":1}`:      `{"prompt":[1],"was":"a","n":1}`,
		`{"n":1,"pro\u006dpt":"a"}`: `{"prompt":[1],"n":1,"was":"a"}`,
		`{"n":1}`:                   `{"prompt":[1],"n":1}`,
	} {
		var r Request
		var p Patch
		require.NoError(t, r.Scan(Completions, []byte(body), Limits{}))
		p.Reset(&r)
		p.Rename(FieldPrompt, "was")
		p.Insert("prompt", []byte("[1]"))
		edits := p.Edits()
		got := edits.Apply(nil, []byte(body))
		require.Equal(t, want, string(got))
		require.Equal(t, body, string(edits.Inverse(nil, []byte(body)).Apply(nil, got)))
	}
}
