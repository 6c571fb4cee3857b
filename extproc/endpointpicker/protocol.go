// Package endpointpicker is what the Endpoint Picker protocol says on the wire in addition to Envoy's messages: which
// endpoints a gateway allows, why it is refused, and the headers for the routing sidecar (sidecar.go).
//
// Package plan decides for its requests ([plan.Gateway]); package extproc has the handler of the gateway's streams.
package endpointpicker

import (
	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
)

// Options are options of the Endpoint Picker protocol.
type Options struct {
	Fallbacks    int  // endpoints listed after the chosen one
	ShedRequests int  // reservations on every decode endpoint from which on requests of negative priority get 429
	WatchBody    bool // keep the stream until the answer ends, instead of until it begins
	Conformance  bool // support the headers of the Inference Extension's conformance suite; for tests only
}

// Subset returns the endpoints that the gateway, or a conformance test, limits the request to.
func Subset(m *envoywire.Message, o *Options) (only []string, limited bool) {
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
