package config

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What the filter inside Envoy does not do is refused, and named.
func TestInsideRefusesWhatItDoesNotDo(t *testing.T) {
	const base = "envoy: {run: inside}\npools:\n- name: a\n  kvTransfer: nixl\n  endpoints: " +
		"[{address: \"10.0.0.1:1\", role: prefill}, {address: \"10.0.0.2:1\", role: decode}]\n"
	cfg, _, err := Parse([]byte(base))
	require.NoError(t, err)
	require.True(t, Inside(cfg))
	for name, tt := range map[string]struct{ from, to, path string }{
		"another place":                     {"run: inside", "run: within", "envoy.run"},
		"legs at once":                      {"kvTransfer: nixl", "kvTransfer: nixl-push", "pools[0].kvTransfer"},
		"rewritten":                         {"kvTransfer: nixl", "kvTransfer: nixl\n  nixl: {bidirectional: true}", "pools[0].kvTransfer"},
		"encode stage":                      {"kvTransfer: nixl", "kvTransfer: nixl\n  encode: {}", "pools[0].encode"},
		"cached tokens":                     {"kvTransfer: nixl", "kvTransfer: nixl\n  cachedTokens: prefill", "pools[0].cachedTokens"},
		"a sidecar":                         {"kvTransfer: nixl", "kvTransfer: nixl\n  handoff: sidecar", "pools[0].handoff"},
		"https":                             {"role: decode}", "role: decode, scheme: https}", "pools[0].endpoints"},
		"tracing":                           {"pools:", "tracing: {endpoint: \"127.0.0.1:4317\"}\npools:", "tracing"},
		"metadata":                          {"pools:", "extProc: {decisionMetadata: true}\npools:", "extProc.decisionMetadata"},
		"Envoy Gateway":                     {"pools:", "envoyGateway: {services: [\"a.b:9002\"]}\npools:", "envoyGateway"},
		"expiry of KV":                      {"kvTransfer: nixl", "kvTransfer: nixl\n  nixl: {declineExpired: true}", "pools[0].nixl.declineExpired"},
		"a stream that outlives any engine": {"kvTransfer: nixl", "kvTransfer: nixl\n  engine: any\n  continueStreams: {}", "pools[0].continueStreams"},
		"streams beside Envoy":              {"run: inside}\npools:\n- name: a", "run: beside}\npools:\n- name: a\n  continueStreams: {}", "pools[0].continueStreams"},
		"continued for ever":                {"kvTransfer: nixl", "kvTransfer: nixl\n  continueStreams: {mostTimes: 101}", "pools[0].continueStreams"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := Parse([]byte(strings.Replace(base, tt.from, tt.to, 1)))
			require.ErrorContains(t, err, tt.path)
			if !strings.HasSuffix(tt.path, "continueStreams") && name != "another place" {
				require.ErrorContains(t, err, "not available inside Envoy")
			}
		})
	}
}
