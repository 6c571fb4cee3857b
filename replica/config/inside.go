package config

import (
	"fmt"

	configv1 "tandem/protos/config/v1"
)

// Inside reports whether Envoy has Tandem loaded, in place of asking a server.
func Inside(c *configv1.Config) bool { return c.GetEnvoy().GetRun() == "inside" }

// notInside is why a setting is refused with run: inside.
const notInside = "is not available inside Envoy (envoy.run: inside): take it out, or run Tandem beside Envoy " +
	"(docs/howto/inside-envoy.md)"

// checkInside refuses what the filter inside Envoy does not do yet: a wrong answer would be worse.
func checkInside(v *validator, c *configv1.Config) {
	for i, p := range c.Pools {
		if p.ContinueStreams != nil && (!Inside(c) || p.Engine != "vllm") {
			v.m.add(fmt.Sprintf("pools[%d].continueStreams", i), "needs envoy.run inside and engine vllm")
		}
	}
	refuse := func(path string, is bool) {
		if is && Inside(c) {
			v.m.add(path, notInside)
		}
	}
	refuse("extProc.protocol", c.ExtProc.Protocol == "endpointPicker")
	refuse("envoyGateway", c.EnvoyGateway != nil)
	refuse("envoy.replicas", c.Envoy.Replicas == "redis")
	for i, p := range c.Pools {
		path := fmt.Sprintf("pools[%d]", i)
		refuse(path+".handoff", p.Handoff == "sidecar")
	}
}
