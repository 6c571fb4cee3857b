package config

import (
	"fmt"

	configv1 "tandem/protos/config/v1"
)

// The values of extProc.protocol.
const (
	ProtocolTandem         = "tandem"
	ProtocolEndpointPicker = "endpointPicker"
)

func setPickerDefaults(e *configv1.ExtProc) {
	if e.Protocol == ProtocolEndpointPicker {
		sub(&e.EndpointPicker)
		if e.Tls == nil {
			sub(&e.Tls)
			e.Tls.Mode = "selfSigned"
		}
	}
}

func defaultHandoff(e *configv1.ExtProc) string {
	if e.Protocol == ProtocolEndpointPicker {
		return "sidecar"
	}
	return "envoy"
}

// Encrypted reports whether clients have to speak TLS to the external processor.
func Encrypted(x *configv1.ExtProc) bool {
	return x.GetTls() != nil && x.GetTls().GetMode() != "plaintext"
}

func checkPicker(v *validator, c *configv1.Config) {
	e := c.ExtProc
	if e.Protocol != ProtocolEndpointPicker {
		if e.EndpointPicker != nil {
			v.warnGiven([]string{"extProc.protocol"}, "extProc.endpointPicker",
				"has no effect: extProc.protocol is %s", e.Protocol)
		}
		return
	}
	p := e.EndpointPicker
	if p.ShedRequests < 1 {
		v.m.add("extProc.endpointPicker.shedRequests", "%d is not above 0", p.ShedRequests)
	}
	for i, pool := range c.Pools {
		if pool.Handoff == "envoy" && pool.KvTransfer != "none" {
			v.m.add(fmt.Sprintf("pools[%d].handoff", i),
				"is envoy, but a gateway that asks an endpoint picker makes one hop: sidecar or direct")
		}
	}
}
