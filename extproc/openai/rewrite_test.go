package openai

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCachedTokens(t *testing.T) {
	c := CachedTokens{7, 3}
	const spaced = ` {"usage":{"input_tokens_details":{"cached_tokens":9}}}`
	for answer, want := range map[string]string{
		`{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":9,"x":1}},"id":"a"}`: `{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":7,"x":1}},"id":"a"}`,
		`{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}`:                               `{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}`,
		spaced: `{"usage":{"input_tokens_details":{"cached_tokens":7}}}`,
		`{"usage":null,"choices":[{"cached_tokens":1}]}`:                                                  `{"usage":null,"choices":[{"cached_tokens":1}]}`,
		`{"usage":{"prompt_tokens_details":{"cached_tokens":9,"created_cache_tokens":0}}}`:                `{"usage":{"prompt_tokens_details":{"cached_tokens":7,"created_cache_tokens":3}}}`,
		`{"usage":{"prompt_tokens_details":{"cached_tokens":9,"created_cache_tokens":null}}}`:             `{"usage":{"prompt_tokens_details":{"cached_tokens":7,"created_cache_tokens":null}}}`,
		`{"usage":{"input_tokens":19,"input_tokens_details":{"cached_tokens":9,"cache_write_tokens":1}}}`: `{"usage":{"input_tokens":19,"input_tokens_details":{"cached_tokens":7,"cache_write_tokens":3}}}`,
		// messages: of 40 tokens decode reports 32 as read
		`{"usage":{"input_tokens":8,"output_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":32}}`: `{"usage":{"input_tokens":30,"output_tokens":4,"cache_creation_input_tokens":3,"cache_read_input_tokens":7}}`,
		`{"usage":{"input_tokens":8,"cache_creation_input_tokens":null,"cache_read_input_tokens":1}}`:                 `{"usage":{"input_tokens":2,"cache_creation_input_tokens":null,"cache_read_input_tokens":7}}`,
	} {
		got, err := c.Whole(nil, []byte(answer))
		require.NoError(t, err)
		require.Equal(t, want, string(got))
	}
	_, err := c.Whole(nil, []byte("x"))
	require.Error(t, err)
	const start = `{"type":"message_start","message":{"usage":{"input_tokens":8,"cache_creation_input_tokens":0,"cache_read_input_tokens":32}}}`
	for event, want := range map[string]string{
		"event: message_start\ndata: " + start: "event: message_start\ndata: " + `{"type":"message_start","message":{"usage":{"input_tokens":30,"cache_creation_input_tokens":3,"cache_read_input_tokens":7}}}` + "\n\n",
		"data: [DONE]":                         "data: [DONE]\n\n",
		`data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":9}}}`:                                                              `data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":7}}}` + "\n\n",
		"event: response.completed\r\n" + `data: {"response":{"usage":{"input_tokens_details":{"cached_tokens":9}}},"type":"response.completed"}`: "event: response.completed\n" + `data: {"response":{"usage":{"input_tokens_details":{"cached_tokens":7}}},"type":"response.completed"}` + "\n\n",
	} {
		require.Equal(t, want, string(c.Event(nil, []byte(event))))
	}
}

// As mini_lb.py joins them: prefill's in front, in answers, batches and events.
func TestInputLogprobs(t *testing.T) {
	const p1, p2 = `[[-0.5,1,null],[-1.5,2,null]]`, `[[-2.5,3,null]]`
	answer := func(lists ...string) string {
		out := ""
		for i, l := range lists {
			if i > 0 {
				out += ","
			}
			out += `{"text":"a","meta_info":{"id":"x","input_token_logprobs":` + l + `,"n":1}}`
		}
		return out
	}
	for name, tt := range map[string]struct{ prefill, decode, want string }{
		"one":                  {answer(p1), answer(`[[-9,9,null]]`), answer(`[[-0.5,1,null],[-1.5,2,null],[-9,9,null]]`)},
		"decode has none":      {answer(p1), answer(`[]`), answer(p1)},
		"decode says null":     {answer(p1), answer(`null`), answer(p1)},
		"decode has no member": {answer(p1), `{"meta_info":{"id":"x"}}`, `{"meta_info":{"id":"x","input_token_logprobs":` + p1 + `}}`},
		"prefill has none":     {answer(`[]`), answer(p2), answer(p2)},
		"a batch":              {"[" + answer(p1, p2) + "]", "[" + answer(`[]`, `[ [-9,9,null]]`) + "]", "[" + answer(p1, `[[-2.5,3,null], [-9,9,null]]`) + "]"},
		"nothing asked for":    {`{"text":"a","meta_info":{}}`, `{"text":"b","meta_info":{}}`, `{"text":"b","meta_info":{}}`},
		"no answer":            {answer(p1), `[]`, `[]`},
	} {
		t.Run(name, func(t *testing.T) {
			l := InputLogprobs{ReadInputLogprobs([]byte(tt.prefill))}
			got, err := l.Whole(nil, []byte(tt.decode))
			require.NoError(t, err)
			require.Equal(t, tt.want, string(got))
		})
	}
	l := InputLogprobs{ReadInputLogprobs([]byte("[" + answer(p1, p2) + "]"))}
	require.Equal(t, `data: {"meta_info":{"input_token_logprobs":`+p2+`},"index":1}`+"\n\n", string(l.Event(nil, []byte(`data: {"meta_info":{},"index":1}`))))
	require.Equal(t, `data: {"meta_info":{},"index":7}`+"\n\n", string(l.Event(nil, []byte(`data: {"meta_info":{},"index":7}`))))
	require.Equal(t, "data: [DONE]\n\n", string(l.Event(nil, []byte("data: [DONE]"))))
}

// FuzzRewrite: whatever engines answer, JSON stays JSON, and anything else passes.
func FuzzRewrite(f *testing.F) {
	f.Add(`{"meta_info":{"input_token_logprobs":[[1]]}}`, `[{"meta_info":{}},{"meta_info":1},7]`)
	f.Add(`[{}]`, `{"usage":{"prompt_tokens_details":{"cached_tokens":1}},"response":{"usage":7}}`)
	f.Fuzz(func(t *testing.T, prefill, decode string) {
		for _, r := range []Rewriter{CachedTokens{3, -1}, InputLogprobs{ReadInputLogprobs([]byte(prefill))}} {
			whole, err := r.Whole(nil, []byte(decode))
			if err == nil {
				require.True(t, json.Valid(whole), "%q", whole)
			}
			for _, data := range eventsOf(string(r.Event(nil, []byte("data: "+decode)))) {
				if len(data) > 0 && data[0] == '{' && json.Valid([]byte(decode)) {
					require.True(t, json.Valid([]byte(data)), "%q", data)
				}
			}
		}
	})
}
