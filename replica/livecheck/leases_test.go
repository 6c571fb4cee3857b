package livecheck

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/replica/config"
)

// The settings by which KV expires, and by which D notices it, are compared with those of vLLM.
func TestLeases(t *testing.T) {
	all := map[string]string{"/v1/models": "vllm-0.32.0-models.json", "/metrics": "vllm-0.32.0-metrics.txt", "/server_info": "vllm-0.32.0-server_info.json"}
	engine := func(role, extra string) string {
		return recorded(t, all, `"kv_role":"kv_producer"`, `"kv_role":"`+role+`"`, `"kv_connector_extra_config":{}`, `"kv_connector_extra_config":{`+extra+`}`)
	}
	const declines = `"bidirectional_kv_xfer":true,"decoder_kv_blocks_ttl":1`
	const prefill, decode = "pools[0].endpoints[0].address: ", "pools[0].endpoints[1].address: "
	for name, tt := range map[string]struct{ settings, p, d, found string }{
		"defaults":    {"", "", "", ""},
		"recommended": {"nixl: {declineExpired: true, lease: 120s}, ", `"kv_lease_duration":120`, declines, ""},
		"a shorter lease": {
			"nixl: {declineExpired: true, lease: 120s}, ", "", declines,
			prefill + "the engine frees KV after 30s (kv_lease_duration), and the pool's nixl.lease is 2m0s: decode would be sent for KV that is another prompt's by then; set nixl.lease to 30s",
		},
		"a longer lease": {
			"", `"kv_lease_duration":120`, "",
			prefill + "the engine keeps KV for 2m0s (kv_lease_duration), and the pool's nixl.lease is 30s: set nixl.lease to 2m0s, or answers are refused too early",
		},
		"D does not look": {
			"nixl: {declineExpired: true}, ", "", "",
			decode + "the pool has nixl.declineExpired, and the engine does not look at when leases end: start it with " + declines + " in kv_connector_extra_config",
		},
		"D tells clients": {
			"", "", declines,
			decode + "the engine runs with bidirectional_kv_xfer, and clients would get the kv_transfer_params of its answers: set nixl.declineExpired",
		},
		"D keeps answers": {
			"nixl: {declineExpired: true}, ", "", `"bidirectional_kv_xfer":true`,
			decode + `the engine keeps the KV of each answer for 480 s, and nobody fetches it: start it with "decoder_kv_blocks_ttl":1 in kv_connector_extra_config`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			found := live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: nixl, %sendpoints: [{role: prefill, address: %q}, {role: decode, address: %q}]}]",
				tt.settings, engine("kv_producer", tt.p), engine("kv_consumer", tt.d)))
			require.Equal(t, tt.found, strings.Join(found, "\n"))
		})
	}
}

// What is not known or not set is said in words.
func TestLeasesNotKnown(t *testing.T) {
	always := map[string]string{"/v1/models": "vllm-0.32.0-models.json", "/metrics": "vllm-0.32.0-metrics.txt"}
	printed := func(settings string) string {
		c, _, err := config.Parse(fmt.Appendf(nil, "pools: [{name: x, kvTransfer: nixl, %sendpoints: [{role: prefill, address: %q}, {role: decode, address: %q}]}]",
			settings, recorded(t, always), recorded(t, always)))
		require.NoError(t, err)
		var out strings.Builder
		r := Check(t.Context(), c, false)
		require.NoError(t, r.Err())
		r.Print(&out)
		return out.String()
	}
	text := printed("")
	require.Contains(t, text, "since it is not reported: connector, role, lease of KV")
	require.Contains(t, text, "recommended: x: decode does not look at when the lease of KV ends, for nixl.declineExpired is not set: see docs/security.md, Wrong text\n")
	text = printed("nixl: {declineExpired: true}, ")
	require.Contains(t, text, "since it is not reported: connector, role, whether it declines expired KV")
	require.Contains(t, text, "recommended: x: a request that waits at decode for longer than nixl.lease (30s) less 6 s computes its prompt again: 120s is recommended, "+
		"with kv_lease_duration 120 of prefill\n")
	require.Contains(t, text, "not asked: pools[0]: the clocks of x's prefill engines, which say when KV expires. They are at the "+
		"side channels that answers name; one that Tandem cannot reach counts in tandem_kv_outdated_total (reason unknown)\n")
	require.NotContains(t, printed("nixl: {declineExpired: true, lease: 120s}, "), "recommended")
}

// An engine whose metrics nobody can read may stand still unseen.
func TestMetricsNotReadable(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/version", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"version":"0.32.0"}`) })
	s := httptest.NewServer(mux)
	defer s.Close()
	silent := strings.TrimPrefix(s.URL, "http://")
	require.Equal(t, []string{"pools[0].endpoints[1].address: its /metrics cannot be read: nobody notices when it stands still, and only nixl.declineExpired keeps answers from KV that was freed meanwhile"},
		live(t, pairOf("nixl", engineOf(t, "0.32.0"), "", silent)))
	require.Empty(t, live(t, pairOf("shared", engineOf(t, "0.32.0"), "", silent)), "nothing expires")
}
