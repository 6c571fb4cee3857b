package openai

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestErrorJSON(t *testing.T) {
	require.Equal(t, `{"error":{"message":"a \"b\"","type":"invalid_request_error","param":"model","code":"x"}}`,
		string(BadRequest("x", "model", `a "b"`).JSON()))
	e := Unavailable("no_endpoint", "later", 2*time.Second)
	require.Equal(t, 503, e.Status)
	require.Equal(t, `{"error":{"message":"later","type":"api_error","param":null,"code":"no_endpoint"}}`, string(e.JSON()))
	require.EqualError(t, e, "503 no_endpoint: later")
}

// On Anthropic's paths an error has its shape, whatever stands before the path.
func TestErrorsOfMessages(t *testing.T) {
	e := Unavailable("no_endpoint", "later", 2*time.Second)
	const openai = `{"error":{"message":"later","type":"api_error","param":null,"code":"no_endpoint"}}`
	const anthropic = `{"type":"error","error":{"type":"overloaded_error","message":"later","code":"no_endpoint"}}`
	for path, want := range map[string]string{
		"/v1/messages": anthropic, "/v1/messages?beta=true": anthropic, "/v1/messages/count_tokens": anthropic,
		"/team/v1/messages": anthropic,
		"/v1/messagesx":     openai, "/v1/chat/completions": openai, "/v1/chat/completions?x=/v1/messages": openai, "": openai,
	} {
		require.Equal(t, want, string(e.For([]byte(path)).JSON()), path)
	}
	require.Equal(t, openai, string(e.JSON()), "it is not changed")
	for status, kind := range map[int]string{400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large",
		426: "invalid_request_error", 429: "rate_limit_error", 500: "api_error", 504: "timeout_error"} {
		require.Equal(t, kind, (&Error{Status: status}).anthropicType())
	}
}

func TestConstructors(t *testing.T) {
	for e, want := range map[*Error]string{
		ModelNotFound("m"):          "404 model_not_found: The model `m` does not exist or is not served here.",
		ModelNotFound("a b"):        "404 model_not_found: The requested model does not exist or is not served here.",
		TooLarge(5):                 "413 body_too_large: the request body is larger than 5 bytes",
		UnsupportedMediaType("no"):  "415 unsupported_media_type: no",
		Timeout():                   "408 body_timeout: the request body did not arrive in time",
		Internal():                  "500 internal_error: internal error; the request id leads to the cause in the log",
		BadRequest("c", "p", "why"): "400 c: why",
	} {
		require.EqualError(t, e, want)
	}
}

func TestCheckHeaders(t *testing.T) {
	for _, c := range []struct {
		contentType, encoding string
		ok                    bool
	}{
		{"application/json", "", true},
		{"application/json", "identity", true},
		{"application/json", " Identity ", true},
		{"application/json; charset=utf-8", "", true},
		{`Application/JSON;charset="UTF-8"`, "", true},
		{"application/json; charset=utf8", "", true},
		{"application/json; charset=utf-16", "", false},
		{"application/json; charset=latin1", "", false},
		{"application/json", "gzip", false},
		{"application/json", "gzip, identity", false},
		{"application/vnd.api+json", "", false},
		{"application/jsonl", "", false},
		{"text/plain", "", false},
		{"multipart/form-data; boundary=x", "", false},
		{"application/x-www-form-urlencoded", "", false},
		{"", "", false},
		{";", "", false},
	} {
		err := CheckHeaders(c.contentType, c.encoding)
		if c.ok {
			require.NoError(t, err, c)
			continue
		}
		var e *Error
		require.ErrorAs(t, err, &e, c)
		require.Equal(t, 415, e.Status)
	}
}

func TestRequestID(t *testing.T) {
	for _, id := range []string{"a", "A-Z_0.9", "3fa85f64-5717-4562-b3fc-2c963f66afa6", strings.Repeat("x", 128)} {
		require.True(t, RequestID(id), id)
	}
	for _, id := range []string{"", " ", "a b", "a\n", "a/b", "a@b", "a[", "a`", "a{", "é", "a:b", "a\x00", strings.Repeat("x", 129)} {
		require.False(t, RequestID(id), id)
	}
}
