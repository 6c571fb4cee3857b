package config

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate/discovery"
	configv1 "tandem/protos/config/v1"
)

func checkPool(v *validator, path string, p *configv1.Pool) {
	switch {
	case p.Name == "":
		v.m.add(path+".name", "is missing: what metrics and logs will call the pool")
	case slices.Contains(v.names, p.Name):
		v.m.add(path+".name", "%.100q names two pools", p.Name)
	}
	v.names = append(v.names, p.Name)
	checkModelsOf(v, path, p)
	checkDialect(v, path, p)
	for i, allowed := range p.Paths {
		if !clientPath.MatchString(allowed) {
			v.m.add(fmt.Sprintf("%s.paths[%d]", path, i),
				"%.100q is not a method and a path, such as \"POST /v1/things/*\"", allowed)
		}
	}
	switch {
	case p.DecodeAlone == "never" && p.OnPrefillFailure == "decodeAlone":
		v.m.add(path+".decodeAlone", "is never, and onPrefillFailure decodeAlone: one of them has to be another")
	case p.DecodeAlone == "never" && p.Split == "never":
		v.m.add(path+".decodeAlone", "is never, and split too: no request could be answered")
	case p.DecodeAlone == "byCost" && p.Split == "always":
		v.m.add(path+".decodeAlone", "is byCost, and split always: costs are compared with split auto")
	}
	checkCachedTokens(v, path+".cachedTokens", p)
	switch {
	case p.MinPrefillTokens < 0:
		v.m.add(path+".minPrefillTokens", "%d is negative", p.MinPrefillTokens)
	case p.MinPrefillTokens > 0 && p.Split != "auto":
		v.warnGiven([]string{path + ".split"}, path+".minPrefillTokens", "has no effect: split is %s", p.Split)
	}
	checkRoles(v, path, p)
	checkSession(v, path+".session", p.Session)
	checkHandoff(v, path, p)
	checkObjectives(v, path, p)
	if p.Discovery != nil {
		checkDiscovery(v, path, p)
	} else {
		checkEndpointsOf(v, path, p)
	}
	checkTransferring(v, path, p)
	checkEncode(v, path, p)
	checkKvEvents(v, path, p)
}

// Encodes reports whether the pool has an encode stage.
func Encodes(p *configv1.Pool) bool { return p.GetEncode() != nil }

// checkEncode refuses an encode stage if the leg behind it could not be planned, and warns of an encode stage without
// endpoints.
func checkEncode(v *validator, path string, p *configv1.Pool) {
	i := slices.IndexFunc(p.Endpoints, func(e *configv1.Endpoint) bool { return e.Role == "encode" })
	switch {
	case p.Encode == nil && i >= 0:
		v.warnGiven([]string{path + ".encode"}, fmt.Sprintf("%s.endpoints[%d].role", path, i),
			"is encode, which has no effect without the pool's encode: set that too, {} is enough")
	case p.Encode == nil:
	case Concurrent(p):
		v.m.add(path+".encode", "takes legs that follow each other, not kvTransfer %s: remove it", p.KvTransfer)
	case p.Handoff == "direct":
		v.m.add(path+".encode",
			"takes handoff envoy or sidecar, not %s: Envoy or the sidecar makes the hop to the encode endpoint",
			p.Handoff)
	case i < 0 && p.Discovery == nil:
		v.warnGiven([]string{path + ".endpoints"}, path+".encode", "has no effect: no endpoint has the role encode")
	}
}

func prefills(e *configv1.Endpoint) bool { return e.GetRole() == "prefill" || e.GetRole() == "both" }
func decodes(e *configv1.Endpoint) bool  { return e.GetRole() == "decode" || e.GetRole() == "both" }

func checkCachedTokens(v *validator, path string, p *configv1.Pool) {
	switch {
	case p.CachedTokens != "prefill":
	case Concurrent(p) || p.KvTransfer == "none":
		v.m.add(path, "is prefill, which takes legs that follow each other, not kvTransfer %s: decode", p.KvTransfer)
	case p.Handoff != "envoy":
		v.m.add(path, "is prefill, which takes handoff envoy, not %s: answers come through the external processor "+
			"there", p.Handoff)
	}
}

// checkHandoff refuses a configuration that leaves the second hop to a gateway or engine that cannot make it.
func checkHandoff(v *validator, path string, p *configv1.Pool) {
	path += ".handoff"
	switch {
	case p.Handoff == "envoy":
	case Concurrent(p):
		v.m.add(path, "is %s, but with kvTransfer %s both legs run at once, which takes an Envoy that makes both: "+
			"envoy", p.Handoff, p.KvTransfer)
	case p.Handoff == "direct" && DialectOf(p).Push != nil:
		v.m.add(path, "is direct, but %s's prefill endpoint sends the KV to a decode endpoint that waits for it: envoy",
			p.KvTransfer)
	}
}

func checkKvEvents(v *validator, path string, p *configv1.Pool) {
	for i, e := range p.Endpoints {
		at := fmt.Sprintf("%s.endpoints[%d]", path, i)
		switch {
		case p.KvEvents == nil && (e.KvEventsPort != 0 || e.KvReplayPort != 0):
			v.m.add(at+".kvEventsPort", "has no effect without the pool's kvEvents: set that too, {} is enough")
		case e.KvReplayPort != 0 && e.KvEventsPort == 0:
			v.m.add(at+".kvReplayPort", "has no effect without kvEventsPort: set that too")
		}
		checkPort(v, at+".kvEventsPort", e.KvEventsPort, p.KvEvents.GetRanks())
		checkPort(v, at+".kvReplayPort", e.KvReplayPort, p.KvEvents.GetRanks())
	}
	k := p.KvEvents
	if k == nil {
		return
	}
	checkPort(v, path+".kvEvents.port", k.Port, k.Ranks)
	checkPort(v, path+".kvEvents.replayPort", k.ReplayPort, k.Ranks)
	for tier, rate := range loadBandwidth(p) {
		if *rate < 0 {
			name := [...]string{"cpuBytes", "diskBytes", "remoteBytes"}[tier]
			v.m.add(path+".kvEvents.loadBandwidth."+name, "%d is negative", *rate)
		}
	}
	if k.Listen != "" {
		checkListen(v, path+".kvEvents.listen", k.Listen)
	} else if k.ReplayPort == 0 &&
		!slices.ContainsFunc(p.Endpoints, func(e *configv1.Endpoint) bool { return e.KvReplayPort != 0 }) {
		v.warnGiven([]string{path + ".kvEvents.listen", path + ".endpoints"}, path+".kvEvents.replayPort",
			"is missing: an event that is lost makes all that an endpoint holds unknown")
	}
}

// checkPort checks the first of as many ports as there are ranks; 0: not set.
func checkPort(v *validator, path string, port, ranks int32) {
	if port < 0 || port+max(ranks, 1)-1 > 65535 {
		v.m.add(path, "%d is not a port", port)
	}
}

// checkAdapters warns of adapters that no request can reach: requests for a name go to the pool that names it as a
// model, else to the first with an endpoint that has it, and there to an endpoint that decodes.
func checkAdapters(v *validator, pools []*configv1.Pool) {
	first := map[string]string{}
	for i, p := range pools {
		path := fmt.Sprintf("pools[%d]", i)
		decoded := map[string]bool{}
		for _, e := range p.Endpoints {
			for _, name := range e.Loras {
				decoded[name] = decoded[name] || decodes(e)
			}
		}
		for j, e := range p.Endpoints {
			for _, name := range e.Loras {
				if first[name] == "" {
					first[name] = path
				}
				goes := cmp.Or(v.models[name], first[name])
				switch at := fmt.Sprintf("%s.endpoints[%d].loras", path, j); {
				case goes != path:
					v.warn(at, "nobody can ask for %.100q here: its requests go to %s", name, goes)
				case !decoded[name]:
					v.warn(at, "has %.100q, but no endpoint that decodes has it or reports it: add it there", name)
				}
			}
		}
	}
}

func checkModelsOf(v *validator, path string, p *configv1.Pool) {
	for i, model := range p.Models {
		at := fmt.Sprintf("%s.models[%d]", path, i)
		if model == "" {
			v.m.add(at, "is empty: a name that requests ask for, or \"*\"")
		} else if other, taken := v.models[model]; taken {
			hint := ""
			if model == "*" {
				hint = `; a pool that names no models has "*", all that no other pool names`
			}
			v.m.add(at, "%.100q is in %s already; a model belongs to one pool%s", model, other, hint)
		}
		v.models[model] = path
	}
}

// Concurrent reports whether both legs of a pool's requests run at once.
func Concurrent(p *configv1.Pool) bool { return DialectOf(p).Concurrent != nil }

// pairs reports whether an endpoint can prefill for another one.
func pairs(p *configv1.Pool) bool {
	d := DialectOf(p)
	whole := d.PairsOnly() // then an engine with both roles was started for neither leg
	for i, a := range p.Endpoints {
		for j, b := range p.Endpoints {
			if i != j && prefills(a) && decodes(b) && !(whole && (decodes(a) || prefills(b))) {
				return true
			}
		}
	}
	return false
}

func checkEndpointsOf(v *validator, path string, p *configv1.Pool) {
	decoding, prefilling := false, false
	for i, e := range p.Endpoints {
		checkEndpoint(v, fmt.Sprintf("%s.endpoints[%d]", path, i), e)
		decoding = decoding || decodes(e)
		prefilling = prefilling || prefills(e)
	}
	checkRanks(v, path, p)
	checkWeights(v, path, p)
	switch {
	case len(p.Endpoints) == 0:
		v.m.add(path+".endpoints", "is missing: at least one endpoint is needed, or discovery")
	case !decoding:
		v.m.add(path+".endpoints", "none of them decodes: at least one needs the role decode or both")
	case p.KvTransfer == "none":
		checkIdleRoles(v, path+".endpoints", p)
	case p.Split == "never":
	case !prefilling && p.Split == "always":
		v.m.add(path+".endpoints",
			"none of them prefills, but split is always: at least one needs the role prefill or both")
	case !prefilling:
		v.warn(path+".endpoints", "none of them prefills, so nothing will be split")
	case p.Split == "always" && p.DecodeAlone != "never" && !pairs(p):
		v.warn(path+".endpoints", "no two of them can share a request, so nothing is split, though split is always: "+
			"add one that prefills or decodes")
	case p.Split == "always" && !pairs(p):
		v.m.add(path+".endpoints", "no two of them can share a request, and with split always and decodeAlone never "+
			"nothing else answers: add one that prefills or decodes, or say decodeAlone: fallback")
	default:
		checkGroups(v, path+".endpoints", p)
	}
}

// checkWeights warns if all endpoints for one of the legs have weight 0. Requests can do without prefill, but not
// without decode.
func checkWeights(v *validator, path string, p *configv1.Pool) {
	drained := func(has func(*configv1.Endpoint) bool) bool {
		works := func(e *configv1.Endpoint) bool { return has(e) && e.GetWeight() != 0 }
		return slices.ContainsFunc(p.Endpoints, has) && !slices.ContainsFunc(p.Endpoints, works)
	}
	switch {
	case drained(decodes):
		v.warn(path+".endpoints", "every one that decodes has weight 0, so no request can be served")
	case drained(prefills) && !neverSplits(p):
		v.warnGiven([]string{path + ".kvTransfer", path + ".split"}, path+".endpoints",
			"every one that prefills has weight 0, so decode computes the prompts, where the pool allows it")
	}
}

// RankLimit returns how many data-parallel ranks an endpoint of a pool may have; 0 if requests of the pool cannot name
// one, or if its KV events are not counted by rank.
func RankLimit(p *configv1.Pool) int {
	if p.KvTransfer != "none" && !DialectOf(p).Engines.DataRanks || p.Handoff != "envoy" ||
		p.GetKvEvents().GetRanks() > 1 {
		return 0
	}
	return discovery.MaxRanks
}

// checkRanks checks the data-parallel ranks of a pool's endpoints.
func checkRanks(v *validator, path string, p *configv1.Pool) {
	for i, e := range p.Endpoints {
		at := fmt.Sprintf("%s.endpoints[%d].dataParallelRanks", path, i)
		if n := e.DataParallelRanks; n > 0 && n <= discovery.MaxRanks {
			checkRanksNamed(v, at, path, p)
		}
	}
}

// checkRanksNamed checks that requests of a pool can name ranks, which at asks for.
func checkRanksNamed(v *validator, at, path string, p *configv1.Pool) {
	switch {
	case p.KvTransfer != "none" && !DialectOf(p).Engines.DataRanks:
		v.m.add(at, "kvTransfer %s has no word for ranks: give each rank a port and an endpoint of its own, "+
			"or leave it to the engine", p.KvTransfer)
	case p.Handoff != "envoy":
		v.m.add(at, "needs handoff envoy, not %s: only there the rank goes with the request", p.Handoff)
	case p.GetKvEvents().GetRanks() > 1:
		v.m.add(path+".kvEvents.ranks",
			"is %d, and endpoints have data-parallel ranks, which count events by rank: leave one out",
			p.GetKvEvents().GetRanks())
	}
}

func checkEndpoint(v *validator, path string, e *configv1.Endpoint) {
	known := len(v.endpoints)
	v.endpoints = addAddress(v, v.endpoints, path+".address", e.Address)
	for _, added := range v.endpoints[known:] {
		checkNotOurs(v, path+".address", added)
	}
	if e.Role == "" {
		v.m.add(path+".role", "is missing: one of prefill, decode, both, encode")
	} else if r := e.Role; !prefills(e) && !decodes(e) && r != "encode" {
		near := meant(r, []string{"prefill", "decode", "both", "encode"})
		v.m.add(path+".role", "%.40q is not a role: one of prefill, decode, both, encode%s", r, near)
	}
	switch {
	case e.ServerName != "" && !isName(e.ServerName):
		v.m.add(path+".serverName", "%.100q is not a name", e.ServerName)
	case e.ServerName != "" && e.Scheme != "https":
		v.m.add(path+".serverName", "is for scheme https, and the endpoint's is %s", e.Scheme)
	}
	checkCommaFree(v, path+".loras", e.Loras)
	checkLabels(v, path+".labels", e.Labels)
}

// checkNotOurs checks that an endpoint is not one of Tandem's or Envoy's own listeners.
func checkNotOurs(v *validator, path string, e seenAddress) {
	ip, err := netip.ParseAddr(e.host)
	here := e.host == "localhost" || err == nil && ip.IsLoopback()
	for _, l := range v.listens {
		if l.port == e.port && (l.host == e.host || here && everywhere(l.host)) {
			v.m.add(path, "%s is %s: a request would go in circles", net.JoinHostPort(e.host, e.port), l.path)
			return
		}
	}
}

// checkIdleRoles warns of endpoints that get no requests because the pool never splits.
func checkIdleRoles(v *validator, path string, p *configv1.Pool) {
	for i, e := range p.Endpoints {
		if e.Role == "prefill" {
			v.warn(fmt.Sprintf("%s[%d].role", path, i),
				"is prefill, and nothing is sent there, since kvTransfer none splits nothing: set kvTransfer to "+
					"what the engines use, or the role to both")
		}
	}
}

// checkRoles checks who decides which endpoints prefill.
func checkRoles(v *validator, path string, p *configv1.Pool) {
	if p.Roles != "auto" {
		return
	}
	dialect := DialectOf(p)
	both := 0
	for _, e := range p.Endpoints {
		if e.Role == "both" {
			both++
		}
	}
	switch {
	case !dialect.Engines.EitherLeg:
		v.m.add(path+".roles", "is auto, but engines with kvTransfer %s serve one leg only: with %s they serve either",
			p.KvTransfer, strings.Join(kvtransfer.EitherLegNames(), ", "))
	case p.Split == "never":
		v.m.add(path+".roles", "is auto, but split is never: every endpoint serves both legs of its requests")
	case p.Discovery == nil && both < 2:
		v.m.add(path+".roles", "is auto, but %d endpoints have the role both: at least two are needed", both)
	}
}

// checkGroups checks that the endpoints that need another one for each request can pair with one: those that prefill,
// and with some dialects those that decode.
func checkGroups(v *validator, path string, p *configv1.Pool) {
	dialect := DialectOf(p)
	for i, e := range p.Endpoints {
		needs, does := e.Role == "prefill", "decodes"
		partner := decodes
		if e.Role == "decode" && dialect.PairsOnly() {
			needs, does, partner = true, "prefills", prefills
		}
		pairs := !needs || slices.ContainsFunc(p.Endpoints, func(o *configv1.Endpoint) bool {
			return partner(o) && PairsAs(p, o) == PairsAs(p, e)
		})
		same := func(o *configv1.Endpoint) bool { return partner(o) && o.Group == e.Group && o.Release == e.Release }
		if !pairs && slices.ContainsFunc(p.Endpoints, same) {
			v.m.add(fmt.Sprintf("%s[%d].transfer.tensorParallelSize", path, i),
				"is %d, and no endpoint of its group that %s has the same: with kvTransfer %s a rank passes KV to the "+
					"rank of the same number", max(e.GetTransfer().GetTensorParallelSize(), 1), does, p.KvTransfer)
		} else if !pairs {
			v.warnGiven([]string{path}, fmt.Sprintf("%s[%d]", path, i),
				"no endpoint that %s pairs with it (%s), so it will never be used", does, pairing(p, e))
		} else if o := unequalRanks(p, e); o != nil {
			v.m.add(fmt.Sprintf("%s[%d].transfer.tensorParallelSize", path, i),
				"is %d, and %d of %s, with which it pairs: one must be a multiple of the other, or the engines refuse "+
					"the handshake; set different groups", e.GetTransfer().GetTensorParallelSize(),
				o.GetTransfer().GetTensorParallelSize(), o.GetAddress())
		}
	}
}

// unequalRanks returns an endpoint that decodes for a prefill endpoint, and whose known tensor-parallel size does not
// fit its size; nil if there is none.
func unequalRanks(p *configv1.Pool, e *configv1.Endpoint) *configv1.Endpoint {
	mine := e.GetTransfer().GetTensorParallelSize()
	if DialectOf(p).RankRule != kvtransfer.RankMultiples || e.Role != "prefill" || mine < 1 {
		return nil
	}
	for _, o := range p.Endpoints {
		theirs := o.GetTransfer().GetTensorParallelSize()
		if theirs > 0 && decodes(o) && PairsAs(p, o) == PairsAs(p, e) && max(mine, theirs)%min(mine, theirs) != 0 {
			return o
		}
	}
	return nil
}

func checkTLSToEndpoints(v *validator, c *configv1.Config) {
	for _, p := range c.Pools {
		for _, e := range p.Endpoints {
			if e.Scheme == "https" && c.Envoy.EndpointTls.GetCaFile() == "" {
				v.warn("envoy.endpointTls.caFile", "is missing: Envoy will take any certificate of https endpoints")
				return
			}
		}
	}
}

// clientPath matches a method and a path of plain segments; * stands for any one.
var clientPath = regexp.MustCompile(`^[A-Z]+ (/[A-Za-z0-9._~:@!$&'()+,=*-]+)+$`)

// pathPrefix matches a path prefix that a gateway may add.
var pathPrefix = regexp.MustCompile(`^(/[A-Za-z0-9._~-]+)+$`)
