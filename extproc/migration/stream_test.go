package migration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

// requests are the bodies that the property tests cut, without the API's prompt.
var requests = map[string]string{
	"plain":         `"max_tokens":40`,
	"no limit":      `"min_tokens":9`,
	"usage":         `"max_tokens":40,"stream_options":{"include_usage":true}`,
	"running usage": `"max_tokens":40,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`,
	"own ids":       `"max_tokens":40,"return_token_ids":true`,
	"stop":          `"max_tokens":60,"stop":["%STOP%","stop!"]`,
	"stop included": `"max_tokens":60,"stop":["%STOP%","stop!"],"include_stop_str_in_output":true,"return_token_ids":true`,
	"sampled":       `"max_tokens":40,"temperature":0.7`,
	"least and end": `"max_tokens":60,"min_tokens":30,"stop":["st"],"stream_options":{"include_usage":true}`,
}

func prompts(api openai.API, seed int) string {
	if api == openai.Chat {
		return fmt.Sprintf(`"messages":[{"role":"user","content":"number %d"}]`, seed)
	}
	return fmt.Sprintf(`"prompt":"number %d"`, seed)
}

// cuts returns the places to cut a stream: behind and inside each event, and more of them if asked for.
func cuts(raw []byte, more bool) (at []int) {
	for i := range raw {
		if more && i%5 == 0 || bytes.HasSuffix(raw[:i], []byte("\n\n")) || bytes.HasSuffix(raw[:i], []byte("content")) {
			at = append(at, i)
		}
	}
	return at
}

// stopOf returns a stop string, as JSON text, that ends an answer after about 20 characters: over several tokens.
func stopOf(t *testing.T, stream []byte) string {
	t.Helper()
	text := []rune(read(t, stream).Text)
	quoted, err := json.Marshal(string(text[20:27]))
	require.NoError(t, err)
	return string(quoted)
}

// TestContinuedAnywhere cuts answers behind and inside every event, continues them on another engine, and requires the client to get
// what the first engine would have answered.
func TestContinuedAnywhere(t *testing.T) {
	for name, members := range requests {
		for _, api := range []openai.API{openai.Chat, openai.Completions} {
			for _, per := range []int{1, 0} {
				t.Run(fmt.Sprintf("%s %s, %d a time", name, api, per), func(t *testing.T) {
					t.Parallel()
					for seed := range 2 {
						text := fmt.Sprintf(`{"stream":true,%s,%s}`, members, prompts(api, seed))
						if name != "sampled" {
							text = strings.Replace(text, "{", `{"temperature":0,`, 1)
						}
						one, two := engine{id: "one", created: 1, perEvent: per}, engine{id: "two", created: 2, perEvent: per}
						if strings.Contains(text, "%STOP%") {
							text = strings.Replace(text, `"%STOP%"`, stopOf(t, one.stream(t, []byte(text))), 1)
						}
						r := scan(t, api, text)
						require.Empty(t, Refusal(r, Policy{}))
						plain := one.stream(t, []byte(text))
						want := read(t, plain)
						s := NewStream(r, Policy{})
						raw := one.stream(t, asked(r, &s))
						if whole := s.End(s.Feed(nil, raw)); !s.of.showIDs {
							require.Equal(t, string(plain), string(whole))
						}
						for _, cut := range cuts(raw, name == "plain" && seed == 0 && per == 1) {
							s := NewStream(r, Policy{})
							got := s.Feed(nil, raw[:cut])
							for attempt := 0; !s.Done(); attempt++ {
								next, reason := continued(r, &s)
								if name == "sampled" && per == 0 && reason == Sampled {
									got = nil
									break
								}
								if reason != "" {
									require.Equal(t, Complete, reason, "cut at %d", cut)
									got = s.Finish(got)
									break
								}
								rest := two.stream(t, next)
								if attempt < 2 && cut%3 == 0 { // it dies, too
									got = s.Feed(got, rest[:len(rest)*(cut%7)/7])
									continue
								}
								got = s.End(s.Feed(got, rest))
								require.Empty(t, s.Broken(), "cut at %d\n%s", cut, next)
							}
							if got == nil {
								continue
							}
							requireSame(t, want, read(t, got), "cut at %d\n%s\n%s", cut, raw[:cut], got)
						}
					}
				})
			}
		}
	}
}

// TestMemoryIsBounded: a prompt of 300,000 tokens fits. A longer one passes, and nothing of it is kept.
func TestMemoryIsBounded(t *testing.T) {
	r := scan(t, openai.Chat, `{"messages":[{"role":"user","content":"a"}],"stream":true}`)
	for tokens, reason := range map[int]Reason{300_000: "", 600_000: TooLong} {
		ids := strings.Repeat("654321,", tokens-1) + "654321"
		stream := []byte(strings.Replace(firstEvent, "1,2,3,4,5,6,7,8,9,10", ids, 1) + nextEvent)
		s := NewStream(r, Policy{})
		var got []byte
		for len(stream) > 0 {
			n := min(16<<10, len(stream))
			got, stream = s.Feed(got, stream[:n]), stream[n:]
		}
		require.Equal(t, reason, s.Reason())
		require.Len(t, s.prompt, map[Reason]int{"": tokens}[reason])
		require.LessOrEqual(t, s.bytes(), defaultMaxBytes)
		if reason == "" {
			require.NotContains(t, string(got), "654321", "ids that the client did not ask for")
		} else {
			require.Zero(t, s.bytes())
		}
		require.True(t, bytes.HasSuffix(got, []byte(strings.Replace(nextEvent, "[31337]", "null", 1))))
	}
}

// TestCachedTokens: the joined answer counts what the first prefill found in its cache, if that is known. The next
// engine found the answer's tokens, too.
func TestCachedTokens(t *testing.T) {
	const end = `data: {"id":"b","object":"chat.completion.chunk","created":2,"model":"m","choices":[],"usage":` +
		`{"prompt_tokens":11,"total_tokens":12,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":11}}}` + "\n\n"
	for cached, want := range map[int64]string{-1: "10", 0: "0", 7: "7"} {
		s := flowing(t, true)
		s.Cached = cached
		require.Contains(t, string(s.Feed(nil, []byte(end))),
			`"usage":{"prompt_tokens":10,"total_tokens":12,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":`+want+`}}`)
	}
	for cached, want := range map[int64]string{-1: "11", 0: "0", 7: "7"} { // of one engine
		s := NewStream(scan(t, openai.Chat, `{"messages":[],"stream":true,"stream_options":{"include_usage":true}}`), Policy{})
		s.Cached = cached
		require.Equal(t, strings.Replace(end, `"cached_tokens":11`, `"cached_tokens":`+want, 1), string(s.Feed(nil, []byte(end))))
	}
}

// TestACopyGoesOn: an engine that still writes goes on with its stream if the one that was asked in its place gives up,
// also when that has begun to write other tokens.
func TestACopyGoesOn(t *testing.T) {
	event := func(who, text string, ids ...int) []byte {
		list, _ := json.Marshal(ids)
		delta := map[string]string{"content": text}
		if text == "" {
			delta = map[string]string{}
		}
		inside, _ := json.Marshal(delta)
		return fmt.Appendf(nil, `data: {"id":%q,"object":"o","created":1,"model":"m","choices":[{"index":0,"delta":%s,`+
			`"finish_reason":null,"token_ids":%s}]}`+"\n\n", who, inside, list)
	}
	r := scan(t, openai.Chat, `{"messages":[{"role":"user","content":"a"}],"stream":true}`)
	s := NewStream(r, Policy{})
	s.Feed(nil, []byte(firstEvent))
	s.Feed(nil, event("a", "one", 1))
	s.Feed(nil, event("a", "two", 2))
	s.ids = slices.Grow(s.ids, 10)
	s.Feed(nil, event("a", "", 3)) // it begins a character
	before := s
	require.Empty(t, s.Continue())
	require.Empty(t, s.Feed(nil, event("b", "", 4)), "of another character")
	s.Feed(nil, event("b", "", 5))

	require.NotEmpty(t, before.Feed(nil, event("a", "é", 6)))
	require.Empty(t, before.Continue())
	require.Equal(t, "[1,2,3,4,5,6,7,8,9,10,1,2,3,6]", string(before.AppendPrompt(nil)))
}
