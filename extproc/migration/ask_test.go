package migration

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

// What a dialect says in kv_transfer_params stays beside the ids, in the leg to prefill and in that to decode.
func TestIDsGoBesideADialectsParameters(t *testing.T) {
	const params, ids = `"kv_transfer_params":`, `"prompt_token_ids":[1,2,3,4,5,6,7,8,9,10,31337]`
	for name, tt := range map[string]struct{ leg, prefill, decode string }{
		"none":   {`{"messages":[]}`, `{` + params + `{` + ids + `},"messages":[]}`, `{"return_token_ids":true,` + params + `{` + ids + `},"messages":[]}`},
		"null":   {`{` + params + `null}`, `{` + params + `{` + ids + `}}`, `{"return_token_ids":true,` + params + `{` + ids + `}}`},
		"empty":  {`{` + params + `{ }}`, `{` + params + `{` + ids + `}}`, `{"return_token_ids":true,` + params + `{` + ids + `}}`},
		"others": {`{` + params + `{ "a":1}}`, `{` + params + `{` + ids + `,"a":1}}`, `{"return_token_ids":true,` + params + `{` + ids + `,"a":1}}`},
		"ids of its own": {
			`{` + params + `{"prompt_token_ids":[1]}}`, `{` + params + `{"prompt_token_ids":[1]}}`,
			`{"return_token_ids":true,` + params + `{"prompt_token_ids":[1]}}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := flowing(t, true)
			leg := scan(t, openai.Chat, tt.leg)
			var p openai.Patch
			p.Reset(leg)
			s.AskPrompt(leg, &p)
			require.Equal(t, tt.prefill, string(p.Edits().Apply(nil, leg.Body())))
			p.Reset(leg)
			s.Ask(leg, &p)
			require.Equal(t, tt.decode, string(p.Edits().Apply(nil, leg.Body())))
		})
	}
	s := flowing(t, false)
	leg := scan(t, openai.Chat, `{}`)
	var p openai.Patch
	p.Reset(leg)
	s.AskPrompt(leg, &p)
	require.Empty(t, p.Edits(), "nothing is continued")
}
