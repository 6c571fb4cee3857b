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

		{openai.Responses, `"input":"a"`, false, "api"},
		{openai.Messages, ``, false, "api"},
		{openai.Generate, ``, false, "api"},
		{chat, `"stream":false`, false, "not_streamed"},
		{chat, `"max_tokens":1`, false, "limit"},
		{chat, `"n":2`, false, "several_choices"},
		{completions, `"best_of":2`, false, "several_choices"},
		{completions, `"echo":true`, false, "echo"},
		{completions, `"prompt":["a","b"]`, false, "prompt_list"},
		{completions, `"prompt_logprobs":1`, false, "prompt_logprobs"},
		{completions, `"logprobs":1`, false, "logprobs"}, // with offsets into the text
		{chat, `"response_format":{"type":"json_object"}`, true, "grammar"},
		{chat, `"structured_outputs":{"regex":"a+"}`, true, "grammar"},
		{chat, `"guided_json":{}`, true, "grammar"},
		{chat, `"tools":[{"type":"function"}],"tool_choice":"required"`, true, "tools"},
		{chat, `"messages":[{"role":"user","content":[{"type":"image_url"}]}]`, true, "media"},
		{chat, `"thinking_token_budget":9`, true, "processor"},
		{chat, `"vllm_xargs":{"a":1}`, true, "processor"},

		{chat, `"seed":1`, false, "seed"},
		{chat, `"seed":1`, true, ""},
		{chat, `"seed":1,"temperature":0`, false, ""},
		{chat, `"presence_penalty":1`, false, "penalty"},
		{chat, `"presence_penalty":1`, true, ""},
		{chat, `"presence_penalty":0`, false, ""},
		{chat, `"bad_words":["a b"]`, false, "penalty"},
		// text that is held back is generated again, which must give the same
		{chat, `"stop":["a"]`, false, "stop"},
		{chat, `"stop":["a"]`, true, "stop"},
		{chat, `"stop":["a"],"temperature":0`, false, ""},
		{chat, `"stop":"` + strings.Repeat("é", 256) + `","temperature":0`, false, ""},
		{chat, `"stop":"` + strings.Repeat("é", 257) + `","temperature":0`, false, "stop"},
		{chat, `"stop":[5],"temperature":0`, false, "stop"},
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
	}
}
