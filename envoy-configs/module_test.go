package envoyconfigs

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"tandem/replica/config"
)

// The resources with which Envoy Gateway's own Envoy loads Tandem: what each has, and what cannot be printed.
func TestEnvoyGatewayModule(t *testing.T) {
	const head = "envoy: {run: inside}\npools:\n- name: chat\n  kvTransfer: nixl\n"
	const listed = head + "  endpoints:\n  - {address: '10.0.0.1:8000', role: prefill}\n  - {address: '10.0.0.2:8000', role: decode}\n"
	const names = head + "  discovery:\n    dns:\n    - {name: p.default.svc.cluster.local, port: 8000, role: prefill}\n    - {name: d.default.svc.cluster.local, port: 8001, role: decode}\n"
	printed := func(text string, o ModuleOptions) (string, error) {
		c, _, err := config.Parse([]byte(text))
		require.NoError(t, err)
		if o.Config == nil {
			o.Config, err = config.ForPolicy([]byte(text))
			require.NoError(t, err)
		}
		o.Library, o.Image = "/usr/lib/tandem/libtandem.so", "tandem-envoy:1"
		out, err := EnvoyGatewayModule(c, o)
		return string(out), err
	}
	kinds := func(text string) (out []string) {
		d := yaml.NewDecoder(strings.NewReader(text))
		for {
			var r struct{ Kind string }
			if d.Decode(&r) != nil {
				return out
			}
			out = append(out, r.Kind)
		}
	}
	text, err := printed(listed, ModuleOptions{GatewayOptions: GatewayOptions{Name: "chat"}})
	require.NoError(t, err)
	require.Equal(t, []string{"EnvoyProxy", "Gateway", "ClientTrafficPolicy", "Backend", "Backend", "HTTPRoute", "BackendTrafficPolicy", "EnvoyExtensionPolicy"}, kinds(text))
	require.Contains(t, text, `ip: {address: "10.0.0.2", port: 8000}`)
	require.Equal(t, 1, strings.Count(text, "10.0.0.1"), "without Tandem no request goes to an engine that prefills")
	require.Contains(t, text, "kvTransfer: nixl")

	text, err = printed(names, ModuleOptions{GatewayOptions: GatewayOptions{Gateway: "shop/https"}})
	require.NoError(t, err)
	require.Equal(t, []string{"Backend", "HTTPRoute", "BackendTrafficPolicy", "EnvoyExtensionPolicy"}, kinds(text))
	require.Contains(t, text, "- {name: d, port: 8001}")
	require.Contains(t, text, "#     filterOrder:")

	text, err = printed(listed, ModuleOptions{Config: []byte(listed), File: "/etc/tandem/tandem.yaml"})
	require.NoError(t, err)
	require.Contains(t, kinds(text), "ConfigMap")
	require.Contains(t, text, "file: /etc/tandem/tandem.yaml")

	// https engines are verified by a name, which a call to an address has not: calls go to a backend of their own.
	for text, refs := range map[string]string{
		strings.ReplaceAll(listed, "role: ", "scheme: https, serverName: engines.test, role: "):                                                                                  "{group: gateway.envoyproxy.io, kind: Backend, name: tandem-calls}",
		strings.Replace(strings.ReplaceAll(names, "role: ", "scheme: https, role: "), "run: inside", "run: inside, endpointTls: {serverName: engines.test, caFile: /ca.pem}", 1): "{name: p, port: 8000}",
	} {
		out, err := printed(text, ModuleOptions{})
		require.NoError(t, err)
		require.Contains(t, kinds(out), "BackendTLSPolicy")
		require.Contains(t, out, "hostname: engines.test")
		require.Contains(t, out, refs)
		require.Contains(t, out, "route: {rule: 1}")
		require.Contains(t, out, "endpointOverride")
		require.NotContains(t, out, "DynamicResolver")
	}

	for _, tt := range []struct{ text, err string }{
		{strings.Replace(listed, "role: decode}", "role: decode, scheme: h2c}", 1), "scheme h2c"},
		{strings.Replace(listed, "role: decode}", "role: decode, scheme: https, serverName: x}", 1), "by http and by https"},
		{strings.ReplaceAll(listed, "role: ", "scheme: https, role: "), "need a name"},
		{strings.ReplaceAll(names, ".default.", ".other."), "another namespace"},
		{head + "  discovery: {file: {path: /x.yaml}}\n", "only lists and discovery.dns"},
		{names + "    - {name: d2.default.svc.cluster.local, port: 8001, role: decode}\n", "in several Services"},
	} {
		_, err = printed(tt.text, ModuleOptions{Config: []byte("x")})
		require.ErrorContains(t, err, tt.err)
	}
}
