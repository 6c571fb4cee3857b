package e2e

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Three engines that serve either leg need no roles: Tandem gives them words, and other ones when the only engine that
// prefills is paused, while requests run. No client notices.
func TestRolesAuto(t *testing.T) {
	f := start(t, withOrders(t, options{
		prefills: 2, decodes: 1,
		engine: func(string, int, func() string) ([]string, string) {
			return []string{"--role", "both", "--model", "tiny"}, ", role: both"
		},
		pools: "pools:\n- name: chat\n  kvTransfer: nixl\n  split: always\n  decodeAlone: fallback\n  roles: auto\n  endpoints:\n" +
			"  - {address: %P}\n  - {address: %P}\n  - {address: %D}\n",
	}))
	prefills := func() (addrs []string) {
		for _, e := range f.engines() {
			if metric(t, f.admins[0], "tandem_endpoint_word", `endpoint="`+e.addr+`"`, `role="prefill"`) == 1 {
				addrs = append(addrs, e.addr)
			}
		}
		return addrs
	}
	soon(t, "words", func() bool { return len(prefills()) == 1 })
	clients := f.wholeTraffic(4)
	clients.more(t, 40)
	first := prefills()
	require.Len(t, first, 1)

	f.order("POST", "/api/pools/chat/endpoints/"+first[0]+"/pause", "")
	soon(t, "another engine prefills", func() bool {
		now := prefills()
		return len(now) > 1 || len(now) == 1 && now[0] != first[0]
	})
	clients.more(t, 40)
	f.order("POST", "/api/pools/chat/endpoints/"+first[0]+"/resume", "")
	clients.more(t, 40)
	clients.end(t)
	require.Positive(t, metric(t, f.admins[0], "tandem_decisions_total", `route="split"`))
}
