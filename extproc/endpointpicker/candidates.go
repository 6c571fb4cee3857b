package endpointpicker

import (
	"net"
	"slices"
	"strings"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
)

// Options are options of the Endpoint Picker protocol.
type Options struct {
	Fallbacks    int  // endpoints listed after the chosen one
	WatchBody    bool // keep the stream until the answer ends, instead of until it begins
	ShedRequests int  // reservations on every decode endpoint from which on requests of negative priority get 429
	Conformance  bool // support the headers of the Inference Extension's conformance suite; for tests only
}

// Allow removes from the view what the gateway's subset, or a conformance test, does not name. If the subset names
// decode endpoints only, prefill endpoints stay: the gateway never connects to them.
func Allow(v *kvstate.View, m *envoywire.Message, o *Options) {
	subset, limited := m.Hints.Subset, m.Hints.HasSubset
	if s := m.Headers.Selection; o.Conformance && len(s) > 0 {
		subset, limited = envoywire.Addresses(nil, string(s)), true
	}
	if !limited {
		return
	}
	v.Endpoints = slices.DeleteFunc(v.Endpoints, func(c kvstate.Candidate) bool {
		return c.Endpoint.Role&kvstate.RoleDecode != 0 && !named(subset, c.Endpoint.Addr)
	})
}

// named reports whether a subset names an endpoint, by its address or by its host; an IPv6 host may have brackets.
func named(subset []string, addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	return slices.ContainsFunc(subset, func(s string) bool { return s == addr || strings.Trim(s, "[]") == host })
}

// ToHolder reduces the view to the endpoint that holds the stored response which the request continues. In this
// protocol the id of a new response is the engine's, so it can be found again only if there is one decode endpoint,
// or by the gateway's own session affinity.
func ToHolder(r *plan.Request, v *kvstate.View) error {
	holder, stored := r.Holder(r.Pool)
	r.Alone = r.Alone || stored
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
func Shed(r *picker.Request, v *kvstate.View, o *Options) error {
	if r.Priority >= 0 {
		return nil
	}
	for _, c := range v.Endpoints {
		if c.Usable && c.Endpoint.Role&kvstate.RoleDecode != 0 && c.Requests < int64(o.ShedRequests) {
			return nil
		}
	}
	return plan.Overloaded()
}

// Fallbacks returns the list of endpoints for the gateway: the chosen one, then those that would have been chosen
// without it.
func Fallbacks(k *picker.Picker, r *picker.Request, v *kvstate.View, c picker.Choice, o *Options) string {
	list := []string{v.Endpoints[c.Decode].Endpoint.Addr}
	others := *r
	for range o.Fallbacks {
		others.Excluded = append(others.Excluded, list[len(list)-1])
		i, err := k.PickDecode(&others, v, c.Prefill)
		if err != nil || slices.Contains(list, v.Endpoints[i].Endpoint.Addr) {
			break
		}
		list = append(list, v.Endpoints[i].Endpoint.Addr)
	}
	return strings.Join(list, ",")
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
