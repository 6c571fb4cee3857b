package gatewayextension

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ratelimit/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"sigs.k8s.io/yaml"

	envoyconfigs "tandem/envoy-configs"
	configv1 "tandem/protos/config/v1"
	egv1 "tandem/protos/envoygateway/v1"
	"tandem/replica/config"
)

var (
	update   = flag.Bool("update", false, "rewrite the golden files")
	recorded = flag.String("record", "", "make testdata/existing.in.yaml of a `FILE` that TestEnvoyGatewayExtension recorded")
)

// translation is one as a file has it.
type translation struct {
	Clusters  []any `json:"clusters"`
	Listeners []any `json:"listeners"`
	Routes    []any `json:"routes"`
}

func read(t *testing.T, file string) *egv1.PostTranslateModifyRequest {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var f translation
	require.NoError(t, yaml.Unmarshal(text, &f))
	return &egv1.PostTranslateModifyRequest{
		Clusters: packed(t, f.Clusters, &clusterv3.Cluster{}), Listeners: packed(t, f.Listeners, &listenerv3.Listener{}),
		Routes: packed(t, f.Routes, &routev3.RouteConfiguration{}),
	}
}

func packed(t *testing.T, all []any, into proto.Message) (out [][]byte) {
	t.Helper()
	for _, one := range all {
		text, err := yaml.Marshal(one)
		require.NoError(t, err)
		text, err = yaml.YAMLToJSON(text)
		require.NoError(t, err)
		require.NoError(t, protojson.Unmarshal(text, into))
		raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(into)
		require.NoError(t, err)
		out = append(out, raw)
	}
	return out
}

func shown(t *testing.T, all [][]byte, into proto.Message) (out []any) {
	t.Helper()
	for _, raw := range all {
		require.NoError(t, proto.Unmarshal(raw, into))
		text, err := protojson.Marshal(into)
		require.NoError(t, err)
		var one any
		require.NoError(t, yaml.Unmarshal(text, &one))
		out = append(out, one)
	}
	return out
}

func show(t *testing.T, file string, clusters, listeners, routes [][]byte) string {
	t.Helper()
	text, err := yaml.Marshal(translation{shown(t, clusters, &clusterv3.Cluster{}), shown(t, listeners, &listenerv3.Listener{}),
		shown(t, routes, &routev3.RouteConfiguration{})})
	require.NoError(t, err)
	if file != "" {
		require.NoError(t, os.WriteFile(file, text, 0o644))
	}
	return string(text)
}

func tandem(t *testing.T) (*configv1.Config, *envoyconfigs.Behind) {
	t.Helper()
	c, _, err := config.Load("testdata/tandem.yaml")
	require.NoError(t, err)
	own, err := envoyconfigs.NewBehind(c)
	require.NoError(t, err)
	return c, own
}

func TestRecord(t *testing.T) {
	if *recorded == "" {
		t.Skip("-record says of what")
	}
	raw, err := os.ReadFile(*recorded)
	require.NoError(t, err)
	var in egv1.PostTranslateModifyRequest
	require.NoError(t, proto.Unmarshal(raw, &in))
	show(t, "testdata/existing.in.yaml", in.GetClusters(), in.GetListeners(), in.GetRoutes())
}

// What the real Envoy Gateway sends becomes what Envoys get: the golden files have the listeners and route
// configurations that changed, and the names of what was added. That itself is in envoy-configs/testdata/behind.yaml.
func TestExtend(t *testing.T) {
	c, own := tandem(t)
	files, err := filepath.Glob("testdata/*.in.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			in := read(t, file)
			before := proto.CloneOf(in)
			out, routes, err := Extend(in, own, c.GetEnvoyGateway().GetServices())
			require.NoError(t, err)
			require.NotEmpty(t, routes)
			require.True(t, proto.Equal(before, in), "the input stays as it is")
			again, _, err := Extend(in, own, c.GetEnvoyGateway().GetServices())
			require.NoError(t, err)
			require.True(t, proto.Equal(out, again), "the same for the same")
			neighbours(t, in, out, routes)

			golden := strings.Replace(file, ".in.", ".out.", 1)
			got := show(t, "", nil, changed(in.GetListeners(), out.GetListeners()), changed(in.GetRoutes(), out.GetRoutes()))
			if *update {
				require.NoError(t, os.WriteFile(golden, []byte(got), 0o644))
			}
			want, err := os.ReadFile(golden)
			require.NoError(t, err)
			require.Equal(t, string(want), got, "run go test -update")
		})
	}
}

// changed are the resources that are not as they were, without those that were added.
func changed(before, after [][]byte) (out [][]byte) {
	for i := range before {
		if string(before[i]) != string(after[i]) {
			out = append(out, after[i])
		}
	}
	return out
}

// neighbours requires that nothing changed but the named routes, and what their listeners answer by themselves.
func neighbours(t *testing.T, in *egv1.PostTranslateModifyRequest, out *egv1.PostTranslateModifyResponse, routes []string) {
	t.Helper()
	require.Equal(t, in.GetClusters(), out.GetClusters()[:len(in.GetClusters())])
	unnamed := func(raw []byte) proto.Message {
		table := &routev3.RouteConfiguration{}
		require.NoError(t, proto.Unmarshal(raw, table))
		for _, host := range table.GetVirtualHosts() {
			for i, r := range host.GetRoutes() {
				if slices.Contains(routes, r.GetName()) {
					host.Routes[i] = &routev3.Route{Name: r.GetName(), Match: r.GetMatch()}
				}
			}
		}
		return table
	}
	for i := range in.GetRoutes() {
		require.True(t, proto.Equal(unnamed(in.GetRoutes()[i]), unnamed(out.GetRoutes()[i])))
	}
	silent := func(raw []byte) proto.Message {
		l := &listenerv3.Listener{}
		require.NoError(t, proto.Unmarshal(raw, l))
		for _, c := range append(l.GetFilterChains(), l.GetDefaultFilterChain()) {
			for _, f := range c.GetFilters() {
				m := &hcmv3.HttpConnectionManager{}
				if f.GetTypedConfig().MessageIs(m) {
					require.NoError(t, f.GetTypedConfig().UnmarshalTo(m))
					m.LocalReplyConfig = nil
					f.ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: must(t, m)}
				}
			}
		}
		return l
	}
	for i := range in.GetListeners() {
		require.True(t, proto.Equal(silent(in.GetListeners()[i]), silent(out.GetListeners()[i])))
	}
}

func must(t *testing.T, m proto.Message) *anypb.Any {
	t.Helper()
	a := &anypb.Any{}
	require.NoError(t, anypb.MarshalFrom(a, m, proto.MarshalOptions{Deterministic: true}))
	return a
}

// A policy that names another service changes nothing, down to the bytes.
func TestNotOurs(t *testing.T) {
	_, own := tandem(t)
	in := read(t, "testdata/existing.in.yaml")
	out, routes, err := Extend(in, own, []string{"other.default:17000"})
	require.NoError(t, err)
	require.Empty(t, routes)
	require.True(t, proto.Equal(unchanged(in), out))
}

// A redirect keeps its meaning, and nobody is asked about it.
func TestRedirectStays(t *testing.T) {
	_, own := tandem(t)
	const filter = extProcPrefix + "/envoyextensionpolicy/default/tandem/extproc/0"
	redirect := &routev3.Route_Redirect{Redirect: &routev3.RedirectAction{ResponseCode: routev3.RedirectAction_FOUND}}
	r := &routev3.Route{Action: redirect, TypedPerFilterConfig: map[string]*anypb.Any{filter: {}, "other": {}}}
	e := extension{own: own, filters: map[string]bool{filter: true}, tables: map[string]bool{}}
	require.True(t, e.disable(r))
	e.extendRoute("t", r)
	require.Equal(t, redirect, r.GetAction())
	require.Contains(t, r.GetTypedPerFilterConfig(), "other")
	require.NotContains(t, r.GetTypedPerFilterConfig(), filter)
	require.Empty(t, e.tables)
}

// What a route says of itself stays; what is about its endpoints, and Envoy's limit of 15 s to an answer, goes.
func TestRouteKeepsItsOwn(t *testing.T) {
	_, own := tandem(t)
	e := extension{own: own, tables: map[string]bool{}}
	retry := &routev3.RetryPolicy{RetryOn: "5xx"}
	r := &routev3.Route{Name: "r", Action: &routev3.Route_Route{Route: &routev3.RouteAction{
		ClusterSpecifier: &routev3.RouteAction_WeightedClusters{WeightedClusters: &routev3.WeightedCluster{}},
		PrefixRewrite:    "/", RetryPolicy: retry,
		HostRewriteSpecifier: &routev3.RouteAction_AutoHostRewrite{},
	}}}
	e.extendRoute("t", r)
	require.Equal(t, "tandem", r.GetRoute().GetCluster())
	require.Equal(t, "/", r.GetRoute().GetPrefixRewrite())
	require.Equal(t, retry, r.GetRoute().GetRetryPolicy())
	require.Nil(t, r.GetRoute().GetHostRewriteSpecifier())
	require.Zero(t, r.GetRoute().GetTimeout().AsDuration())
	require.NotNil(t, r.GetRoute().GetTimeout())
	require.Equal(t, own.IdleTimeout, r.GetRoute().GetIdleTimeout().AsDuration())
}

// Names of others are never taken over.
func TestNameTaken(t *testing.T) {
	c, own := tandem(t)
	in := read(t, "testdata/existing.in.yaml")
	in.Clusters = append(in.Clusters, packed(t, []any{map[string]any{"name": "tandem-pod"}}, &clusterv3.Cluster{})...)
	_, _, err := Extend(in, own, c.GetEnvoyGateway().GetServices())
	require.ErrorIs(t, err, errNameTaken)
}

// Tokens are read on a route of the gateway's whose policy names them, and on all routes to Tandem of a listener whose
// access log does: on no other route, and on no other listener.
func TestTokensAreReadWhereNamed(t *testing.T) {
	c, own := tandem(t)
	const usage = "%DYNAMIC_METADATA(tandem.usage:total)%"
	const table, limited, neighbour = "default/existing/http", "httproute/default/llm/rule/0", "httproute/default/shop/rule/0"
	// run returns the routes and the route configurations whose listeners have the filter.
	run := func(t *testing.T, policy, log bool) (routes, tables []string) {
		t.Helper()
		in := read(t, "testdata/existing.in.yaml")
		eachRoute(t, in.Routes, func(of string, r *routev3.Route) {
			named := strings.HasPrefix(r.GetName(), limited) || strings.HasPrefix(r.GetName(), neighbour)
			if !policy || of != table || !named {
				return
			}
			if r.TypedPerFilterConfig == nil {
				r.TypedPerFilterConfig = map[string]*anypb.Any{}
			}
			r.TypedPerFilterConfig["envoy.filters.http.ratelimit"] = must(t, &ratelimitv3.RateLimitPerRoute{
				RateLimits: []*routev3.RateLimit{{HitsAddend: &routev3.RateLimit_HitsAddend{Format: usage}, ApplyOnStreamDone: true}},
			})
		})
		if log {
			eachListener(t, in.Listeners, func(m *hcmv3.HttpConnectionManager) {
				if m.GetRds().GetRouteConfigName() == table {
					m.AccessLog = []*accesslogv3.AccessLog{{Name: usage}}
				}
			})
		}
		out, _, err := Extend(in, own, c.GetEnvoyGateway().GetServices())
		require.NoError(t, err)
		eachRoute(t, out.Routes, func(_ string, r *routev3.Route) {
			if on, ok := r.GetTypedPerFilterConfig()[own.Usage.GetName()]; ok {
				var config routev3.FilterConfig
				require.NoError(t, on.UnmarshalTo(&config))
				require.False(t, config.GetDisabled())
				routes = append(routes, r.GetName())
			}
		})
		eachListener(t, out.Listeners[:len(in.Listeners)], func(m *hcmv3.HttpConnectionManager) {
			for i, f := range m.GetHttpFilters() {
				if f.GetName() == own.Usage.GetName() {
					require.True(t, f.GetDisabled(), "it is enabled by routes")
					require.Equal(t, len(m.GetHttpFilters())-2, i, "before the router")
					tables = append(tables, m.GetRds().GetRouteConfigName())
				}
			}
		})
		return routes, tables
	}
	routes, read := run(t, false, false)
	require.Empty(t, routes)
	require.Empty(t, read)
	routes, read = run(t, true, false)
	require.Len(t, routes, 1)
	require.Contains(t, routes[0], limited)
	require.Equal(t, []string{table}, read)
	routes, read = run(t, false, true)
	require.Len(t, routes, 5, "all to Tandem")
	require.NotContains(t, strings.Join(routes, " "), neighbour)
	require.Equal(t, []string{table}, read)
}

// eachRoute changes routes in place.
func eachRoute(t *testing.T, tables [][]byte, f func(table string, r *routev3.Route)) {
	t.Helper()
	for i, raw := range tables {
		var table routev3.RouteConfiguration
		require.NoError(t, proto.Unmarshal(raw, &table))
		for _, host := range table.GetVirtualHosts() {
			for _, r := range host.GetRoutes() {
				f(table.GetName(), r)
			}
		}
		var err error
		tables[i], err = write(&table)
		require.NoError(t, err)
	}
}

// eachListener changes connection managers in place.
func eachListener(t *testing.T, listeners [][]byte, f func(*hcmv3.HttpConnectionManager)) {
	t.Helper()
	for i, raw := range listeners {
		require.NoError(t, eachManager(raw, func(filter *listenerv3.Filter, m *hcmv3.HttpConnectionManager) error {
			f(m)
			filter.ConfigType = &listenerv3.Filter_TypedConfig{TypedConfig: must(t, m)}
			return nil
		}, &listeners[i]))
	}
}
