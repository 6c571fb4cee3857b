package openai

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOneShot(t *testing.T) {
	const chat = `{"id":"c1","object":"chat.completion","created":7,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"A\u00e9","tool_calls":[]},"logprobs":null,"finish_reason":"stop"}],` +
		`"usage":{"prompt_tokens":9007199254740993,"completion_tokens":1}}`
	for name, tt := range map[string]struct {
		answer string
		usage  bool
		want   string
	}{
		"chat": {chat, false, `data: {"id":"c1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":"A\u00e9","tool_calls":[]},"logprobs":null,"finish_reason":"stop"}]}` +
			"\n\ndata: [DONE]\n\n"},
		"with usage": {chat, true, `data: {"id":"c1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":"A\u00e9","tool_calls":[]},"logprobs":null,"finish_reason":"stop"}]}` +
			"\n\n" + `data: {"id":"c1","object":"chat.completion.chunk","created":7,"model":"m","choices":[],"usage":{"prompt_tokens":9007199254740993,"completion_tokens":1}}` + "\n\ndata: [DONE]\n\n"},
		"completion": {`{"object":"text_completion","choices":[{"text":"x","index":0,"finish_reason":"stop"}]}`, true,
			`data: {"object":"text_completion","choices":[{"text":"x","index":0,"finish_reason":"stop"}]}` + "\n\ndata: [DONE]\n\n"},
		"tool calls":   {`{"object":"chat.completion","choices":[{"message":{"tool_calls":[{"id":"1"}]}}]}`, false, ""},
		"responses":    {`{"object":"response","output":[]}`, false, ""},
		"no choices":   {`{"object":"chat.completion","choices":[]}`, false, ""},
		"not a choice": {`{"object":"chat.completion","choices":[1]}`, false, ""},
		"null":         {`{"object":"chat.completion","choices":null}`, false, ""},
		"two lines":    {"{\"object\":\"text_completion\",\n\"choices\":[{\"te\\u0022xt\":\"x\"\r\n}]}", false, `data: {"object":"text_completion","choices":[{"te\"xt":"x"}]}` + "\n\ndata: [DONE]\n\n"},
		"broken":       {`{"object":"chat.completion"`, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := OneShot([]byte(tt.answer), tt.usage)
			require.Equal(t, tt.want, string(got))
			require.Equal(t, tt.want == "", err != nil)
		})
	}
}

func TestWantsUsage(t *testing.T) {
	for body, want := range map[string]bool{
		`{}`: false, `{"stream_options":null}`: false, `{"stream_options":{}}`: false, `{"stream_options":[true]}`: false,
		`{"stream_options":{"include_usage":false}}`: false, `{"stream_options":{"x":1, "include_usage": true}}`: true,
	} {
		var r Request
		require.NoError(t, r.Scan(Chat, []byte(body), Limits{}))
		require.Equal(t, want, r.WantsUsage(), body)
	}
}

// FuzzOneShot: every event of the stream is JSON on one line, and the stream ends.
func FuzzOneShot(f *testing.F) {
	f.Add([]byte(`{"object":"chat.completion","choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}],"usage":{}}`), true)
	f.Fuzz(func(t *testing.T, answer []byte, usage bool) {
		stream, err := OneShot(answer, usage)
		if err != nil {
			return
		}
		events := bytes.Split(stream, []byte("\n\n"))
		require.Equal(t, "data: [DONE]", string(events[len(events)-2]))
		for _, e := range events[:len(events)-2] {
			require.True(t, json.Valid(bytes.TrimPrefix(e, []byte("data: "))), "%s", e)
		}
	})
}
