package envoyconfigs

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	overridehostv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/override_host/v3"
	randomv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/random/v3"
	subsetv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/subset/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	configv1 "tandem/protos/config/v1"
)

// Upstream is how Envoy gets to the endpoint that ext_proc names in x-gateway-destination-endpoint.
type Upstream string

const (
	// OriginalDst connects to the address, whichever it is.
	OriginalDst Upstream = "original-dst"
	// OverrideHost looks the address up among the endpoints that Envoy Gateway gave it (Services and Backends, which
	// are printed too), by Envoy's load-balancing policy override_host. A hop to any other is planned again.
	OverrideHost Upstream = "override-host"
)

// Limits of Envoy Gateway's and the Gateway API's resources.
const (
	maxBackendEndpoints = 256
	maxRules            = 16
)

// endpointSet is what Envoy Gateway has to know of the endpoints of one scheme: one Backend, or one Service. If there
// were several of which one has no endpoints, Envoy Gateway (v1.9.1) would make a cluster of each, and the patches
// would miss them.
type endpointSet struct {
	Suffix  string    // of the scheme's clusters
	Backend string    // that lists Hosts
	Hosts   []address // configured, or found by discovery
	Service *gatewayService
}

// gatewayService selects the pods of a pool.
type gatewayService struct {
	Name   string
	Labels []string // k: v
	Ports  []int32
}

// refs are the backendRefs of a rule for the set.
func (s endpointSet) refs() (out []backendRef) {
	if len(s.Hosts) > 0 {
		out = append(out, backendRef{Backend: s.Backend})
	}
	if s.Service != nil {
		for _, port := range s.Service.Ports {
			out = append(out, backendRef{Service: s.Service.Name, Port: port})
		}
	}
	return out
}

var errSeveral = errors.New("with --upstream override-host the engines of one scheme are the pods of one pool, or are listed, " +
	"for Envoy Gateway would lose all of them while one of several pools had no pods; use original-dst")

// endpointSets are those of every scheme, in the schemes' order.
func endpointSets(c *configv1.Config, o GatewayOptions, schemes []scheme) ([]endpointSet, error) {
	sets := make([]endpointSet, len(schemes))
	of := map[string]*endpointSet{}
	for i, s := range schemes {
		sets[i] = endpointSet{Suffix: s.Suffix, Backend: o.Name + "-endpoints" + s.Suffix}
		of[s.Name] = &sets[i]
	}
	for i, p := range c.GetPools() {
		if err := addEndpoints(of, p, o, fmt.Sprintf("%s-pool-%d", o.Name, i)); err != nil {
			return nil, fmt.Errorf("pool %s: %w", p.GetName(), err)
		}
	}
	for _, s := range sets {
		switch {
		case s.Service != nil && len(s.Hosts) > 0:
			return nil, errSeveral
		case slices.ContainsFunc(s.Hosts, func(a address) bool { return a.ByName() != s.Hosts[0].ByName() }):
			return nil, errors.New("endpoints by name stand beside others, which Envoy Gateway cannot have in one cluster; use --upstream original-dst")
		case len(s.Hosts) > maxBackendEndpoints:
			return nil, fmt.Errorf("%d endpoints are more than Envoy Gateway's Backend holds (%d); use --upstream original-dst", len(s.Hosts), maxBackendEndpoints)
		}
	}
	return sets, nil
}

// addEndpoints adds those of a pool to the sets of their schemes.
func addEndpoints(of map[string]*endpointSet, p *configv1.Pool, o GatewayOptions, service string) error {
	const unknown = "%s says where endpoints are to Tandem alone, and with --upstream override-host Envoy Gateway has to know them; use original-dst"
	add := func(scheme, hostPort string) error {
		a, err := parse(hostPort)
		if err != nil {
			return err
		}
		if s := of[scheme]; !slices.Contains(s.Hosts, a) {
			s.Hosts = append(s.Hosts, a)
		}
		return nil
	}
	for _, e := range p.GetEndpoints() {
		if err := add(e.GetScheme(), e.GetAddress()); err != nil {
			return err
		}
	}
	d := p.GetDiscovery()
	switch {
	case d.GetFile() != nil:
		return fmt.Errorf(unknown, "discovery.file")
	case d.GetInferencePool() != nil:
		return fmt.Errorf(unknown, "discovery.inferencePool")
	}
	for _, n := range d.GetDns() {
		if n.GetPort() == 0 {
			return fmt.Errorf(unknown, "an SRV record")
		}
		if err := add(n.GetScheme(), fmt.Sprintf("%s:%d", n.GetName(), n.GetPort())); err != nil {
			return err
		}
	}
	if k := d.GetKubernetes(); k != nil {
		s, err := newGatewayService(k, o, service)
		if err != nil {
			return err
		}
		set := of[k.GetScheme()]
		if set.Service != nil {
			return errSeveral
		}
		set.Service = &s
	}
	return nil
}

// newGatewayService selects the pods of a discovery, as far as a Service can.
func newGatewayService(k *configv1.KubernetesDiscovery, o GatewayOptions, name string) (gatewayService, error) {
	s := gatewayService{Name: name, Ports: k.GetPorts()}
	if ns := k.GetNamespace(); ns != "" && ns != o.Namespace {
		return s, fmt.Errorf("its pods are in namespace %s, and an HTTPRoute of namespace %s may not refer to them there; print the resources with --namespace %s", ns, o.Namespace, ns)
	}
	if l := k.GetLabels(); len(s.Ports) == 0 || l.GetPortLabel() != "" || l.GetConvention() == "aibrix" {
		return s, errors.New("a Service has the same ports for all pods, and here labels of pods say their ports; use --upstream original-dst")
	}
	for term := range strings.SplitSeq(k.GetSelector(), ",") {
		key, value, ok := strings.Cut(strings.Replace(term, "==", "=", 1), "=")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		if !ok || strings.ContainsAny(key+value, "!() \t") {
			return s, fmt.Errorf("a Service cannot select %q, only labels that are equal to something; use --upstream original-dst", k.GetSelector())
		}
		s.Labels = append(s.Labels, fmt.Sprintf("%s: %q", key, value))
	}
	return s, nil
}

// knownCluster is how an ORIGINAL_DST cluster of the bootstrap is replaced.
type knownCluster struct {
	Cluster string // of the bootstrap
	Header  string // that names the endpoint
	Known   string // Envoy Gateway's cluster; "": there are no such endpoints
	of      func() *clusterv3.Cluster
}

// knownClusters gives each set's rules, which stand behind the one for requests, and the clusters that they replace.
func (g *gatewayResources) knownClusters(m model) {
	g.known = map[string]knownCluster{}
	for i, set := range g.Endpoints {
		replace := func(cluster, header string) {
			k := knownCluster{Cluster: cluster + set.Suffix, Header: header, of: func() *clusterv3.Cluster {
				return clusters(m).endpoints(cluster, header, m.Engines.Schemes[i])
			}}
			if refs := set.refs(); len(refs) > 0 {
				g.Known = append(g.Known, refs)
				k.Known = fmt.Sprintf("httproute/%s/%s/rule/%d", g.Namespace, g.Name, len(g.Known))
			}
			g.known[k.Cluster] = k
		}
		replace("tandem-pod", destination)
		if m.Pairs {
			replace("tandem-mirror-pod", "x-tandem-prefill-endpoint")
		}
	}
}

// patches replace a cluster of the bootstrap by Envoy Gateway's, which gets its settings.
//
// If Envoy Gateway does not know an endpoint, the hop must fail as with a refused connection: its next try goes to
// tandem-replan. But Envoy's router does not retry if a load balancer has no host. So the cluster leads to a listener
// that asks Envoy Gateway's cluster, and the listener's own 503 is retried like any other.
func (k knownCluster) patches(m model) []patch {
	out := []patch{
		addResource(m, listenerKind, k.Cluster, k.listener(m)),
		addResource(m, clusterKind, k.Cluster, clusters(m).loopCluster(loop{k.Cluster, k.Cluster})),
	}
	if k.Known == "" {
		return out
	}
	c := k.of()
	c.Name, c.ClusterDiscoveryType, c.LbPolicy, c.LbConfig, c.CleanupInterval = "", nil, 0, nil, nil
	c.LoadBalancingPolicy = clusters(m).overrideHost(k.Header)
	c.PerConnectionBufferLimitBytes = wrapperspb.UInt32(1 << 20) // Envoy's default; Envoy Gateway's is 32 KiB
	for field, value := range m.fields(c) {
		out = append(out, patch{Type: clusterKind, Name: k.Known, Op: "add", Path: "/" + field, Value: value})
	}
	return out
}

// listener asks Envoy Gateway's cluster. Envoy's own answers are those of the main listener.
func (k knownCluster) listener(m model) *listenerv3.Listener {
	route := toCluster(k.Known)
	if k.Known == "" {
		route = &routev3.Route{Match: anyPath(), Action: &routev3.Route_DirectResponse{DirectResponse: &routev3.DirectResponseAction{Status: 503}}}
	}
	return legs(m).listener(leg{
		name: k.Cluster, host: &routev3.VirtualHost{Routes: []*routev3.Route{route}}, untraced: true,
		replies: replies(m).config(), optional: true,
	})
}

// overrideHost takes the endpoint that a header names, and no other: KV blocks, ranks and reservations belong to it.
//
// It reads the header, not the metadata that endpoint pickers also set: metadata pass neither a redirect nor an
// internal listener. If the cluster does not have the endpoint, the policy falls back on the hosts with a certain
// label, which no host has.
func (m clusters) overrideHost(header string) *clusterv3.LoadBalancingPolicy {
	policy := func(name string, config proto.Message) *clusterv3.LoadBalancingPolicy {
		return &clusterv3.LoadBalancingPolicy{Policies: []*clusterv3.LoadBalancingPolicy_Policy{{
			TypedExtensionConfig: m.extension("envoy.load_balancing_policies."+name, config),
		}}}
	}
	none := policy("subset", &subsetv3.Subset{
		FallbackPolicy:  subsetv3.Subset_NO_FALLBACK,
		SubsetSelectors: []*subsetv3.Subset_LbSubsetSelector{{Keys: []string{"none"}}},
		SubsetLbPolicy:  policy("random", &randomv3.Random{}),
	})
	return policy("override_host", &overridehostv3.OverrideHost{
		OverrideHostSources: []*overridehostv3.OverrideHost_OverrideHostSource{{Header: header}}, FallbackPolicy: none,
	})
}
