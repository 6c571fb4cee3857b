package config

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/reflect/protoreflect"

	configv1 "tandem/protos/config/v1"
)

// Every setting is decided: a new one is not a policy's until somebody has said that it may be.
func TestEverySettingIsDecided(t *testing.T) {
	ownersAlone := map[string]string{
		"Config":   "ext_proc replan admin state tickets notices envoy_gateway tracing record",
		"Usage":    "ledger",
		"Envoy":    "listen admin max_body_bytes ext_procs replans body_mode decode_idle_timeout ext_proc_tls endpoint_tls replicas cors stats run",
		"Pool":     "api_key_file lmcache handoff",
		"Endpoint": "lmcache api_key_file",
		"Transfer": "host", "KvEvents": "listen", "Discovery": "file kubernetes inference_pool",
	}
	seen := map[protoreflect.Name]bool{}
	var walk func(d protoreflect.MessageDescriptor)
	walk = func(d protoreflect.MessageDescriptor) {
		if seen[d.Name()] {
			return
		}
		seen[d.Name()] = true
		allowed := strings.Fields(inPolicies[d.Name()])
		for i := range d.Fields().Len() {
			f := d.Fields().Get(i)
			may := slices.Contains(allowed, "*") || slices.Contains(allowed, string(f.Name()))
			owner := slices.Contains(strings.Fields(ownersAlone[string(d.Name())]), string(f.Name()))
			require.NotEqual(t, may, owner, "%s.%s: a policy may have it (inPolicies), or only the gateway's owner (here)", d.Name(), f.Name())
			if may && f.Kind() == protoreflect.MessageKind {
				walk(f.Message())
			}
		}
	}
	walk((&configv1.Config{}).ProtoReflect().Descriptor())
	for _, name := range slices.Collect(maps.Keys(inPolicies)) {
		require.True(t, seen[name], "%s is in no policy", name)
	}
}

// What stands in a policy is what a file says, without what holds in a gateway's Envoy anyway.
func TestForPolicy(t *testing.T) {
	const file = "admin: {listen: '0.0.0.0:9090'}\nenvoy: {run: inside, pathPrefixes: [/llm]}\n" +
		"pools: # the engines\n- {name: a, kvTransfer: nixl, endpoints: [{address: '10.0.0.1:8000', role: both}]}\n"
	got, err := ForPolicy([]byte(file))
	require.NoError(t, err)
	require.Contains(t, string(got), "pathPrefixes: [/llm]")
	require.Contains(t, string(got), "# the engines")
	require.NotContains(t, string(got), "admin")
	require.NotContains(t, string(got), "run")
	for _, more := range []string{"state: {redis: {url: 'redis://x'}}\n", "usage: {ledger: '-'}\n"} {
		got, err = ForPolicy([]byte(file + more))
		require.NoError(t, err)
		require.Nil(t, got, "a file of the gateway's owner")
	}
}
