// Package gatewayextension is Tandem's side of Envoy Gateway's extension protocol (docs/adr/0039): an HTTPRoute whose
// EnvoyExtensionPolicy names Tandem leads to Tandem's own listener within the same Envoy.
//
// Files: extend.go the changes, a function of resources; server.go the gRPC service.
package gatewayextension

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	envoyconfigs "tandem/envoy-configs"
	"tandem/extproc/names"
	egv1 "tandem/protos/envoygateway/v1"
)

// extProcPrefix begins the names of Envoy Gateway's external processors.
const extProcPrefix = "envoy.filters.http.ext_proc"

// errNameTaken means that a foreign resource has the name of one of Tandem's.
var errNameTaken = errors.New("the name is taken")

// Extend returns Envoys' resources in place of a translation, and the names of the routes that now lead to Tandem.
// These are the routes with an enabled external processor of services ("name.namespace:port", the policy's
// backendRef). Unchanged resources keep the bytes of the translation.
func Extend(
	in *egv1.PostTranslateModifyRequest, own *envoyconfigs.Behind, services []string,
) (*egv1.PostTranslateModifyResponse, []string, error) {
	out := &egv1.PostTranslateModifyResponse{
		Clusters: in.GetClusters(), Secrets: in.GetSecrets(),
		Listeners: slices.Clone(in.GetListeners()), Routes: slices.Clone(in.GetRoutes()),
	}
	e := extension{own: own, services: services,
		filters: map[string]bool{}, tables: map[string]bool{}, logged: map[string]bool{}, counted: map[string]bool{}}
	for _, raw := range out.Listeners {
		if err := e.find(raw); err != nil {
			return nil, nil, err
		}
	}
	var err error
	for i, raw := range out.Routes {
		if out.Routes[i], err = e.extendTable(raw); err != nil {
			return nil, nil, err
		}
	}
	if len(e.routes) == 0 {
		return out, nil, nil
	}
	for i, raw := range out.Listeners {
		if out.Listeners[i], err = e.extendListener(raw); err != nil {
			return nil, nil, err
		}
	}
	if out.Clusters, err = add(out.Clusters, own.Clusters, &clusterv3.Cluster{}); err != nil {
		return nil, nil, err
	}
	if out.Listeners, err = add(out.Listeners, own.Listeners, &listenerv3.Listener{}); err != nil {
		return nil, nil, err
	}
	return out, e.routes, nil
}

// extension is one run of Extend.
type extension struct {
	own      *envoyconfigs.Behind
	services []string

	filters map[string]bool // filters that ask Tandem
	tables  map[string]bool // route configurations with routes to Tandem
	logged  map[string]bool // route configurations of listeners that name the metadata with the tokens of an answer
	counted map[string]bool // route configurations with routes to Tandem whose answers' tokens are read
	routes  []string        // their names
}

// find collects the filters of a listener that ask Tandem.
func (e *extension) find(raw []byte) error {
	if !bytes.Contains(raw, []byte(extProcPrefix)) {
		return nil
	}
	logged := bytes.Contains(raw, []byte(names.UsageNamespace))
	return eachManager(raw, func(_ *listenerv3.Filter, m *hcmv3.HttpConnectionManager) error {
		if logged {
			e.logged[m.GetRds().GetRouteConfigName()] = true
		}
		for _, f := range m.GetHttpFilters() {
			var ask extprocv3.ExternalProcessor
			if !strings.HasPrefix(f.GetName(), extProcPrefix) || !f.GetTypedConfig().MessageIs(&ask) {
				continue
			}
			if err := f.GetTypedConfig().UnmarshalTo(&ask); err != nil {
				return fmt.Errorf("reading the filter %s: %w", f.GetName(), err)
			}
			if slices.Contains(e.services, ask.GetGrpcService().GetEnvoyGrpc().GetAuthority()) {
				e.filters[f.GetName()] = true
			}
		}
		return nil
	}, nil)
}

// extendTable makes the routes of a route configuration lead to Tandem if one of the filters is enabled on them.
func (e *extension) extendTable(raw []byte) ([]byte, error) {
	if !mentions(raw, e.filters) {
		return raw, nil
	}
	var table routev3.RouteConfiguration
	if err := proto.Unmarshal(raw, &table); err != nil {
		return nil, fmt.Errorf("reading a route configuration: %w", err)
	}
	changed := false
	for _, host := range table.GetVirtualHosts() {
		for _, r := range host.GetRoutes() {
			if e.disable(r) {
				changed = true
				e.extendRoute(table.GetName(), r)
				if err := e.count(table.GetName(), r); err != nil {
					return nil, err
				}
			}
		}
	}
	if !changed {
		return raw, nil
	}
	return write(&table)
}

// disable removes the filters from a route and reports whether there were any: Tandem's own listener has its own.
func (e *extension) disable(r *routev3.Route) (was bool) {
	for name := range e.filters {
		if _, ok := r.GetTypedPerFilterConfig()[name]; ok {
			delete(r.TypedPerFilterConfig, name)
			was = true
		}
	}
	return was
}

// extendRoute makes a route lead to Tandem's listener. Its match, rewrites, headers, mirrors, retries and the settings
// of its other filters stay. A route that redirects or answers directly stays unchanged.
func (e *extension) extendRoute(table string, r *routev3.Route) {
	a := r.GetRoute()
	if a == nil {
		return
	}
	e.tables[table] = true
	e.routes = append(e.routes, r.GetName())
	a.ClusterSpecifier = &routev3.RouteAction_Cluster{Cluster: envoyconfigs.BehindName}
	// These are about the route's former endpoints.
	a.MetadataMatch = nil
	if _, ok := a.GetHostRewriteSpecifier().(*routev3.RouteAction_AutoHostRewrite); ok {
		a.HostRewriteSpecifier = nil
	}
	// Envoy's default of 15 s covers the whole answer. A timeout of the HTTPRoute or a policy stays.
	if a.Timeout == nil {
		a.Timeout = durationpb.New(0)
	}
	if a.IdleTimeout == nil {
		a.IdleTimeout = durationpb.New(e.own.IdleTimeout)
	}
}

// count has the tokens of a route's answers read on its own listener, if a policy of the route or an access log of the
// listener names them: what Tandem's listener reads stays there. No other route pays for it.
func (e *extension) count(table string, r *routev3.Route) error {
	if r.GetRoute() == nil {
		return nil
	}
	raw, err := write(r)
	if err != nil {
		return err
	}
	if !e.logged[table] && !bytes.Contains(raw, []byte(names.UsageNamespace)) {
		return nil
	}
	enabled, err := anypb.New(&routev3.FilterConfig{Config: &anypb.Any{}})
	if err != nil {
		return fmt.Errorf("writing the settings of a filter: %w", err)
	}
	if r.TypedPerFilterConfig == nil {
		r.TypedPerFilterConfig = map[string]*anypb.Any{}
	}
	r.TypedPerFilterConfig[e.own.Usage.GetName()] = enabled
	e.counted[table] = true
	return nil
}

// read adds the filter that reads tokens, disabled but on the routes that [extension.count] enables it on. It is the
// first to see an answer.
func (e *extension) read(m *hcmv3.HttpConnectionManager) {
	reader := proto.CloneOf(e.own.Usage)
	reader.Disabled = true
	m.HttpFilters = slices.Insert(m.HttpFilters, max(len(m.HttpFilters)-1, 0), reader)
}

// extendListener gives the own answers of a listener with routes to Tandem OpenAI's shape, for requests to these
// routes.
func (e *extension) extendListener(raw []byte) ([]byte, error) {
	if !mentions(raw, e.tables) {
		return raw, nil
	}
	out := raw
	err := eachManager(raw, func(f *listenerv3.Filter, m *hcmv3.HttpConnectionManager) error {
		if !e.tables[m.GetRds().GetRouteConfigName()] {
			return nil
		}
		if m.LocalReplyConfig == nil {
			m.LocalReplyConfig = &hcmv3.LocalReplyConfig{}
		}
		m.LocalReplyConfig.Mappers = append(slices.Clone(e.own.Replies), m.LocalReplyConfig.Mappers...)
		if e.counted[m.GetRds().GetRouteConfigName()] {
			e.read(m)
		}
		config := &anypb.Any{}
		if err := anypb.MarshalFrom(config, m, proto.MarshalOptions{Deterministic: true}); err != nil {
			return fmt.Errorf("writing a connection manager: %w", err)
		}
		f.ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: config}
		return nil
	}, &out)
	return out, err
}

// mentions reports whether a resource may refer to one of some names: if not, it need not be read.
func mentions(raw []byte, names map[string]bool) bool {
	for name := range names {
		if bytes.Contains(raw, []byte(name)) {
			return true
		}
	}
	return false
}

// eachManager calls f with each HTTP connection manager of a listener. If out is not nil, it gets the listener with
// f's changes, if f changed a filter.
func eachManager(
	raw []byte, f func(*listenerv3.Filter, *hcmv3.HttpConnectionManager) error, out *[]byte,
) error {
	var l listenerv3.Listener
	if err := proto.Unmarshal(raw, &l); err != nil {
		return fmt.Errorf("reading a listener: %w", err)
	}
	chains := l.GetFilterChains()
	if c := l.GetDefaultFilterChain(); c != nil {
		chains = append(slices.Clone(chains), c)
	}
	changed := false
	for _, c := range chains {
		for _, filter := range c.GetFilters() {
			var m hcmv3.HttpConnectionManager
			before := filter.GetTypedConfig()
			if !before.MessageIs(&m) {
				continue
			}
			if err := before.UnmarshalTo(&m); err != nil {
				return fmt.Errorf("reading the connection manager of %s: %w", l.GetName(), err)
			}
			if err := f(filter, &m); err != nil {
				return err
			}
			changed = changed || filter.GetTypedConfig() != before
		}
	}
	if out == nil || !changed {
		return nil
	}
	var err error
	*out, err = write(&l)
	return err
}

// named is a resource of Envoy's.
type named interface {
	proto.Message
	GetName() string
}

// add appends resources; into is an empty one of their kind.
func add[M named](to [][]byte, own []M, into M) ([][]byte, error) {
	out := slices.Clone(to)
	for _, raw := range to {
		for _, o := range own {
			if !bytes.Contains(raw, []byte(o.GetName())) {
				continue
			}
			if err := proto.Unmarshal(raw, into); err != nil {
				return nil, fmt.Errorf("reading a resource: %w", err)
			}
			if into.GetName() == o.GetName() {
				return nil, fmt.Errorf("adding %s: %w", o.GetName(), errNameTaken)
			}
		}
	}
	for _, o := range own {
		raw, err := write(o)
		if err != nil {
			return nil, err
		}
		out = append(out, raw)
	}
	return out, nil
}

// write is deterministic: otherwise Envoys would get a new version of an unchanged configuration.
func write(m proto.Message) ([]byte, error) {
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("writing a resource: %w", err)
	}
	return raw, nil
}
