// Package livemodule holds the resources of a cluster against what a route needs whose requests a Tandem answers that
// Envoy Gateway's Envoy has loaded (docs/howto/envoy-gateway-module.md). It reads what it is given, and asks nobody.
package livemodule

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// Kinds are the resources that are read, as kubectl names them.
const Kinds = "gatewayclasses.gateway.networking.k8s.io,gateways.gateway.networking.k8s.io," +
	"httproutes.gateway.networking.k8s.io,envoyproxies.gateway.envoyproxy.io,backends.gateway.envoyproxy.io," +
	"backendtrafficpolicies.gateway.envoyproxy.io,envoyextensionpolicies.gateway.envoyproxy.io,services"

// Resource is one of a cluster, as it is written.
type Resource map[string]any

func (r Resource) kind() string      { return text(r, "kind") }
func (r Resource) name() string      { return text(r, "metadata", "name") }
func (r Resource) namespace() string { return text(r, "metadata", "namespace") }
func (r Resource) title() string     { return title(r.kind(), r.namespace(), r.name()) }

// Resources are those of a cluster, in any order.
type Resources []Resource

// Read reads resources: YAML documents, or lists of them, as `kubectl get -o json` or files have them.
func Read(from io.Reader) (out Resources, err error) {
	d := yaml.NewDecoder(from)
	for {
		var r map[string]any
		switch err := d.Decode(&r); {
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil:
			return nil, fmt.Errorf("reading resources: %w", err)
		case strings.HasSuffix(text(r, "kind"), "List"):
			for _, item := range objects(r, "items") {
				out = append(out, item)
			}
		case r != nil:
			out = append(out, r)
		}
	}
}

// check is what is found out about one route.
type check struct {
	all    Resources
	found  []string
	policy Resource
	module config.Module    // of the policy
	tandem *configv1.Config // likewise; nil: it is in a file
	route  Resource
	entry  string // of the EnvoyProxy's dynamicModules
}

// Check returns what is missing or wrong for the policy of a name, each in a sentence that says how to mend it. None:
// all that can be seen is as it must be.
func Check(all Resources, namespace, name string) []string {
	c := &check{all: all}
	if c.policy = c.get("EnvoyExtensionPolicy", namespace, name); c.policy == nil {
		c.add("%s is not there: apply what `tandem envoy --for envoy-gateway` prints, or name the policy (--name, "+
			"--namespace)", title("EnvoyExtensionPolicy", namespace, name))
		return c.found
	}
	c.conditions(c.policy, "status", "ancestors")
	if !c.config() {
		return c.found
	}
	for _, target := range objects(c.policy, "spec", "targetRefs") {
		if target["kind"] != "HTTPRoute" {
			continue // of a Gateway: its routes are looked at through their own policies
		}
		if c.route = c.get("HTTPRoute", namespace, text(target, "name")); c.route == nil {
			c.add("%s is not there, which the policy %s targets",
				title("HTTPRoute", namespace, text(target, "name")), name)
			continue
		}
		c.conditions(c.route, "status", "parents")
		c.rules()
		c.traffic()
		for _, parent := range objects(c.route, "spec", "parentRefs") {
			c.gateway(parent)
		}
	}
	return c.found
}

func (c *check) add(format string, args ...any) {
	if line := fmt.Sprintf(format, args...); !slices.Contains(c.found, line) {
		c.found = append(c.found, line)
	}
}

// config reads the policy's entry for Tandem.
func (c *check) config() bool {
	modules := objects(c.policy, "spec", "dynamicModule")
	i := slices.IndexFunc(modules, func(m map[string]any) bool { return text(m, "filterName") != "hold" })
	if i < 0 {
		c.add("%s has no dynamicModule: add the printed one", c.policy.title())
		return false
	}
	c.entry = text(modules[i], "name")
	written, _ := json.Marshal(modules[i]["config"])
	var err error
	if c.module, err = config.ReadModule(written); err != nil {
		c.add("%s: %v", c.policy.title(), err)
		return false
	}
	if c.module.Tandem != nil {
		everywhere := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
		if c.tandem, _, err = config.ParsePolicy(c.module.Tandem, everywhere); err != nil {
			c.add("%s: config.tandem: %v", c.policy.title(), err)
		}
	}
	if c.module.Route == nil {
		c.add("%s: config has no route: add route: {rule: 1, strict: true}, the rule that calls go to",
			c.policy.title())
	}
	return true
}

// rules looks at the rules of the route, and at what they lead to.
func (c *check) rules() {
	rules := objects(c.route, "spec", "rules")
	calls := -1
	if r := c.module.Route; r != nil && r.Cluster == "" && r.Rule != nil {
		if calls = *r.Rule; calls >= len(rules) {
			c.add("%s has no rule %d (from 0), which the policy names for calls (route.rule): add the rule with the "+
				"Backend of type DynamicResolver", c.route.title(), calls)
		}
	}
	for i, rule := range rules {
		rulesName := fmt.Sprintf("%s: rule %d", c.route.title(), i)
		refs := objects(rule, "backendRefs")
		if len(refs) != 1 {
			c.add("%s has %d backendRefs: leave one, for of several Envoy Gateway makes weighted clusters, and a "+
				"part of the requests fails where one has no endpoints", rulesName, len(refs))
		}
		if t := text(rule, "timeouts", "request"); t != "0s" && t != "0" {
			c.add("%s has no timeouts: {request: 0s}: long answers are cut", rulesName)
		}
		for _, f := range objects(rule, "filters") {
			if text(f, "type") == "URLRewrite" && c.tandem != nil && len(c.tandem.GetEnvoy().GetPathPrefixes()) == 0 {
				c.add("%s rewrites the path, which comes after Tandem: name the prefix in the policy, "+
					"config.tandem.envoy.pathPrefixes", rulesName)
			}
		}
		for _, ref := range refs {
			c.backend(rulesName, ref, i == calls)
		}
	}
	if c.module.Route != nil && c.module.Route.Rule == nil && c.module.Route.Cluster == "" && c.module.Route.Strict {
		c.add("%s says strict: true, and names no rule for calls: add route.rule", c.policy.title())
	}
}

// backend looks at what a rule leads to.
func (c *check) backend(from string, ref map[string]any, calls bool) {
	kind, name := cmp.Or(text(ref, "kind"), "Service"), text(ref, "name")
	namespace := cmp.Or(text(ref, "namespace"), c.route.namespace())
	r := c.get(kind, namespace, name)
	if r == nil {
		c.add("%s leads to %s, which is not there", from, title(kind, namespace, name))
		return
	}
	dynamic := text(r, "spec", "type") == "DynamicResolver"
	switch {
	case kind == "Backend":
		c.conditions(r, "status")
	case kind == "Service" && !calls && text(r, "spec", "clusterIP") != "None":
		c.headless(r)
	}
	switch {
	case calls && c.module.Route.Strict && !dynamic:
		c.add("%s is for calls, and leads to %s: give it a Backend of type DynamicResolver, or leave strict out of "+
			"the policy", from, r.title())
	case !calls && dynamic:
		c.add("%s leads to %s, through which a client can have Envoy connect to any address: only the rule for "+
			"calls, which no request matches, may", from, r.title())
	}
}

// headless says that the names of a Service in the configuration are not those of its pods.
func (c *check) headless(service Resource) {
	for _, p := range c.tandem.GetPools() {
		for _, n := range p.GetDiscovery().GetDns() {
			if first, rest, _ := strings.Cut(n.GetName(), "."); first == service.name() &&
				(rest == "" || strings.HasPrefix(rest+".", service.namespace()+".")) {
				c.add("%s is not headless, so %s is one address for all engines: set clusterIP: None (in a Service "+
					"made anew)", service.title(), n.GetName())
			}
		}
	}
}

// traffic looks at the BackendTrafficPolicy of the route.
func (c *check) traffic() {
	policy := c.policyFor("BackendTrafficPolicy")
	if policy == nil {
		c.add("%s has no BackendTrafficPolicy: add the printed one. Without a retry policy a request whose engine "+
			"fails gets 503, and more than 1,024 at once are refused", c.route.title())
		return
	}
	c.conditions(policy, "status", "ancestors")
	retry := "retry: {numRetries: 1, retryOn: {triggers: [retriable-status-codes], httpStatusCodes: [599]}}"
	spec := policy["spec"]
	triggers, codes := list(spec, "retry", "retryOn", "triggers"), list(spec, "retry", "retryOn", "httpStatusCodes")
	switch {
	case at(spec, "retry") == nil:
		c.add("%s has no retry policy, so Envoy keeps no body and a request whose engine fails gets 503: add %s",
			policy.title(), retry)
	case !slices.Equal(triggers, []string{"retriable-status-codes"}) || !slices.Equal(codes, []string{"599"}):
		c.add("%s retries on %s %s: Envoy repeats at any engine what Tandem plans again; say %s", policy.title(),
			strings.Join(triggers, ","), strings.Join(codes, ","), retry)
	}
	if at(spec, "circuitBreaker") == nil {
		c.add("%s has no circuitBreaker: more than 1,024 requests at once get 503; add the printed one", policy.title())
	}
	if at(spec, "timeout", "http", "streamIdleTimeout") == nil {
		c.add("%s has no timeout.http.streamIdleTimeout: an answer that is silent for 5 minutes is cut; say 1800s",
			policy.title())
	}
	if at(spec, "healthCheck") != nil {
		c.add("%s checks the health of engines: one that it ejects is unknown to the route, so a request for it is "+
			"planned again; leave healthCheck to Tandem", policy.title())
	}
	if r := c.module.Route; r != nil && !r.Strict && at(spec, "loadBalancer", "endpointOverride") == nil {
		c.add("%s has no loadBalancer.endpointOverride, and calls are not strict: P's leg goes to any engine; add "+
			"loadBalancer: {type: LeastRequest, endpointOverride: {extractFrom: [{header: "+
			"x-gateway-destination-endpoint}]}}", policy.title())
	}
}

// policyFor returns the policy of a kind for the route, or for its Gateway.
func (c *check) policyFor(kind string) (of Resource) {
	for _, p := range c.all {
		if p.kind() != kind || p.namespace() != c.route.namespace() {
			continue
		}
		for _, target := range objects(p, "spec", "targetRefs") {
			switch {
			case target["kind"] == "HTTPRoute" && text(target, "name") == c.route.name():
				return p
			case target["kind"] == "Gateway" && slices.ContainsFunc(objects(c.route, "spec", "parentRefs"),
				func(parent map[string]any) bool { return text(parent, "name") == text(target, "name") }):
				of = p
			}
		}
	}
	return of
}

// gateway looks at a Gateway of the route, and at the EnvoyProxy that says how its Envoys run.
func (c *check) gateway(parent map[string]any) {
	namespace := cmp.Or(text(parent, "namespace"), c.route.namespace())
	gateway := c.get("Gateway", namespace, text(parent, "name"))
	if gateway == nil {
		c.add("%s is not there, which %s is for", title("Gateway", namespace, text(parent, "name")), c.route.title())
		return
	}
	c.conditions(gateway, "status")
	ref, in := at(gateway, "spec", "infrastructure", "parametersRef"), namespace
	if class := c.get("GatewayClass", "", text(gateway, "spec", "gatewayClassName")); ref == nil && class != nil {
		ref = at(class, "spec", "parametersRef")
		in = text(ref, "namespace")
	}
	if ref == nil {
		c.add("%s has no EnvoyProxy, so its Envoy loads no module: name one in infrastructure.parametersRef",
			gateway.title())
		return
	}
	proxy := c.get("EnvoyProxy", in, text(ref, "name"))
	if proxy == nil {
		c.add("%s is not there, which %s names", title("EnvoyProxy", in, text(ref, "name")), gateway.title())
		return
	}
	c.proxy(proxy)
}

// behind are the filters that Tandem has to stand behind, as Envoy Gateway 1.9 names them: by its default order they
// come after dynamic modules.
var behind = []string{"envoy.filters.http.rbac", "envoy.filters.http.local_ratelimit", "envoy.filters.http.ratelimit"}

func (c *check) proxy(proxy Resource) {
	spec := proxy["spec"]
	modules := objects(spec, "dynamicModules")
	i := slices.IndexFunc(modules, func(m map[string]any) bool { return text(m, "name") == c.entry })
	if i < 0 {
		c.add("%s does not load the module %s that the policy names, so Envoy Gateway answers all requests of the "+
			"route with 500: add it to dynamicModules", proxy.title(), c.entry)
		return
	}
	module := modules[i]
	if keep, _ := module["doNotClose"].(bool); !keep {
		c.add("%s: dynamicModules: %s has no doNotClose: true: Go's runtime cannot be unloaded, and Envoy would crash",
			proxy.title(), c.entry)
	}
	if text(module, "source", "type") == "Remote" {
		c.add("%s loads the library by URL: while that fails requests pass unsplit; prefer an image that has it "+
			"(Local)", proxy.title())
	}
	order := objects(spec, "filterOrder")
	for _, f := range behind {
		if !slices.ContainsFunc(order, func(o map[string]any) bool {
			return text(o, "name") == "envoy.filters.http.dynamic_modules" && text(o, "after") == f
		}) {
			c.add("%s lets Tandem come before %s, so what that refuses has been prefilled, and answers of Tandem's "+
				"own pass it by: add to filterOrder {name: envoy.filters.http.dynamic_modules, after: %s}",
				proxy.title(), f, f)
		}
	}
	if text(spec, "shutdown", "drainTimeout") == "" {
		c.add("%s has no shutdown.drainTimeout: a change of a policy ends streams after 60 s; say 1800s", proxy.title())
	}
	deployment := at(spec, "provider", "kubernetes", "envoyDeployment")
	if text(spec, "provider", "type") != "Kubernetes" || text(module, "source", "type") == "Remote" {
		return
	}
	library := text(module, "source", "local", "path")
	if text(deployment, "container", "image") == "" && !mounts(deployment, library) {
		c.add("%s has neither an image of Envoy with %s nor a volume there: Envoy Gateway's own image lacks it",
			proxy.title(), library)
	}
	if file := c.module.File; file != "" && !mounts(deployment, file) {
		c.add("%s mounts nothing at %s, which the policy names: mount the ConfigMap there", proxy.title(), file)
	}
}

// mounts reports whether a file is in a volume of Envoy's container.
func mounts(deployment any, file string) bool {
	return slices.ContainsFunc(objects(deployment, "container", "volumeMounts"), func(m map[string]any) bool {
		dir := path.Clean(text(m, "mountPath"))
		return file == dir || strings.HasPrefix(file, dir+"/")
	})
}

// wanted are the conditions that have to be true.
var wanted = []string{"Accepted", "ResolvedRefs", "Programmed"}

// conditions says what Envoy Gateway says of a resource: in its status, or in each member of a list of it.
func (c *check) conditions(r Resource, where ...string) {
	of := []map[string]any{}
	if status, ok := at(r, where...).(map[string]any); ok {
		of = append(of, status)
	}
	for _, one := range append(of, objects(r, where...)...) {
		for _, condition := range objects(one, "conditions") {
			if slices.Contains(wanted, text(condition, "type")) && text(condition, "status") == "False" {
				c.add("%s: Envoy Gateway says %s: False (%s): %s",
					r.title(), text(condition, "type"), text(condition, "reason"), text(condition, "message"))
			}
		}
	}
}

func (c *check) get(kind, namespace, name string) Resource {
	for _, r := range c.all {
		if r.kind() == kind && r.name() == name && (kind == "GatewayClass" || r.namespace() == namespace) {
			return r
		}
	}
	return nil
}

func title(kind, namespace, name string) string {
	return fmt.Sprintf("%s %s/%s", kind, namespace, name)
}

// at returns a member of members; nil: there is none.
func at(of any, names ...string) any {
	for _, name := range names {
		switch m := of.(type) {
		case Resource:
			of = m[name]
		case map[string]any:
			of = m[name]
		default:
			return nil
		}
	}
	return of
}

// text is at of text.
func text(of any, names ...string) string {
	s, _ := at(of, names...).(string)
	return s
}

// objects is at of a list of objects.
func objects(of any, names ...string) (out []map[string]any) {
	values, _ := at(of, names...).([]any)
	for _, v := range values {
		if m, ok := v.(map[string]any); ok {
			out = append(out, m)
		}
	}
	return out
}

// list is at of a list of plain values, as text.
func list(of any, names ...string) (out []string) {
	values, _ := at(of, names...).([]any)
	for _, v := range values {
		out = append(out, fmt.Sprint(v))
	}
	return out
}
