package envoyconfigs

import (
	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
)

const adminCluster = "envoy-admin"

// showStats adds a listener for the statistics and readiness of Envoy's admin port to a bootstrap, if it is configured.
func (m model) showStats(b *bootstrapv3.Bootstrap_StaticResources) {
	if m.Stats == nil {
		return
	}
	routes := &routev3.VirtualHost{Name: "stats", Domains: []string{"*"}}
	for _, path := range []string{"/stats/prometheus", "/ready"} {
		routes.Routes = append(routes.Routes, &routev3.Route{
			Match: &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Path{Path: path},
				Headers: []*routev3.HeaderMatcher{exact(":method", "GET")}},
			Action: &routev3.Route_Route{Route: &routev3.RouteAction{
				ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: adminCluster},
			}},
		})
	}
	manager := &hcmv3.HttpConnectionManager{
		StatPrefix: "stats",
		RouteSpecifier: &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: &routev3.RouteConfiguration{
			Name: "stats", VirtualHosts: []*routev3.VirtualHost{routes},
		}},
		HttpFilters: []*hcmv3.HttpFilter{filters(m).filter("envoy.filters.http.router", &routerv3.Router{})},
	}
	l := listeners(m).listener("stats", manager)
	l.Address, l.PerConnectionBufferLimitBytes = socketAddress(*m.Stats), nil
	l.IgnoreGlobalConnLimit = true
	b.Listeners = append(b.Listeners, noted(m, l, notes{"": "Statistics and readiness, for Prometheus and probes: no " +
		"other path of the admin port."}))
	b.Clusters = append(b.Clusters, cluster(hosts{adminCluster, []address{m.Admin}}))
}
