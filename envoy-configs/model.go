// Package envoyconfigs builds the Envoy configuration that belongs to a Tandem configuration, from go-control-plane's
// types.
//
// There is one model. [Bootstrap] prints all of it as a commented bootstrap, [EnvoyGateway] the resources with which
// Envoy Gateway makes the same of its own listeners. The folders next to this file hold the bootstrap for the common
// shapes, ready to run: a tandem.yaml each, and the envoy.yaml printed from it, which a test keeps equal and holds
// against the real `envoy --mode validate`.
//
// Where to look: listener.go has the main listener, legs.go the internal listeners of the legs, routes.go,
// clusters.go and filters.go what their names say, accesslog.go how Tandem learns the end of a request, replies.go
// what Envoy answers by itself. Each has a type whose methods build these resources. settings.go gathers what all of
// them are built from, hosts.go and tls.go how servers are reached, inside.go
// an Envoy that has Tandem loaded. Why something is set is a note of the model next to it, so that the printed
// configuration has it, too.
package envoyconfigs

import (
	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	overloadv3 "github.com/envoyproxy/go-control-plane/envoy/config/overload/v3"
	internallistenerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/bootstrap/internal_listener/v3"
	downstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/downstream_connections/v3"

	configv1 "tandem/protos/config/v1"
)

// model builds Envoy's resources from settings.
type model struct {
	*settings
	*notebook
}

// Each of these types builds one kind of resource. All have the model's fields, so one gets at another's resources by
// a conversion: filters(m).buffer().
type (
	listeners  model
	legs       model
	routes     model
	filters    model
	clusters   model
	accessLogs model
	replies    model
)

// newModel makes the model of a configuration that was loaded by configv1; see gather.
func newModel(c *configv1.Config, dynamic bool, living ...Replica) (model, error) {
	s, err := gather(c, dynamic, living...)
	return model{s, newNotebook()}, err
}

// overview stands above every printed bootstrap; pairsOverview too where a pool has both legs run at once.
const (
	overview = `Envoy for Tandem: one request, two hops, all inside Envoy. Written by ` + "`tandem envoy`" + `; needs Envoy 1.37.5, 1.38.3, 1.39 or newer.

  pass 1   ext_proc reads the client's request, picks prefill and decode, writes the prefill body    -> x-tandem-leg: prefill
  hop 1    through the internal listener prefill-leg: its ext_proc turns the answer into 307 + ticket -> internal redirect
  pass 2   the same ext_proc as in pass 1 writes the decode body                                     -> x-tandem-leg: decode
  hop 2    the decode endpoint's answer streams to the client; no ext_proc stream is open meanwhile
  replan   a hop that fails outright is tried once more, and that try goes to tandem-replan (composite clusters), which
           answers 307 + ticket: pass 2 plans again
  the end  the gRPC access log reports to Tandem how each hop ended
`
	pairsOverview = `
  pairs    engines that need both legs at once: x-tandem-leg: pair goes to decode through the internal listener decode-leg, and
           a copy of it to prefill through prefill-mirror. decode-leg's ext_proc writes the decode body and watches until prefill
           is done; if a leg fails before that, it answers 307 + ticket
`
	crashOverview = `
ext_proc never sits in a cluster's http_filters: Envoy 1.37 to 1.40 dies of SIGSEGV there under load with large bodies.`
)

func (s *settings) overview() string {
	text := overview
	if s.Pairs {
		text += pairsOverview
	}
	return text + crashOverview
}

// bootstrap is all of Envoy's configuration in one message.
func (m model) bootstrap() *bootstrapv3.Bootstrap {
	b := m.frame()
	b.StaticResources = &bootstrapv3.Bootstrap_StaticResources{
		Listeners: append([]*listenerv3.Listener{listeners(m).main()}, legs(m).all()...),
		Clusters:  clusters(m).all(),
	}
	m.showStats(b.StaticResources)
	return b
}

// maxDownstream is how many connections clients may have open at once.
const maxDownstream = 50000

// frame is the part of a bootstrap that is about the process.
func (m model) frame() *bootstrapv3.Bootstrap {
	return &bootstrapv3.Bootstrap{
		Node:  &corev3.Node{Id: "tandem", Cluster: "tandem"},
		Admin: &bootstrapv3.Admin{Address: socketAddress(m.Admin)},
		BootstrapExtensions: []*corev3.TypedExtensionConfig{
			noted(m, m.extension("envoy.bootstrap.internal_listener", &internallistenerv3.InternalListener{}), notes{
				"": "The legs' listeners have no port. Without this Envoy refuses them.",
			}),
		},
		OverloadManager: &overloadv3.OverloadManager{
			ResourceMonitors: []*overloadv3.ResourceMonitor{{
				Name: "envoy.resource_monitors.global_downstream_max_connections",
				ConfigType: &overloadv3.ResourceMonitor_TypedConfig{
					TypedConfig: m.pack(&downstreamv3.DownstreamConnectionsConfig{MaxActiveDownstreamConnections: maxDownstream}),
				},
			}},
		},
	}
}

// Bootstrap prints the Envoy bootstrap for a configuration that was loaded by configv1.
func Bootstrap(c *configv1.Config) ([]byte, error) {
	m, err := newModel(c, false)
	if err != nil {
		return nil, err
	}
	return m.print(m.overview(), m.bootstrap())
}
