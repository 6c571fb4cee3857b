package deploy

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	envoyconfigs "tandem/envoy-configs"
	"tandem/replica/config"
)

// This file does the part of Envoy Gateway's translation that resources.yaml makes use of (a route for each rule of the
// HTTPRoute, then the patches), so that the real Envoy can say what it thinks of the result where there is no Envoy Gateway.

type object = map[string]any

// routePath is the path of a patch of the HTTPRoute's first rule.
const routePath = `$.virtual_hosts[*].routes[?match(@.name, "httproute/default/tandem/rule/0/.*")]`

// patchPolicy is the part of an EnvoyPatchPolicy that is translated.
type patchPolicy struct {
	Spec struct {
		Patches []struct {
			Type, Name string
			Operation  struct {
				Op, JSONPath, Path string
				Value              any
			}
		} `json:"jsonPatches"`
	}
}

type httpRoute struct {
	Spec struct {
		Rules []any
	}
}

// translate makes a static bootstrap of resources.
func translate(t *testing.T, resources string) []byte {
	t.Helper()
	var route httpRoute
	var policy patchPolicy
	for doc := range strings.SplitSeq(resources, "\n---") {
		switch {
		case strings.Contains(doc, "\nkind: HTTPRoute\n"):
			require.NoError(t, yaml.Unmarshal([]byte(doc), &route))
		case strings.Contains(doc, "\nkind: EnvoyPatchPolicy\n"):
			require.NoError(t, yaml.Unmarshal([]byte(doc), &policy))
		}
	}
	clusters := map[string]object{} // those of the rules, by name
	for i := range route.Spec.Rules {
		name := fmt.Sprintf("httproute/default/tandem/rule/%d", i)
		clusters[name] = object{"name": name, "type": "STATIC", "load_assignment": object{"cluster_name": name}}
	}
	first := object{"match": object{"prefix": "/"}, "route": object{"cluster": "httproute/default/tandem/rule/0", "timeout": "0s"}}
	hcm := object{
		"@type":       "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
		"stat_prefix": "http",
		"http_filters": []any{object{"name": "envoy.filters.http.router",
			"typed_config": object{"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}},
		"route_config": object{"virtual_hosts": []any{object{"name": "all", "domains": []any{"*"}, "routes": []any{first}}}},
	}
	static := object{"listeners": []any{object{
		"name": "http", "address": object{"socket_address": object{"address": "127.0.0.1", "port_value": 0}},
		"filter_chains": []any{object{"filters": []any{object{
			"name": "envoy.filters.network.http_connection_manager", "typed_config": hcm}}}},
	}}, "clusters": []any{}}
	for _, p := range policy.Spec.Patches {
		kind := p.Type[strings.LastIndexByte(p.Type, '.')+1:]
		switch op := p.Operation; {
		case kind == "RouteConfiguration":
			require.Equal(t, routePath, op.JSONPath)
			put(t, first, op.Op, op.Path, op.Value)
		case kind == "Listener" && op.JSONPath != "":
			put(t, hcm, op.Op, op.Path, op.Value)
		case op.Path == "" && kind == "Listener":
			static["listeners"] = append(static["listeners"].([]any), op.Value)
		case op.Path == "" && kind == "Cluster":
			static["clusters"] = append(static["clusters"].([]any), op.Value)
		case kind == "Cluster":
			require.Contains(t, clusters, p.Name)
			put(t, clusters[p.Name], op.Op, op.Path, op.Value)
		default:
			require.Fail(t, "a patch that is not understood", "%+v", p)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(clusters)) {
		static["clusters"] = append(static["clusters"].([]any), clusters[name])
	}
	text, err := yaml.Marshal(object{
		"node": object{"id": "t", "cluster": "t"}, "static_resources": static,
		"bootstrap_extensions": []any{object{"name": "envoy.bootstrap.internal_listener", "typed_config": object{
			"@type": "type.googleapis.com/envoy.extensions.bootstrap.internal_listener.v3.InternalListener"}}},
	})
	require.NoError(t, err)
	return text
}

// put does one JSON patch. As in RFC 6902, replace needs something to replace.
func put(t *testing.T, at object, op, path string, value any) {
	t.Helper()
	names := strings.Split(strings.TrimPrefix(path, "/"), "/")
	for _, name := range names[:len(names)-1] {
		next, ok := at[name].(object)
		require.True(t, ok, path)
		at = next
	}
	last := names[len(names)-1]
	if op == "replace" {
		require.Contains(t, at, last)
	}
	at[last] = value
}

// What Envoy Gateway would make of resources.yaml is a configuration that the real Envoy takes.
func TestEnvoyTakesTheResources(t *testing.T) {
	envoy := os.Getenv("ENVOY")
	if envoy == "" {
		var err error
		if envoy, err = exec.LookPath("envoy"); err != nil {
			envoy, err = filepath.Abs("../.tools/bin/envoy")
			require.NoError(t, err)
		}
	}
	if _, err := os.Stat(envoy); err != nil {
		if os.Getenv("TANDEM_REQUIRE_TOOLS") != "" {
			t.Fatal(err)
		}
		t.Skip("no Envoy: run scripts/tools.sh, or set ENVOY")
	}
	pairs, _, err := config.Parse([]byte(`extProc: {tls: {mode: selfSigned}}
pools:
- {name: a, kvTransfer: sglang, endpoints: [{address: "127.0.0.1:8101", role: prefill}, {address: "127.0.0.1:8201", role: decode}]}
- {name: b, models: [b], kvTransfer: nixl, endpoints: [{address: "127.0.0.1:8102", role: prefill, scheme: https}, {address: "127.0.0.1:8202", role: decode, scheme: h2c}]}
`))
	require.NoError(t, err)
	every, err := envoyconfigs.EnvoyGateway(pairs, envoyconfigs.GatewayOptions{})
	require.NoError(t, err)
	known, err := envoyconfigs.EnvoyGateway(pairs, envoyconfigs.GatewayOptions{Upstream: envoyconfigs.OverrideHost})
	require.NoError(t, err)
	resources := read(t, "envoy-gateway/resources.yaml")
	validate := func(text []byte) (string, error) {
		file := filepath.Join(t.TempDir(), "envoy.yaml")
		require.NoError(t, os.WriteFile(file, text, 0o600))
		out, err := exec.CommandContext(t.Context(), envoy, "--mode", "validate", "-c", file, "-l", "warning", "--disable-hot-restart").CombinedOutput()
		return string(out), err
	}
	for _, text := range []string{resources, string(every), read(t, "envoy-gateway/override-host.yaml"), string(known)} {
		out, err := validate(translate(t, text))
		require.NoError(t, err, out)
	}
	// And what Envoy Gateway itself made of such resources when make e2e-gateway last ran.
	for _, golden := range []string{"envoy-gateway/envoy.json", "envoy-gateway/envoy-override-host.json"} {
		out, err := validate([]byte(read(t, golden)))
		require.NoError(t, err, out)
	}
	_, err = validate(translate(t, strings.Replace(resources, "max_internal_redirects: ", "max_internal_redirect: ", 1)))
	require.Error(t, err, "a patch that Envoy does not know is refused")
}
