package extproc

import (
	"strings"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
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

// sidecarHeaders returns the headers for the sidecar, nil if there is none; computes is the index of the endpoint
// of the view that computes the prompt.
func (x firstPass) sidecarHeaders(policy *Policy, computes int, prefill *kvstate.Endpoint) *plan.SidecarHeaders {
	if policy.Handoff != plan.HandoffSidecar {
		return nil
	}
	h := &plan.SidecarHeaders{}
	if prefill != nil {
		h.Prefill = prefill.Addr
	}
	if policy.EncodeTimeout > 0 && x.req.HasMedia() {
		var encoders []string
		for i := range x.view.Endpoints {
			if c := &x.view.Endpoints[i]; encodes(c) {
				encoders = append(encoders, c.Endpoint.Addr)
			}
		}
		h.Encoders = strings.Join(encoders, ",")
	}
	x.pair.Source = nil
	if x.setSource(*policy, computes); x.pair.Source != nil {
		h.Source = x.pair.Source.Addr
	}
	return h
}

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
func (x firstPass) handOver(pool *kvstate.Pool, policy Policy, c picker.Choice, tokens int64, model string, a *plan.Attempt) (prefill *kvstate.Endpoint, edits openai.Edits, err error) {
	if policy.Handoff == plan.HandoffSidecar {
		prefill = x.view.Endpoints[c.Prefill].Endpoint
		x.s.State.Routed(pool, prefill, x.hashes)
		return prefill, nil, nil
	}
	edits, err = x.prefillDirectly(pool, policy, c, tokens, model, a)
	return nil, edits, err
}

// oneHop decides for the one hop of a split request whose prefill bypasses Envoy.
func (x firstPass) oneHop(pool *kvstate.Pool, policy Policy, c picker.Choice, tokens int64, a plan.Attempt) (*plan.Decision, error) {
	prefill, edits, err := x.handOver(pool, policy, c, tokens, "", &a)
	if err != nil {
		return nil, err
	}
	d, p := x.view.Endpoints[c.Decode].Endpoint, x.view.Endpoints[c.Prefill].Endpoint
	kind := "split"
	if prefill == nil && edits == nil {
		kind, c.Prefill = "decode_alone", -1
	}
	out := plan.Decision{
		Leg: envoywire.LegDecode, Pool: pool, Endpoint: d, Edits: edits, Sidecar: x.sidecarHeaders(&policy, computes(c), prefill),
		PerTry: policy.AnswerStart(x.req.True(openai.FieldStream), policy.PrefillTimeout+pool.PrefillTime(tokens, policy.PerToken)),
		Decode: plan.Reservation{Endpoint: d, Booking: c.DecodeBooking()}, Computes: d,
		Affinity: plan.Affinity{Session: x.session, Prefill: p, Decode: d}, Report: plan.Report{Route: kind, Reason: a.Why, Prefill: p, Decode: d},
		Ticket: kvtransfer.Ticket{
			ID: newTicketID(), Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: a.Started,
			Pool: pool.Spec.Name, Decode: d.Addr, Redirects: a.Redirects, Prefills: a.Prefills, Excluded: a.Excluded,
			Undo: edits.Inverse(nil, x.body.Bytes()), BodyBytes: edits.Len(x.body.Len()), PromptTokens: tokens,
		},
	}
	if a.Redirects+1 >= x.s.MaxRedirects || x.body.Len() > x.s.SplitBodyBytes {
		out.Leg = envoywire.LegPass
	}
	return x.decided(&out), nil
}

// computes returns the index of the endpoint of a choice that computes the prompt.
func computes(c picker.Choice) int {
	if c.Prefill >= 0 {
		return c.Prefill
	}
	return c.Decode
}
