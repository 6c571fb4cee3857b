package configv1

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// concurrent judges what only pools whose legs run at once can get wrong, and that nobody else says what only they use.
func (v *validator) concurrent(path string, p *Pool) {
	for i, e := range p.Endpoints {
		v.transfer(fmt.Sprintf("%s.endpoints[%d]", path, i), p, e)
	}
	if p.KvTransfer == "sglang" {
		v.sglang(path, p)
	}
}

func (v *validator) transfer(path string, p *Pool, e *Endpoint) {
	t := e.Transfer
	if t == nil {
		return
	}
	path += ".transfer"
	if !Concurrent(p) {
		v.warn(path, "has no effect with kvTransfer %s: those engines tell each other", p.KvTransfer)
		return
	}
	if strings.ContainsAny(t.Host, "[]\"\\/ ") {
		v.m.add(path+".host", "%.100q is no host: a name or an IP address without brackets", t.Host)
	}
	if ip, err := netip.ParseAddr(t.Host); err == nil && ip.IsUnspecified() {
		v.m.add(path+".host", "%s is where an engine listens; this is where others reach it", t.Host)
	}
	v.port(path+".bootstrapPort", t.BootstrapPort)
	if t.BootstrapPort != 0 && e.Role == "decode" {
		v.warn(path+".bootstrapPort", "has no effect on an endpoint that only decodes: the bootstrap server is the prefill engine's")
	}
}

func (v *validator) port(path string, port int32) {
	if port < 0 || port > 65535 {
		v.m.add(path, "%d is no port", port)
	}
}

// sglang: its engines are started for one leg, or for none, and neither leg can do anything alone.
func (v *validator) sglang(path string, p *Pool) {
	has := func(role string) bool {
		return slices.ContainsFunc(p.Endpoints, func(e *Endpoint) bool { return e.Role == role })
	}
	whole := has("both")
	if !whole && len(p.Endpoints) > 0 && !(has("prefill") && has("decode")) {
		v.m.add(path+".endpoints", "an SGLang engine that decodes cannot prefill: this needs endpoints of both roles, prefill and decode, or some with the role both (started without --disaggregation-mode)")
	}
	if whole {
		return
	}
	if p.Split == "never" {
		v.m.add(path+".split", "never leaves only endpoints with the role both (SGLang without --disaggregation-mode), and there are none")
	}
	if p.OnPrefillFailure == "decodeAlone" {
		v.m.add(path+".onPrefillFailure", "SGLang cannot decode without a prefill: otherPrefill or fail, or add an endpoint with the role both (started without --disaggregation-mode)")
	}
	if p.LongPrompts == "decodeAlone" {
		v.warn(path+".longPrompts", "bodies over envoy.maxBodyBytes will be refused (413): no endpoint has the role both, which could answer them alone")
	}
}
