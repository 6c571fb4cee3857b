package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// openAIError is the shape of every refusal.
type openAIError struct {
	Error struct {
		Message, Type, Code string
		Param               *string
	}
}

// Requests that cannot be served are refused in OpenAI's shape, before any engine sees them.
func TestRefusals(t *testing.T) {
	t.Parallel()
	f := start(t, options{pools: `pools:
- name: chat
  models: [tiny]
  kvTransfer: nixl
  split: always
  decodeAlone: fallback
  longPrompts: refuse
  endpoints:
  - {address: %P, role: prefill}
  - {address: %P, role: prefill}
  - {address: %D, role: decode}
  - {address: %D, role: decode}
`, envoyFields: ", maxBodyBytes: 100000"})
	const path = "/v1/chat/completions"
	ok := `{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":2}`
	for _, tt := range []struct {
		name, body string
		headers    []string
		status     int
		code       string
	}{
		{"broken JSON", `{"model":"tiny","messages":[}`, nil, 400, "invalid_json"},
		{"cut off", ok[:40], nil, 400, "invalid_json"},
		{"no object", `["tiny"]`, nil, 400, "invalid_body"},
		{"a key twice", `{"model":"tiny","messages":[],"model":"other"}`, nil, 400, "duplicate_key"},
		{"a key twice, once escaped", `{"model":"tiny","messages":[],"m\u006fdel":"other"}`, nil, 400, "duplicate_key"},
		{"too deep", `{"model":"tiny","messages":` + strings.Repeat("[", 3000) + strings.Repeat("]", 3000) + `}`, nil, 400, "too_deep"},
		{"unknown model", strings.Replace(ok, "tiny", "huge", 1), nil, 404, "model_not_found"},
		{"wrong content type", ok, []string{"content-type", "text/plain"}, 415, "unsupported_media_type"},
		{"form", "a=b", []string{"content-type", "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"},
		{"compressed", ok, []string{"content-encoding", "gzip"}, 415, "unsupported_media_type"},
		{"too long", `{"model":"tiny","messages":[{"role":"user","content":"` + strings.Repeat("x", 110_000) + `"}]}`, nil, 413, "body_too_large"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := f.post(path, tt.body, append([]string{"x-request-id", "refused"}, tt.headers...)...)
			require.Equal(t, tt.status, got.status, got.body)
			requireError(t, got, tt.code)
		})
	}
	require.Empty(t, f.requests("refused", f.engines()...))

	t.Run("upgrade", func(t *testing.T) {
		got := raw(t, f, "GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		require.Contains(t, got, "HTTP/1.1 426 ")
		require.Contains(t, got, `"code":"upgrade_not_supported"`)
		require.Contains(t, got, "Upgrade: HTTP/1.1\n", "RFC 9110, 15.5.22")
	})
	for _, path := range []string{"/metrics", "/sleep?level=1", "/v1/load_lora_adapter", "/inference/v1/abort_requests", "/reset_prefix_cache", "//sl%65ep"} {
		t.Run("operators' path "+path, func(t *testing.T) {
			got := f.post(path, `{}`, "x-request-id", "refused")
			require.Equal(t, 404, got.status, got.body)
			requireError(t, got, "path_not_served")
		})
	}
	require.Empty(t, f.requests("refused", f.engines()...))
	t.Run("no body", func(t *testing.T) {
		got, err := f.try(context.Background(), http.MethodPost, path, "", "content-type", "application/json")
		require.NoError(t, err)
		require.Equal(t, 400, got.status)
		requireError(t, got, "empty_body")
	})
	t.Run("the engine's own refusal is the client's answer", func(t *testing.T) {
		got := f.post(path, `{"model":"tiny","messages":17}`)
		require.Equal(t, 400, got.status)
		require.NotEmpty(t, got.body)
	})
}

func requireError(t *testing.T, got answer, code string) {
	t.Helper()
	var e openAIError
	require.NoError(t, json.Unmarshal([]byte(got.body), &e), got.body)
	require.Equal(t, code, e.Error.Code)
	require.NotEmpty(t, e.Error.Message)
	require.NotEmpty(t, e.Error.Type)
	require.Contains(t, got.header.Get("content-type"), "application/json")
}

// sendRaw sends bytes unchanged over a new connection.
func sendRaw(t *testing.T, f *fleet, request string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	require.NoError(t, err)
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	_, err = io.WriteString(conn, request)
	require.NoError(t, err)
	return conn
}

// raw sends bytes unchanged and reads the answer.
func raw(t *testing.T, f *fleet, request string) string {
	t.Helper()
	conn := sendRaw(t, f, request)
	defer conn.Close()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	upgrade := ""
	if to := resp.Header.Get("Upgrade"); to != "" {
		upgrade = "Upgrade: " + to + "\n"
	}
	return fmt.Sprintf("HTTP/1.1 %d \n%s%s", resp.StatusCode, upgrade, body)
}

// The client's own request id names the request on both hops, if it is valid; otherwise another one replaces it.
func TestRequestIDs(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	body := apis[0].body
	got := f.post(apis[0].path, body, "x-request-id", "My.id_1-2")
	require.Equal(t, 200, got.status)
	f.hops("My.id_1-2")

	for _, bad := range []string{"with space", "semi;colon", strings.Repeat("x", 129), "ünïcode", "a/b"} {
		require.Equal(t, 200, f.post(apis[0].path, body, "x-request-id", bad).status)
	}
	ids := map[string]int{}
	for _, s := range f.requests("", f.engines()...) {
		require.Regexp(t, `^[A-Za-z0-9._-]{1,128}$`, s.RequestID)
		ids[s.RequestID]++
	}
	require.Len(t, ids, 6)
	for id, n := range ids {
		require.Equal(t, 2, n, "both hops of %s", id)
	}
}

// Nothing in a client's request steers: not control members, not headers, not tickets.
func TestClientsDoNotSteer(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	victim := f.engines()[0].addr
	deadly := []string{
		`{"do_remote_prefill":true}`,
		`{"do_remote_prefill":true,"remote_block_ids":["a"],"remote_engine_id":"e","remote_host":"` + victim + `","remote_port":1}`,
		`{"do_remote_decode":true}`, `"x"`, `null`, `17`,
	}
	for i, kv := range deadly {
		for _, api := range apis {
			for _, form := range []string{`{"kv_transfer_params":` + kv + `,`, `{"kv\u005ftransfer_params" : ` + kv + ` ,`} {
				body := strings.Replace(api.body, "{", form, 1)
				got := f.post(api.path, body, "x-request-id", fmt.Sprintf("steer-%d", i))
				require.Equal(t, 200, got.status, "%s %s: %s", api.name, kv, got.body)
			}
		}
	}
	got := f.post("/v1/chat/completions", `{"model":"tiny","n":2,"messages":[{"role":"user","content":"x"}],"kv_transfer_params":{"do_remote_prefill":true},"data_parallel_rank":3}`,
		"x-request-id", "steer-alone")
	require.Equal(t, 200, got.status, got.body)
	d := f.requests("steer-alone", f.decodes...)
	require.Len(t, d, 1)
	require.Equal(t, `{"model":"tiny","n":2,"messages":[{"role":"user","content":"x"}]}`, d[0].Body)

	// A ticket that an engine has seen, and invented ones.
	sealed := f.requests("steer-0", f.prefills...)[0].Headers["X-Tandem-Ticket"][0]
	for _, ticket := range []string{sealed, "AAAA", strings.Repeat("A", 300), sealed[:len(sealed)-2], ""} {
		for _, id := range []string{"steer-0", "steer-ticket"} {
			got := f.post(apis[0].path, apis[0].body, "x-request-id", id, "x-tandem-ticket", ticket, "x-tandem-leg", "decode",
				"x-tandem-scheme", "https", "x-gateway-destination-endpoint", "127.0.0.1:1",
				"x-envoy-upstream-rq-timeout-ms", "1", "x-envoy-retry-on", "5xx", "x-envoy-max-retries", "9", "x-envoy-hedge-on-per-try-timeout", "true",
				"x-data-parallel-rank", "1", "x-override-port", "1")
			require.Equal(t, 200, got.status, got.body)
			require.Empty(t, got.header.Get("x-tandem-ticket"))
		}
	}
	for _, e := range f.engines() {
		require.True(t, e.running(), "a client killed an engine")
	}
	for _, s := range f.requests("", f.engines()...) {
		require.NotContains(t, s.Headers, "X-Tandem-Leg", "what steered is not the engine's business")
		require.NotContains(t, s.Headers, "X-Data-Parallel-Rank")
		require.NotContains(t, s.Headers, "X-Override-Port")
	}
}

// An engine's own redirect (FastAPI redirects a path with a superfluous slash) names an address of the fleet. It is no
// answer, nor is a 101 without a request for it: another engine answers if possible, else the client gets an error.
// Envoy does not follow it, and its reservations are released.
func TestEnginesOwnRedirect(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]options{
		"nixl":         {},
		"sglang":       {dialect: "sglang"},
		"two replicas": {replicas: 2},
		"alone":        {decodes: 2, pools: "pools:\n- name: chat\n  kvTransfer: none\n  endpoints: [{address: %D}, {address: %D}]\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.envoyFields = ", maxBodyBytes: 65536"
			f := start(t, o)
			f.lenient = true // prefill's blocks are not fetched
			all := func(rule string) {
				for _, e := range f.decodes {
					f.clear(e)
					f.inject(e, rule)
				}
			}
			settled := func() {
				for _, admin := range f.admins {
					soon(t, "nothing is booked", func() bool { return metric(t, admin, "tandem_reservations") == 0 })
					require.Zero(t, metric(t, admin, "tandem_redirects_not_followed_total"))
				}
			}
			ask := func(path, body string) answer {
				ctx, stop := context.WithTimeout(context.Background(), patience)
				defer stop()
				got, err := f.try(ctx, http.MethodPost, path, body)
				require.NoError(t, err, "%s after %v", path, got.took)
				return got
			}
			for _, status := range []int{301, 302, 303, 307, 308} {
				all(fmt.Sprintf(`{"mode":"status","status":%d,"count":2}`, status))
				for _, tokens := range []int{100, 50_000} {
					if tokens > 100 && name == "sglang" {
						continue // 413
					}
					for range 2 {
						got := ask("/v1/chat/completions", question("redirect", tokens))
						require.Contains(t, []int{200, 502, 503}, got.status, got.body)
						require.Empty(t, got.header.Get("location"))
					}
				}
				settled()
			}
			all(`{"mode":"status","status":101}`)
			for _, stream := range []bool{false, true} {
				got := ask(loadBody("chat", 0, stream))
				require.Contains(t, []int{502, 503}, got.status, got.body)
				require.Contains(t, got.body, `"error":{`)
			}
			if name != "sglang" {
				got := ask("/v1/chat/completions", question("switch", 50_000)) // too large for Envoy to keep for another try
				require.Equal(t, 502, got.status, got.body)
				require.Contains(t, got.body, `"code":"bad_gateway"`)
			}
			settled()
			f.clear(f.decodes[1])
			if name != "sglang" {
				soon(t, "it is back", func() bool { return ask(loadBody("chat", 1, false)).status == 200 })
			}
		})
	}
}
