package openai

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func hashes(t *testing.T, api API, body string) []uint64 {
	t.Helper()
	return scanned(t, api, body).PromptHash(nil, 16, 100)
}

func shared(a, b []uint64) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

func TestPromptHash(t *testing.T) {
	turn := func(n int) string {
		return fmt.Sprintf(`{"role":"user","content":"turn %d: %s"}`, n, strings.Repeat("words ", 20))
	}
	chat := func(messages, rest string) []uint64 {
		return hashes(t, Chat, `{"model":"m","messages":[`+messages+`]`+rest+`}`)
	}
	first, second := turn(1), turn(1)+","+turn(2)

	one := chat(first, "")
	require.Len(t, one, (len(first)+1)/16)
	two := chat(second, "")
	require.Equal(t, len(one), shared(one, two), "a conversation that grows shares all of its earlier turns")
	require.Equal(t, one, hashes(t, Chat, `{"temperature":1,"messages":[`+first+`],"stream":true, "model":"m"}`), "other members change nothing")
	require.Equal(t, one, hashes(t, Messages, `{"messages":[`+first+`],"model":"m"}`))

	for _, rest := range []string{`,"tools":[]`, `,"cache_salt":"s"`, `,"system":"s"`, `,"chat_template_kwargs":{}`, `,"documents":[]`, `,"reasoning_effort":"low"`} {
		require.Zero(t, shared(one, chat(first, rest)), rest)
	}
	require.Equal(t, one, chat(first, `,"tools":null`))
	require.NotEqual(t, chat(first, `,"tools":[]`), chat(first, `,"documents":[]`))
	require.NotEqual(t, one, hashes(t, Chat, `{"model":"other","messages":[`+first+`]}`))

	r := scanned(t, Chat, `{"model":"m","messages":[`+first+`]}`)
	require.Equal(t, len(first)+2, r.PromptBytes())
	require.Equal(t, one[:3], r.PromptHash(nil, 16, 3))
	require.Equal(t, append([]uint64{7}, one[:3]...), r.PromptHash([]uint64{7}, 16, 3))
	require.Empty(t, r.PromptHash(nil, len(first)+2, 9), "a block that is not full has no hash")
	require.Empty(t, r.PromptHash(nil, 0, 9))
}

func TestPromptOfEachAPI(t *testing.T) {
	for api, body := range map[API]string{
		Chat:        `{"messages":["0123456789"],"prompt":"x"}`,
		Completions: `{"messages":[],"prompt":"012345678901"}`,
		Responses:   `{"input":"012345678901","prompt":{}}`,
		Messages:    `{"messages":["0123456789"],"input":1}`,
		Generate:    `{"token_ids":[1,2,3,4,5,66],"prompt":"x"}`,
	} {
		require.Equal(t, 14, scanned(t, api, body).PromptBytes(), api)
	}
	r := scanned(t, PassThrough, `{"prompt":"x"}`)
	require.Zero(t, r.PromptBytes())
	require.Empty(t, r.PromptHash(nil, 1, 9))
}

// TestPromptHashStays: replicas share hashes, so they may change only together with the shared format.
func TestPromptHashStays(t *testing.T) {
	r := scanned(t, Chat, `{"model":"m","tools":[1],"messages":[{"role":"user","content":"hello"}]}`)
	require.Equal(t, "[5adc9a8722ed868d 8dd38910f0112e5]", fmt.Sprintf("%x", r.PromptHash(nil, 16, 2)))
}
