package config

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What the filter inside Envoy does is taken.
func TestInsideTakesWhatItDoes(t *testing.T) {
	const engines = "[{address: \"10.0.0.1:1\", role: prefill, scheme: https}, {address: \"10.0.0.2:1\", role: decode}]"
	for _, pool := range []string{
		"kvTransfer: nixl-push", "kvTransfer: sglang", "kvTransfer: mooncake", "kvTransfer: trtllm",
		"kvTransfer: nixl, nixl: {declineExpired: true}",
		"kvTransfer: nixl, cachedTokens: prefill",
	} {
		t.Run(pool, func(t *testing.T) {
			_, _, err := Parse([]byte("envoy: {run: inside}\nextProc: {decisionMetadata: true}\n" +
				"tracing: {endpoint: \"127.0.0.1:4317\"}\npools:\n- {name: a, " + pool + ", endpoints: " + engines + "}\n"))
			require.NoError(t, err)
		})
	}
}

// What the filter inside Envoy does not do is refused, and named.
func TestInsideRefusesWhatItDoesNotDo(t *testing.T) {
	const base = "envoy: {run: inside}\npools:\n- name: a\n  kvTransfer: nixl\n  endpoints: " +
		"[{address: \"10.0.0.1:1\", role: prefill}, {address: \"10.0.0.2:1\", role: decode}]\n"
	cfg, _, err := Parse([]byte(base))
	require.NoError(t, err)
	require.True(t, Inside(cfg))
	for name, tt := range map[string]struct{ from, to, path string }{
		"another place":                     {"run: inside", "run: within", "envoy.run"},
		"a sidecar":                         {"kvTransfer: nixl", "kvTransfer: nixl\n  handoff: sidecar", "pools[0].handoff"},
		"Envoy Gateway":                     {"pools:", "envoyGateway: {services: [\"a.b:9002\"]}\npools:", "envoyGateway"},
		"a stream that outlives any engine": {"kvTransfer: nixl", "kvTransfer: nixl\n  engine: any\n  continueStreams: {}", "pools[0].continueStreams"},
		"streams beside Envoy":              {"run: inside}\npools:\n- name: a", "run: beside}\npools:\n- name: a\n  continueStreams: {}", "pools[0].continueStreams"},
		"continued for ever":                {"kvTransfer: nixl", "kvTransfer: nixl\n  engine: vllm\n  continueStreams: {mostTimes: 101}", "pools[0].continueStreams.mostTimes"},
		"answers of no length":              {"kvTransfer: nixl", "kvTransfer: nixl\n  engine: vllm\n  continueStreams: {minAnswerTokens: -1}", "pools[0].continueStreams.minAnswerTokens"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := Parse([]byte(strings.Replace(base, tt.from, tt.to, 1)))
			require.ErrorContains(t, err, tt.path)
			if !strings.Contains(tt.path, "continueStreams") && name != "another place" {
				require.ErrorContains(t, err, "not available inside Envoy")
			}
		})
	}
}
