package envoyconfigs

import (
	"encoding/json"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/types/known/durationpb"

	"tandem/envoy-configs/inside"
	configv1 "tandem/protos/config/v1"
)

// Inside prints the bootstrap of an Envoy that has Tandem loaded, with the configuration in file.
func Inside(c *configv1.Config, file string) ([]byte, error) {
	m, err := newModel(c, false)
	if err != nil {
		return nil, err
	}
	if m.Explains != "" {
		m.Explains = "%DYNAMIC_METADATA(tandem:explanation)%"
	}
	m.Bodies.Buffer = 4*m.Bodies.Max + bufferMargin
	if m.secure() { // an engine behind a name gets it as Host, of which Envoy makes SNI
		m.Engines.Schemes = append(m.Engines.Schemes, scheme{Name: "https-named", Suffix: "-https-named"})
	}
	b := m.frame()
	b.BootstrapExtensions = nil
	b.StaticResources = &bootstrapv3.Bootstrap_StaticResources{
		Listeners: []*listenerv3.Listener{m.insideListener(file)}, Clusters: clusters(m).pods(),
	}
	m.showStats(b.StaticResources)
	return m.print(inside.Overview, b)
}

func (m model) insideListener(file string) *listenerv3.Listener {
	h := listeners(m).mainManager()
	h.AccessLog, h.Tracing, h.HttpFilters = nil, nil, filters(m).inside(file)
	h.RequestTimeout, h.StreamIdleTimeout = durationpb.New(5*time.Minute), durationpb.New(m.TicketTTL)
	h.RouteSpecifier = &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: routes(m).inside()}
	m.note(h, notes{
		"request_timeout":        "Of the request's body, until it is here.",
		"stream_idle_timeout":    "Until a route says otherwise: a prefill takes no longer.",
		"max_request_headers_kb": "", "tracing": "",
		"early_header_mutation_extensions": "What steers is not the client's to set. This runs once, when the " +
			"request comes in, and not when the filter has it begin again.",
	})
	l := listeners(m).listener("openai", h)
	l.Address = socketAddress(m.Listen)
	return noted(m, l, notes{"per_connection_buffer_limit_bytes": "A body is kept whole until the decode endpoint " +
		"answers. The filter refuses bodies over four times envoy.maxBodyBytes; the margin is what one grows by."})
}

// inside are the filters of an Envoy that has Tandem loaded.
func (m filters) inside(file string) []*hcmv3.HttpFilter {
	config, _ := json.Marshal(map[string]string{"file": file}) // a string cannot fail
	module := m.filter("tandem", noted(m, inside.Module("tandem", string(config), m.pack), notes{
		"filter_config":         "Tandem's own configuration, where Envoy finds it.",
		"dynamic_module_config": "libtandem.so; Go's runtime cannot be unloaded.",
	}))
	return append(m.cors(), m.hygiene(), module, m.router())
}

// inside are the routes of requests that the filter has decided.
func (m routes) inside() *routev3.RouteConfiguration {
	keep := noted(m, &routev3.RetryPolicy{RetryOn: "retriable-headers"}, notes{
		"": "Nothing is retried: no header is named. But for a policy Envoy keeps the body, with which the filter " +
			"begins again where the endpoint fails before it answers.",
	})
	var out []*routev3.Route
	for _, s := range m.legSchemes() {
		of := ofScheme("x-tandem-scheme", s)
		decode := m.legRoute("decode"+s.Suffix, "decode", "tandem-pod"+s.Suffix, m.IdleTimeout, keep, of...)
		pass := m.legRoute("pass"+s.Suffix, "pass", "tandem-pod"+s.Suffix, m.IdleTimeout, nil, of...)
		pair := m.legRoute("pair"+s.Suffix, "pair", "tandem-pair"+s.Suffix, m.IdleTimeout, keep, of...)
		for _, r := range []*routev3.Route{decode, pair, pass} {
			r.TypedPerFilterConfig, r.GetRoute().InternalRedirectPolicy, r.ResponseHeadersToAdd = nil, nil, nil
			out = append(out, r)
		}
	}
	return &routev3.RouteConfiguration{Name: "openai", VirtualHosts: []*routev3.VirtualHost{{
		Name: "all", Domains: []string{"*"}, Routes: append(out, undecided("undecided", nil)),
		ResponseHeadersToRemove: []string{"x-envoy-upstream-service-time", "x-envoy-ratelimited"},
		RequestHeadersToRemove: []string{"x-tandem-leg", "x-envoy-external-address", "x-envoy-internal",
			"x-envoy-original-url", "x-tandem-reservation"},
	}}}
}

// holding is the cluster of requests both of whose legs run at once: decode's answer waits in it for prefill.
const holding = "tandem-pair"

// pods are the clusters that the filter's legs go to.
func (m clusters) pods() (out []*clusterv3.Cluster) {
	for _, s := range m.Engines.Schemes {
		for _, name := range []string{"tandem-pod", holding} {
			c := m.endpoints(name, destination, s, inside.Upstream(name == holding, m.unseen(), m.pack)...)
			out = append(out, c)
		}
	}
	return out
}

// unseen has engines see no header of Envoy's or Tandem's: not those that Envoy's HTTP client adds to the filter's
// calls (1.40, AsyncStreamImpl: x-envoy-internal, and its own address in x-forwarded-for), nor those that said where
// the request goes.
func (m clusters) unseen() []*mutationv3.HeaderMutation {
	via := setHeader("x-forwarded-for", "%REQ(x-tandem-forwarded-for)%", overwrite)
	return []*mutationv3.HeaderMutation{
		noted(m, &mutationv3.HeaderMutation{Action: &mutationv3.HeaderMutation_Append{Append: via}}, notes{
			"": "Envoy's HTTP client has added its own address to that of a call; this is as it was.",
		}),
		removePrefix("x-tandem-"), removePrefix("x-envoy-"), remove(destination),
	}
}
