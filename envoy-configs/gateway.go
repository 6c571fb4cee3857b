package envoyconfigs

import (
	"bytes"
	_ "embed"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"text/template"

	"sigs.k8s.io/yaml"

	configv1 "tandem/protos/config/v1"
)

//go:embed gateway.yaml.tmpl
var gatewayTemplate string

// GatewayOptions are what Envoy Gateway's resources need beside a Tandem configuration.
type GatewayOptions struct {
	Namespace  string   // of all of them; default "default"
	Name       string   // of the Gateway, the HTTPRoute and the policies; default "tandem"
	Class      string   // of the Gateway; default "eg"
	Standalone bool     // Envoy Gateway runs without a cluster and starts Envoy itself (provider Host)
	Upstream   Upstream // how Envoy gets to endpoints; default OriginalDst
}

// gatewayResources is what the template is filled with.
type gatewayResources struct {
	GatewayOptions
	Port      int
	ExtProcs  []gatewayHost
	Replans   []gatewayHost
	Endpoints []endpointSet // with OverrideHost
	Rules     []gatewayRule
	Patches   string // a YAML list
	Bytes     int64
	Idle      string

	known map[string]knownCluster // by the cluster that is replaced
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
	Patched     string // the bootstrap's route whose match this rule gets by a patch; "": the headers are its match
	Timeout     string
	Refs        []backendRef // what it leads to by itself; none: the replan port
	name        string       // of the bootstrap's route whose action this rule gets; "": it keeps Envoy Gateway's
}

// backendRef is a Backend, or a port of a Service.
type backendRef struct {
	Backend, Service string
	Port             int32
}

// EnvoyGateway renders the resources with which Envoy Gateway 1.9 makes both hops: the documented API where it suffices, and
// an EnvoyPatchPolicy for the rest. The patches' clusters, the legs' listeners and what the routes do are those of
// [Bootstrap], so the two never differ.
func EnvoyGateway(c *configv1.Config, o GatewayOptions) ([]byte, error) {
	for _, p := range c.GetPools() {
		if configv1.Encodes(p) {
			return nil, fmt.Errorf("pool %s: the resources for Envoy Gateway have no route to encode endpoints; leave encode out, or run an Envoy of your own with what `tandem envoy` prints", p.GetName())
		}
		if configv1.RewritesAnswers(p) && !configv1.Concurrent(p) { // where both legs run at once a leg's own listener leads there
			return nil, fmt.Errorf("pool %s: lmcache.retFirstToken, nixl.bidirectional and cachedTokens have answers rewritten, "+
				"for which the resources for Envoy Gateway have no routes; leave it out, or run an Envoy of your own with what `tandem envoy` prints", p.GetName())
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
	switch o.Upstream {
	case OriginalDst, "":
	case OverrideHost:
		if g.Endpoints, err = endpointSets(c, o, b.Schemes); err != nil {
			return nil, err
		}
		g.knownClusters(b)
	default:
		return nil, fmt.Errorf("--upstream %q: it is %s or %s", o.Upstream, OriginalDst, OverrideHost)
	}
	g.Rules = append(append(g.Rules, bodyRules(b)...), gatewayRule{Timeout: "0s"})
	if len(g.Rules) > maxRules {
		return nil, fmt.Errorf("%d rules are more than an HTTPRoute may have (%d): use fewer schemes, or --upstream original-dst", len(g.Rules), maxRules)
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

// gatewayRules are those of every leg and scheme.
func gatewayRules(b *bootstrap) []gatewayRule {
	var rules []gatewayRule
	for _, s := range b.LegSchemes() {
		name := s.Name
		if s.Suffix == "" {
			name = ""
		}
		rules = append(rules,
			gatewayRule{Leg: "prefill", Scheme: name, Timeout: "0s", name: "prefill" + s.Suffix},
			gatewayRule{Leg: "decode", Scheme: name, Timeout: "0s", name: "decode" + s.Suffix},
			gatewayRule{Leg: "pass", Scheme: name, Timeout: "0s", name: "pass" + s.Suffix})
	}
	if b.Pairs {
		rules = append(rules, gatewayRule{Leg: "pair", Timeout: "0s", name: "pair"})
	}
	return rules
}

// bodyRules are those of requests that ext_proc has not decided yet, by how their bodies come to it and by whether they have a ticket. Their
// matches need what an HTTPRoute cannot say (ranges of numbers, any value): a patch replaces the match that stands in the route.
func bodyRules(b *bootstrap) []gatewayRule {
	rule := func(name string) gatewayRule { return gatewayRule{Patched: name, Timeout: "5s", name: name} }
	if b.Mode == "duplex" || !b.Several() {
		return []gatewayRule{rule("pass-2")}
	}
	return []gatewayRule{rule("pass-2-buffered"), rule("pass-2"), rule("json-buffered")}
}

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
	var out []patch
	var localReplies any
	for _, l := range bootstrap.Static.Listeners {
		name, _ := l["name"].(string)
		if _, leg := l["internal_listener"]; leg {
			out = append(out, patch{typePrefix + "listener.v3.Listener", name, operation{Op: "add", Value: l}})
			continue
		}
		hcm := connectionManager(l)
		localReplies = hcm["local_reply_config"]
		routes, err := g.routePatches(listener, hcm)
		if err != nil {
			return nil, err
		}
		out = append(out, routes...)
		out = append(out, g.listenerPatches(listener, hcm)...)
	}
	for _, cluster := range bootstrap.Static.Clusters {
		name, _ := cluster["name"].(string)
		if k, ok := g.known[name]; ok {
			known, err := k.patches(cluster, localReplies)
			if err != nil {
				return nil, err
			}
			out = append(out, known...)
			continue
		}
		out = append(out, patch{typePrefix + "cluster.v3.Cluster", name, operation{Op: "add", Value: cluster}})
	}
	return out, nil
}

// connectionManager is the configuration of a listener's HTTP connection manager.
func connectionManager(listener map[string]any) map[string]any {
	chains, _ := listener["filter_chains"].([]any)
	for _, chain := range chains {
		filters, _ := chain.(map[string]any)["filters"].([]any)
		for _, f := range filters {
			if config, ok := f.(map[string]any)["typed_config"].(map[string]any); ok {
				return config
			}
		}
	}
	return nil
}

// listenerPatches give Envoy Gateway's listener what its policies cannot: room for tickets that carry KV parameters, the log of
// how each pass ended, errors in OpenAI's shape, an end for redirects that Envoy could not follow; and to its ext_proc filter
// the bootstrap's settings, of which EnvoyExtensionPolicy knows neither the headers that may be set (a prefill's time limit is
// one) nor how to try another replica.
func (g *gatewayResources) listenerPatches(listener string, hcm map[string]any) []patch {
	const manager = `$..filters[?@.name=="envoy.filters.network.http_connection_manager"].typed_config`
	var out []patch
	do := func(op, at, path string, value any) {
		out = append(out, patch{typePrefix + "listener.v3.Listener", listener, operation{Op: op, JSONPath: at, Path: path, Value: value}})
	}
	do("add", manager, "/max_request_headers_kb", hcm["max_request_headers_kb"])
	do("add", manager, "/common_http_protocol_options/max_headers_count", 160)
	do("add", manager, "/local_reply_config", hcm["local_reply_config"])
	// After the ClientTrafficPolicy's removals. Its own "set" would come before them.
	do("add", manager, "/early_header_mutation_extensions/0/typed_config/mutations/-", reservationMutation(hcm))
	logs, _ := hcm["access_log"].([]any)
	for _, log := range logs {
		do("add", manager, "/access_log/-", log)
	}
	filters, _ := hcm["http_filters"].([]any)
	var hygiene map[string]any
	for _, f := range filters {
		switch filter, _ := f.(map[string]any); filter["name"] {
		case "envoy.filters.http.ext_proc":
			// Its name has the policy's kind in the middle, in a cluster, and nothing there in standalone mode.
			at := fmt.Sprintf(`$..http_filters[?match(@.name, "envoy.filters.http.ext_proc/.*/%s/%s/extproc/0")]`, g.Namespace, g.Name)
			do("replace", at, "/typed_config", filter["typed_config"])
		case "envoy.filters.http.lua":
			do("add", manager, "/http_filters/0", filter) // before the other filters, and so behind them for an answer
		case "envoy.filters.http.header_mutation/tandem":
			hygiene = filter
		}
	}
	do("add", manager, "/http_filters/0", hygiene) // the first, and so the last to see an answer
	return out
}

// reservationMutation is what has Envoy name each request for its reservations.
func reservationMutation(hcm map[string]any) any {
	extensions, _ := hcm["early_header_mutation_extensions"].([]any)
	for _, e := range extensions {
		config, _ := e.(map[string]any)["typed_config"].(map[string]any)
		mutations, _ := config["mutations"].([]any)
		for _, m := range mutations {
			if _, ok := m.(map[string]any)["append"]; ok {
				return m
			}
		}
	}
	return nil
}

// routePatches give the routes of rules the actions of the bootstrap's routes. How long a request may take says the HTTPRoute.
func (g *gatewayResources) routePatches(listener string, hcm map[string]any) ([]patch, error) {
	routes := routesByName(hcm)
	var out []patch
	for i, rule := range g.Rules {
		if rule.name == "" {
			continue
		}
		at := fmt.Sprintf(`$.virtual_hosts[*].routes[?match(@.name, "httproute/%s/%s/rule/%d/.*")]`, g.Namespace, g.Name, i)
		addUnder := func(under, op, path string, value any) {
			out = append(out, patch{typePrefix + "route.v3.RouteConfiguration", listener, operation{Op: op, Path: path, Value: value, JSONPath: at + under}})
		}
		add := func(op, path string, value any) { addUnder("", op, path, value) }
		if rule.Patched != "" {
			add("replace", "/match", routes[rule.name]["match"])
		}
		action, ok := routes[rule.name]["route"].(map[string]any)
		if !ok && rule.name == "pass-2" {
			continue // it answers what is undecided with an error; here that goes to the replan port
		}
		if !ok {
			return nil, fmt.Errorf("the bootstrap has no route %s", rule.name)
		}
		add("replace", "/route/cluster", action["cluster"])
		for _, field := range slices.Sorted(maps.Keys(action)) {
			switch field {
			case "cluster", "timeout":
			case "internal_redirect_policy":
				add("add", "/route/"+field, g.redirectPolicy(action[field]))
			default:
				add("add", "/route/"+field, action[field])
			}
		}
		filters, _ := routes[rule.name]["typed_per_filter_config"].(map[string]any)
		for _, name := range slices.Sorted(maps.Keys(filters)) {
			switch name {
			case "envoy.filters.http.ext_proc":
				// Envoy Gateway's filter has another name; its route has an empty configuration for it that enables it.
				addUnder(`.typed_per_filter_config[?@["@type"]=="type.googleapis.com/envoy.config.route.v3.FilterConfig"]`, "add", "/config", filters[name])
			case "envoy.filters.http.buffer": // Envoy Gateway's listener has no such filter
			default:
				add("add", "/typed_per_filter_config/"+name, filters[name])
			}
		}
		remove := []string{"x-tandem-leg"} // or the next pass would begin here
		switch {
		case rule.Patched != "":
			add("add", "/request_headers_to_add", routes[rule.name]["request_headers_to_add"])
		case routes[rule.name]["request_headers_to_remove"] != nil:
			remove = append(remove, "x-tandem-restart")
		}
		add("add", "/request_headers_to_remove", remove)
		add("add", "/response_headers_to_remove", notForClients(hcm)) // a redirect still gets them
	}
	return out, nil
}

// redirectPolicy is the bootstrap's with Envoy Gateway's names of the routes that a redirect may lead to: those of requests with a ticket. An
// engine's own redirect leads to none of them.
func (g *gatewayResources) redirectPolicy(of any) any {
	policy := maps.Clone(of.(map[string]any))
	var names []string
	for i, rule := range g.Rules {
		if rule.name == "pass-2" || rule.name == "pass-2-buffered" {
			names = append(names, fmt.Sprintf("httproute/%s/%s/rule/%d/match/0/*", g.Namespace, g.Name, i))
		}
	}
	policy["predicates"] = []any{map[string]any{"name": "tandem", "typed_config": map[string]any{
		"@type": "type.googleapis.com/envoy.extensions.internal_redirect.allow_listed_routes.v3.AllowListedRoutesConfig", "allowed_route_names": names,
	}}}
	return policy
}

// notForClients are the headers that the bootstrap's main listener takes off answers.
func notForClients(hcm map[string]any) any {
	config, _ := hcm["route_config"].(map[string]any)
	hosts, _ := config["virtual_hosts"].([]any)
	host, _ := hosts[0].(map[string]any)
	return host["response_headers_to_remove"]
}

// routesByName are the routes of a connection manager.
func routesByName(hcm map[string]any) map[string]map[string]any {
	out := map[string]map[string]any{}
	config, _ := hcm["route_config"].(map[string]any)
	hosts, _ := config["virtual_hosts"].([]any)
	for _, host := range hosts {
		routes, _ := host.(map[string]any)["routes"].([]any)
		for _, r := range routes {
			route, _ := r.(map[string]any)
			name, _ := route["name"].(string)
			out[name] = route
		}
	}
	return out
}
