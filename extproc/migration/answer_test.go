package migration

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

// answer is what a client reads from a stream.
type answer struct {
	Text     string
	IDs      []uint32 // token_ids, if the client asked for them
	Prompt   []uint32
	Finish   []string // each finish reason
	Roles    int      // events with a role
	Usage    []string // each usage behind the last choice, as JSON text
	Running  []string // usage in events with choices (continuous_usage_stats)
	Logprobs []float64
	Done     int // [DONE]
	Names    map[string]bool
}

// usage as an engine writes it, without what depends on an engine's cache.
type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Total      int `json:"total_tokens"`
	Completion int `json:"completion_tokens"`
}

// read reads a client's stream: whole events, each of one line, and nothing behind [DONE].
func read(t testing.TB, stream []byte) (a answer) {
	t.Helper()
	a.Names = map[string]bool{}
	require.True(t, len(stream) == 0 || strings.HasSuffix(string(stream), "\n\n"), "half an event: %.200q", stream)
	for event := range strings.SplitSeq(strings.TrimSuffix(string(stream), "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		require.True(t, ok, event)
		require.Zero(t, a.Done, "an event behind [DONE]: %s", event)
		if data == "[DONE]" {
			a.Done++
			continue
		}
		var e struct {
			ID      string
			Object  string
			Created int64
			Usage   *usage
			Prompt  []uint32 `json:"prompt_token_ids"`
			Choices []struct {
				Text  string
				Delta struct {
					Role, Content string
				}
				Finish   *string  `json:"finish_reason"`
				IDs      []uint32 `json:"token_ids"`
				Prompt   []uint32 `json:"prompt_token_ids"`
				Logprobs *struct {
					Content []struct{ Logprob float64 }
				}
			}
		}
		require.NoError(t, json.Unmarshal([]byte(data), &e), data)
		require.NotEmpty(t, e.ID, data)
		head, _ := json.Marshal([]any{e.ID, e.Object, e.Created})
		a.Names[string(head)] = true
		a.Prompt = append(a.Prompt, e.Prompt...)
		if e.Usage != nil {
			text, _ := json.Marshal(e.Usage)
			if len(e.Choices) == 0 {
				a.Usage = append(a.Usage, string(text))
			} else {
				a.Running = append(a.Running, string(text))
			}
		}
		for _, c := range e.Choices {
			a.Text += c.Text + c.Delta.Content
			a.IDs, a.Prompt = append(a.IDs, c.IDs...), append(a.Prompt, c.Prompt...)
			if c.Delta.Role != "" {
				a.Roles++
			}
			if c.Finish != nil {
				a.Finish = append(a.Finish, *c.Finish)
			}
			if c.Logprobs != nil {
				for _, one := range c.Logprobs.Content {
					a.Logprobs = append(a.Logprobs, one.Logprob)
				}
			}
		}
	}
	return a
}

// requireSame requires got to be what a single engine would have answered: want, under one name.
func requireSame(t testing.TB, want, got answer, msg ...any) {
	t.Helper()
	require.Len(t, got.Names, 1, msg...)
	want.Names, got.Names = nil, nil
	want.Logprobs, got.Logprobs = nil, nil
	if len(want.Running) > 0 { // as many as there are events
		require.NotEmpty(t, got.Running, msg...)
		require.Equal(t, want.Running[len(want.Running)-1], got.Running[len(got.Running)-1], msg...)
	}
	want.Running, got.Running = nil, nil
	require.Equal(t, want, got, msg...)
}

// scan returns the client's scanned request.
func scan(t testing.TB, api openai.API, body string) *openai.Request {
	t.Helper()
	r := &openai.Request{}
	require.NoError(t, r.Scan(api, []byte(body), openai.Limits{}))
	return r
}

// asked returns the body that makes the first engine answer token ids.
func asked(r *openai.Request, s *Stream) []byte {
	var p openai.Patch
	p.Reset(r)
	s.Ask(r, &p)
	return p.Edits().Apply(nil, r.Body())
}

// continued returns the body for the next engine.
func continued(r *openai.Request, s *Stream) ([]byte, Reason) {
	var p openai.Patch
	p.Reset(r)
	reason := s.Continue()
	if reason == "" {
		s.Ask(r, &p)
	}
	return p.Edits().Apply(nil, r.Body()), reason
}
