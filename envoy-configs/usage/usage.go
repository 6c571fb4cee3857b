// Package usage has Envoy report times of answers in its access log, beside the tokens that lua/usage.lua reads
// (docs/adr/0067). extproc/envoywire reads them by the same names.
package usage

import tracingv3 "github.com/envoyproxy/go-control-plane/envoy/type/tracing/v3"

// FirstBody adds the time of the first byte of an answer's body to the access log, in microseconds from the request's
// start. It is the time of the first token; that of the headers is not, because some engines send them earlier.
func FirstBody() *tracingv3.CustomTag {
	return &tracingv3.CustomTag{Tag: "first_body",
		Type: &tracingv3.CustomTag_Value{Value: "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%"}}
}
