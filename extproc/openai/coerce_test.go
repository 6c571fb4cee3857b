package openai

import (
	"encoding/json"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCoerced: what pydantic makes of values (e2e/oracles/judge_coercion.py wrote the table and holds it to new
// releases), Tandem makes of them, too.
func TestCoerced(t *testing.T) {
	text, err := os.ReadFile("testdata/coerced.json")
	require.NoError(t, err)
	var table struct {
		Count map[string]*json.Number
		Flag  map[string]*bool
	}
	require.NoError(t, json.Unmarshal(text, &table))
	require.Greater(t, len(table.Count), 90)
	for raw, want := range table.Count {
		n, ok := Count([]byte(raw))
		if require.Equal(t, want != nil, ok, raw); ok {
			require.Equal(t, want.String(), strconv.FormatInt(n, 10), raw)
		}
	}
	for raw, want := range table.Flag {
		v, ok := boolean([]byte(raw))
		if require.Equal(t, want != nil, ok, raw); ok {
			require.Equal(t, *want, v, raw)
		}
	}
	for raw, want := range map[string]int64{ // engines take them and find them too great
		"99999999999999999999": 1<<63 - 1024, `"99999999999999999999"`: 1<<63 - 1, "-1e30": -1 << 63,
	} {
		n, ok := Count([]byte(raw))
		require.True(t, ok, raw)
		require.Equal(t, want, n, raw)
	}
}

// TestCoercedMembers: the decisions that follow from such values.
func TestCoercedMembers(t *testing.T) {
	for body, want := range map[string]string{
		`{"n":"1"}`: "", `{"n":true}`: "", `{"n":1.0}`: "", `{"n":"2"}`: "several_choices",
		`{"n":"x"}`:       "several_choices",
		`{"best_of":"1"}`: "", `{"best_of":"2"}`: "several_choices", `{"echo":"false"}`: "", `{"echo":0}`: "",
		`{"echo":"no"}`: "", `{"echo":1}`: "echo", `{"echo":"on"}`: "echo", `{"echo":"maybe"}`: "echo",
		`{"use_beam_search":"off"}`: "", `{"use_beam_search":"1"}`: "beam_search",
		`{"prompt":["one"]}`: "", `{"prompt":[ "one" ]}`: "", `{"prompt":[[1,2]]}`: "", `{"prompt":[1,2]}`: "",
		`{"prompt":["a","b"]}`: "prompt_list", `{"prompt":[[1],[2]]}`: "prompt_list", `{"prompt":[]}`: "prompt_list",
		`{"prompt":[null]}`: "prompt_list", `{"prompt":[["a"]]}`: "prompt_list",
	} {
		require.Equal(t, want, scanned(t, Completions, body).Unsplittable(), body)
	}
	for body, want := range map[string]string{
		`{"store":"false"}`: "", `{"store":0.0}`: "", `{"store":"true"}`: "stored_response",
		`{"background":"f"}`: "", `{"background":1}`: "stored_response",
	} {
		require.Equal(t, want, scanned(t, Responses, body).Unsplittable(), body)
	}
	r := scanned(t, Chat, `{"stream":"on","stream_options":{"include_usage":"yes"},`+
		`"min_tokens":"5","max_tokens":"9.0"}`)
	require.True(t, r.True(FieldStream) && r.WantsUsage() && r.StreamOptionsAllowed())
	least, most := r.AnswerTokens()
	require.Equal(t, []int64{5, 9}, []int64{least, most})
	limit, ok := r.TokenLimit()
	require.True(t, ok)
	require.EqualValues(t, 9, limit)
	require.Empty(t, r.Uncontinuable())
	for body, want := range map[string]bool{ // vLLM: not data.get("stream")
		`{"stream":"false"}`: true, `{"stream":"0"}`: true, `{"stream":0}`: false, `{"stream":""}`: false, `{}`: false,
		`{"stream":1}`: true, `{"stream":null}`: false,
	} {
		require.Equal(t, want, scanned(t, Chat, body).StreamOptionsAllowed(), body)
	}
}

// TestListOfOne: one prompt in a list is that prompt.
func TestListOfOne(t *testing.T) {
	for list, single := range map[string]string{
		`["a prompt of some length"]`: `"a prompt of some length"`, ` [ [1,2,3,4,5,6,7,8] ] `: `[1,2,3,4,5,6,7,8]`,
	} {
		one := scanned(t, Completions, `{"model":"m","prompt":`+list+`}`)
		other := scanned(t, Completions, `{"model":"m","prompt":`+single+`}`)
		require.Equal(t, other.PromptHash(nil, 4, 100), one.PromptHash(nil, 4, 100), list)
		require.Equal(t, other.PromptIDs(), one.PromptIDs(), list)
		require.Equal(t, other.PromptBytes(), one.PromptBytes())
		n, isList := one.Prompts()
		require.True(t, n == 1 && isList, "SGLang takes a list of rooms with a list of one")
	}
	require.Nil(t, scanned(t, Completions, `{"prompt":[[1],[2]]}`).PromptIDs())
}
