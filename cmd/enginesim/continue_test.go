package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// streamed is what a stream has, event by event.
type streamed struct {
	prompt []uint32
	ids    []uint32
	texts  []string // of each token
	finish string
}

func (s streamed) text() string { return strings.Join(s.texts, "") }

// streamed posts a request that streams with token ids.
func (e *simulator) streamed(t *testing.T, path, body string) (s streamed) {
	t.Helper()
	answer := e.post(t, path, "continue", body)
	require.Equal(t, 200, answer.status, answer)
	for event := range strings.SplitSeq(strings.TrimSpace(answer.String()), "\n\n") {
		data := strings.TrimPrefix(event, "data: ")
		if data == "[DONE]" {
			break
		}
		var v struct {
			Prompt  []uint32 `json:"prompt_token_ids"`
			Choices []struct {
				Text   string
				Delta  struct{ Content string }
				Finish string   `json:"finish_reason"`
				IDs    []uint32 `json:"token_ids"`
				Prompt []uint32 `json:"prompt_token_ids"`
			}
		}
		require.NoError(t, json.Unmarshal([]byte(data), &v), data)
		s.prompt = append(s.prompt, v.Prompt...)
		for _, c := range v.Choices {
			s.prompt, s.ids = append(s.prompt, c.Prompt...), append(s.ids, c.IDs...)
			if len(c.IDs) > 0 {
				s.texts = append(s.texts, c.Text+c.Delta.Content)
			}
			s.finish = c.Finish
		}
	}
	return s
}

// TestBeginsAnew: an engine of another release takes no notice of the ids, and its first event says so.
func TestBeginsAnew(t *testing.T) {
	e := startEngine(t, "-begin-anew")
	const members = `"max_tokens":5,"stream":true,"return_token_ids":true`
	whole := e.streamed(t, chatPath, chat("hi", members))
	again := e.streamed(t, chatPath, chat("hi", members+`,"kv_transfer_params":{"prompt_token_ids":[1,2,3]}`))
	require.Equal(t, whole, again)
}

// TestContinues: an engine that gets a prompt and the beginning of its answer as token ids writes the rest of that
// answer, as a real engine does at temperature 0. Text that was held back for a stop string comes from the place where
// the new engine begins.
func TestContinues(t *testing.T) {
	one, two := startEngine(t), startEngine(t)
	for _, test := range []struct{ name, members string }{
		{"limit", `"max_tokens":%d`},
		{"natural end", `"min_tokens":0`},
		{"stop", `"max_tokens":%d,"stop":["STOP"]`},
		{"stop included", `"max_tokens":%d,"stop":["STOP"],"include_stop_str_in_output":true`},
	} {
		t.Run(test.name, func(t *testing.T) {
			const most = 40
			members := func(taken int, stop string) string {
				m := strings.ReplaceAll(test.members, "STOP", stop)
				if strings.Contains(m, "%d") {
					m = fmt.Sprintf(m, most-taken)
				}
				return `"stream":true,"return_token_ids":true,` + m
			}
			stop, until := "never", most
			if strings.Contains(test.members, "STOP") {
				whole := one.streamed(t, chatPath, chat(longPrompt, members(0, stop))).text()
				quoted, err := json.Marshal(whole[80:86])
				require.NoError(t, err)
				stop, until = strings.Trim(string(quoted), `"`), 20 // an engine does not see one that began before it
			}
			want := one.streamed(t, chatPath, chat(longPrompt, members(0, stop)))
			require.NotEmpty(t, want.prompt)
			require.Len(t, want.texts, len(want.ids))
			for k := 1; k < min(len(want.ids), until+1); k++ {
				ids, err := json.Marshal(slices.Concat(want.prompt, want.ids[:k]))
				require.NoError(t, err)
				params := fmt.Sprintf(`"kv_transfer_params":{"prompt_token_ids":%s}`, ids)
				got := two.streamed(t, chatPath, chat("another text", members(k, stop), params))
				require.Equal(t, want.ids[k:], got.ids, "after %d", k)
				require.Equal(t, want.finish, got.finish, "after %d", k)
				if !strings.Contains(test.members, "STOP") || strings.Contains(test.members, "include") {
					require.Equal(t, want.texts[k:], got.texts, "after %d", k)
				} else { // what the first engine held back is not in the second one's text, and nothing else lacks
					require.True(t, strings.HasSuffix(want.text(), got.text()), "%q after %d: %q", want.text(), k, got.text())
				}
				if test.name == "limit" {
					body := fmt.Sprintf(`{"model":"tiny","prompt":%s,%s}`, ids, members(k, stop))
					require.Equal(t, want.texts[k:], two.streamed(t, "/v1/completions", body).texts, "a completion, after %d", k)
				}
			}
		})
	}
}
