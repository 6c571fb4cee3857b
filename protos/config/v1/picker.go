package configv1

import "fmt"

// The values of extProc.protocol.
const (
	ProtocolTandem         = "tandem"
	ProtocolEndpointPicker = "endpointPicker"
)

func setPickerDefaults(e *ExtProc) {
	or(&e.Protocol, ProtocolTandem)
	if e.Protocol == ProtocolEndpointPicker {
		sub(&e.EndpointPicker)
		or(&e.EndpointPicker.Responses, "body")
		or(&e.EndpointPicker.ShedRequests, 128)
		if e.Tls == nil {
			e.Tls = &Tls{Mode: "selfSigned"}
		}
	}
	if e.Tls != nil {
		or(&e.Tls.Mode, "files")
	}
}

func defaultHandoff(e *ExtProc) string {
	if e.Protocol == ProtocolEndpointPicker {
		return "sidecar"
	}
	return "envoy"
}

// Encrypted reports whether clients have to speak TLS to the external processor.
func (x *ExtProc) Encrypted() bool { return x.GetTls() != nil && x.GetTls().GetMode() != "plaintext" }

func (v *validator) picker(c *Config) {
	e := c.ExtProc
	v.oneOf("extProc.protocol", e.Protocol, ProtocolTandem, ProtocolEndpointPicker)
	if e.Protocol != ProtocolEndpointPicker {
		if e.EndpointPicker != nil {
			v.warn("extProc.endpointPicker", "has no effect: extProc.protocol is %s", e.Protocol)
		}
		return
	}
	p := e.EndpointPicker
	if p.Fallbacks < 0 || p.Fallbacks > 7 {
		v.m.add("extProc.endpointPicker.fallbacks", "%d is not between 0 and 7", p.Fallbacks)
	}
	if p.ShedRequests < 1 {
		v.m.add("extProc.endpointPicker.shedRequests", "%d is not above 0", p.ShedRequests)
	}
	v.oneOf("extProc.endpointPicker.responses", p.Responses, "body", "headers")
	for i, pool := range c.Pools {
		if pool.Handoff == "envoy" && pool.KvTransfer != "none" {
			v.m.add(fmt.Sprintf("pools[%d].handoff", i), "is envoy, but a gateway that asks an endpoint picker makes one hop: sidecar or direct")
		}
	}
}
