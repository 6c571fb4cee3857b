package envoyconfigs

import (
	"slices"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	statev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/common/set_filter_state/v3"
	luav3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/lua/v3"
	filterstatev3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/set_filter_state/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"

	"tandem/envoy-configs/cors"
	"tandem/envoy-configs/lua"
)

// secure reports whether there may be endpoints with the scheme https.
func (s *settings) secure() bool {
	return slices.ContainsFunc(s.Engines.Schemes, func(e scheme) bool { return e.Name == "https" })
}

// names makes the names of https engines, which ext_proc writes into a header, SNI, and checks certificates for them.
func (m filters) names(header string) []*hcmv3.HttpFilter {
	if !m.secure() {
		return nil
	}
	keys := []string{"envoy.network.upstream_server_name"}
	if m.Engines.TLS != nil && m.Engines.TLS.CAFile != "" {
		keys = append(keys, "envoy.network.upstream_subject_alt_names")
	}
	config := &filterstatev3.Config{}
	for _, key := range keys {
		config.OnRequestHeaders = append(config.OnRequestHeaders, &statev3.FilterStateValue{
			Key: &statev3.FilterStateValue_ObjectKey{ObjectKey: key}, SkipIfEmpty: true,
			Value: &statev3.FilterStateValue_FormatString{FormatString: &corev3.SubstitutionFormatString{
				Format: &corev3.SubstitutionFormatString_TextFormatSource{
					TextFormatSource: inline("%REQ(" + header + ")%"),
				},
				OmitEmptyValues: true,
			}},
		})
	}
	out := []*hcmv3.HttpFilter{noted(m, m.filter("envoy.filters.http.set_filter_state", config), notes{
		"": "An https engine behind a name gets it as SNI.",
	})}
	if header == mirroredName { // a route's rewrite would come after the header's removal
		out = append(out, m.filter("envoy.filters.http.lua/host", &luav3.Lua{DefaultSourceCode: inline(lua.Host)}))
	}
	return out
}

// mirroredName is the header with the name of a mirrored leg's engine.
const mirroredName = "x-tandem-prefill-server-name"

// cors answers preflights, and adds its headers to every answer, if CORS is configured.
func (m filters) cors() []*hcmv3.HttpFilter {
	if m.CORS == nil {
		return nil
	}
	return []*hcmv3.HttpFilter{m.filter("envoy.filters.http.lua/cors",
		&luav3.Lua{DefaultSourceCode: inline(cors.Script(m.CORS))})}
}
