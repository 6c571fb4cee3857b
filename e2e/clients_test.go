package e2e

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// formHeaders ask for another form of an answer, for a part of it, or for none.
func formHeaders() []string {
	return []string{
		"accept-encoding: gzip, deflate", "accept: application/xml", "te: trailers", "range: bytes=0-9",
		`if-match: "x"`, `if-none-match: "x"`, "if-modified-since: Thu, 26 Nov 2026 00:00:00 GMT",
		"if-unmodified-since: Thu, 26 Nov 2026 00:00:00 GMT", `if-range: "x"`, "prefer: respond-async", "a-im: gzip",
		"expect: 100-continue", "accept-charset: utf-16", "want-digest: sha-256",
	}
}

// Tandem reads P's answer, so P gets no header that changes its form; D gets the client's, and answers in that form.
func TestFormOfAnswers(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "trtllm", "sglang", "nixl-push", "mooncake"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			f := start(t, options{prefills: 1, decodes: 1, dialect: dialect, engineArgs: []string{"--forms"}})
			f.lenient = true // D may refuse, so KV is left over
			headers := formHeaders()
			for i, header := range headers {
				name, value, _ := strings.Cut(header, ": ")
				body := strings.Replace(pairBody, " long", fmt.Sprintf(" long %d", i), 1)
				id := fmt.Sprintf("form-%02d", i)
				got := f.post("/v1/chat/completions", body, "x-request-id", id, name, value)
				prefill, decode := f.legsOf(id)
				if got.status == http.StatusOK && name != "prefer" { // if D refuses, P's leg may end before P has it
					soon(t, "P has answered: "+header, func() bool {
						prefill, decode = f.legsOf(id)
						return prefill.Status != 0
					})
				}
				switch status := map[string]int{"if-match": 412, "if-unmodified-since": 412, "if-none-match": 304,
					"if-modified-since": 304}[name]; {
				case name == "prefer": // D has not worked, so a pair's P has not answered
				case status != 0: // the answer of what stands before D
					require.Equal(t, status, got.status, header)
				case prefill.Status != 200:
					require.Fail(t, "P answered", "%s: %d", header, prefill.Status)
				case name == "accept-encoding" && runsInside(): // where D's answer is read, too
					require.Equal(t, []string{"identity"}, decode.Headers[http.CanonicalHeaderKey(name)], header)
				case name != "expect" && name != "te": // those are of one connection
					require.Equal(t, []string{value}, decode.Headers[http.CanonicalHeaderKey(name)], header)
				}
				switch name {
				case "accept-encoding", "accept", "accept-charset":
					require.NotEqual(t, []string{value}, prefill.Headers[http.CanonicalHeaderKey(name)], header)
				default:
					require.Empty(t, prefill.Headers[http.CanonicalHeaderKey(name)], header)
				}
				if name == "accept-encoding" && !runsInside() {
					require.Equal(t, "gzip", got.header.Get("Content-Encoding"))
					z, err := gzip.NewReader(strings.NewReader(got.body))
					require.NoError(t, err)
					require.NoError(t, json.NewDecoder(z).Decode(new(map[string]any)))
				}
			}
		})
	}
}

// legsOf are the legs of a request at the engines; of several the last.
func (f *fleet) legsOf(id string) (prefill, decode seen) {
	for of, into := range map[*engine]*seen{f.prefills[0]: &prefill, f.decodes[0]: &decode} {
		for _, s := range f.requests("", of) {
			if strings.Contains(s.RequestID, id) {
				*into = s
			}
		}
	}
	return prefill, decode
}

// An answer that Tandem rewrites is read by it, too. One that an engine compresses all the same stays as it is.
func TestFormOfRewrittenAnswers(t *testing.T) {
	t.Parallel()
	for pool, args := range map[string][]string{
		"  cachedTokens: prefill\n": {"--forms"}, "  nixl: {declineExpired: true}\n": {"--forms", "--bidirectional", "--decoder-ttl", "1s"},
	} {
		t.Run(strings.TrimSpace(pool), func(t *testing.T) {
			t.Parallel()
			f := start(t, options{prefills: 1, decodes: 1, engineArgs: args, pool: pool})
			asked := strings.Replace(pairBody, "{", `{"stream":true,"stream_options":{"include_usage":true},`, 1) // usage is read where it is asked for
			for _, body := range []string{pairBody, asked} {
				got := f.post("/v1/chat/completions", body, "accept-encoding", "gzip")
				require.Equal(t, 200, got.status, got.body)
				require.Empty(t, got.header.Get("Content-Encoding"))
				require.NotContains(t, got.body, "remote_host")
				require.Equal(t, body == pairBody, json.Valid([]byte(got.body)), got.body)
				got = f.post("/v1/chat/completions", body, "a-im", "gzip")
				require.Equal(t, 200, got.status, got.body)
				if got.header.Get("Content-Encoding") != "gzip" { // its leg removes that header
					continue
				}
				z, err := gzip.NewReader(strings.NewReader(got.body))
				require.NoError(t, err)
				_, err = io.ReadAll(z)
				require.NoError(t, err, "as it came")
			}
		})
	}
}

// Neither does an encode engine get them.
func TestFormOfEncodings(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 1, decodes: 1, encodes: 1, engineArgs: []string{"--forms"}, pool: "  encode: {timeout: 50s}\n"})
	a := show(1, 1, 1, "")
	got := f.post(a.path, a.body, "x-request-id", a.id, "accept-encoding", "gzip", "range", "bytes=0-9", "accept", "application/xml")
	require.Less(t, got.status, 300, got.body)
	require.Len(t, f.requests(a.id, f.encodes...), 1)
	prefill, _ := f.hops(a.id)
	require.Equal(t, 1, prefill.Encoded)
}

// What engines read as a number or as true and false, Tandem reads alike: P writes one token, and does not stream.
func TestCoercedMembers(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 1, decodes: 1})
	message := `"messages":[{"role":"user","content":"What is the capital of France, in one word or more words %d?"}]`
	prompt := `"prompt":"What is the capital of France, in one word or more words %d?"`
	input := `"store":"false","input":"What is the capital of France, in one word or more words %d?"`
	for i, c := range []struct {
		path, members string
		tokens        int // of the answer
		streams       bool
	}{
		{"/v1/chat/completions", message + `,"max_tokens":"12"`, 12, false},
		{"/v1/chat/completions", message + `,"max_completion_tokens":" 12.0 "`, 12, false},
		{"/v1/chat/completions", message + `,"max_tokens":"1_2","min_tokens":"3","n":"1"`, 12, false},
		{"/v1/chat/completions", message + `,"max_tokens":12.0,"n":true,"echo":"off"`, 12, false},
		{"/v1/chat/completions", message + `,"max_tokens":true`, 1, false},
		{"/v1/chat/completions", message + `,"max_tokens":"12","stream":"on","stream_options":{"include_usage":"yes"}`, 12, true},
		{"/v1/chat/completions", message + `,"max_tokens":"12","stream":"false","stream_options":{"include_usage":true}`, 12, false},
		{"/v1/chat/completions", message + `,"max_tokens":"12","stream":1`, 12, true},
		{"/v1/completions", prompt + `,"max_tokens":"12","n":"1"`, 12, false},
		{"/v1/completions", strings.Replace(prompt, `:"`, `:["`, 1) + `],"max_tokens":"12","echo":"no"`, 12, false},
		{"/v1/completions", `"prompt":[[%d,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20]],"max_tokens":12`, 12, false},
		{"/v1/responses", input + `,"max_output_tokens":"12"`, 12, false},
		{"/v1/messages", message + `,"max_tokens":"12"`, 12, false},
		{"/inference/v1/generate", `"token_ids":[%d,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20],` +
			`"sampling_params":{"max_tokens":"12","min_tokens":"2","n":"1"}`, 12, false},
	} {
		id := fmt.Sprintf("coerced-%d", i)
		got := f.post(c.path, fmt.Sprintf(`{"model":"tiny","ignore_eos":"true",`+c.members+`}`, i), "x-request-id", id)
		require.Equal(t, 200, got.status, "%s: %s", c.members, got.body)
		require.Equal(t, c.streams, strings.HasPrefix(got.header.Get("Content-Type"), "text/event-stream"), c.members)
		prefill, decode := f.hops(id)
		require.Equal(t, 1, prefill.CompletionTokens, "%s at P", c.members)
		require.Equal(t, c.tokens, decode.CompletionTokens, "%s at D", c.members)
	}
}
