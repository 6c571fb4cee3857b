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
	switch p.KvTransfer {
	case "sglang":
		v.sglang(path, p)
	case "p2p-nccl":
		v.p2pNCCL(path, p)
		v.neverAlone(path, p, "P2P-NCCL")
	case "moriio", "moriio-read":
		v.sameSizes(path, p)
	}
	if p.Registration != nil && p.KvTransfer != "p2p-nccl" {
		v.warn(path+".registration", "has no effect with kvTransfer %s", p.KvTransfer)
	}
}

func (v *validator) transfer(path string, p *Pool, e *Endpoint) {
	t := e.Transfer
	if t == nil {
		return
	}
	path += ".transfer"
	if !Concurrent(p) && p.KvTransfer != "moriio-read" {
		if t.BootstrapPort != 0 || t.KvPort != 0 || t.HandshakePort != 0 || t.NotifyPort != 0 {
			v.warn(path, "its ports have no effect with kvTransfer %s: those engines tell each other", p.KvTransfer)
		}
		return
	}
	if strings.ContainsAny(t.Host, "[]\"\\/ ") {
		v.m.add(path+".host", "%.100q is no host: a name or an IP address without brackets", t.Host)
	}
	if ip, err := netip.ParseAddr(t.Host); err == nil && ip.IsUnspecified() {
		v.m.add(path+".host", "%s is where an engine listens; this is where others reach it", t.Host)
	}
	v.port(path+".bootstrapPort", t.BootstrapPort, 1)
	v.port(path+".kvPort", t.KvPort, 1)
	v.port(path+".handshakePort", t.HandshakePort, 1)
	v.port(path+".notifyPort", t.NotifyPort, 1)
	v.count(path+".tensorParallelSize", t.TensorParallelSize)
	v.count(path+".dataParallelSize", t.DataParallelSize)
	if t.BootstrapPort != 0 && e.Role == "decode" {
		v.warn(path+".bootstrapPort", "has no effect on an endpoint that only decodes: the bootstrap server is the prefill engine's")
	}
}

func (v *validator) count(path string, n int32) {
	if n < 0 || n > 4096 {
		v.m.add(path, "%d is not between 1 and 4096", n)
	}
}

// p2pNCCL: its engines find each other by addresses that are told, or registered.
func (v *validator) p2pNCCL(path string, p *Pool) {
	if p.Registration != nil {
		v.listen(path+".registration.listen", p.Registration.Listen)
		return
	}
	if p.Discovery != nil {
		v.m.add(path+".registration", "is missing: of endpoints that are found nobody says the kv_port; set registration.listen to what the engines have as proxy_ip and proxy_port")
	}
	for i, e := range p.Endpoints {
		if e.Role != "both" && e.Transfer.GetKvPort() == 0 {
			v.m.add(fmt.Sprintf("%s.endpoints[%d].transfer.kvPort", path, i), "is missing: the engine's kv_port, or set registration.listen of the pool to what the engines have as proxy_ip and proxy_port")
		}
	}
}

// sameSizes: MoRIIO's rank n of prefill writes to rank n of decode.
func (v *validator) sameSizes(path string, p *Pool) {
	size := func(e *Endpoint) int32 { return max(e.GetTransfer().GetTensorParallelSize(), 1) }
	for i, e := range p.Endpoints {
		other := slices.IndexFunc(p.Endpoints[:i], func(o *Endpoint) bool { return p.PairsAs(o) == p.PairsAs(e) && size(o) != size(e) })
		if other >= 0 {
			v.m.add(fmt.Sprintf("%s.endpoints[%d].transfer.tensorParallelSize", path, i), "is %d, and that of endpoints[%d] is %d: "+
				"MoRIIO maps ranks one to one, so give engines of another size a group of their own",
				size(e), other, size(p.Endpoints[other]))
		}
	}
}

// sglang: its engines are started for one leg, or for none, and neither leg can do anything alone.
func (v *validator) sglang(path string, p *Pool) {
	has := func(role string) bool {
		return slices.ContainsFunc(p.Endpoints, func(e *Endpoint) bool { return e.Role == role })
	}
	if !has("both") && len(p.Endpoints) > 0 && !(has("prefill") && has("decode")) {
		v.m.add(path+".endpoints", "an SGLang engine that decodes cannot prefill: "+
			"this needs endpoints of both roles, prefill and decode, or some with the role both (started without --disaggregation-mode)")
	}
	v.neverAlone(path, p, "SGLang")
}

// neverAlone: what decode cannot do without a prefill needs an endpoint that was started for neither.
func (v *validator) neverAlone(path string, p *Pool, engine string) {
	if p.Discovery != nil || slices.ContainsFunc(p.Endpoints, func(e *Endpoint) bool { return e.Role == "both" }) {
		return // there is one, or nobody knows yet
	}
	if p.Split == "never" {
		v.m.add(path+".split", "never leaves only endpoints with the role both (engines started for neither leg), and there are none")
	}
	if p.OnPrefillFailure == "decodeAlone" {
		v.m.add(path+".onPrefillFailure", "%s cannot decode without a prefill: otherPrefill or fail, or add an endpoint with the role both (started for neither leg)", engine)
	}
	if p.LongPrompts == "decodeAlone" {
		v.warn(path+".longPrompts", "bodies over envoy.maxBodyBytes will be refused (413): no endpoint has the role both, which could answer them alone")
	}
}
