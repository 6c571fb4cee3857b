package envoyconfigs

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/replica/config"
)

// With override-host, what Envoy Gateway has to know is printed for it: Backends of what is listed, Services of what is selected.
func TestOverrideHostNamesTheEndpoints(t *testing.T) {
	c, _, err := config.Parse([]byte(`
pools:
- name: listed
  models: [a]
  kvTransfer: nixl
  endpoints:
  - {address: 10.0.0.1:8000, role: prefill}
  - {address: 10.0.0.2:8000, role: decode, scheme: h2c}
- name: again
  models: [b]
  kvTransfer: none
  endpoints: [{address: "10.0.0.3:8000"}]
- name: selected
  models: [c]
  kvTransfer: sglang
  discovery: {kubernetes: {selector: "app=llm, tier==gpu", ports: [8000, 8001], scheme: https}}
`))
	require.NoError(t, err)
	s, err := gather(c, false)
	require.NoError(t, err)
	sets, err := endpointSets(c, GatewayOptions{Namespace: "default", Name: "tandem"}, s.Engines.Schemes)
	require.NoError(t, err)
	ip := func(host string) address { return address{host, 8000} }
	require.Equal(t, []endpointSet{
		{Backend: "tandem-endpoints", Hosts: []address{ip("10.0.0.1"), ip("10.0.0.3")}},
		{Suffix: "-h2c", Backend: "tandem-endpoints-h2c", Hosts: []address{ip("10.0.0.2")}},
		{
			Suffix: "-https", Backend: "tandem-endpoints-https",
			Service: &gatewayService{Name: "tandem-pool-2", Labels: []string{`app: "llm"`, `tier: "gpu"`}, Ports: []int32{8000, 8001}},
		},
	}, sets)
	require.Equal(t, []backendRef{{Backend: "tandem-endpoints"}}, sets[0].refs())
	require.Equal(t, []backendRef{{Service: "tandem-pool-2", Port: 8000}, {Service: "tandem-pool-2", Port: 8001}}, sets[2].refs())
}

// Whatever is known, no cluster of the resources connects to an address for its name alone.
func TestOverrideHostIsAll(t *testing.T) {
	c, _, err := config.Parse([]byte(strings.Replace(pool, "nixl", "sglang", 1)))
	require.NoError(t, err)
	text, err := EnvoyGateway(c, GatewayOptions{Upstream: OverrideHost})
	require.NoError(t, err)
	require.NotContains(t, string(text), "ORIGINAL_DST")
	text, err = EnvoyGateway(c, GatewayOptions{})
	require.NoError(t, err)
	require.Contains(t, string(text), "ORIGINAL_DST")
}

// What Envoy Gateway's resources cannot express is refused when they are printed.
func TestOverrideHostRefuses(t *testing.T) {
	for text, want := range map[string]string{
		`discovery: {file: {path: endpoints.yaml}}`:                                                          "pool a: discovery.file says where endpoints are to Tandem alone",
		`discovery: {inferencePool: {name: llm}}`:                                                            "discovery.inferencePool",
		`discovery: {dns: [{name: _llm._tcp.x.svc}]}`:                                                        "an SRV record",
		`discovery: {kubernetes: {selector: "model in (prefill,decode)", ports: [8000]}}`:                    "a Service cannot select",
		`discovery: {kubernetes: {selector: "app=llm,tier!=cpu", ports: [8000]}}`:                            "a Service cannot select",
		`discovery: {kubernetes: {selector: app=llm, labels: {portLabel: port}}}`:                            "labels of pods say their ports",
		`discovery: {kubernetes: {selector: app=llm, ports: [8000], namespace: gpu}}`:                        "print the resources with --namespace gpu",
		`endpoints: [{address: "10.0.0.1:8000", role: prefill}, {address: "engine.svc:8000", role: decode}]`: "endpoints by name stand beside others",
	} {
		c, _, err := config.Parse([]byte("pools: [{name: a, kvTransfer: nixl, " + text + "}]"))
		require.NoError(t, err, text)
		_, err = EnvoyGateway(c, GatewayOptions{Upstream: OverrideHost})
		require.ErrorContains(t, err, want, text)
		_, err = EnvoyGateway(c, GatewayOptions{})
		require.NoError(t, err, text)
	}
	c, _, err := config.Parse([]byte(pool))
	require.NoError(t, err)
	two, _, err := config.Parse([]byte(`pools:
- {name: a, models: [a], kvTransfer: nixl, discovery: {kubernetes: {selector: app=a, ports: [8000]}}}
- {name: b, models: [b], kvTransfer: nixl, discovery: {kubernetes: {selector: app=b, ports: [8000]}}}
`))
	require.NoError(t, err)
	_, err = EnvoyGateway(two, GatewayOptions{Upstream: OverrideHost})
	require.ErrorContains(t, err, "pool b: with --upstream override-host the engines of one scheme are the pods of one pool")
	_, err = EnvoyGateway(c, GatewayOptions{Upstream: "dns"})
	require.EqualError(t, err, `--upstream "dns": it is original-dst or override-host`)
}
