package extproc

import (
	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
)

// Headers that llm-d's routing sidecar applies (llm-d-router, pkg/common/routing/common.go). A client's never pass.
// Data-parallel ranks are endpoints here, so that header is only ever removed.
const (
	headerPrefiller    = "x-prefiller-host-port"
	headerEncoders     = "x-encoder-hosts-ports"
	headerCacheSource  = "x-kv-cache-source-host-port"
	headerDataParallel = "x-data-parallel-host-port"
)

// setSidecar sets the headers for the sidecar, and removes those that the client sent.
func setSidecar(h *envoywire.HeaderEdits, o *plan.SidecarHeaders) {
	if o == nil {
		o = &plan.SidecarHeaders{}
	}
	for _, header := range [...]struct{ name, value string }{
		{headerPrefiller, o.Prefill}, {headerEncoders, o.Encoders}, {headerCacheSource, o.Source}, {headerDataParallel, ""},
	} {
		if header.value != "" {
			h.Set(header.name, []byte(header.value))
		} else {
			h.Remove(header.name)
		}
	}
}

// handOver plans the call to P for a request whose second hop is not Envoy's. prefill is set if the sidecar has the
// prompt computed; edits are those of the client's body for D. model is the name to ask P for, "": the client's.
func (x firstPass) handOver(policy *Policy, c picker.Choice, model string) (prefill *kvstate.Endpoint, edits openai.Edits, err error) {
	if policy.Handoff == plan.HandoffSidecar {
		prefill = x.view.Endpoints[c.Prefill].Endpoint
		x.s.State.Routed(x.req.Pool, prefill, x.req.Hashes)
		return prefill, nil, nil
	}
	edits, err = x.prefillDirectly(policy, c, model)
	return nil, edits, err
}
