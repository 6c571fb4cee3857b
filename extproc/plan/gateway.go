package plan

import (
	"bytes"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// Gateway is what a gateway that asks only for endpoints is answered in addition.
type Gateway struct {
	List  string // the endpoint and its fallbacks
	Model string // the model that the request is sent to; "": the one that it asked for
	Asked string
}

// GatewayOptions are the options of requests of such gateways: of the Endpoint Picker protocol.
type GatewayOptions struct {
	Fallbacks    int  // endpoints listed after the chosen one
	ShedRequests int  // reservations on every decode endpoint from which on requests of negative priority get 429
	WatchBody    bool // keep the stream until the answer ends, instead of until it begins
	Conformance  bool // support the headers of the Inference Extension's conformance suite; for tests only
}

// Allow removes from the view what a gateway's subset does not name. If the subset names decode endpoints only, prefill
// endpoints stay: the gateway never connects to them.
func Allow(v *kvstate.View, subset []string) {
	v.Endpoints = slices.DeleteFunc(v.Endpoints, func(c kvstate.Candidate) bool {
		return c.Endpoint.Role&kvstate.RoleDecode != 0 && !named(subset, c.Endpoint.Addr)
	})
}

// named reports whether a subset names an endpoint, by its address or by its host; an IPv6 host may have brackets.
func named(subset []string, addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	return slices.ContainsFunc(subset, func(s string) bool { return s == addr || strings.Trim(s, "[]") == host })
}

// GatewayHolder reduces the view to the endpoint that holds the stored response which the request continues. For a
// gateway the id of a new response is the engine's, so it can be found again only if there is one decode endpoint, or
// by the gateway's own session affinity.
func GatewayHolder(r *Request, v *kvstate.View) error {
	holder, stored := r.Holder(r.Pool)
	r.Attempt.Alone = r.Attempt.Alone || stored
	if holder == nil {
		return nil
	}
	v.Endpoints = slices.DeleteFunc(v.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint != holder })
	if len(v.Endpoints) == 0 {
		const message = "the endpoint that holds this response is not among those allowed"
		return openai.Unavailable("no_endpoint", message, time.Second)
	}
	return nil
}

// Shed refuses a request of negative priority when the pool is full.
func Shed(priority int32, v *kvstate.View, o *GatewayOptions) error {
	if priority >= 0 {
		return nil
	}
	for _, c := range v.Endpoints {
		if c.Usable && c.Endpoint.Role&kvstate.RoleDecode != 0 && c.Requests < int64(o.ShedRequests) {
			return nil
		}
	}
	return Overloaded()
}

// Fallbacks returns the list of endpoints for the gateway: the chosen one, then those that would have been chosen
// without it. None is known to lack the model that the chosen one serves: its 404 would be the client's.
func Fallbacks(k *picker.Picker, r *picker.Request, v *kvstate.View, c picker.Choice, o *GatewayOptions) string {
	list := []string{v.Endpoints[c.Decode].Endpoint.Addr}
	others := *r
	for range o.Fallbacks {
		others.Excluded = append(others.Excluded, list[len(list)-1])
		i, err := k.PickDecode(&others, v, c.Prefill)
		if err != nil || slices.Contains(list, v.Endpoints[i].Endpoint.Addr) ||
			c.Named && lacks(v.Endpoints[i].Endpoint, r.Model) {
			break
		}
		list = append(list, v.Endpoints[i].Endpoint.Addr)
	}
	return strings.Join(list, ",")
}

// lacks reports whether an endpoint has said what it serves, and a model is not among it.
func lacks(e *kvstate.Endpoint, model string) bool {
	listed := e.Models()
	return len(listed) > 0 && !slices.Contains(listed, model) && !e.HasLoRA(model)
}

// Rewritten returns the model that a request is sent to according to the cluster's rewrites; "": the one it asked
// for. Its endpoint is chosen among those that serve that one.
func Rewritten(r *Request, state *kvstate.State) string {
	asked := r.Client.Model()
	if asked == "" || len(r.Client.Body()) == 0 {
		return ""
	}
	to := state.Policies.Rewritten(r.Pool.Spec.Name, asked, rand.Uint64())
	if to == asked {
		return ""
	}
	return to
}

// Rewrite replaces the request's model by another one; "": by none. It returns the edits of the body, which the
// decision had for what the operator has set.
func (g *Gateway) Rewrite(r *Request, to string, p *Policy, own openai.Edits) openai.Edits {
	if g.Asked = r.Client.Model(); to == "" {
		return own
	}
	g.Model = to
	r.Patch.Reset(&r.Client)
	r.Patch.Set("model", openai.FieldModel, strconv.AppendQuote(nil, to))
	if len(own) > 0 {
		r.setPriority(p)
	}
	return cloned(r.Patch.Edits()) // the patch is used again, for the prefill
}

// cloned returns edits that do not refer to the patch that made them.
func cloned(edits openai.Edits) openai.Edits {
	edits = slices.Clone(edits)
	for i := range edits {
		edits[i].New = bytes.Clone(edits[i].New)
	}
	return edits
}

// Merge joins two lists of edits of one body in their order. They do not overlap; insertions of a come first.
func Merge(a, b openai.Edits) openai.Edits {
	if len(a) == 0 {
		return b
	}
	out := append(slices.Clone(a), b...)
	slices.SortStableFunc(out, func(a, b openai.Edit) int { return a.Start - b.Start })
	return out
}
