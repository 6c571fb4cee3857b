package endpointpicker

import (
	"tandem/extproc/envoywire"
	"tandem/extproc/plan"
)

// Headers that llm-d's routing sidecar applies (llm-d-router, pkg/common/routing/common.go). A client's never pass.
// Data-parallel ranks are endpoints here, so that header is only ever removed.
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
