package envoyconfigs

import (
	"bytes"
	_ "embed"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"text/template"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	allowlistedv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/internal_redirect/allow_listed_routes/v3"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"

	"tandem/internal/config"
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
		if config.Encodes(p) {
			return nil, fmt.Errorf("pool %s: the resources for Envoy Gateway have no route to encode endpoints; leave encode out, or run an Envoy of your own with what `tandem envoy` prints", p.GetName())
		}
		if config.RewritesAnswers(p) && !config.Concurrent(p) { // where both legs run at once a leg's own listener leads there
			return nil, fmt.Errorf("pool %s: lmcache.retFirstToken, nixl.bidirectional and cachedTokens have answers rewritten, "+
				"for which the resources for Envoy Gateway have no routes; leave it out, or run an Envoy of your own with what `tandem envoy` prints", p.GetName())
		}
	}
	or(&o.Namespace, "default")
	or(&o.Name, "tandem")
	or(&o.Class, "eg")
	s, err := gather(c, false)
	if err != nil {
		return nil, err
	}
	m := newModel(s)
	g := gatewayResources{
		GatewayOptions: o, Port: s.Listen.Port, Bytes: s.Bodies.Buffer,
		ExtProcs: gatewayHosts(s.Servers.ExtProcs), Replans: gatewayHosts(s.Servers.Replans), Rules: gatewayRules(s),
	}
	switch o.Upstream {
	case OriginalDst, "":
	case OverrideHost:
		if g.Endpoints, err = endpointSets(c, o, s.Engines.Schemes); err != nil {
			return nil, err
		}
		g.knownClusters(m)
	default:
		return nil, fmt.Errorf("--upstream %q: it is %s or %s", o.Upstream, OriginalDst, OverrideHost)
	}
	g.Rules = append(append(g.Rules, bodyRules(s)...), gatewayRule{Timeout: "0s"})
	if len(g.Rules) > maxRules {
		return nil, fmt.Errorf("%d rules are more than an HTTPRoute may have (%d): use fewer schemes, or --upstream original-dst", len(g.Rules), maxRules)
	}
	list := &yaml.Node{Kind: yaml.SequenceNode}
	for _, p := range g.patches(m) {
		list.Content = append(list.Content, p.node())
	}
	patches, err := m.printNode(list)
	if err != nil {
		return nil, fmt.Errorf("writing the patches: %w", err)
	}
	g.Patches = "  " + strings.ReplaceAll(strings.TrimSpace(string(patches)), "\n", "\n  ")
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
func gatewayRules(b *settings) []gatewayRule {
	var rules []gatewayRule
	for _, s := range b.legSchemes() {
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
func bodyRules(b *settings) []gatewayRule {
	rule := func(name string) gatewayRule { return gatewayRule{Patched: name, Timeout: "5s", name: name} }
	if b.Bodies.Mode == "duplex" || !b.several() {
		return []gatewayRule{rule("pass-2")}
	}
	return []gatewayRule{rule("pass-2-buffered"), rule("pass-2"), rule("json-buffered")}
}

const typePrefix = "type.googleapis.com/envoy.config."

// patch changes one of Envoy's resources: JSONPath selects an object in it, Path a field of that object.
type patch struct {
	Type, Name         string
	Op, JSONPath, Path string
	Value              *yaml.Node
}

// node is the patch as one of an EnvoyPatchPolicy.
func (p patch) node() *yaml.Node {
	field := func(name, value string) []*yaml.Node {
		return []*yaml.Node{scalar("!!str", name), scalar("!!str", value)}
	}
	operation := &yaml.Node{Kind: yaml.MappingNode, Content: append(field("op", p.Op), field("path", p.Path)...)}
	if p.JSONPath != "" {
		operation.Content = append(operation.Content, field("jsonPath", p.JSONPath)...)
	}
	operation.Content = append(operation.Content, scalar("!!str", "value"), p.Value)
	return &yaml.Node{Kind: yaml.MappingNode, Content: slices.Concat(
		field("name", p.Name), field("type", typePrefix+p.Type), []*yaml.Node{scalar("!!str", "operation"), operation},
	)}
}

// Kinds of Envoy's resources.
const (
	listenerKind = "listener.v3.Listener"
	clusterKind  = "cluster.v3.Cluster"
	routesKind   = "route.v3.RouteConfiguration"
)

// addResource adds a whole resource to Envoy's configuration.
func addResource(m *model, kind, name string, resource proto.Message) patch {
	return patch{Type: kind, Name: name, Op: "add", Value: m.node(resource.ProtoReflect())}
}

// patches are what the documented API cannot say.
func (g *gatewayResources) patches(m *model) []patch {
	listener := g.Namespace + "/" + g.Name + "/http"
	out := append(g.routePatches(m, listener), g.listenerPatches(m, listener)...)
	for _, leg := range m.legListeners() {
		out = append(out, addResource(m, listenerKind, leg.GetName(), leg))
	}
	for _, cluster := range m.clusters() {
		if k, ok := g.known[cluster.GetName()]; ok {
			out = append(out, k.patches(m)...)
			continue
		}
		out = append(out, addResource(m, clusterKind, cluster.GetName(), cluster))
	}
	return out
}

// listenerPatches give Envoy Gateway's listener what its policies cannot: room for tickets that carry KV parameters, the log of
// how each pass ended, errors in OpenAI's shape, an end for redirects that Envoy could not follow; and to its ext_proc filter
// the bootstrap's settings, of which EnvoyExtensionPolicy knows neither the headers that may be set (a prefill's time limit is
// one) nor how to try another replica.
func (g *gatewayResources) listenerPatches(m *model, listener string) []patch {
	const manager = `$..filters[?@.name=="envoy.filters.network.http_connection_manager"].typed_config`
	var out []patch
	do := func(op, at, path string, value *yaml.Node) {
		out = append(out, patch{Type: listenerKind, Name: listener, Op: op, JSONPath: at, Path: path, Value: value})
	}
	add := func(path string, message proto.Message) { do("add", manager, path, m.node(message.ProtoReflect())) }
	do("add", manager, "/max_request_headers_kb", scalar("!!int", strconv.Itoa(maxHeaderKiB)))
	do("add", manager, "/common_http_protocol_options/max_headers_count", scalar("!!int", strconv.Itoa(maxHeaders)))
	add("/local_reply_config", m.localReplies())
	// After the ClientTrafficPolicy's removals. Its own "set" would come before them.
	add("/early_header_mutation_extensions/0/typed_config/mutations/-", m.reservation())
	for _, log := range m.endOfPass() {
		add("/access_log/-", log)
	}
	// Its name has the policy's kind in the middle, in a cluster, and nothing there in standalone mode.
	at := fmt.Sprintf(`$..http_filters[?match(@.name, "envoy.filters.http.ext_proc/.*/%s/%s/extproc/0")]`, g.Namespace, g.Name)
	do("replace", at, "/typed_config", m.node(m.mainExtProc().GetTypedConfig().ProtoReflect()))
	add("/http_filters/0", m.unfollowed()) // before the other filters, and so behind them for an answer
	add("/http_filters/0", m.hygiene())    // the first, and so the last to see an answer
	return out
}

// routePatches give the routes of rules the actions of the bootstrap's routes. How long a request may take says the HTTPRoute.
func (g *gatewayResources) routePatches(m *model, listener string) []patch {
	host := m.routes().GetVirtualHosts()[0]
	routes := map[string]*routev3.Route{}
	for _, r := range host.GetRoutes() {
		routes[r.GetName()] = r
	}
	var out []patch
	for i, rule := range g.Rules {
		if rule.name == "" {
			continue
		}
		at := fmt.Sprintf(`$.virtual_hosts[*].routes[?match(@.name, "httproute/%s/%s/rule/%d/.*")]`, g.Namespace, g.Name, i)
		addUnder := func(under, op, path string, value *yaml.Node) {
			out = append(out, patch{Type: routesKind, Name: listener, Op: op, JSONPath: at + under, Path: path, Value: value})
		}
		add := func(op, path string, value *yaml.Node) { addUnder("", op, path, value) }
		route := routes[rule.name]
		if rule.Patched != "" {
			add("replace", "/match", m.node(route.GetMatch().ProtoReflect()))
		}
		action := route.GetRoute()
		if action == nil {
			continue // pass-2 answers what is undecided with an error; here that goes to the replan port
		}
		add("replace", "/route/cluster", scalar("!!str", action.GetCluster()))
		action.ClusterSpecifier, action.Timeout = nil, nil
		if action.InternalRedirectPolicy != nil {
			g.redirectsByName(m, action.InternalRedirectPolicy)
		}
		for field, value := range m.fields(action) {
			add("add", "/route/"+field, value)
		}
		for _, name := range slices.Sorted(maps.Keys(route.GetTypedPerFilterConfig())) {
			switch config := m.node(route.GetTypedPerFilterConfig()[name].ProtoReflect()); name {
			case extProcFilter:
				// Envoy Gateway's filter has another name; its route has an empty configuration for it that enables it.
				addUnder(`.typed_per_filter_config[?@["@type"]=="type.googleapis.com/envoy.config.route.v3.FilterConfig"]`, "add", "/config", config)
			case bufferFilter: // Envoy Gateway's listener has no such filter
			default:
				add("add", "/typed_per_filter_config/"+name, config)
			}
		}
		remove := []string{"x-tandem-leg"} // or the next pass would begin here
		switch {
		case rule.Patched != "":
			add("add", "/request_headers_to_add", &yaml.Node{
				Kind: yaml.SequenceNode, Content: []*yaml.Node{m.node(route.GetRequestHeadersToAdd()[0].ProtoReflect())},
			})
		case len(route.GetRequestHeadersToRemove()) > 0:
			remove = append(remove, "x-tandem-restart")
		}
		add("add", "/request_headers_to_remove", texts(remove...))
		add("add", "/response_headers_to_remove", texts(host.GetResponseHeadersToRemove()...)) // a redirect still gets them
	}
	return out
}

// redirectsByName allows Envoy Gateway's names of the routes that a redirect may lead to: those of requests with a ticket. An
// engine's own redirect leads to none of them.
func (g *gatewayResources) redirectsByName(m *model, policy *routev3.InternalRedirectPolicy) {
	var names []string
	for i, rule := range g.Rules {
		if rule.name == "pass-2" || rule.name == "pass-2-buffered" {
			names = append(names, fmt.Sprintf("httproute/%s/%s/rule/%d/match/0/*", g.Namespace, g.Name, i))
		}
	}
	policy.Predicates = []*corev3.TypedExtensionConfig{m.extension("tandem", &allowlistedv3.AllowListedRoutesConfig{AllowedRouteNames: names})}
}
