package envoyconfigs

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/template"

	"sigs.k8s.io/yaml"

	configv1 "tandem/protos/config/v1"
)

//go:embed endpoints.yaml.tmpl
var endpointsTemplate string

// Upstream is how Envoy gets to the endpoint that ext_proc names in x-gateway-destination-endpoint.
type Upstream string

const (
	// OriginalDst connects to the address, whichever it is.
	OriginalDst Upstream = "original-dst"
	// OverrideHost looks the address up among the endpoints that Envoy Gateway has told it of (Services and Backends that
	// are printed too), by Envoy's load-balancing policy override_host. A hop to any other is planned again.
	OverrideHost Upstream = "override-host"
)

// Limits of Envoy Gateway's and the Gateway API's resources.
const (
	maxBackendEndpoints = 256
	maxRules            = 16
)

// endpointSet is what Envoy Gateway has to know of the endpoints that are spoken to with one scheme: one Backend, or one Service.
// Of several it would make a cluster each as soon as one of them had no endpoints (v1.9.1), and the patches would miss them all.
type endpointSet struct {
	Suffix  string        // of the scheme's clusters
	Backend string        // that lists Hosts
	Hosts   []gatewayHost // listed or looked up
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
		named := slices.ContainsFunc(s.Hosts, func(h gatewayHost) bool { return h.FQDN })
		switch {
		case s.Service != nil && len(s.Hosts) > 0:
			return nil, errSeveral
		case named && slices.ContainsFunc(s.Hosts, func(h gatewayHost) bool { return !h.FQDN }):
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
		s := of[scheme]
		for _, h := range gatewayHosts(hosts{Hosts: []address{a}}) {
			if !slices.Contains(s.Hosts, h) {
				s.Hosts = append(s.Hosts, h)
			}
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

// newGatewayService says in a Service's words what pods are meant.
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
	Bytes   int64
}

// knownClusters gives each set's rules, which stand behind those of the legs, and the clusters that they replace.
func (g *gatewayResources) knownClusters(b *bootstrap) {
	g.known = map[string]knownCluster{}
	for _, set := range g.Endpoints {
		replace := func(cluster, header string) {
			k := knownCluster{Cluster: cluster + set.Suffix, Header: header, Bytes: g.Bytes}
			if refs := set.refs(); len(refs) > 0 {
				k.Known = fmt.Sprintf("httproute/%s/%s/rule/%d", g.Namespace, g.Name, len(g.Rules))
				g.Rules = append(g.Rules, gatewayRule{Leg: "none-" + k.Cluster, Timeout: "0s", Refs: refs})
			}
			g.known[k.Cluster] = k
		}
		replace("tandem-pod", "x-gateway-destination-endpoint")
		if b.Pairs {
			replace("tandem-mirror-pod", "x-tandem-prefill-endpoint")
		}
	}
}

// patches put Envoy Gateway's cluster in the place of one of the bootstrap, whose settings it gets. Envoy's own answers are
// those of the main listener.
func (k knownCluster) patches(cluster map[string]any, localReplies any) ([]patch, error) {
	t, err := template.New("endpoints").Delims("<<", ">>").Parse(endpointsTemplate)
	if err != nil {
		return nil, fmt.Errorf("reading the template of endpoints: %w", err)
	}
	var text bytes.Buffer
	if err := t.Execute(&text, k); err != nil {
		return nil, fmt.Errorf("rendering endpoints: %w", err)
	}
	var parts struct {
		Cluster  map[string]any `json:"cluster"`
		Listener map[string]any `json:"listener"`
		Policy   any            `json:"policy"`
	}
	if err := yaml.Unmarshal(text.Bytes(), &parts); err != nil {
		return nil, fmt.Errorf("reading endpoints: %w", err)
	}
	connectionManager(parts.Listener)["local_reply_config"] = localReplies
	parts.Cluster["circuit_breakers"] = cluster["circuit_breakers"]
	out := []patch{
		{typePrefix + "listener.v3.Listener", k.Cluster, operation{Op: "add", Value: parts.Listener}},
		{typePrefix + "cluster.v3.Cluster", k.Cluster, operation{Op: "add", Value: parts.Cluster}},
	}
	if k.Known == "" {
		return out, nil
	}
	settings := maps.Clone(cluster)
	for _, field := range []string{"name", "type", "lb_policy", "original_dst_lb_config", "cleanup_interval"} {
		delete(settings, field)
	}
	settings["load_balancing_policy"] = parts.Policy
	settings["per_connection_buffer_limit_bytes"] = 1 << 20 // Envoy's default; Envoy Gateway's is 32 KiB
	for _, field := range slices.Sorted(maps.Keys(settings)) {
		out = append(out, patch{typePrefix + "cluster.v3.Cluster", k.Known, operation{Op: "add", Path: "/" + field, Value: settings[field]}})
	}
	return out, nil
}
