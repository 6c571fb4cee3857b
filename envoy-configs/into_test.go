package envoyconfigs

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/replica/config"
)

const yours = `# An Envoy of my own.
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 19901}}}
static_resources:
  listeners:
  - name: mine # with a comment
    address: {socket_address: {address: 127.0.0.1, port_value: 10000}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: mine
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {prefix: /v1/}
                route: {cluster: tandem-front, timeout: 0s, idle_timeout: 1800s}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
`

const two = `pools:
- name: chat
  kvTransfer: nixl
  endpoints: [{address: "127.0.0.1:8101", role: prefill}, {address: "127.0.0.1:8201", role: decode}]
`

// What is added leaves everything else as it is, real Envoy takes the result, and to add again changes nothing.
func TestInto(t *testing.T) {
	cfg, _, err := config.Parse([]byte(two))
	require.NoError(t, err)
	out, err := Into([]byte(yours), cfg)
	require.NoError(t, err)
	text := string(out)
	require.Contains(t, text, "# An Envoy of my own.")
	require.Contains(t, text, "- name: mine # with a comment")
	require.Equal(t, 1, strings.Count(text, "port_value: 19901"), "the admin port is still the reader's")
	require.NotContains(t, text, "overload_manager")
	require.Contains(t, text, "- name: tandem-front")
	again, err := Into(out, cfg)
	require.NoError(t, err)
	require.Equal(t, text, string(again))

	validate(t, out)

	for mine, says := range map[string]string{
		"[]":                              "is not a mapping",
		"{":                               "reading your bootstrap",
		"":                                "is not a mapping",
		"dynamic_resources: {}":           "has no static_resources",
		"static_resources: {clusters: a}": "clusters of your bootstrap is not a list",
	} {
		_, err := Into([]byte(mine), cfg)
		require.ErrorContains(t, err, says, mine)
	}
	fresh, err := Into([]byte("static_resources: {}"), cfg)
	require.NoError(t, err)
	require.Contains(t, string(fresh), "tandem-front")
}
