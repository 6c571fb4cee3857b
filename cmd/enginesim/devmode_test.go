package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// In vLLM's development mode an engine tells its connector and role, and otherwise nothing.
func TestDevMode(t *testing.T) {
	require.Equal(t, 404, startEngine(t, "-role", "prefill").get(t, "/server_info").status)
	t.Setenv("VLLM_SERVER_DEV_MODE", "1")
	for role, want := range map[string]string{"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"} {
		require.Contains(t, startEngine(t, "-role", role).get(t, "/server_info").String(), want)
	}
	require.Contains(t, startEngine(t, "-lease", "120s").get(t, "/server_info").String(), `"kv_connector_extra_config":{"kv_lease_duration":120}`)
	require.Contains(t, startEngine(t, "-bidirectional", "-decoder-ttl", "1s").get(t, "/server_info").String(),
		`"kv_connector_extra_config":{"bidirectional_kv_xfer":true,"decoder_kv_blocks_ttl":1}`)
	other := startEngine(t, "-connector", "lmcache", "-role", "decode", "-lmcache-init-port", "1", "-lmcache-alloc-port", "2")
	require.Contains(t, other.get(t, "/server_info").String(), "LMCacheConnectorV1")
}
