package openai

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// passing returns what a client gets of an answer that comes in pieces of a size.
func passing(answer string, size int) string {
	p := PassingCounts{By: CachedTokens{N: 7, Written: 3}}
	var out []byte
	for rest := answer; ; {
		n := min(size, len(rest))
		out = p.Append(out, []byte(rest[:n]), n == len(rest))
		if rest = rest[n:]; rest == "" {
			return string(out)
		}
	}
}

// Wherever pieces end, the answer is the same, and only the counts of its own usage are others.
func TestPassingCounts(t *testing.T) {
	const messages = `"usage":{"input_tokens":8,"output_tokens":4,"cache_creation_input_tokens":0,"cache_read_input_tokens":32}`
	for answer, want := range map[string]string{
		`{"id":"a",` + messages + `}`: `{"id":"a","usage":{"input_tokens":30,"output_tokens":4,"cache_creation_input_tokens":3,"cache_read_input_tokens":7}}`,
		` { "usage" : {"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":9}} , "id": "a" } `: ` { "usage" : {"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":7}} , "id": "a" } `, //nolint:gocritic // its white space is kept
		// what the model or the client wrote is no usage
		`{"content":[{"type":"tool_use","input":{` + messages + `}}],"x":"` + strings.ReplaceAll(messages, `"`, `\"`) + `"}`: "",
		`{"content":"usage","n":{"usage":1},"us\u0061ge":{"cached_tokens":1},"usages":{"cached_tokens":1}}`:                  "",
		`[{` + messages + `}]`: "",
		`{"usage":null}`:       "", `{"usage":7,"a":{"cached_tokens":9}}`: "", `{"usage":[{"cached_tokens":9}]}`: "",
		`{"usage":{"cached_tokens":9`: "", `{"usage":{"cached_tokens":nine}}`: "", "hello": "", "": "",
		`{"usage":{"x":"` + strings.Repeat("x", maxUsageHeld) + `","cached_tokens":9}}`: "",
		`{}` + messages: "",
	} {
		if want == "" {
			want = answer
		}
		for _, size := range []int{1, 2, 7, 50, 1 << 30} {
			require.Equal(t, want, passing(answer, size), "in pieces of %d", size)
		}
	}
}

// What waits is bounded by the value of usage, however long the answer is.
func TestPassingCountsKeepLittle(t *testing.T) {
	p := PassingCounts{By: CachedTokens{N: 7, Written: 3}}
	text := []byte(strings.Repeat(`some \" text {`, 1<<10))
	out := p.Append(nil, []byte(`{"content":"`), false)
	allocations := testing.AllocsPerRun(100, func() { out = p.Append(out[:0], text, false) })
	require.Zero(t, int(allocations))
	require.Zero(t, cap(p.held))
}

// FuzzPassingCounts: of any bytes in any pieces the client gets the same as at once; what is JSON means the same as what
// [CachedTokens.Whole] makes of it.
func FuzzPassingCounts(f *testing.F) {
	f.Add(`{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":9}},"choices":[{"text":"\"usage\":{"}]}`, 3)
	f.Add(`{"usage":{"input_tokens":8,"cache_creation_input_tokens":0,"cache_read_input_tokens":32}}`, 1)
	f.Add(`{"a":[{}],"usage":{},"usage":{"cached_tokens":1}}`, 2)
	f.Fuzz(func(t *testing.T, answer string, size int) {
		once := passing(answer, 1<<30)
		require.Equal(t, once, passing(answer, 1+int(uint(size)%100)))
		var of struct {
			Usage    any
			Response struct{} `json:"response"`
		}
		if json.Unmarshal([]byte(answer), &of) != nil || !valid([]byte(answer)) {
			return
		}
		whole, err := (CachedTokens{N: 7, Written: 3}).Whole(nil, []byte(answer))
		if err != nil || strings.Contains(answer, `\`) || len(answer) > maxUsageHeld {
			return
		}
		var got, want struct{ Usage any }
		require.NoError(t, json.Unmarshal([]byte(once), &got), once)
		require.NoError(t, json.Unmarshal(whole, &want))
		require.Equal(t, want, got, once)
	})
}
