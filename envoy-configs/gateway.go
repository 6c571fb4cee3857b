package envoyconfigs

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"text/template"

	"sigs.k8s.io/yaml"

	configv1 "tandem/protos/config/v1"
)

//go:embed gateway.yaml.tmpl
var gatewayTemplate string

// GatewayOptions are what Envoy Gateway's resources need beside a Tandem configuration.
type GatewayOptions struct {
	Namespace  string // of all of them; default "default"
	Name       string // of the Gateway, the HTTPRoute and the policies; default "tandem"
	Class      string // of the Gateway; default "eg"
	Standalone bool   // Envoy Gateway runs without a cluster and starts Envoy itself (provider Host)
}

// gatewayResources is what the template is filled with.
type gatewayResources struct {
	GatewayOptions
	Port     int
	ExtProcs []gatewayHost
	Replans  []gatewayHost
	Rules    []gatewayRule
	Patches  string // a YAML list
	Bytes    int64
	Idle     string
}

// gatewayHost is one endpoint of a Backend.
type gatewayHost struct {
	address
	FQDN bool
}

// gatewayRule is one rule of the HTTPRoute. Envoy Gateway makes a route of each, with the external processor enabled; what its
// API cannot say is patched into that route.
type gatewayRule struct {
	Leg, Scheme string // headers to match; "": any
	Timeout     string
	route       map[string]any // patched fields of the route's action, by name
}

// EnvoyGateway renders the resources with which Envoy Gateway 1.9 makes both hops: the documented API where it suffices, and
// an EnvoyPatchPolicy for the rest. The patches' clusters and the prefill leg's listener are those of [Bootstrap], so the
// two never differ.
func EnvoyGateway(c *configv1.Config, o GatewayOptions) ([]byte, error) {
	if c.GetExtProc().Encrypted() {
		return nil, errors.New("extProc.tls: the resources for Envoy Gateway reach the external processor in plaintext; leave extProc.tls out, or encrypt between pods with the mesh")
	}
	for _, p := range c.GetPools() {
		if configv1.Concurrent(p) {
			return nil, fmt.Errorf("pool %s: with kvTransfer %s both legs run at once, "+
				"for which the resources for Envoy Gateway have no routes; run an Envoy of your own with what `tandem envoy` prints", p.GetName(), p.GetKvTransfer())
		}
	}
	or(&o.Namespace, "default")
	or(&o.Name, "tandem")
	or(&o.Class, "eg")
	b, err := gather(c)
	if err != nil {
		return nil, err
	}
	g := gatewayResources{
		GatewayOptions: o, Port: b.Listen.Port, Bytes: b.BufferBytes, Idle: b.IdleTimeout,
		ExtProcs: gatewayHosts(b.ExtProcs), Replans: gatewayHosts(b.Replans), Rules: gatewayRules(b),
	}
	patches, err := g.patches(c)
	if err != nil {
		return nil, err
	}
	text, err := yaml.Marshal(patches)
	if err != nil {
		return nil, fmt.Errorf("writing the patches: %w", err)
	}
	g.Patches = "  " + strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", "\n  ")
	t, err := template.New("gateway").Delims("<<", ">>").Parse(gatewayTemplate)
	if err != nil {
		return nil, fmt.Errorf("reading the template of Envoy Gateway's resources: %w", err)
	}
	var out bytes.Buffer
	if err := t.Execute(&out, g); err != nil {
		return nil, fmt.Errorf("rendering Envoy Gateway's resources: %w", err)
	}
	return out.Bytes(), nil
}

func or(v *string, d string) {
	if *v == "" {
		*v = d
	}
}

func gatewayHosts(h hosts) []gatewayHost {
	var out []gatewayHost
	for _, a := range h.Hosts {
		_, err := netip.ParseAddr(a.Host)
		out = append(out, gatewayHost{a, err != nil})
	}
	return out
}

// gatewayRules are those of every leg and scheme, and last the one for a request that was not decided yet.
func gatewayRules(b *bootstrap) []gatewayRule {
	redirect := map[string]any{
		"max_internal_redirects": b.MaxRedirects, "redirect_response_codes": []int{307},
		"response_headers_to_copy": []string{"x-tandem-ticket"}, "allow_cross_scheme_redirect": true,
	}
	retry := func(perTry string) map[string]any {
		r := map[string]any{
			"retry_on": "connect-failure,refused-stream,reset,5xx,retriable-status-codes", "retriable_status_codes": []int{408, 425, 429},
			"num_retries": 1, "retry_back_off": map[string]any{"base_interval": "0.001s", "max_interval": "0.002s"},
		}
		if perTry != "" {
			r["per_try_timeout"] = perTry
		}
		return r
	}
	var rules []gatewayRule
	for _, s := range b.LegSchemes() {
		name := s.Name
		if s.Suffix == "" {
			name = ""
		}
		rules = append(rules,
			gatewayRule{Leg: "prefill", Scheme: name, Timeout: "600s", route: map[string]any{
				"cluster": "tandem-prefill" + s.Suffix, "internal_redirect_policy": redirect, "retry_policy": retry(prefillPerTry),
			}},
			gatewayRule{Leg: "decode", Scheme: name, Timeout: "0s", route: map[string]any{
				"cluster": "tandem-decode" + s.Suffix, "internal_redirect_policy": redirect, "retry_policy": retry(""), "idle_timeout": b.IdleTimeout,
			}},
			gatewayRule{Leg: "pass", Scheme: name, Timeout: "0s", route: map[string]any{
				"cluster": "tandem-pod" + s.Suffix, "idle_timeout": b.IdleTimeout,
			}})
	}
	return append(rules, gatewayRule{Timeout: "0s"})
}

// prefillPerTry is the time limit of a prefill under Envoy Gateway. The server's own limit, by the prompt's length, goes with
// a header that Envoy Gateway's ext_proc filter may not set (mutation_rules has no field in EnvoyExtensionPolicy).
const prefillPerTry = "120s"

const typePrefix = "type.googleapis.com/envoy.config."

type patch struct {
	Type      string    `json:"type"`
	Name      string    `json:"name"`
	Operation operation `json:"operation"`
}

type operation struct {
	Op       string `json:"op"`
	JSONPath string `json:"jsonPath,omitempty"`
	Path     string `json:"path"`
	Value    any    `json:"value"`
}

// patches are what the documented API cannot say.
func (g *gatewayResources) patches(c *configv1.Config) ([]patch, error) {
	text, err := Bootstrap(c)
	if err != nil {
		return nil, err
	}
	var bootstrap struct {
		Static struct {
			Listeners []map[string]any `json:"listeners"`
			Clusters  []map[string]any `json:"clusters"`
		} `json:"static_resources"`
	}
	if err := yaml.Unmarshal(text, &bootstrap); err != nil {
		return nil, fmt.Errorf("reading the bootstrap: %w", err)
	}
	listener := g.Namespace + "/" + g.Name + "/http"
	out := g.routePatches(listener)
	for _, l := range bootstrap.Static.Listeners {
		name, _ := l["name"].(string)
		if name == "prefill-leg" {
			out = append(out, patch{typePrefix + "listener.v3.Listener", name, operation{Op: "add", Value: l}})
			continue
		}
		for _, log := range accessLogs(l) {
			out = append(out, patch{typePrefix + "listener.v3.Listener", listener, operation{
				Op: "add", JSONPath: `$..filters[?@.name=="envoy.filters.network.http_connection_manager"].typed_config`, Path: "/access_log/-", Value: log,
			}})
		}
	}
	for _, cluster := range bootstrap.Static.Clusters {
		name, _ := cluster["name"].(string)
		out = append(out, patch{typePrefix + "cluster.v3.Cluster", name, operation{Op: "add", Value: cluster}})
	}
	return out, nil
}

// accessLogs are those of a listener's connection manager.
func accessLogs(listener map[string]any) []any {
	chains, _ := listener["filter_chains"].([]any)
	for _, chain := range chains {
		filters, _ := chain.(map[string]any)["filters"].([]any)
		for _, f := range filters {
			config, _ := f.(map[string]any)["typed_config"].(map[string]any)
			if logs, ok := config["access_log"].([]any); ok {
				return logs
			}
		}
	}
	return nil
}

func (g *gatewayResources) routePatches(listener string) []patch {
	var out []patch
	for i, rule := range g.Rules {
		add := func(op, path string, value any) {
			out = append(out, patch{typePrefix + "route.v3.RouteConfiguration", listener, operation{
				Op: op, Path: path, Value: value,
				JSONPath: fmt.Sprintf(`$.virtual_hosts[*].routes[?match(@.name, "httproute/%s/%s/rule/%d/.*")]`, g.Namespace, g.Name, i),
			}})
		}
		for _, field := range []string{"cluster", "internal_redirect_policy", "retry_policy", "idle_timeout"} {
			if value, ok := rule.route[field]; ok {
				op := "add"
				if field == "cluster" {
					op = "replace"
				}
				add(op, "/route/"+field, value)
			}
		}
		if rule.Leg != "" {
			add("add", "/response_headers_to_remove", []string{"x-tandem-ticket", "x-tandem-leg"}) // a redirect still gets the ticket
		}
	}
	return out
}
