package openai

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestScanAnswer reads recorded answers of vLLM 0.32.0.
func TestScanAnswer(t *testing.T) {
	for _, c := range []struct {
		name           string
		params         string // its block ids, which differ
		prompt, cached int64
	}{
		{"chat", `"remote_block_ids":[[1,2,3,39]]`, 122, 96},
		{"responses", `"remote_block_ids":[[48,49,50,51]]`, 103, 0},
		{"messages", `"remote_block_ids":[[52,53,54,55]]`, 99, 0},
		{"no-params", "", 123, 96},
	} {
		t.Run(c.name, func(t *testing.T) {
			body, err := os.ReadFile("testdata/answers/vllm-0.32.0-" + c.name + ".json")
			require.NoError(t, err)
			a, err := ScanAnswer(body)
			require.NoError(t, err)
			require.Equal(t, c.prompt, a.PromptTokens)
			require.Equal(t, c.cached, a.CachedTokens)
			if c.params == "" {
				require.Nil(t, a.Params)
				return
			}
			require.Contains(t, string(a.Params), c.params)
			require.Equal(t, byte('{'), a.Params[0])
			require.Equal(t, byte('}'), a.Params[len(a.Params)-1])
		})
	}
}

func TestScanAnswerShapes(t *testing.T) {
	for _, c := range []struct {
		body string
		want Answer
	}{
		{`{}`, Answer{nil, -1, -1, nil, nil, -1}},
		{`{"kv_transfer_params":null,"usage":null}`, Answer{nil, -1, -1, nil, nil, -1}},
		{`{"kv_transfer_params": {"a": 1e3 } ,"usage":[]}`, Answer{[]byte(`{"a": 1e3 }`), -1, -1, nil, nil, -1}},
		{`{"kv_transfer_params":"x","usage":{"prompt_tokens":5,"prompt_tokens_details":null}}`, Answer{[]byte(`"x"`), 5, -1, nil, nil, -1}},
		{`{"usage":{"prompt_tokens":-5,"prompt_tokens_details":{"cached_tokens":1.5}}}`, Answer{nil, -1, -1, nil, nil, -1}},
		{`{"usage":{"prompt_tokens":"5","cache_read_input_tokens":7}}`, Answer{nil, -1, 7, nil, nil, -1}},
		{`{"usage":{"input_tokens":3,"cache_creation_input_tokens":null,"cache_read_input_tokens":96}}`, Answer{nil, 99, 96, nil, nil, -1}},
		{`{"prompt_token_ids": [1, 2] ,"choices":[]}`, Answer{nil, -1, -1, []byte("[1, 2]"), nil, -1}},
		{`{"prompt_token_ids":null}`, Answer{nil, -1, -1, nil, nil, -1}},
		{`{"prompt_token_ids":[1, 2],"choices":[]}`, Answer{nil, -1, -1, []byte(`[1, 2]`), nil, -1}},
		{`{"choices":[{"index":0,"prompt_token_ids":[3]},{"prompt_token_ids":[4]}]}`, Answer{nil, -1, -1, []byte(`[3]`), nil, -1}},
		{`{"prompt_token_ids":null,"choices":[1]}`, Answer{nil, -1, -1, nil, nil, -1}},
		{`{"choices":[{"kv_transfer_params":{"a":1},"usage":{"prompt_tokens":1}}]}`, Answer{nil, -1, -1, nil, nil, -1}},
		{`{"ec_transfer_params": {"a":{}} ,"choices":[]}`, Answer{nil, -1, -1, nil, []byte(`{"a":{}}`), -1}},
		{`{"ec_transfer_params":null}`, Answer{nil, -1, -1, nil, nil, -1}},
	} {
		got, err := ScanAnswer([]byte(c.body))
		require.NoError(t, err, c.body)
		require.Equal(t, c.want, got, c.body)
	}
	for _, body := range []string{``, `[]`, `{"a":`, `data: {}`, `{"kv_transfer_params":{},"kv_transfer_params":{}}`, `<html>`} {
		_, err := ScanAnswer([]byte(body))
		require.Error(t, err, body)
	}
}

func TestTokenIDs(t *testing.T) {
	for text, want := range map[string][]uint32{
		"[]": nil, "[ 1 ,2,4294967295]": {1, 2, 4294967295}, "[4294967296]": nil, "[-1]": nil, "[1.5]": nil, `["1"]`: nil, "[[1]]": nil, "{}": nil, "": nil,
	} {
		got, ok := TokenIDs(nil, []byte(text))
		require.Equal(t, want != nil || text == "[]", ok, text)
		if ok {
			require.Equal(t, want, got, text)
		}
	}
}
