package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// This file does the part of Envoy Gateway's translation that resources.yaml makes use of (a route for each rule of the
// HTTPRoute, then the patches), so that the real Envoy can say what it thinks of the result where there is no Envoy Gateway.

type object = map[string]any

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
		Rules []struct {
			Matches []struct {
				Headers []struct{ Name, Value string }
			}
		}
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
	var routes []any
	for _, rule := range route.Spec.Rules {
		match := object{"prefix": "/"}
		for _, h := range rule.Matches[0].Headers {
			headers, _ := match["headers"].([]any)
			match["headers"] = append(headers, object{"name": h.Name, "string_match": object{"exact": h.Value}})
		}
		routes = append(routes, object{"match": match, "route": object{"cluster": "tandem-replan", "timeout": "0s"}})
	}
	hcm := object{
		"@type":       "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
		"stat_prefix": "http", "access_log": []any{},
		"http_filters": []any{object{"name": "envoy.filters.http.router", "typed_config": object{"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}},
		"route_config": object{"virtual_hosts": []any{object{"name": "all", "domains": []any{"*"}, "routes": routes}}},
	}
	static := object{"listeners": []any{object{
		"name": "http", "address": object{"socket_address": object{"address": "127.0.0.1", "port_value": 0}},
		"filter_chains": []any{object{"filters": []any{object{"name": "envoy.filters.network.http_connection_manager", "typed_config": hcm}}}},
	}}, "clusters": []any{}}
	for _, p := range policy.Spec.Patches {
		kind := p.Type[strings.LastIndexByte(p.Type, '.')+1:]
		switch op := p.Operation; {
		case kind == "RouteConfiguration":
			_, index, ok := strings.Cut(op.JSONPath, "/rule/")
			require.True(t, ok, op.JSONPath)
			n, err := strconv.Atoi(strings.TrimSuffix(index, `/.*")]`))
			require.NoError(t, err)
			put(t, routes[n].(object), op.Op, op.Path, op.Value)
		case op.Path == "/access_log/-":
			hcm["access_log"] = append(hcm["access_log"].([]any), op.Value)
		case op.Path == "" && kind == "Listener":
			static["listeners"] = append(static["listeners"].([]any), op.Value)
		case op.Path == "" && kind == "Cluster":
			static["clusters"] = append(static["clusters"].([]any), op.Value)
		default:
			require.Fail(t, "a patch that is not understood", "%+v", p)
		}
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
	resources := read(t, "envoy-gateway/resources.yaml")
	validate := func(text []byte) (string, error) {
		file := filepath.Join(t.TempDir(), "envoy.yaml")
		require.NoError(t, os.WriteFile(file, text, 0o600))
		out, err := exec.CommandContext(t.Context(), envoy, "--mode", "validate", "-c", file, "-l", "warning", "--disable-hot-restart").CombinedOutput()
		return string(out), err
	}
	out, err := validate(translate(t, resources))
	require.NoError(t, err, out)
	_, err = validate(translate(t, strings.Replace(resources, "max_internal_redirects: ", "max_internal_redirect: ", 1)))
	require.Error(t, err, "a patch that Envoy does not know is refused")
}
