package extproc

import (
	"strings"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// Handoff says who makes the second hop of a request that is split.
type Handoff uint8

// The values of a pool's handoff.
const (
	HandoffEnvoy   Handoff = iota // Envoy, by a redirect: two passes
	HandoffSidecar                // llm-d's routing sidecar beside D, which calls P before it calls its engine
	HandoffDirect                 // this server calls P before it answers Envoy
)

// Headers that llm-d's routing sidecar takes orders from (llm-d-router, pkg/common/routing/common.go): a client's never pass.
// Data-parallel ranks are endpoints here, so that one is only ever removed.
const (
	headerPrefiller    = "x-prefiller-host-port"
	headerEncoders     = "x-encoder-hosts-ports"
	headerCacheSource  = "x-kv-cache-source-host-port"
	headerDataParallel = "x-data-parallel-host-port"
)

// sidecarOrders are what the sidecar beside D is told, as addresses; "" is nothing.
type sidecarOrders struct {
	prefill  string // where the prompt is to be computed; "": at D alone
	encoders string // that may encode the request's media, joined by commas: the sidecar spreads the parts over them
	source   string // who has most of the prompt's beginning, for a dialect that fetches prefixes
}

// orders are what a request of the view is told, whose prompt the endpoint at computes computes.
func (x firstPass) orders(policy *Policy, computes int, prefill *kvstate.Endpoint) (o sidecarOrders) {
	if policy.Handoff != HandoffSidecar {
		return o
	}
	if prefill != nil {
		o.prefill = prefill.Addr
	}
	if policy.EncodeTimeout > 0 && x.req.HasMedia() {
		var encoders []string
		for i := range x.view.Endpoints {
			if c := &x.view.Endpoints[i]; encodes(c) {
				encoders = append(encoders, c.Endpoint.Addr)
			}
		}
		o.encoders = strings.Join(encoders, ",")
	}
	x.pair.Source = nil
	if x.setSource(*policy, computes); x.pair.Source != nil {
		o.source = x.pair.Source.Addr
	}
	return o
}

// setSidecar sets the headers for the sidecar, and removes those that the client sent.
func setSidecar(h *envoywire.HeaderEdits, o sidecarOrders) {
	for _, order := range [...]struct{ header, value string }{
		{headerPrefiller, o.prefill}, {headerEncoders, o.encoders}, {headerCacheSource, o.source}, {headerDataParallel, ""},
	} {
		if order.value != "" {
			h.Set(order.header, []byte(order.value))
		} else {
			h.Remove(order.header)
		}
	}
}

// handOver plans the hop to P of a request whose second hop is not Envoy's. prefill is where the sidecar is to have the
// prompt computed; edits are those of the client's body for D. model is the name that P is to be asked for, "" the client's.
func (x firstPass) handOver(pool *kvstate.Pool, policy Policy, c picker.Choice, tokens int64, model string, a *attempt) (prefill *kvstate.Endpoint, edits openai.Edits, err error) {
	if policy.Handoff == HandoffSidecar {
		prefill = x.view.Endpoints[c.Prefill].Endpoint
		x.s.State.Routed(pool, prefill, x.hashes)
		return prefill, nil, nil
	}
	edits, err = x.prefillDirectly(pool, policy, c, tokens, model, a)
	return nil, edits, err
}

// oneHop writes the one hop of a split request whose prefill Envoy has nothing to do with.
func (x firstPass) oneHop(pool *kvstate.Pool, policy Policy, c picker.Choice, tokens int64, a attempt) (route, error) {
	prefill, edits, err := x.handOver(pool, policy, c, tokens, "", &a)
	if err != nil {
		return route{}, err
	}
	d, p := x.view.Endpoints[c.Decode].Endpoint, x.view.Endpoints[c.Prefill].Endpoint
	kind := "split"
	if prefill == nil && edits == nil {
		kind, c.Prefill = "decode_alone", -1
	}
	r := route{leg: envoywire.LegDecode, endpoint: d, edits: edits, handoff: policy.Handoff, orders: x.orders(&policy, computes(c), prefill)}
	r.perTry = answerStart(policy, x.req.True(openai.FieldStream), policy.PrefillTimeout+pool.PrefillTime(tokens, policy.PerToken))
	if a.redirects+1 >= x.s.MaxRedirects || x.body.Len() > x.s.SplitBodyBytes {
		r.leg = envoywire.LegPass
	}
	r.booked[1] = x.reserve(d, kvstate.RoleDecode, a.redirects, c.DecodeBooking())
	x.s.State.Routed(pool, d, x.hashes)
	x.stick(pool, x.session, p, d)
	x.planned(pool, kind, a.why, p, d, tokens)
	return x.seal(r, &kvtransfer.Ticket{
		ID: newTicketID(), Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: a.started,
		Pool: pool.Spec.Name, Decode: d.Addr, Reservations: [2]uint64{0, uint64(r.booked[1])},
		Redirects: a.redirects, Prefills: a.prefills, Excluded: a.excluded,
		Undo: edits.Inverse(nil, x.body.Bytes()), BodyBytes: edits.Len(x.body.Len()), PromptTokens: tokens,
	})
}

// computes is the endpoint of a choice that computes the prompt.
func computes(c picker.Choice) int {
	if c.Prefill >= 0 {
		return c.Prefill
	}
	return c.Decode
}
