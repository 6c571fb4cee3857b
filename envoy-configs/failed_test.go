package envoyconfigs

import (
	"net/http"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/faults"
	"tandem/replica/config"
)

// Beside Envoy a failed decode leg comes back to Tandem only if Envoy tries the request again: for the statuses that
// count as failures (faults.Failed), and no other.
func TestEnvoyTriesFailedLegsAgain(t *testing.T) {
	c, _, err := config.Parse([]byte(`pools: [{name: a, kvTransfer: nixl, endpoints: [` +
		`{address: "10.0.0.1:1", role: prefill}, {address: "10.0.0.2:1", role: decode}]}]`))
	require.NoError(t, err)
	m, err := newModel(c, false)
	require.NoError(t, err)
	codes := routes(m).retryDecode().RetriableStatusCodes
	for status := range 600 {
		switch {
		case status < 100 || status >= 500 || faults.Redirects(status): // 5xx, and the header of a redirect
		case status < 200 && status != http.StatusSwitchingProtocols: // no final answer
		default:
			require.Equal(t, faults.Failed(status), slices.Contains(codes, uint32(status)), status)
		}
	}
}
