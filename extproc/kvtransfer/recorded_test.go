package kvtransfer

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
	"github.com/stretchr/testify/require"
)

// TestOrchestratedAsRecorded compares the goldens of orchestrated with what production-stack's own router sent for the
// same requests and the same answers of P. e2e/oracles/judge_proxies.py recorded it, and compares it with the router
// anew where there is a checkout.
func TestOrchestratedAsRecorded(t *testing.T) {
	text, err := os.ReadFile("testdata/recorded-production-stack.json")
	require.NoError(t, err)
	var recorded struct{ Legs []map[string]json.RawMessage }
	require.NoError(t, json.Unmarshal(text, &recorded))
	require.NotEmpty(t, recorded.Legs)
	for _, legs := range recorded.Legs {
		var golden string
		require.NoError(t, json.Unmarshal(legs["golden"], &golden))
		t.Run(golden, func(t *testing.T) {
			archive, err := txtar.ParseFile("testdata/" + golden + ".txtar")
			require.NoError(t, err)
			require.Equal(t, routed(t, legs["prefill"]), routed(t, section(archive, "prefill request")), "P")
			require.Equal(t, routed(t, legs["decode"]), routed(t, section(archive, "decode request")), "D")
		})
	}
}

// routed is a leg's body but for its two differences: the router leaves stops to P, which makes one token alone; and it
// puts P's address in the place of any remote_host, Tandem where the host is good on P's machine alone.
func routed(t *testing.T, body []byte) map[string]any {
	var out map[string]any
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	require.NoError(t, d.Decode(&out))
	if out["max_tokens"] == json.Number("1") {
		delete(out, "stop")
	}
	if params, ok := out["kv_transfer_params"].(map[string]any); ok && params["remote_host"] != nil {
		delete(params, "remote_host")
	}
	return out
}
