package config

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestConcurrentPools has mistakes that only pools whose legs run at once can have.
func TestConcurrentPools(t *testing.T) {
	const endpoints = `[{address: "10.0.0.1:1", role: prefill}, {address: "10.0.0.2:1", role: decode}]`
	pool := func(fields string) string { return `pools: [{name: a, ` + fields + `}]` }
	for name, tt := range map[string]struct {
		text    string
		mistake string // "": valid
		warning string
	}{
		"address and role suffice":   {pool(`kvTransfer: sglang, endpoints: ` + endpoints), "", ""},
		"mooncake too":               {pool(`kvTransfer: mooncake, endpoints: ` + endpoints), "", ""},
		"nixl-push too":              {pool(`kvTransfer: nixl-push, endpoints: ` + endpoints), "", ""},
		"moriio too":                 {pool(`kvTransfer: moriio, endpoints: ` + endpoints), "", ""},
		"p2p-nccl":                   {pool(`kvTransfer: p2p-nccl, endpoints: ` + endpoints), `pools[0].kvTransfer: "p2p-nccl" is gone: vLLM has no P2pNcclConnector since 0.24; use nixl, with the engines' NixlConnector`, ""},
		"by vLLM's name":             {pool(`kvTransfer: P2pNcclConnector, endpoints: ` + endpoints), `"P2pNcclConnector" is gone: vLLM has no P2pNcclConnector since 0.24`, ""},
		"its registration":           {pool(`kvTransfer: nixl, registration: {listen: "10.0.0.9:30001"}, endpoints: ` + endpoints), "pools[0].registration: is gone with kvTransfer p2p-nccl: remove it", ""},
		"its port":                   {pool(`kvTransfer: nixl, endpoints: ` + strings.Replace(endpoints, "role: prefill", "role: prefill, transfer: {kvPort: 1}", 1)), "pools[0].endpoints[0].transfer.kvPort: is gone with kvTransfer p2p-nccl: remove it", ""},
		"an old mooncake":            {pool(`kvTransfer: mooncake-0.13, endpoints: ` + endpoints), `pools[0].kvTransfer: "mooncake-0.13" is gone: only vLLM 0.13 and 0.14 have it; use mooncake, with vLLM 0.16 or newer`, ""},
		"no such size":               {pool(`kvTransfer: moriio, endpoints: ` + strings.Replace(endpoints, "role: decode", "role: decode, transfer: {tensorParallelSize: -1}", 1)), "tensorParallelSize: -1 is not between", ""},
		"sizes that differ":          {pool(`kvTransfer: moriio, endpoints: ` + strings.Replace(endpoints, "role: decode", "role: decode, transfer: {tensorParallelSize: 8}", 1)), "pools[0].endpoints[1].transfer.tensorParallelSize: is 8, and that of endpoints[0] is 1", ""},
		"of groups of their own":     {pool(`kvTransfer: moriio, endpoints: ` + strings.Replace(endpoints, "role: decode", "role: decode, group: a, transfer: {tensorParallelSize: 8}", 1)), "", "no endpoint that decodes pairs"},
		"whole servers only":         {pool(`kvTransfer: sglang, endpoints: [{address: "10.0.0.1:1", role: both}]`), "", ""},
		"decode without prefill":     {pool(`kvTransfer: sglang, endpoints: [{address: "10.0.0.2:1", role: decode}]`), "pools[0].endpoints: an SGLang engine that decodes cannot prefill", ""},
		"never split":                {pool(`kvTransfer: sglang, split: never, endpoints: ` + endpoints), "pools[0].split: never leaves only endpoints with the role both", ""},
		"decode alone":               {pool(`kvTransfer: sglang, onPrefillFailure: decodeAlone, endpoints: ` + endpoints), "pools[0].onPrefillFailure: with kvTransfer sglang decode cannot work without a prefill", ""},
		"long prompts":               {pool(`kvTransfer: sglang, longPrompts: decodeAlone, endpoints: ` + endpoints), "", "pools[0].longPrompts: bodies over envoy.maxBodyBytes will be refused"},
		"a port":                     {pool(`kvTransfer: sglang, endpoints: ` + strings.Replace(endpoints, "role: prefill", "role: prefill, transfer: {bootstrapPort: 65536}", 1)), "pools[0].endpoints[0].transfer.bootstrapPort: 65536 is not a port", ""},
		"a host":                     {pool(`kvTransfer: sglang, endpoints: ` + strings.Replace(endpoints, "role: prefill", `role: prefill, transfer: {host: "[fd00::1]"}`, 1)), `pools[0].endpoints[0].transfer.host: "[fd00::1]" is no host`, ""},
		"a host that is none":        {pool(`kvTransfer: mooncake, endpoints: ` + strings.Replace(endpoints, "role: prefill", `role: prefill, transfer: {host: "0.0.0.0"}`, 1)), "0.0.0.0 is where an engine listens", ""},
		"a port of decode":           {pool(`kvTransfer: mooncake, endpoints: ` + strings.Replace(endpoints, "role: decode", "role: decode, transfer: {bootstrapPort: 1}", 1)), "", "bootstrapPort: has no effect on an endpoint with the role decode"},
		"transfer where it does not": {pool(`kvTransfer: nixl, endpoints: ` + strings.Replace(endpoints, "role: prefill", "role: prefill, transfer: {bootstrapPort: 1}", 1)), "", "bootstrapPort: has no effect with kvTransfer nixl"},
	} {
		t.Run(name, func(t *testing.T) {
			_, warnings, err := Parse([]byte(tt.text))
			if tt.mistake != "" {
				require.ErrorContains(t, err, tt.mistake)
				return
			}
			require.NoError(t, err)
			if tt.warning == "" {
				require.Empty(t, besidesExperimental(warnings))
			} else {
				require.Contains(t, strings.Join(warnings, "\n"), tt.warning)
			}
		})
	}
}
