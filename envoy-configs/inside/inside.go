// Package inside has what only the bootstrap of an Envoy that has Tandem loaded needs: the library's filters.
package inside

import (
	mutationv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	modulesv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/dynamic_modules/v3"
	modulefilterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/dynamic_modules/v3"
	headermutationv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"
	codecv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/upstream_codec/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Overview stands above the bootstrap.
const Overview = `Envoy with Tandem inside: one filter makes both hops (experimental). Written by
` + "`tandem envoy`" + `; needs Envoy 1.39 or 1.40.

Start it with the folder of libtandem.so:
  ENVOY_DYNAMIC_MODULES_SEARCH_PATH=/path/to/folder envoy -c THIS_FILE
`

// Pack packs a message into a configuration.
type Pack = func(proto.Message) *anypb.Any

// Module is a filter of the library; config is that filter's own.
func Module(name, config string, pack Pack) *modulefilterv3.DynamicModuleFilter {
	return &modulefilterv3.DynamicModuleFilter{
		DynamicModuleConfig: &modulesv3.DynamicModuleConfig{Name: "tandem", DoNotClose: true}, FilterName: name,
		FilterConfig: pack(wrapperspb.String(config)),
	}
}

// Upstream are the filters of a cluster behind Envoy's router. With hold its answers wait until the library lets them
// go on. clean changes the headers of requests: engines get none of Envoy's or Tandem's own.
func Upstream(hold bool, clean []*mutationv3.HeaderMutation, pack Pack) []*hcmv3.HttpFilter {
	filter := func(name string, config proto.Message) *hcmv3.HttpFilter {
		return &hcmv3.HttpFilter{Name: name, ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: pack(config)}}
	}
	var out []*hcmv3.HttpFilter
	if hold {
		out = append(out, filter("tandem", Module("hold", "{}", pack)))
	}
	return append(out, filter("envoy.filters.http.header_mutation", &headermutationv3.HeaderMutation{
		Mutations: &headermutationv3.Mutations{RequestMutations: clean},
	}), filter("envoy.filters.http.upstream_codec", &codecv3.UpstreamCodec{}))
}
