package e2e

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// deploy/envoy-gateway/extension/limit-tokens.yaml as it stands, but for the length of a period: what answers say that
// they used is off the budget of the client's API key, to the token, and one for each request. Tandem counts the same
// tokens. A key without budget gets 429 in OpenAI's shape, and the others do not.
func TestEnvoyGatewayTokenLimits(t *testing.T) {
	ledgers := t.TempDir()
	var r *redis
	g := startGatewayOf(t, gatewayOptions{
		top: "usage: {tenantHeader: x-tenant, ledger: " + filepath.Join(ledgers, "ledger-%i") + "}\n",
		beside: func(g *gateway) {
			r = startRedis(t)
			g.startRateLimits(r)
		},
		replacements: []string{
			"enableBackend: true", "enableBackend: true, enableEnvoyPatchPolicy: true",
			"extensionManager:", "rateLimit: {backend: {type: Redis, redis: {url: \"redis.test:6379\"}}}\nextensionManager:",
		},
	})
	before := g.neighbour()
	g.attach()
	const limit = 10000
	manifest, err := os.ReadFile("../deploy/envoy-gateway/extension/limit-tokens.yaml")
	require.NoError(t, err)
	yearly := strings.Replace(string(manifest), "unit: Minute", "unit: Year", 1) // so that it does not end within the test
	require.NotEqual(t, string(manifest), yearly)
	require.Contains(t, yearly, "requests: 10000,")
	require.NoError(t, os.WriteFile(filepath.Join(g.dir, "resources/limit-tokens.yaml"), []byte(yearly), 0o600))

	asked := 0
	try := func(key string, stream, says bool) (answer, error) {
		asked++
		body := gatewayChat("limited-tokens-"+strconv.Itoa(asked), 300)
		switch {
		case stream && says:
			body = strings.Replace(body, `{"model"`, `{"stream":true,"stream_options":{"include_usage":true},"model"`, 1)
		case stream:
			body = strings.Replace(body, `{"model"`, `{"stream":true,"model"`, 1)
		}
		return g.try(t.Context(), http.MethodPost, "/v1/chat/completions", body, "host", "llm.test", "authorization", "Bearer "+key,
			"x-request-id", "tokens-"+strconv.Itoa(asked), "x-tenant", "team-b") // which is not the client's to say
	}
	ask := func(key string, stream, says bool) answer {
		t.Helper()
		got, err := try(key, stream, says)
		require.NoError(t, err)
		return got
	}
	soon(t, "the service has the limits", func() bool {
		got, err := try("key-of-team-c", false, true) // Envoy's listener is replaced meanwhile
		return err == nil && got.status == 200 && got.header.Get("x-ratelimit-limit") != ""
	})
	openAI(t, g.ask("llm.test", "/v1/chat/completions", "no-key"), 401, "invalid_api_key", "")

	spent, requests, remaining := 0, 0, 0
	var refused answer
	soon(t, "the budget is used up", func() bool {
		stream, says := asked%3 > 0, asked%3 < 2
		got := ask("key-of-team-a", stream, says)
		requests++
		if got.status == 429 {
			refused = got
			return true
		}
		require.Equal(t, 200, got.status, got.body)
		remaining, err = strconv.Atoi(got.header.Get("x-ratelimit-remaining"))
		require.NoError(t, err, "%v", got.header)
		require.GreaterOrEqual(t, remaining, limit-spent-requests, "more was taken off than answers said")
		cost := usageOf(got)
		require.Equal(t, says, cost.Said, got.body)
		spent += cost.Prompt + cost.Answer
		return false
	})
	require.Greater(t, spent+requests, limit, "refused within the budget")
	openAI(t, refused, 429, "rate_limit_exceeded", "the rate limit of this gateway is exceeded")
	require.Equal(t, "0", refused.header.Get("x-ratelimit-remaining"), "%v", refused.header)
	require.Contains(t, refused.header.Get("x-ratelimit-limit"), "10000")
	seconds, err := strconv.Atoi(refused.header.Get("retry-after"))
	require.NoError(t, err, "%v", refused.header)
	require.Positive(t, seconds)
	require.Equal(t, refused.header.Get("x-ratelimit-reset"), refused.header.Get("retry-after"))
	require.Equal(t, 200, ask("key-of-team-b", false, true).status, "another key has a budget of its own")
	hops := 0
	for _, hop := range g.requests("", append(g.prefills, g.decodes...)...) {
		if slices.Contains(hop.Headers["X-Tenant"], "team-a") {
			hops++
			require.Empty(t, hop.Headers["Authorization"], "the key is removed")
		}
	}
	require.Equal(t, 2*(requests-1), hops, "each that was answered has two hops")
	soon(t, "Tandem counts the same", func() bool {
		total := 0
		for _, line := range readLedgers(t, ledgers) {
			if line.Tenant == "team-a" {
				said := line.used()
				total += said.Prompt + said.Answer
			}
		}
		return total == spent
	})
	soon(t, "the service counts the same", func() bool { return r.limited("team-a") == spent+requests })
	require.Equal(t, before, g.neighbour())
}

// startRateLimits starts Envoy's rate limit service as Envoy Gateway does in a cluster, and has the gateway's Envoy ask
// it: without a cluster Envoy Gateway 1.9 cannot (internal/infrastructure/host/ratelimit_infra.go).
func (g *gateway) startRateLimits(r *redis) {
	g.t.Helper()
	certs := filepath.Join(g.dir, "config/certs/envoy-rate-limit")
	free := ports(g.t, 3)
	args := []string{
		"CONFIG_TYPE=GRPC_XDS_SOTW", "CONFIG_GRPC_XDS_SERVER_URL=127.0.0.1:18001", "CONFIG_GRPC_XDS_NODE_ID=envoy-ratelimit",
		"CONFIG_GRPC_XDS_SERVER_USE_TLS=true", "CONFIG_GRPC_XDS_SERVER_TLS_SAN=envoy-gateway",
		"CONFIG_GRPC_XDS_CLIENT_TLS_CERT=" + certs + "/tls.crt", "CONFIG_GRPC_XDS_CLIENT_TLS_KEY=" + certs + "/tls.key",
		"CONFIG_GRPC_XDS_SERVER_TLS_CACERT=" + certs + "/ca.crt",
		"GRPC_SERVER_USE_TLS=true", "GRPC_SERVER_TLS_CERT=" + certs + "/tls.crt", "GRPC_SERVER_TLS_KEY=" + certs + "/tls.key",
		"GRPC_SERVER_TLS_CA_CERT=" + certs + "/ca.crt", "FORCE_START_WITHOUT_INITIAL_CONFIG=true", "LOG_LEVEL=info",
		"USE_STATSD=false", "REDIS_SOCKET_TYPE=tcp", "REDIS_URL=" + r.addr, "XDS_CLIENT_BACKOFF_INITIAL_INTERVAL=100ms",
		"XDS_CLIENT_BACKOFF_MAX_INTERVAL=1s", "CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL=100ms",
	}
	for i, name := range []string{"", "GRPC_", "DEBUG_"} {
		host, port, err := net.SplitHostPort(free[i])
		require.NoError(g.t, err)
		args = append(args, name+"HOST="+host, name+"PORT="+port)
	}
	startProcess(g.t, g.dir, "ratelimit", "/usr/bin/env", append(args, builtTool(g.t, "ratelimit"))...)
	g.write("ratelimit.yaml", "resources/ratelimit.yaml", "CACERT", certs+"/ca.crt", "RATELIMIT", portOf(free[1]))
}

// limited returns what Envoy's rate limit service has counted of a client.
func (r *redis) limited(client string) int {
	r.t.Helper()
	const sum = `"local n=0 for _,k in ipairs(redis.call('KEYS','*_%s_*')) do n=n+redis.call('GET',k) end return n"`
	n, err := strconv.Atoi(strings.TrimPrefix(r.do("EVAL", strings.Replace(sum, "%s", client, 1), "0"), ":"))
	require.NoError(r.t, err)
	return n
}
