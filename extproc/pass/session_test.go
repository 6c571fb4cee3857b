package pass

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
	"tandem/extproc/plan"
)

type headers map[string]string

func (h headers) Extra(name string) []byte { return []byte(h[name]) }

func TestSessionOf(t *testing.T) {
	names := func(k SessionKey, header, cookies, body string) uint64 {
		h := headers{"x-session": header, "cookie": cookies}
		var r plan.Request
		require.NoError(t, r.Client.Scan(openai.Chat, []byte(body), openai.Limits{}))
		return k.of(&Head{More: h}, &r)
	}
	const body = `{"model":"m","user":"anna","n":1}`
	all := SessionKey{Header: "x-session", Cookie: "sid", Body: "user"}
	require.Zero(t, names(SessionKey{}, "a", "sid=b", body), "nothing names it")
	require.Zero(t, names(all, "", "other=b; sid2=c", `{"model":"m","user":7}`))
	header, fromCookie, fromBody := names(all, "a", "sid=a", body), names(all, "", `x=y; sid="a"; z=1`, body), names(all, "", "", body)
	require.NotZero(t, header)
	require.Equal(t, header, names(all, "a", "", `{"model":"m"}`))
	require.NotEqual(t, header, fromCookie, "what a header says is not what a cookie says")
	require.Equal(t, fromCookie, names(all, "", "sid=a", body))
	require.NotZero(t, fromBody)
	require.NotEqual(t, fromBody, names(all, "", "", `{"model":"m","user":"bert"}`))
	require.Zero(t, names(SessionKey{Body: "n"}, "", "", body), "a number is no name")
}
