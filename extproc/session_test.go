package extproc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

func TestSessionOf(t *testing.T) {
	names := func(k SessionKey, header, cookies, body string) uint64 {
		x := newScratch(&Server{}).request
		x.msg.Headers.Names = sessionHeaders(map[string]Policy{"p": {Session: k}})
		set := func(name, value string) {
			if value != "" {
				x.msg.Headers.Set(name, []byte(value))
			}
		}
		set("x-session", header)
		set("cookie", cookies)
		require.NoError(t, x.req.Scan(openai.Chat, []byte(body), openai.Limits{}))
		return x.sessionOf(k)
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
