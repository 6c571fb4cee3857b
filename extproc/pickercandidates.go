package extproc

import (
	"net"
	"slices"
	"strings"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// The endpoints that the endpoint picker may choose from, and what it reports to the gateway in addition to its
// choice.

// allow removes from the view what the gateway's subset, or a conformance test, does not name. If the subset names
// decode endpoints only, prefill endpoints stay: the gateway never connects to them.
func (x endpointPicker) allow() {
	hint := &x.msg.Hints
	subset, limited := hint.Subset, hint.HasSubset
	if s := x.msg.Headers.Selection; x.s.Picker.Conformance && len(s) > 0 {
		subset, limited = envoywire.Addresses(nil, string(s)), true
	}
	if !limited {
		return
	}
	x.view.Endpoints = slices.DeleteFunc(x.view.Endpoints, func(c kvstate.Candidate) bool {
		return c.Endpoint.Role&kvstate.RoleDecode != 0 && !named(subset, c.Endpoint.Addr)
	})
}

// toHolderOf reduces the view to the endpoint that holds the stored response which the request continues. In this
// protocol the id of a new response is the engine's, so it can be found again only if there is one decode endpoint,
// or by the gateway's own session affinity.
func (x endpointPicker) toHolderOf() error {
	a := &x.req.Attempt
	if a.Why == "pass_through" {
		return nil
	}
	holder, stored := x.req.Holder(x.req.Pool)
	a.Alone = a.Alone || stored
	if holder == nil {
		return nil
	}
	x.view.Endpoints = slices.DeleteFunc(x.view.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint != holder })
	if len(x.view.Endpoints) == 0 {
		return openai.Unavailable("no_endpoint", "the endpoint that holds this response is not among those allowed", time.Second)
	}
	return nil
}

// named reports whether a subset names an endpoint, by its address or by its host; an IPv6 host may have brackets.
func named(subset []string, addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	return slices.ContainsFunc(subset, func(s string) bool { return s == addr || strings.Trim(s, "[]") == host })
}

// shed refuses a request of negative priority when the pool is full.
func (x endpointPicker) shed(r *picker.Request) error {
	if r.Priority >= 0 {
		return nil
	}
	for _, c := range x.view.Endpoints {
		if c.Usable && c.Endpoint.Role&kvstate.RoleDecode != 0 && c.Requests < int64(x.s.Picker.ShedRequests) {
			return nil
		}
	}
	return overloaded()
}

// withFallbacks returns the list of endpoints for the gateway: the chosen one, then those that would have been
// chosen without it.
func (x endpointPicker) withFallbacks(r *picker.Request, c picker.Choice) string {
	list := []string{x.view.Endpoints[c.Decode].Endpoint.Addr}
	others := *r
	for range x.s.Picker.Fallbacks {
		others.Excluded = append(others.Excluded, list[len(list)-1])
		i, err := x.picker.PickDecode(&others, &x.view, c.Prefill)
		if err != nil || slices.Contains(list, x.view.Endpoints[i].Endpoint.Addr) {
			break
		}
		list = append(list, x.view.Endpoints[i].Endpoint.Addr)
	}
	return strings.Join(list, ",")
}
