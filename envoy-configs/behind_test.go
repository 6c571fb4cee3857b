package envoyconfigs

import (
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	rbacconfigv3 "github.com/envoyproxy/go-control-plane/envoy/config/rbac/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	rbacv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/rbac/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// inFront is a bootstrap with a listener that is not ours, as a gateway has one, and all that is behind it. The path
// /denied is refused to clients, of Tandem and of a neighbour.
func inFront(c *configv1.Config) ([]byte, error) {
	own, m, err := behind(c)
	if err != nil {
		return nil, err
	}
	denied := &rbacv3.RBAC{Rules: &rbacconfigv3.RBAC{Action: rbacconfigv3.RBAC_DENY, Policies: map[string]*rbacconfigv3.Policy{
		"all": {
			Permissions: []*rbacconfigv3.Permission{{Rule: &rbacconfigv3.Permission_Header{Header: exact("x-denied", "true")}}},
			Principals:  []*rbacconfigv3.Principal{{Identifier: &rbacconfigv3.Principal_Any{Any: true}}},
		},
	}}}
	neighbour := toCluster("neighbour")
	neighbour.Match.PathSpecifier = &routev3.RouteMatch_Prefix{Prefix: "/neighbour"}
	ours := toCluster(BehindName)
	ours.GetRoute().IdleTimeout = durationpb.New(own.IdleTimeout)
	front := listeners(m).listener("front", &hcmv3.HttpConnectionManager{
		StatPrefix: "front", UseRemoteAddress: wrapperspb.Bool(true), PreserveExternalRequestId: true,
		MaxRequestHeadersKb: wrapperspb.UInt32(8192), // so that it is the listener behind that has a limit
		RouteSpecifier: &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: &routev3.RouteConfiguration{
			Name: "front", VirtualHosts: []*routev3.VirtualHost{{
				Name: "all", Domains: []string{"*"}, Routes: []*routev3.Route{neighbour, ours},
			}},
		}},
		LocalReplyConfig: &hcmv3.LocalReplyConfig{Mappers: own.Replies},
		HttpFilters:      []*hcmv3.HttpFilter{filters(m).filter("envoy.filters.http.rbac", denied), filters(m).router()},
	})
	front.PerConnectionBufferLimitBytes = wrapperspb.UInt32(32 << 10) // as Envoy Gateway's
	front.Address = socketAddress(m.Listen)
	nobody := &clusterv3.Cluster{Name: "neighbour", ConnectTimeout: durationpb.New(time.Second)}
	b := m.frame()
	b.StaticResources = &bootstrapv3.Bootstrap_StaticResources{
		Listeners: append([]*listenerv3.Listener{front}, own.Listeners...), Clusters: append(own.Clusters, nobody),
	}
	return m.print("", b)
}

// Behind a listener that is not ours everything is as in an Envoy of our own.
func TestEnvoyBehind(t *testing.T) {
	s := newStandOf(t, standConfig, inFront)
	s.testRequests(t)
	t.Run("refusals", s.testRefusals)
}

// A refusal in front of Tandem gets OpenAI's shape, and a neighbour's stays as it is.
func (s *stand) testRefusals(t *testing.T) {
	got := s.post(t, "/v1/chat/completions", "application/json", strings.NewReader("{}"), "x-denied", "true")
	require.Equal(t, http.StatusForbidden, got.Status)
	require.Equal(t, "permission_denied", codeOf(t, got))
	require.Contains(t, got.Body, "RBAC: access denied")
	got = s.post(t, "/neighbour", "application/json", strings.NewReader("{}"), "x-denied", "true")
	require.Equal(t, http.StatusForbidden, got.Status)
	require.Equal(t, "RBAC: access denied", got.Body)
	require.Equal(t, "text/plain", got.Header.Get("content-type"))
}

// What a gateway's Envoys get, as typed YAML.
func TestBehindGolden(t *testing.T) {
	const file = "testdata/behind.yaml"
	c, _, err := config.Parse([]byte(`{envoy: {extProcs: ["tandem.default.svc.cluster.local:9002"]}, tickets: {keyFile: k},
pools: [{name: a, kvTransfer: nixl, discovery: {kubernetes: {selector: "app=llm", ports: [8000]}}}]}`))
	require.NoError(t, err)
	own, m, err := behind(c)
	require.NoError(t, err)
	for _, l := range own.Listeners {
		require.NoError(t, l.ValidateAll())
	}
	for _, c := range own.Clusters {
		require.NoError(t, c.ValidateAll())
	}
	got, err := m.print("What an Envoy needs whose listeners are not ours.", &bootstrapv3.Bootstrap{
		Node: &corev3.Node{Id: "golden", Cluster: "golden"},
		StaticResources: &bootstrapv3.Bootstrap_StaticResources{
			Listeners: append(own.Listeners, &listenerv3.Listener{Name: "replies", FilterChains: []*listenerv3.FilterChain{{
				Filters: []*listenerv3.Filter{{Name: "replies", ConfigType: &listenerv3.Filter_TypedConfig{
					TypedConfig: m.pack(&hcmv3.HttpConnectionManager{LocalReplyConfig: &hcmv3.LocalReplyConfig{Mappers: own.Replies}}),
				}}},
			}}}),
			Clusters: own.Clusters,
		},
	})
	require.NoError(t, err)
	if *update {
		require.NoError(t, os.WriteFile(file, got, 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got), "run go test -update")
}

// Pools change nothing of it: Envoy Gateway would not ask again.
func TestBehindWithOtherPools(t *testing.T) {
	made := func(pools string) *Behind {
		c, _, err := config.Parse([]byte(pools))
		require.NoError(t, err)
		own, err := NewBehind(c)
		require.NoError(t, err)
		return own
	}
	want, got := made(pool), made(strings.Replace(pool, "nixl", "sglang", 1))
	require.Len(t, got.Listeners, len(want.Listeners))
	for i := range want.Listeners {
		require.True(t, proto.Equal(want.Listeners[i], got.Listeners[i]), want.Listeners[i].GetName())
	}
	require.Len(t, got.Clusters, len(want.Clusters))
	for i := range want.Clusters {
		require.True(t, proto.Equal(want.Clusters[i], got.Clusters[i]), want.Clusters[i].GetName())
	}
}
