package envoyconfigs

import (
	"bytes"
	"cmp"
	_ "embed"
	"fmt"
	"slices"
	"strings"
	"text/template"

	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"tandem/envoy-configs/layout"
	configv1 "tandem/protos/config/v1"
)

//go:embed gateway.yaml.tmpl
var gatewayTemplate string

// GatewayOptions are what Envoy Gateway's resources need in addition to a Tandem configuration.
type GatewayOptions struct {
	Namespace  string   // of all of them, and of Gateway; default "default"
	Name       string   // of the HTTPRoute and the rest; default "tandem"
	Gateway    string   // "name/section": the listener of a Gateway that exists; "": a Gateway is among the resources
	Class      string   // of that Gateway; default "eg", which Envoy Gateway's documentation has
	Standalone bool     // Envoy Gateway runs without a cluster and starts Envoy itself: there is a class among them too
	Upstream   Upstream // how Envoy gets to endpoints; default OriginalDst
}

// gatewayResources is what the template is filled with.
type gatewayResources struct {
	GatewayOptions
	Gateway, Section string
	Own              bool // the Gateway is among the resources
	Port             int
	Replans          []address
	Endpoints        []endpointSet           // with OverrideHost
	Known            [][]backendRef          // one rule each, which no request matches
	Patches          string                  // a YAML list
	known            map[string]knownCluster // by the cluster that is replaced
}

// backendRef is a Backend, or a port of a Service.
type backendRef struct {
	Backend, Service string
	Port             int32
}

// complete fills in the defaults of options, and returns the Gateway and its listener to which the resources attach:
// those that are named, or one of their own.
func complete(o *GatewayOptions) (gateway, section string, err error) {
	o.Namespace, o.Name = cmp.Or(o.Namespace, "default"), cmp.Or(o.Name, "tandem")
	if o.Standalone {
		o.Class = cmp.Or(o.Class, o.Name)
	}
	o.Class = cmp.Or(o.Class, "eg")
	if o.Gateway == "" {
		return o.Name, "http", nil
	}
	gateway, section, ok := strings.Cut(o.Gateway, "/")
	if !ok || gateway == "" || section == "" {
		return "", "", fmt.Errorf("--gateway %q: it is NAME/SECTION, of a Gateway and its listener", o.Gateway)
	}
	return gateway, section, nil
}

// EnvoyGateway renders the resources with which Envoy Gateway 1.9 does without an extension what it does with one
// (docs/adr/0039): an HTTPRoute, and an EnvoyPatchPolicy that has it lead to a listener of Tandem's own, and that adds
// [Behind]. The HTTPRoute is on one listener, the patched one; where the patches are not in force it leads to the
// replan port, which refuses what has no ticket.
func EnvoyGateway(c *configv1.Config, o GatewayOptions) ([]byte, error) {
	gateway, section, err := complete(&o)
	if err != nil {
		return nil, err
	}
	m, err := newModel(c, false)
	if err != nil {
		return nil, err
	}
	m.Late = true
	g := gatewayResources{
		GatewayOptions: o, Gateway: gateway, Section: section, Own: o.Gateway == "", Port: m.Listen.Port,
		Replans: m.Servers.Replans.Hosts,
	}
	switch o.Upstream {
	case OriginalDst, "":
	case OverrideHost:
		if g.Endpoints, err = endpointSets(c, o, m.Engines.Schemes); err != nil {
			return nil, err
		}
		g.knownClusters(m)
	default:
		return nil, fmt.Errorf("--upstream %q: it is %s or %s", o.Upstream, OriginalDst, OverrideHost)
	}
	if len(g.Known) >= maxRules {
		return nil, fmt.Errorf("%d rules are more than an HTTPRoute may have (%d): use --upstream original-dst",
			len(g.Known)+1, maxRules)
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

const typePrefix = "type.googleapis.com/envoy.config."

// patch changes one of Envoy's resources: JSONPath selects an object in it, Path a field of that object.
type patch struct {
	Type, Name         string
	Op, JSONPath, Path string
	Value              *yaml.Node
}

// node returns the patch in the form of an EnvoyPatchPolicy.
func (p patch) node() *yaml.Node {
	operation := &yaml.Node{Kind: yaml.MappingNode, Content: layout.Field("op", p.Op, "path", p.Path)}
	if p.JSONPath != "" {
		operation.Content = append(operation.Content, layout.Field("jsonPath", p.JSONPath)...)
	}
	operation.Content = append(operation.Content, layout.Scalar("!!str", "value"), p.Value)
	return &yaml.Node{Kind: yaml.MappingNode, Content: slices.Concat(
		layout.Field("name", p.Name, "type", typePrefix+p.Type),
		[]*yaml.Node{layout.Scalar("!!str", "operation"), operation},
	)}
}

// Kinds of Envoy's resources.
const (
	listenerKind = "listener.v3.Listener"
	clusterKind  = "cluster.v3.Cluster"
	routesKind   = "route.v3.RouteConfiguration"
)

// addResource adds a whole resource to Envoy's configuration.
func addResource(m model, kind, name string, resource proto.Message) patch {
	return patch{Type: kind, Name: name, Op: "add", Value: m.node(resource.ProtoReflect())}
}

// patches are what the documented API cannot say.
func (g *gatewayResources) patches(m model) []patch {
	own := behindOf(m)
	listener := g.Namespace + "/" + g.Gateway + "/" + g.Section
	route := fmt.Sprintf(`$.virtual_hosts[*].routes[?match(@.name, "httproute/%s/%s/rule/0/.*")]`, g.Namespace, g.Name)
	const manager = `$..filters[?@.name=="envoy.filters.network.http_connection_manager"].typed_config`
	replies := m.node((&hcmv3.LocalReplyConfig{Mappers: own.Replies}).ProtoReflect())
	out := []patch{
		{Type: routesKind, Name: listener, Op: "replace", JSONPath: route, Path: "/route/cluster",
			Value: layout.Scalar("!!str", BehindName)},
		{Type: routesKind, Name: listener, Op: "add", JSONPath: route, Path: "/route/idle_timeout",
			Value: m.node(durationpb.New(own.IdleTimeout).ProtoReflect())},
		{Type: listenerKind, Name: listener, Op: "add", JSONPath: manager, Path: "/local_reply_config", Value: replies},
	}
	for _, l := range own.Listeners {
		out = append(out, addResource(m, listenerKind, l.GetName(), l))
	}
	for _, cluster := range own.Clusters {
		if k, ok := g.known[cluster.GetName()]; ok {
			out = append(out, k.patches(m)...)
			continue
		}
		out = append(out, addResource(m, clusterKind, cluster.GetName(), cluster))
	}
	return out
}
