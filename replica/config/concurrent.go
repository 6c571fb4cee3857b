package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	configv1 "tandem/protos/config/v1"
)

// checkTransferring checks the requirements of the pool's dialect on the pool and its endpoints.
func checkTransferring(v *validator, path string, p *configv1.Pool) {
	d := DialectOf(p)
	var members []kvtransfer.Member
	for i, e := range p.Endpoints {
		checkTransfer(v, fmt.Sprintf("%s.endpoints[%d]", path, i), p, &d, e)
		members = append(members, kvtransfer.Member{Role: e.Role, Pairs: PairsAs(p, e), Transfer: TransferOf(e)})
	}
	if d.Validate != nil {
		for _, problem := range d.Validate(members) {
			v.m.add(path+"."+problem.Path, "%s", problem.Text)
		}
	}
	if d.PairsOnly() {
		checkNeverAlone(v, path, p)
	}
}

// checkTransfer checks the addresses and ports that an endpoint has for KV transfer.
func checkTransfer(v *validator, path string, p *configv1.Pool, d *kvtransfer.Dialect, e *configv1.Endpoint) {
	t := e.Transfer
	if t == nil {
		return
	}
	for _, name := range []string{"transfer.bootstrapPort", "transfer.handshakePort", "transfer.notifyPort"} {
		at, set := path+"."+name, PortOf(e, name)
		declared := slices.IndexFunc(d.Ports, func(port kvtransfer.Port) bool { return port.Name == name })
		checkPort(v, at, set, 1)
		role, err := kvstate.ParseRole(e.Role)
		switch {
		case set == 0:
		case declared < 0:
			pool, _, _ := strings.Cut(path, ".endpoints[")
			v.warnGiven([]string{pool + ".kvTransfer"}, at, "has no effect with kvTransfer %s", p.KvTransfer)
		case err == nil && d.Ports[declared].Roles&role == 0:
			v.warnGiven([]string{path + ".role"}, at, "has no effect on an endpoint with the role %s", e.Role)
		}
	}
	if d.Name == "" {
		return
	}
	path += ".transfer"
	if strings.ContainsAny(t.Host, "[]\"\\/ ") {
		v.m.add(path+".host", "%.100q is no host: a name or an IP address without brackets", t.Host)
	}
	if ip, err := netip.ParseAddr(t.Host); err == nil && ip.IsUnspecified() {
		v.m.add(path+".host", "%s is where an engine listens; this is where others reach it", t.Host)
	}
}

// checkNeverAlone requires an endpoint with both roles if decode needs a prefill for every request.
func checkNeverAlone(v *validator, path string, p *configv1.Pool) {
	if p.Discovery != nil ||
		slices.ContainsFunc(p.Endpoints, func(e *configv1.Endpoint) bool { return e.Role == "both" }) {
		return // there is one, or the endpoints are not known yet
	}
	if p.Split == "never" {
		v.m.add(path+".split",
			"never leaves only endpoints with the role both (engines started for neither leg), and there are none")
	}
	if p.OnPrefillFailure == "decodeAlone" {
		v.m.add(path+".onPrefillFailure",
			"with kvTransfer %s decode cannot work without a prefill: otherPrefill or fail, or add an endpoint with "+
				"the role both (started for neither leg)", p.KvTransfer)
	}
	if p.LongPrompts == "decodeAlone" {
		v.warnGiven([]string{path + ".kvTransfer", path + ".endpoints"}, path+".longPrompts",
			"bodies over envoy.maxBodyBytes will be refused (413): no endpoint has the role both, which could "+
				"answer them alone")
	}
}
