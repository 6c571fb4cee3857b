package envoyconfigs

import (
	"bytes"
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/template"

	configv1 "tandem/protos/config/v1"
)

//go:embed module.yaml.tmpl
var moduleTemplate string

// ModuleOptions are what Envoy Gateway's resources need for a Tandem that its Envoy has loaded.
type ModuleOptions struct {
	GatewayOptions
	Config  []byte // the replica's configuration, YAML: the part for the policy or, with File, all of it
	File    string // where Envoy finds it; "": it stands in the policy
	Library string // where Envoy finds libtandem.so
	Image   string // of an Envoy that has it
}

// moduleResources is what the template is filled with.
type moduleResources struct {
	ModuleOptions
	Gateway, Section, Config string
	Proxy, Comment           string // the part of the EnvoyProxy's spec that loads the library, and the same as a comment
	Own                      bool   // the Gateway is among the resources
	Port                     int
	Decode, Calls            backends
	// ServerName is that of https engines, which Envoy Gateway has Envoy verify by a BackendTLSPolicy; "": engines are
	// spoken to by http. A call cannot be both strict and verified by a name that is not in its address, so calls go to
	// the engines that prefill by a header then.
	ServerName string
}

// backends are where requests of a rule go.
type backends struct {
	Addresses []address
	Services  []backendRef
}

func (b *backends) add(to *backendRef, a *address) {
	if to != nil && !slices.Contains(b.Services, *to) {
		b.Services = append(b.Services, *to)
	}
	if a != nil && !slices.Contains(b.Addresses, *a) {
		b.Addresses = append(b.Addresses, *a)
	}
}

// one reports whether they are one backend: of several, one of which has no pods, Envoy Gateway makes a cluster that
// fails a part of all requests.
func (b *backends) one() bool { return len(b.Services)+min(len(b.Addresses), 1) <= 1 }

// proxySpec is that part. Without filterOrder Envoy Gateway 1.9 puts the module before authorization and rate limits, so
// that a request that these refuse would have been prefilled. Each line moves it behind a filter that the listener has.
const proxySpec = `  dynamicModules:
  - name: tandem
    source: {type: Local, local: {path: %s}}
    doNotClose: true   # Go's runtime cannot be unloaded
  filterOrder:   # without these a request that is denied or limited would have been prefilled
  - {name: envoy.filters.http.dynamic_modules, after: envoy.filters.http.rbac}
  - {name: envoy.filters.http.dynamic_modules, after: envoy.filters.http.local_ratelimit}
  - {name: envoy.filters.http.dynamic_modules, after: envoy.filters.http.ratelimit}
  - {name: envoy.filters.http.dynamic_modules, after: envoy.filters.http.compressor}
  shutdown: {drainTimeout: 1800s}   # a change of the policy ends streams that last longer`

// EnvoyGatewayModule renders the resources with which Envoy Gateway 1.9 has its own Envoy load Tandem: a route whose
// requests go through Tandem, without any other process (docs/howto/envoy-gateway-module.md).
func EnvoyGatewayModule(c *configv1.Config, o ModuleOptions) ([]byte, error) {
	gateway, section, err := complete(&o.GatewayOptions)
	if err != nil {
		return nil, err
	}
	listen, err := parse(c.GetEnvoy().GetListen())
	if err != nil {
		return nil, err
	}
	m := moduleResources{ModuleOptions: o, Gateway: gateway, Section: section, Own: o.Gateway == "", Port: listen.Port}
	schemes := map[string]bool{}
	for _, p := range c.GetPools() {
		if err := m.engines(p, c.GetEnvoy().GetEndpointTls().GetServerName(), schemes); err != nil {
			return nil, fmt.Errorf("pool %s: %w", p.GetName(), err)
		}
	}
	switch {
	case len(schemes) > 1:
		return nil, errors.New("engines are spoken to by http and by https: print each pool by itself, with a route of its own")
	case !m.Decode.one() || m.ServerName != "" && !m.Calls.one():
		return nil, errors.New("the engines of a role are in several Services, or in one and in a list: of one of them that has no pods " +
			"Envoy Gateway makes a cluster that fails a part of all requests; print each pool by itself, with a route of its own")
	}
	m.Proxy = fmt.Sprintf(proxySpec, o.Library)
	m.Comment = "#   " + strings.ReplaceAll(m.Proxy, "\n", "\n#   ")
	indent := "        "
	if o.File != "" {
		indent = "    "
	}
	m.Config = indent + strings.ReplaceAll(strings.TrimSpace(string(o.Config)), "\n", "\n"+indent)
	t, err := template.New("module").Delims("<<", ">>").Parse(moduleTemplate)
	if err != nil {
		return nil, fmt.Errorf("reading the template of Envoy Gateway's resources: %w", err)
	}
	var out bytes.Buffer
	if err := t.Execute(&out, m); err != nil {
		return nil, fmt.Errorf("rendering Envoy Gateway's resources: %w", err)
	}
	return out.Bytes(), nil
}

// engines adds the engines of a pool as backends of the route and, if they are https, of the rule for calls.
// serverName is the name of those that have none of their own.
func (m *moduleResources) engines(p *configv1.Pool, serverName string, schemes map[string]bool) error {
	add := func(role, scheme, name string, to *backendRef, a *address) error {
		schemes[scheme] = true
		switch {
		case scheme == "https" && name == "":
			return errors.New("https engines need a name that their certificate has: serverName, or envoy.endpointTls.serverName for all")
		case scheme == "https" && m.ServerName != "" && m.ServerName != name:
			return fmt.Errorf("https engines have the names %s and %s: Envoy Gateway verifies one for a backend", m.ServerName, name)
		case scheme == "https":
			m.ServerName = name
		case scheme != "http":
			return fmt.Errorf("engines with the scheme %s: print the resources for http, and say in the Backends how they "+
				"are spoken to (docs/howto/envoy-gateway-module.md)", scheme)
		}
		if role != "prefill" && role != "encode" {
			m.Decode.add(to, a)
		}
		if role != "decode" {
			m.Calls.add(to, a)
		}
		return nil
	}
	for _, e := range p.GetEndpoints() {
		a, err := parse(e.GetAddress())
		if err != nil {
			return err
		}
		if err := add(e.GetRole(), e.GetScheme(), cmp.Or(e.GetServerName(), serverName), nil, &a); err != nil {
			return err
		}
	}
	if d := p.GetDiscovery(); d != nil && len(d.GetDns()) == 0 {
		return errors.New("its endpoints are found in a way that says nothing of Services: only lists and discovery.dns can be printed")
	}
	for _, n := range p.GetDiscovery().GetDns() {
		service, rest, _ := strings.Cut(n.GetName(), ".")
		if namespace, _, _ := strings.Cut(rest, "."); n.GetRole() != "prefill" && namespace != "" && namespace != m.Namespace {
			return fmt.Errorf("%s is in another namespace than the route (--namespace %s), which takes a ReferenceGrant", n.GetName(), m.Namespace)
		}
		if err := add(n.GetRole(), n.GetScheme(), serverName, &backendRef{Service: service, Port: n.GetPort()}, nil); err != nil {
			return err
		}
	}
	return nil
}
