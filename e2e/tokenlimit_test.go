package e2e

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// docs/howto/limit-tokens.md as it stands: a tenant whose answers have used up the budget gets 429 until the minute ends,
// and others do not. It runs where envoyproxy/ratelimit is there: RATELIMIT names it (make ratelimit builds it).
func TestTokenLimits(t *testing.T) {
	service := os.Getenv("RATELIMIT")
	if service == "" {
		var err error
		service, err = filepath.Abs("../.tools/bin/ratelimit")
		require.NoError(t, err)
		if _, err := os.Stat(service); err != nil {
			t.Skip("envoyproxy/ratelimit is missing: make ratelimit builds it, or set RATELIMIT")
		}
	}
	t.Parallel()
	page, err := os.ReadFile("../docs/howto/limit-tokens.md")
	require.NoError(t, err)
	var blocks []string
	for _, m := range regexp.MustCompile("(?s)```yml\n(.*?)```").FindAllSubmatch(page, -1) {
		blocks = append(blocks, string(m[1]))
	}
	require.Len(t, blocks, 3, "the service's configuration, the cluster, the filter")

	r, free := startRedis(t), ports(t, 3)
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "limits", "config"), 0o700))
	limits := strings.Replace(blocks[0], "10000}", "60}", 1)
	require.NotEqual(t, blocks[0], limits)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "limits", "config", "tokens.yaml"), []byte(limits), 0o600))
	args := []string{"RUNTIME_ROOT=" + dir, "RUNTIME_SUBDIRECTORY=limits", "RUNTIME_WATCH_ROOT=false", "USE_STATSD=false",
		"REDIS_SOCKET_TYPE=tcp", "REDIS_URL=" + r.addr}
	for i, name := range []string{"", "GRPC_", "DEBUG_"} {
		host, port, err := net.SplitHostPort(free[i])
		require.NoError(t, err)
		args = append(args, name+"HOST="+host, name+"PORT="+port)
	}
	p := startProcess(t, dir, "ratelimit", "/usr/bin/env", append(args, service)...)

	f := start(t, options{prefills: 1, decodes: 1, top: "usage: {}\n", bootstrap: func(f *fleet) string {
		f.waitFor(p, "http://"+free[0]+"/healthcheck")
		bin, _ := binaries()
		text, err := exec.Command(filepath.Join(bin, "tandem"), "envoy", "-f", f.config).Output()
		require.NoError(t, err)
		return withRateLimit(t, text, strings.Replace(blocks[1], "8081", portOf(free[1]), 1), blocks[2])
	}})
	ask := func(tenant string) answer {
		return f.post("/v1/completions", `{"model":"tiny","prompt":"Two hops, please.","max_tokens":12}`, "x-tenant", tenant)
	}
	first := ask("team-b")
	require.Equal(t, 200, first.status, first.body)
	cost := usageOf(first)
	require.Positive(t, cost.Prompt*cost.Answer)
	require.Equal(t, "60", first.header.Get("x-ratelimit-remaining"), "%v", first.header)
	var refused answer
	answered := 1
	soon(t, "the budget is used up", func() bool {
		refused = ask("team-b")
		if refused.status == 200 {
			answered++
		}
		return refused.status == 429
	})
	require.GreaterOrEqual(t, answered*(cost.Prompt+cost.Answer), 60, "the budget was not used up")
	requireError(t, refused, "rate_limit_exceeded")
	seconds, err := strconv.Atoi(refused.header.Get("retry-after"))
	require.NoError(t, err, "%v", refused.header)
	require.LessOrEqual(t, seconds, 60)
	require.Equal(t, "0", refused.header.Get("x-ratelimit-remaining"))
	require.Equal(t, 200, ask("team-a").status, "another tenant")
	require.Equal(t, 200, f.post("/v1/completions", `{"model":"tiny","prompt":"x","max_tokens":1}`).status, "no tenant")
}

// withRateLimit adds a cluster and a filter to a bootstrap, as the how-to says.
func withRateLimit(t *testing.T, bootstrap []byte, cluster, filter string) string {
	t.Helper()
	var config map[string]any
	require.NoError(t, yaml.Unmarshal(bootstrap, &config))
	parsed := func(text string) (out map[string]any) {
		require.NoError(t, yaml.Unmarshal([]byte(text), &out), text)
		return out
	}
	static := config["static_resources"].(map[string]any)
	static["clusters"] = append(static["clusters"].([]any), parsed(cluster))
	listener := static["listeners"].([]any)[0].(map[string]any)
	require.Equal(t, "openai", listener["name"])
	chain := listener["filter_chains"].([]any)[0].(map[string]any)
	manager := chain["filters"].([]any)[0].(map[string]any)["typed_config"].(map[string]any)
	filters := manager["http_filters"].([]any)
	last := len(filters) - 1
	require.Equal(t, "envoy.filters.http.router", filters[last].(map[string]any)["name"])
	manager["http_filters"] = append(filters[:last:last], parsed(filter), filters[last])
	text, err := yaml.Marshal(config)
	require.NoError(t, err)
	return string(text)
}
