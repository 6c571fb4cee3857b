// Package endpointpicker has what the Endpoint Picker protocol adds to Envoy's messages: the endpoints that a gateway
// allows, the reason of a refusal, and the headers for the routing sidecar.
//
// Package plan decides for its requests ([plan.Gateway]); package extproc has the handler of the gateway's streams.
package endpointpicker

import (
	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
)

// Subset returns the endpoints that the gateway, or a conformance test, limits the request to.
func Subset(m *envoywire.Message, o *plan.GatewayOptions) (only []string, limited bool) {
	if s := m.Headers.Selection; o.Conformance && len(s) > 0 {
		return envoywire.Addresses(nil, string(s)), true
	}
	return m.Hints.Subset, m.Hints.HasSubset
}

// Dropped reports in the Inference Extension's terms why a request was not served.
func Dropped(i *envoywire.Immediate, e *openai.Error) {
	switch e.Status {
	case 429:
		i.Headers.Set(envoywire.HeaderDropped, []byte(envoywire.ReasonSaturated))
	case 503:
		i.Headers.Set(envoywire.HeaderDropped, []byte(envoywire.ReasonNoEndpoints))
	}
}

// Headers that llm-d's routing sidecar applies (llm-d-router, pkg/common/routing/common.go). Those that a client sends
// are removed. Data-parallel ranks are endpoints here, so that header is only ever removed.
const (
	headerPrefiller    = "x-prefiller-host-port"
	headerEncoders     = "x-encoder-hosts-ports"
	headerCacheSource  = "x-kv-cache-source-host-port"
	headerDataParallel = "x-data-parallel-host-port"
)

// SetSidecar sets the headers for the sidecar, and removes those that the client sent. The sidecar sends the client's
// other headers to P and reads P's answer as JSON (llm-d-router, pkg/sidecar/proxy), so with a P the engines must not
// compress.
func SetSidecar(h *envoywire.HeaderEdits, o *plan.SidecarHeaders) {
	if o == nil {
		o = &plan.SidecarHeaders{}
	}
	if o.Prefill != "" {
		h.Set("accept-encoding", []byte("identity"))
	}
	for _, header := range [...]struct{ name, value string }{
		{headerPrefiller, o.Prefill}, {headerEncoders, o.Encoders}, {headerCacheSource, o.Source},
		{headerDataParallel, ""},
	} {
		if header.value != "" {
			h.Set(header.name, []byte(header.value))
		} else {
			h.Remove(header.name)
		}
	}
}
