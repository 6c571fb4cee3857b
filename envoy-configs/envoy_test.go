package envoyconfigs

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"tandem/replica/config"
)

const standConfig = `{extProc: {listen: $EXTPROC}, replan: {listen: $REPLAN}, envoy: {listen: $LISTEN, admin: $ADMIN, maxBodyBytes: 200000, bodyMode: auto},
pools: [{name: a, kvTransfer: nixl, endpoints: [{address: "127.0.0.1:8101", role: prefill}, {address: "127.0.0.1:8201", role: decode}]}]}`

// answer is what a client got.
type answer struct {
	Status int
	Header http.Header
	Body   string
}

// post sends a request; extra is header names and values.
func (s *stand) post(t *testing.T, path, contentType string, body io.Reader, extra ...string) answer {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+path, body)
	require.NoError(t, err)
	r.Header.Set("content-type", contentType)
	for i := 0; i < len(extra); i += 2 {
		r.Header.Set(extra[i], extra[i+1])
	}
	return s.do(t, r)
}

func (s *stand) do(t *testing.T, r *http.Request) answer {
	t.Helper()
	got, err := s.client.Do(r)
	require.NoError(t, err)
	defer got.Body.Close()
	text, err := io.ReadAll(got.Body)
	require.NoError(t, err)
	return answer{got.StatusCode, got.Header, string(text)}
}

// TestEnvoy holds what the server relies on against the real Envoy.
func TestEnvoy(t *testing.T) {
	s := newStand(t, standConfig)
	s.testRequests(t)
	t.Run("local replies", s.testLocalReplies)
}

// testRequests holds what an Envoy does with requests, wherever Tandem's main listener stands in it.
func (s *stand) testRequests(t *testing.T) {
	t.Helper()
	t.Run("two hops", s.testTwoHops)
	t.Run("what a client must not set", s.testForged)
	t.Run("how bodies come", s.testModes)
	t.Run("paths", s.testPaths)
	t.Run("replan", s.testReplan)
	t.Run("early answers", s.testEarlyAnswers)
	t.Run("circle", s.testCircle)
	t.Run("immediate", s.testImmediate)
}

func (s *stand) testTwoHops(t *testing.T) {
	got := s.post(t, "/v1/chat/completions", "application/json", strings.NewReader("{}"), "x-request-id", "mine-1")
	require.Equal(t, 200, got.Status)
	require.Equal(t, `{"engine":"D"}`, got.Body)
	require.Equal(t, "mine-1", got.Header.Get("x-request-id"))
	for name := range got.Header {
		own := strings.HasPrefix(name, "X-Tandem-") || strings.HasPrefix(name, "X-Envoy-")
		require.False(t, own || name == "X-Gateway-Destination-Endpoint", name)
	}
	passes, calls := s.take()
	require.Len(t, passes, 2)
	require.True(t, strings.HasPrefix(passes[1].Headers["x-tandem-ticket"], "back out mine-1"), "the redirect's ticket, made with the leg's")
	require.NotContains(t, passes[1].Headers, "x-tandem-leg", "pass 1's route is forgotten")
	require.Len(t, calls, 2)
	require.Equal(t, []string{"P", " {}"}, []string{calls[0].Engine, calls[0].Body})
	require.Equal(t, "3", calls[0].Header.Get("content-length"), "the leg had the whole body before it asked P")
	require.Equal(t, []string{"D", "  {}"}, []string{calls[1].Engine, calls[1].Body}, "pass 2 begins with the body of pass 1")
	for _, c := range calls {
		require.Equal(t, "mine-1", c.Header.Get("x-request-id"))
		require.Equal(t, "out", c.Header.Get("x-tandem-ticket"), "never the one with KV parameters")
		for name := range c.Header {
			require.False(t, strings.HasPrefix(name, "X-Envoy-"), name)
		}
		require.Empty(t, c.Header.Get("x-tandem-leg"))
	}
}

func (s *stand) testForged(t *testing.T) {
	got := s.post(t, "/v1/chat/completions", "application/json", strings.NewReader("{}"), "x-tandem-ticket", "forged", "x-tandem-leg", "pass",
		"x-tandem-scheme", "https", "x-gateway-destination-endpoint", "127.0.0.1:1", "x-envoy-max-retries", "9",
		"x-envoy-upstream-rq-timeout-ms", "1", "x-envoy-original-url", "x", "x-envoy-anything", "x", "x-tandem-reservation", "forged")
	require.Equal(t, `{"engine":"D"}`, got.Body)
	passes, _ := s.take()
	require.Len(t, passes, 2)
	require.Len(t, passes[0].Headers["x-tandem-reservation"], len("2f3e4d5c-0000-4000-8000-0123456789ab"), "Envoy's own name for the request")
	require.Equal(t, passes[0].Headers["x-tandem-reservation"], passes[1].Headers["x-tandem-reservation"])
	delete(passes[0].Headers, "x-tandem-reservation")
	for name := range passes[0].Headers {
		require.False(t, strings.HasPrefix(name, "x-tandem-") || name == "x-gateway-destination-endpoint", name)
		require.False(t, strings.HasPrefix(name, "x-envoy-") && name != "x-envoy-external-address" && name != "x-envoy-internal", name)
	}
}

func (s *stand) testModes(t *testing.T) {
	const small, large, long = 1000, 100000, 300000
	for name, tt := range map[string]struct {
		bytes       int
		contentType string
		chunked     bool
		first       string
		second      string // mode of pass 2
	}{
		"small":                 {small, "application/json", false, "FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"},
		"large":                 {large, "application/json; charset=utf-8", false, "BUFFERED", "BUFFERED"},
		"at the limit":          {200000, "application/json", false, "BUFFERED", "BUFFERED"},
		"longer":                {200001, "application/json", false, "FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"},
		"far longer":            {long, "application/json", false, "FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"},
		"small, of no length":   {small, "Application/JSON", true, "FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"},
		"large, of no length":   {large, "application/json", true, "FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"},
		"upload":                {large, "multipart/form-data; boundary=x", false, "NONE", ""},
		"upload, of no length":  {20 << 20, "multipart/form-data; boundary=x", true, "NONE", ""},
		"upload over all limit": {40 << 20, "application/octet-stream", false, "NONE", ""},
	} {
		t.Run(name, func(t *testing.T) {
			content := bytes.Repeat([]byte("x"), tt.bytes)
			var body io.Reader = bytes.NewReader(content)
			if tt.chunked {
				body = io.MultiReader(body) // net/http cannot tell its length
			}
			path := "/v1/chat/completions"
			if tt.second == "" {
				path += "?pass"
			}
			got := s.post(t, path, tt.contentType, body)
			require.Equal(t, 200, got.Status, got.Body)
			passes, calls := s.take()
			require.Equal(t, tt.first, passes[0].Mode)
			last := calls[len(calls)-1]
			if tt.second == "" {
				require.Equal(t, string(content), last.Body)
				return
			}
			require.Equal(t, tt.bytes, passes[0].Body)
			require.Equal(t, tt.second, passes[1].Mode)
			require.Equal(t, "  "+string(content), last.Body)
			if tt.first == "BUFFERED" || tt.bytes == small && !tt.chunked {
				require.Equal(t, 1, passes[0].Pieces)
			}
		})
	}
}

// What engines decode is decoded before it is looked at, so that there is one spelling of every path.
func (s *stand) testPaths(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/chat/%63ompletions":      "/v1/chat/completions",
		"/v1%2Fchat%2fcompletions":    "/v1/chat/completions",
		"/v1/./chat//completions":     "/v1/chat/completions",
		"/%2e%2e/v1/x/../completions": "/v1/completions",
		"/v1/models/a%20b%3Ac":        "/v1/models/a%20b%3Ac",
	} {
		u, err := url.Parse(s.URL)
		require.NoError(t, err)
		u.Opaque = path
		r := &http.Request{Method: http.MethodGet, URL: u, Host: u.Host, Header: http.Header{}}
		require.Equal(t, 200, s.do(t, r.WithContext(t.Context())).Status)
		passes, _ := s.take()
		require.Equal(t, want, passes[0].Headers[":path"])
	}
}

func (s *stand) testReplan(t *testing.T) {
	got := s.post(t, "/v1/chat/completions?dead", "application/json", strings.NewReader("{}"))
	require.Equal(t, `{"engine":"D"}`, got.Body)
	passes, calls := s.take()
	require.Len(t, calls, 1)
	// The leg turned P's absence into a redirect; D's was turned into one by the replan port.
	require.Len(t, passes, 3)
	require.True(t, strings.HasPrefix(passes[1].Headers["x-tandem-ticket"], "back out"))
	require.Equal(t, "replanned after out", passes[2].Headers["x-tandem-ticket"])
}

// Envoy follows no redirect of a request that has not gone out in full. If the router sends the last piece of a body
// late, a hop may have failed by then.
func (s *stand) testEarlyAnswers(t *testing.T) {
	for query, passes := range map[string]int{"dead+late": 3, "early+late": 2} {
		t.Run(query, func(t *testing.T) {
			body := io.MultiReader(bytes.NewReader(make([]byte, 130000))) // of no length, and so in pieces
			got := s.post(t, "/v1/chat/completions?"+query, "application/json", body)
			require.Equal(t, 200, got.Status, got.Body)
			require.Equal(t, `{"engine":"D"}`, got.Body)
			seen, calls := s.take()
			require.Len(t, seen, passes)
			require.Equal(t, "FULL_DUPLEX_STREAMED", seen[0].Mode)
			require.Len(t, calls[len(calls)-1].Body, 130000+passes)
		})
	}
}

func (s *stand) testCircle(t *testing.T) {
	got := s.post(t, "/v1/chat/completions?circle", "application/json", strings.NewReader("{}"))
	require.Equal(t, 503, got.Status, "not the redirect")
	require.Equal(t, "attempts_exhausted", codeOf(t, got))
	require.Equal(t, "1", got.Header.Get("retry-after"))
	require.Equal(t, strconv.Itoa(len(got.Body)), got.Header.Get("content-length"))
	require.Empty(t, got.Header.Get("location"))
	require.Empty(t, got.Header.Get("x-tandem-ticket"))
	passes, _ := s.take()
	require.Len(t, passes, config.MaxRedirects+1)
	// A body over the buffer cannot be redirected at all.
	got = s.post(t, "/v1/chat/completions", "application/json", bytes.NewReader(make([]byte, 200000+bufferMargin+1)))
	require.Equal(t, 503, got.Status)
	require.Equal(t, "attempts_exhausted", codeOf(t, got))
	s.take()
}

func (s *stand) testImmediate(t *testing.T) {
	for _, body := range []string{`{"error":{"message":"say 100%_\"hi\""}}`, "%REQ(host)%", "", strings.Repeat("long ", 8000)} {
		for _, size := range []int{2, 100000} {
			got := s.post(t, "/v1/chat/completions?immediate="+url.QueryEscape(body), "application/json", bytes.NewReader(make([]byte, size)))
			require.Equal(t, 503, got.Status)
			require.Equal(t, body, got.Body)
			require.Equal(t, "7", got.Header.Get("retry-after"))
			if body != "" {
				require.Equal(t, []string{"application/json"}, got.Header.Values("content-type"))
			}
		}
	}
	s.take()
}

// codeOf checks the shape of an error and returns its code.
func codeOf(t *testing.T, a answer) string {
	t.Helper()
	require.Equal(t, []string{"application/json"}, a.Header.Values("content-type"))
	var e struct {
		Error map[string]any `json:"error"`
	}
	require.NoError(t, json.Unmarshal([]byte(a.Body), &e), a.Body)
	require.Len(t, e.Error, 4)
	require.NotEmpty(t, e.Error["message"])
	require.NotEmpty(t, e.Error["type"])
	require.Contains(t, e.Error, "param")
	code, _ := e.Error["code"].(string)
	return code
}

func (s *stand) testLocalReplies(t *testing.T) {
	for name, tt := range map[string]struct {
		path, retryAfter string
		header           []string
		status           int
		code             string
	}{
		"broken":    {"/v1/chat/completions?broken", "1", nil, 503, "router_unavailable"},
		"undecided": {"/v1/chat/completions?undecided", "1", nil, 503, "router_undecided"},
		"headers":   {"/", "", []string{"x", strings.Repeat("x", 200<<10)}, 431, "headers_too_large"},
		"gone":      {"/v1/embeddings?gone", "1", nil, 503, "endpoint_unavailable"},
		"upgrade":   {"/v1/realtime", "", []string{"connection", "upgrade", "upgrade", "websocket"}, 426, "upgrade_not_supported"},
	} {
		t.Run(name, func(t *testing.T) {
			got := s.post(t, tt.path, "application/json", strings.NewReader("{}"), tt.header...)
			require.Equal(t, tt.status, got.Status)
			require.Equal(t, tt.code, codeOf(t, got))
			require.Equal(t, tt.retryAfter, got.Header.Get("retry-after"))
			require.Equal(t, tt.status == 426, got.Header.Get("upgrade") == "HTTP/1.1")
		})
	}
	for path, want := range map[string]string{ // in Anthropic's shape
		"/v1/messages?broken":                 `{"error":{"code":"router_unavailable","message":"the router did not answer; try again","type":"api_error"},"type":"error"}`,
		"/team/v1/messages?undecided":         `{"error":{"code":"router_undecided","message":"the router named no endpoint; try again","type":"api_error"},"type":"error"}`,
		"/v1/messages/count_tokens?undecided": `{"error":{"code":"router_undecided","message":"the router named no endpoint; try again","type":"api_error"},"type":"error"}`,
	} {
		got := s.post(t, path, "application/json", strings.NewReader("{}"))
		require.Equal(t, 503, got.Status, path)
		require.JSONEq(t, want, got.Body, path)
		require.Equal(t, "1", got.Header.Get("retry-after"), path)
	}
}

// TLS to the external processor, with a certificate of Envoy's own.
func TestEnvoyOverTLS(t *testing.T) {
	file := writeCertificate(t)
	pair, err := tls.LoadX509KeyPair(file, file)
	require.NoError(t, err)
	s := newStand(t, `{extProc: {listen: $EXTPROC, tls: {certFile: c, keyFile: k, clientCaFile: c}}, replan: {listen: $REPLAN},
envoy: {listen: $LISTEN, admin: $ADMIN, extProcTls: {caFile: "`+file+`", serverName: tandem.test, certFile: "`+file+`", keyFile: "`+file+`"}},
pools: [{name: a, kvTransfer: none, endpoints: [{address: "127.0.0.1:8101"}]}]}`,
		grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAnyClientCert})))
	got := s.post(t, "/v1/chat/completions", "application/json", strings.NewReader("{}"))
	require.Equal(t, `{"engine":"D"}`, got.Body)
}
