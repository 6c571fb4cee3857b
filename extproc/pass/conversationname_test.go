package pass

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
	"tandem/internal/budget"
)

func TestConversationName(t *testing.T) {
	name := func(body string, pairs ...string) uint64 {
		x, h := &Pass{shared: &Shared{}}, headers{}
		for i := 0; i < len(pairs); i += 2 {
			h[pairs[i]] = pairs[i+1]
		}
		x.Head.More, x.Head.Authorization = h, []byte(h["authorization"])
		require.NoError(t, x.Req.Client.Scan(openai.Chat, []byte(body), openai.Limits{}))
		return x.conversationName()
	}
	const plain = `{"model":"m","messages":[]}`
	require.Zero(t, name(plain))
	require.Zero(t, name(plain, "x-session-id", string(make([]byte, longestName+1))))
	require.Zero(t, name(`{"model":"m","messages":[],"metadata":{"user_id":"anna"}}`), "a user is no conversation")

	seen := map[uint64]string{}
	for _, one := range []struct {
		what, body string
		headers    []string
	}{
		{"Claude Code", plain, []string{"x-claude-code-session-id", "s"}},
		{"its subagent", plain, []string{"x-claude-code-session-id", "s", "x-claude-code-agent-id", "a"}},
		{"another key's", plain, []string{"x-claude-code-session-id", "s", "authorization", "Bearer k"}},
		{"another key's of Anthropic's API", plain, []string{"x-claude-code-session-id", "s", "x-api-key", "k"}},
		{"Codex", plain, []string{"session-id", "s"}},
		{"another thread", plain, []string{"session-id", "s", "thread-id", "t"}},
		{"OpenCode", plain, []string{"x-session-affinity", "s"}},
		{"OpenAI's field", `{"model":"m","messages":[],"prompt_cache_key":"s"}`, nil},
		{"SGLang's field", `{"model":"m","messages":[],"session_id":"s"}`, nil},
		{"metadata", `{"model":"m","messages":[],"metadata":{"user_id":"{\"device_id\":\"d\",\"session_id\":\"s\"}"}}`, nil},
		{"metadata of old", `{"model":"m","messages":[],"metadata":{"user_id":"user_1_account_2_session_s"}}`, nil},
	} {
		h := name(one.body, one.headers...)
		require.NotZero(t, h, one.what)
		if one.what == "metadata of old" {
			require.Equal(t, "metadata", seen[h], "the same session")
		} else {
			require.Empty(t, seen[h], one.what)
		}
		seen[h] = one.what
	}
	require.Equal(t, name(plain, "session-id", "s"), name(`{"model":"m","messages":[],"prompt_cache_key":"t"}`, "session-id", "s"))
}

// A name costs no memory, and no header of those is refused if it comes twice.
func TestConversationNameAllocates(t *testing.T) {
	x := &Pass{shared: &Shared{}}
	require.NoError(t, x.Req.Client.Scan(openai.Chat, []byte(`{"model":"m","messages":[],"prompt_cache_key":"s"}`), openai.Limits{}))
	budget.Allocs(t, 100, 0, func() { x.conversationName() })
	require.Contains(t, lenientHeaders(), "thread-id")
	require.NotContains(t, lenientHeaders(), "")
}
