package migration

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

// TestRefusal says which requests can be continued, by their members beside a prompt and stream.
func TestRefusal(t *testing.T) {
	const chat, completions = openai.Chat, openai.Completions
	for _, test := range []struct {
		api         openai.API
		members     string
		inexact     bool
		wantRefusal Reason
	}{
		{chat, ``, false, ""},
		{chat, `"max_tokens":9,"temperature":0.7,"top_p":0.9`, false, ""},
		{chat, `"temperature":0,"logprobs":true`, false, ""},
		{chat, `"repetition_penalty":1.3,"logit_bias":{"5":1},"min_tokens":3`, false, ""},
		{chat, `"return_token_ids":true,"response_format":{"type":"text"},"tools":null`, false, ""},
		{completions, `"max_tokens":9`, false, ""},

		{openai.Responses, `"input":"a"`, false, "sampled"},
		{openai.Responses, `"input":"a","temperature":0`, false, ""},
		{openai.Responses, `"input":"a","seed":3`, false, ""},
		{openai.Responses, `"input":"a","temperature":0,"tools":[{"type":"function"}]`, false, ""},
		{openai.Responses, `"input":"a","temperature":0,"tools":[{"type":"web_search"}]`, false, "engine_tools"},
		{openai.Responses, `"input":"a","temperature":0,"store":true`, false, "stored_response"},
		{openai.Responses, `"input":"a","temperature":0,"include":["message.output_text.logprobs"]`, false, "logprobs"},
		{openai.Responses, `"input":"a","temperature":0,"include":["reasoning.encrypted_content"]`, false, ""},
		{openai.Responses, `"input":[{"role":"user","content":[{"type": "input_image"}]}],"temperature":0`, false, ""},
		{openai.Generate, ``, false, "api"},
		{chat, `"stream":false`, false, "not_streamed"},
		{chat, `"max_tokens":1`, false, "limit"},
		{chat, `"n":2`, false, "several_choices"},
		{completions, `"best_of":2`, false, "several_choices"},
		{completions, `"echo":true`, false, "echo"},
		{completions, `"prompt":["a","b"]`, false, "prompt_list"},
		{completions, `"prompt_logprobs":1`, false, "prompt_logprobs"},
		{completions, `"logprobs":1,"temperature":0`, false, "logprobs"}, // with offsets into the text
		{chat, `"messages":[{"role":"user","content":[{"type":"image_url"}]}],"temperature":0`, false, ""},
		{chat, `"messages":[{"role":"user","content":[{"type":"image_url"}]}]`, true, "sampled"},
		{chat, `"modalities":["text","audio"],"audio":{},"temperature":0`, true, "modalities"},
		{openai.Messages, `"temperature":0,"messages":[{"role":"user","content":[{"type": "image"}]}]`, false, ""},

		// those that can only be repeated: the same answer has to come again
		{chat, `"tools":[{"type":"function"}]`, true, "sampled"},
		{chat, `"tools":[{"type":"function"}],"temperature":1`, true, "sampled"},
		{chat, `"tools":[{"type":"function"}],"temperature":0`, false, ""},
		{chat, `"tools":[{"type":"function"}],"tool_choice":"required","temperature":1,"seed":7`, false, ""},
		{chat, `"tools":[{"type":"function"}],"seed":null`, false, "sampled"},
		{chat, `"tools":[{"type":"function"}],"temperature":0,"logprobs":true`, false, "logprobs"},
		{chat, `"tools":[{"type":"function"}],"temperature":0,"return_token_ids":true`, false, "token_ids"},
		{chat, `"tools":[{"type":"function"}],"temperature":0,"max_tokens":1`, false, "limit"},
		{chat, `"response_format":{"type":"json_object"}`, true, "sampled"},
		{chat, `"response_format":{"type":"json_object"},"temperature":0`, false, ""},
		{completions, `"structured_outputs":{"regex":"a+"},"temperature":0`, false, ""},
		{chat, `"guided_json":{},"temperature":0`, false, ""},
		{chat, `"thinking_token_budget":9,"temperature":0`, false, ""},
		{chat, `"vllm_xargs":{"a":1},"temperature":0`, false, ""},
		{openai.Messages, ``, false, "sampled"},
		{openai.Messages, `"temperature":1,"seed":5`, false, "sampled"}, // which has no effect
		{openai.Messages, `"temperature":0`, false, ""},

		{chat, `"seed":1`, false, ""},
		{chat, `"seed":1`, true, ""},
		{chat, `"seed":1,"temperature":0`, false, ""},
		{chat, `"presence_penalty":1`, false, "sampled"},
		{chat, `"presence_penalty":1`, true, ""},
		{chat, `"presence_penalty":1,"temperature":0`, false, ""},
		{chat, `"presence_penalty":0`, false, ""},
		{chat, `"bad_words":["a b"]`, false, "sampled"},
		// text that is held back is generated again, which must give the same
		{chat, `"stop":["a"]`, false, "sampled"},
		{chat, `"stop":["a"]`, true, "sampled"},
		{chat, `"stop":["a"],"temperature":0`, false, ""},
		{chat, `"stop":"` + strings.Repeat("é", 256) + `","temperature":0`, false, ""},
		{chat, `"stop":"` + strings.Repeat("é", 257) + `","temperature":0`, false, ""},
	} {
		members := []string{}
		for _, member := range []string{`"stream":true`, `"messages":[{"role":"user","content":"a"}]`, `"prompt":"a"`} {
			if name, _, _ := strings.Cut(member, ":"); !strings.Contains(test.members, name+":") {
				members = append(members, member)
			}
		}
		if test.members != "" {
			members = append(members, test.members)
		}
		r := scan(t, test.api, "{"+strings.Join(members, ",")+"}")
		require.Equal(t, test.wantRefusal, Refusal(r, Policy{Inexact: test.inexact}), "%v %s", test.api, test.members)
		if test.wantRefusal == Sampled && test.api != openai.Messages { // whose requests have no seed
			require.Empty(t, Refusal(r, Policy{Seeds: true}), "%v %s", test.api, test.members)
		}
	}
}

// A sampled request that can only be repeated gets a seed where the operator says so, and each engine the same one.
func TestSeeds(t *testing.T) {
	r := scan(t, openai.Chat, `{"messages":[],"tools":[{}],"stream":true}`)
	s := NewStream(r, Policy{Seeds: true})
	first := asked(r, &s)
	require.Regexp(t, `^\{"seed":[1-9][0-9]*,"messages":\[\],"tools":\[\{\}\],"stream":true\}$`, string(first))
	s.Feed(nil, agent{"one", 1, false}.chat(5, false)[:600])
	next, reason := continued(r, &s)
	require.Empty(t, reason)
	require.Equal(t, string(first), string(next))
	other := NewStream(r, Policy{Seeds: true})
	require.NotEqual(t, string(first), string(asked(r, &other)))

	r = scan(t, openai.Chat, `{"messages":[],"stream":true}`)
	s = NewStream(r, Policy{Seeds: true})
	require.NotContains(t, string(asked(r, &s)), "seed", "it is continued from its tokens")
}
