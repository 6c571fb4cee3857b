package config

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	configv1 "tandem/protos/config/v1"
)

// usesP2P reports whether the pool's engines have vLLM's P2P offload tier.
func usesP2P(p *configv1.Pool) bool {
	return slices.ContainsFunc(DialectOf(p).Ports, func(port kvtransfer.Port) bool {
		return port.Name == "transfer.p2pPort"
	})
}

// PairsAs returns the properties that two endpoints of the pool must share to pair: their group, the engine's release,
// and, if rank talks to rank, the number of ranks. Engines of different releases refuse each other's KV at the
// handshake, or misread it.
func PairsAs(p *configv1.Pool, e *configv1.Endpoint) string {
	as := e.Group
	if e.Release != "" {
		as += " " + e.Release
	}
	if e.GetTransfer().GetTensorParallelSize() > 1 && DialectOf(p).RankRule == kvtransfer.RankToRank {
		as += " tp" + strconv.Itoa(int(e.GetTransfer().GetTensorParallelSize()))
	}
	return strings.TrimPrefix(as, " ")
}

// Alike returns the facts in which the engines of a pair must not be known to differ. Releases that the file has keep
// endpoints apart by themselves.
func Alike(p *configv1.Pool) kvstate.FactSet {
	d := DialectOf(p)
	alike := d.Alike()
	for f := range kvstate.Facts {
		if slices.Contains(p.GetPairUnlike(), f.Setting()) {
			alike &^= kvstate.FactsOf(f)
		}
	}
	return alike
}

// checkUnlike checks pairUnlike: each is a fact that the dialect compares.
func checkUnlike(v *validator, path string, p *configv1.Pool) {
	d := DialectOf(p)
	var known []string
	for f := range kvstate.Facts {
		if d.Alike().Has(f) && !slices.Contains(known, f.Setting()) {
			known = append(known, f.Setting())
		}
	}
	for i, name := range p.GetPairUnlike() {
		switch {
		case len(known) == 0:
			v.m.add(fmt.Sprintf("%s.pairUnlike[%d]", path, i), "kvTransfer %s compares no facts of engines: remove it",
				p.GetKvTransfer())
		case !slices.Contains(known, name):
			v.m.add(fmt.Sprintf("%s.pairUnlike[%d]", path, i), "%.40q is not one of %s, which kvTransfer %s compares",
				name, strings.Join(known, ", "), p.GetKvTransfer())
		}
	}
}

// pairing is PairsAs in words for people.
func pairing(p *configv1.Pool, e *configv1.Endpoint) string {
	text := fmt.Sprintf("group %q", e.Group)
	if e.Release != "" {
		text += ", release " + e.Release
	}
	if DialectOf(p).RankRule == kvtransfer.RankToRank {
		text += ", tensorParallelSize " + strconv.Itoa(int(max(e.GetTransfer().GetTensorParallelSize(), 1)))
	}
	return text
}

func checkDialect(v *validator, path string, p *configv1.Pool) {
	checkUnlike(v, path, p)
	at := path + ".kvTransfer"
	switch p.KvTransfer {
	case "":
		v.m.add(at, "is missing: one of %s; none is for engines that prefill and decode by themselves",
			strings.Join(Dialects(), ", "))
		return
	default:
		checkOneOf(v, at, p.KvTransfer, Dialects()...)
	}
	if kvtransfer.Named(p.KvTransfer).Engines.Experimental {
		v.warn(at, "%s is experimental: no real engine has run with it yet, only simulators (docs/protocols.md)",
			p.KvTransfer)
	}
	checkOnlyWith(v, path+".lmcache", p.Lmcache != nil, p, "lmcache")
	checkOnlyWith(v, path+".nixl", p.Nixl != nil, p, "nixl")
	checkLease(v, path, p)
	checkOnlyWith(v, path+".orchestrated", p.Orchestrated != nil, p, "orchestrated")
	checkOnlyWith(v, path+".members", len(p.Members) > 0, p, "multi")
	switch p.KvTransfer {
	case "lmcache":
		if p.Lmcache.RetFirstToken && p.Handoff != "envoy" {
			v.m.add(path+".lmcache.retFirstToken",
				"needs handoff envoy, not %s: prefill's token is put in front of decode's answer there", p.Handoff)
		}
	case "orchestrated":
		if !orchestratedKey.MatchString(p.Orchestrated.Key) {
			v.m.add(path+".orchestrated.key",
				"%.60q is not disagg_ and letters, digits or _: names that begin so are cut from what clients send",
				p.Orchestrated.Key)
		}
	case "multi":
		checkMembers(v, path+".members", p)
	}
	checkTransfers(v, path, p)
}

func checkLease(v *validator, path string, p *configv1.Pool) {
	n := p.Nixl
	if p.KvTimeout != "" && !DialectOf(p).Final {
		v.m.add(path+".kvTimeout", "has no effect with kvTransfer %s: remove it", p.KvTransfer)
	}
	if n.GetDeclineExpired() && p.Handoff != "envoy" {
		v.m.add(path+".nixl.declineExpired", "needs handoff envoy, not %s: the hand-over is written there", p.Handoff)
	}
}

// RewritesAnswers reports whether the external processor rewrites answers of the pool.
func RewritesAnswers(p *configv1.Pool) bool {
	d := DialectOf(p)
	return d.Continue != nil || p.GetCachedTokens() == "prefill" ||
		d.Concurrent != nil && d.Concurrent.JoinsAnswers
}

var (
	orchestratedKey = regexp.MustCompile(`^disagg_[A-Za-z0-9_]{1,57}$`)
	release         = regexp.MustCompile(`^v?[0-9]+\.[0-9]+[-+.0-9A-Za-z]{0,40}$`)
)

func checkOnlyWith(v *validator, path string, set bool, p *configv1.Pool, dialect string) {
	if set && p.KvTransfer != dialect {
		v.m.add(path, "has no effect with kvTransfer %s: remove it, or set kvTransfer to %s", p.KvTransfer, dialect)
	}
}

func checkMembers(v *validator, path string, p *configv1.Pool) {
	if len(p.Members) == 0 {
		v.m.add(path, "is missing: the connectors within MultiConnector, some of nixl, offload, shared")
	}
	for i, m := range p.Members {
		at := fmt.Sprintf("%s[%d]", path, i)
		if checkOneOf(v, at, m, "nixl", "offload", "shared"); slices.Contains(p.Members[:i], m) {
			v.m.add(at, "%s is there twice", m)
		}
	}
}

// checkTransfers checks the settings of KV transfer of all endpoints.
func checkTransfers(v *validator, path string, p *configv1.Pool) {
	if p.KvTransfer == "none" {
		return
	}
	withRelease := slices.IndexFunc(p.Endpoints, func(e *configv1.Endpoint) bool { return e.Release != "" })
	taken := map[string]string{} // host and port to the path of the setting that has them
	for i, e := range p.Endpoints {
		at := fmt.Sprintf("%s.endpoints[%d]", path, i)
		switch {
		case e.Release != "" && !release.MatchString(e.Release):
			v.m.add(at+".release", "%.60q is not a release such as 0.32.0", e.Release)
		case e.Release == "" && withRelease >= 0:
			v.m.add(at+".release",
				"is missing, and %s.endpoints[%d] has one: endpoints pair by release, so give it to all of the pool "+
					"or to none", path, withRelease)
		case p.Nixl.GetReuseTokenIds() && kvtransfer.Older(e.Release, 32):
			v.m.add(at+".release",
				"%s does not take prefill's token ids: nixl.reuseTokenIds needs vLLM 0.32 or newer on both sides",
				e.Release)
		case usesP2P(p) && kvtransfer.Older(e.Release, 25):
			v.m.add(at+".release", "%s has no P2P tier: kvTransfer %s needs vLLM 0.25 or newer on both sides",
				e.Release, p.KvTransfer)
		}
		if h := e.GetTransfer().GetHost(); h != "" && !isName(h) {
			if _, err := netip.ParseAddr(h); err != nil {
				v.m.add(at+".transfer.host", "%.100q is neither an IP address nor a name; it has no port", h)
			}
		}
		checkReceiver(v, at, p, e, taken)
		checkP2p(v, at, p, e, taken)
	}
}

// checkReceiver checks the ports to which LMCache's prefill engines push.
func checkReceiver(v *validator, at string, p *configv1.Pool, e *configv1.Endpoint, taken map[string]string) {
	r := e.Lmcache
	if r == nil {
		return
	}
	if at += ".lmcache"; p.KvTransfer != "lmcache" || e.Role == "prefill" {
		v.m.add(at, "has no effect here: it belongs to endpoints that decode, with kvTransfer lmcache")
		return
	}
	if r.BufferTokens < 0 {
		v.m.add(at+".bufferTokens", "%d is not a number of tokens", r.BufferTokens)
	}
	ranks := min(max(e.GetTransfer().GetTensorParallelSize(), 1), 1024)
	for _, port := range []struct {
		name  string
		first int32
	}{{"initPort", r.InitPort}, {"allocPort", r.AllocPort}, {"queryPort", r.QueryPort}} {
		if port.name == "queryPort" && port.first == 0 {
			continue
		}
		checkPorts(v, at+"."+port.name, e, port.first, ranks, taken)
	}
}

func checkP2p(v *validator, at string, p *configv1.Pool, e *configv1.Endpoint, taken map[string]string) {
	if at += ".transfer.p2pPort"; e.GetTransfer().GetP2PPort() == 0 {
		return
	}
	if !usesP2P(p) || e.Role == "decode" {
		v.m.add(at, "has no effect here: it belongs to endpoints that prefill, with kvTransfer offload")
		return
	}
	checkPorts(v, at, e, e.GetTransfer().GetP2PPort(), 1, taken)
}

// checkPorts checks n ports from first on, and that no other engine on the same host has one of them.
func checkPorts(v *validator, at string, e *configv1.Endpoint, first, n int32, taken map[string]string) {
	if first < 1 || first+n-1 > 65535 {
		v.m.add(at, "%d is not a port, or %d ranks need more ports than there are above it", first, n)
		return
	}
	host := e.GetTransfer().GetHost()
	if host == "" {
		host, _, _ = net.SplitHostPort(e.Address)
	}
	for port := first; port < first+n; port++ {
		key := net.JoinHostPort(host, strconv.Itoa(int(port)))
		if other, ok := taken[key]; ok {
			v.m.add(at, "%s is taken by %s: engines on one machine need ports of their own", key, other)
			return
		}
		taken[key] = at
	}
}

// checkNotices warns if engines cannot reach the listener for notifications.
func checkNotices(v *validator, c *configv1.Config) {
	if c.Notices == nil {
		return
	}
	if !slices.ContainsFunc(c.Pools, TakesNotices) {
		v.warnGiven([]string{"pools"}, "notices", "has no effect: no pool has kvTransfer lmcache with notices")
		return
	}
	if len(c.Envoy.ExtProcs) > 1 && c.GetState().GetRedis() == nil {
		v.warnGiven([]string{"state.redis", "envoy.extProcs"}, "notices",
			"a notice reaches one replica, and prefill legs at the others wait noticeTimeout in vain: "+
				"share it through state.redis, or set lmcache.skipNotices (pd_skip_proxy_notification of the engines)")
	}
	host, _, _ := net.SplitHostPort(c.Notices.Listen)
	if !loopback(host) {
		return
	}
	for _, p := range c.Pools {
		for _, e := range p.Endpoints {
			at, _, _ := net.SplitHostPort(e.Address)
			if TakesNotices(p) && prefills(e) && !loopback(at) {
				v.warn("notices.listen",
					"%s is not reached from other machines, such as %s: set an address that is pd_proxy_host of the "+
						"engines", c.Notices.Listen, e.Address)
				return
			}
		}
	}
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}
