package filter

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/usage"
)

// The tokens of a request are those that its client is told, whoever wrote the answer and whatever was made of it. The
// request's row has them, and Envoy's metadata.
func TestTokensAreCounted(t *testing.T) {
	cached := func(p *pass.Policy) {
		always(p)
		p.Cached = plan.CachedInPassing
	}
	trtllm := func(p *pass.Policy) {
		always(p)
		var err error
		p.Dialect, err = kvtransfer.New(kvtransfer.Options{Name: "trtllm"})
		require.NoError(t, err)
	}
	final := strings.Replace(answered, `"length"`, `"stop"`, 1)
	prefilled := strings.Replace(answered, `"completion_tokens":1`,
		`"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":5}`, 1)
	stream := strings.Replace(chat, `"max_tokens"`, `"stream":true,"stream_options":{"include_usage":true},"max_tokens"`, 1)
	const said = `"usage":{"prompt_tokens":12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":11}}`
	const event = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n"
	for name, tt := range map[string]struct {
		policy           func(*pass.Policy)
		body             string // the client's
		prefill, decoded string // answers
		want             string // prompt, cached, answer
	}{
		"whole":                 {always, chat, answered, `{"choices":[],` + said + `}`, `[12,11,3]`},
		"stream":                {always, stream, answered, event + event + "data: {" + said + "}\n\ndata: [DONE]\n\n", `[12,11,3]`},
		"that says nothing":     {always, stream, answered, event + event + "data: [DONE]\n\n", `[null,null,null]`},
		"that is absurd":        {always, chat, answered, `{"usage":{"prompt_tokens":-1}}`, `[null,null,null]`},
		"whole and rewritten":   {cached, chat, prefilled, `{"choices":[],` + said + `}`, `[12,5,3]`},
		"stream and rewritten":  {cached, stream, prefilled, event + "data: {" + said + "}\n\ndata: [DONE]\n\n", `[12,5,3]`},
		"prefill's answer":      {trtllm, chat, final, "", `[12,null,1]`},
		"prefill's as a stream": {trtllm, stream, final, "", `[12,null,1]`},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, tt.policy)
			c := newClient(t, f, func(at string, _ []byte) engineAnswer {
				if prefills(at) {
					return engineAnswer{status: 200, body: tt.prefill}
				}
				return engineAnswer{status: 200, body: tt.decoded}
			}, tt.body)
			if tt.body == chat {
				c.kind = "application/json"
			}
			c.headers = append(c.headers, Header{"x-tenant", "team"})
			c.run()
			require.Equal(t, 200, c.status, c.reply)
			require.Equal(t, tt.decoded == "", len(c.sent) == 0, "who answered")
			require.JSONEq(t, tt.want, rowOf(t, f))
			if strings.HasPrefix(tt.want, "[12") {
				require.InDelta(t, 12, c.tokens["in"], 0)
			}
		})
	}
}

// rowOf returns the counts of the one request.
func rowOf(t *testing.T, f *fleet) string {
	t.Helper()
	var used *usage.Used
	require.Eventually(t, func() bool {
		rows := f.Passes.Observer.Recent.Latest(2)
		if len(rows) > 0 {
			used = rows[0].Used
		}
		return used != nil
	}, time.Minute, time.Millisecond)
	require.Equal(t, "team", used.Tenant)
	require.Equal(t, "m", used.Model)
	got, err := json.Marshal([]*int64{used.Prompt, used.Cached, used.Answer})
	require.NoError(t, err)
	return string(got)
}
