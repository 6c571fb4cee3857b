package config

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"strings"

	"tandem/extproc/kvtransfer"
	"tandem/picker"
	configv1 "tandem/protos/config/v1"
)

// SetDefaults fills in missing settings, as [Load] does. The values are those of config.proto's comments.
func SetDefaults(c *configv1.Config) {
	sub(&c.ExtProc)
	sub(&c.Replan)
	sub(&c.Admin)
	sub(&c.Envoy)
	sub(&c.Tickets)
	or(&c.ExtProc.Listen, "127.0.0.1:9002")
	or(&c.Replan.Listen, "127.0.0.1:9003")
	or(&c.Admin.Listen, "127.0.0.1:9090")
	or(&c.Tickets.Ttl, "10m")
	if c.Tracing != nil && c.Tracing.SampleRatio == nil {
		all := 1.
		c.Tracing.SampleRatio = &all
	}
	setUsageDefaults(c.Usage)
	setEnvoyDefaults(c)
	setPickerDefaults(c.ExtProc)
	or(&c.ExtProc.MaxMessageBytes, messageBytes(c.Envoy.MaxBodyBytes))
	if r := c.State.GetRedis(); r != nil {
		or(&r.Mode, "single")
		or(&r.KeyPrefix, "tandem")
		or(&r.Lease, "3s")
	}
	for _, p := range c.Pools {
		setPoolDefaults(p)
		setWaitDefault(p, c.Envoy.BodyMode)
		setDiscoveryDefaults(p.Discovery)
		or(&p.Handoff, defaultHandoff(c.ExtProc))
		if TakesNotices(p) {
			sub(&c.Notices)
		}
	}
	setGatewayDefaults(c)
	if c.Notices != nil {
		or(&c.Notices.Listen, "127.0.0.1:7500")
		or(&c.Notices.Keep, "1m")
	}
}

// messageBytes returns the default of extProc.maxMessageBytes.
func messageBytes(maxBody int64) int64 { return 4*maxBody + 16<<20 }

func setGatewayDefaults(c *configv1.Config) {
	g := c.EnvoyGateway
	if g == nil {
		return
	}
	or(&g.Listen, "127.0.0.1:9004")
	if len(g.Services) > 0 {
		return
	}
	_, port, err := net.SplitHostPort(g.Listen)
	if err != nil {
		return // the validation reports it
	}
	for _, e := range c.Envoy.ExtProcs {
		host, _, _ := net.SplitHostPort(e)
		if labels := strings.Split(host, "."); len(labels) > 2 && labels[2] == "svc" {
			g.Services = append(g.Services, labels[0]+"."+labels[1]+":"+port)
		}
	}
}

// TakesNotices reports whether the pool's engines notify Tandem when KV has arrived.
func TakesNotices(p *configv1.Pool) bool {
	return DialectOf(p).Push != nil && !p.GetLmcache().GetSkipNotices()
}

func setEnvoyDefaults(c *configv1.Config) {
	e := c.Envoy
	or(&e.Listen, "127.0.0.1:8080")
	or(&e.Admin, "127.0.0.1:9901")
	or(&e.MaxBodyBytes, 16<<20)
	or(&e.Replicas, "configured")
	or(&e.Run, "beside")
	or(&e.BodyMode, bodyMode(c))
	or(&e.DecodeIdleTimeout, "30m")
	if c := e.Cors; c != nil {
		or(&c.MaxAge, "10m")
		orList(&c.AllowHeaders, "authorization", "content-type")
		orList(&c.ExposeHeaders, "x-request-id")
	}
	if len(e.ExtProcs) == 0 {
		e.ExtProcs = []string{c.ExtProc.Listen}
		if len(e.Replans) == 0 {
			e.Replans = []string{c.Replan.Listen}
		}
	}
	if len(e.Replans) == 0 {
		e.Replans = besides(e.ExtProcs, c.Replan.Listen)
	}
}

// bodyMode returns the default of envoy.bodyMode. With several replicas Envoy buffers long bodies, because it can then
// ask another replica if one fails; but it limits the time that such a body may wait in a queue.
func bodyMode(c *configv1.Config) string {
	long := func(p *configv1.Pool) bool { return Duration(p.GetQueue().GetMaxWait()) > maxBufferedWait }
	if !several(c.Envoy.ExtProcs) && c.Envoy.Replicas != "redis" || slices.ContainsFunc(c.Pools, long) {
		return "duplex"
	}
	return "auto"
}

// several reports whether addresses may reach more than one replica; a name may stand for many.
func several(extProcs []string) bool {
	if len(extProcs) != 1 {
		return len(extProcs) > 1
	}
	host, _, err := net.SplitHostPort(extProcs[0])
	if err != nil {
		return false // validate reports it
	}
	_, err = netip.ParseAddr(host)
	return err != nil
}

// besides returns the replan ports of replicas that are configured only by their main port: they listen alike.
func besides(extProcs []string, replan string) (replans []string) {
	_, port, err := net.SplitHostPort(replan)
	if err != nil {
		return []string{replan} // validate reports the error
	}
	for _, a := range extProcs {
		if host, _, err := net.SplitHostPort(a); err == nil {
			if r := net.JoinHostPort(host, port); !slices.Contains(replans, r) {
				replans = append(replans, r)
			}
		}
	}
	return replans
}

// decodeAlone returns the default of a pool's decodeAlone.
func decodeAlone(p *configv1.Pool) string {
	switch {
	case p.Split != "always":
		return "byCost"
	case p.OnPrefillFailure == "decodeAlone", len(p.Endpoints) > 0 && !pairs(p):
		return "fallback" // without a pair nothing else could answer
	}
	return "never"
}

func setPoolDefaults(p *configv1.Pool) {
	if len(p.Models) == 0 {
		p.Models = []string{"*"}
	}
	or(&p.Split, "auto")
	d := DialectOf(p)
	or(&p.Engine, cmp.Or(d.Engine, kvtransfer.EngineAny))
	if d.PairsOnly() {
		or(&p.LongPrompts, "refuse")
	}
	or(&p.LongPrompts, "decodeAlone")
	or(&p.OnPrefillFailure, "otherPrefill")
	or(&p.DecodeAlone, decodeAlone(p))
	or(&p.AnswerWeight, picker.DefaultAnswerWeight)
	sub(&p.Targets)
	or(&p.Targets.Ttft, "5s")
	or(&p.Targets.Tpot, "50ms")
	or(&p.Roles, "fixed")
	or(&p.PrefillAttempts, 3)
	or(&p.StrandedBlocks, "lease")
	or(&p.AttemptsTime, "1m")
	or(&p.StreamStartTimeout, "1m")
	sub(&p.PrefillTimeout)
	or(&p.PrefillTimeout.Base, "10s")
	or(&p.PrefillTimeout.PerToken, "2ms")
	if p.KvEvents != nil {
		or(&p.KvEvents.Port, 5557)
		or(&p.KvEvents.Ranks, 1)
		or(&p.KvEvents.Tokens, "learned")
		or(&p.KvEvents.TokenBudget, "0s")
		sub(&p.KvEvents.LoadBandwidth)
		rates := picker.DefaultModel().LoadBandwidth
		for tier, rate := range loadBandwidth(p) {
			or(rate, int64(rates[tier]))
		}
	}
	if p.Encode != nil {
		or(&p.Encode.Timeout, "30s")
	}
	for _, e := range p.Endpoints {
		or(&e.Scheme, "http")
		if e.Weight == nil {
			e.Weight = new(int32(100))
		}
		if p.KvTransfer == "none" {
			or(&e.Role, "both")
		}
	}
	setDialectDefaults(p)
	setObjectiveDefaults(p)
}

func setDialectDefaults(p *configv1.Pool) {
	switch p.KvTransfer {
	case "lmcache":
		sub(&p.Lmcache)
		or(&p.Lmcache.NoticeTimeout, "10s")
		or(&p.Lmcache.ChunkSize, 256)
	case "orchestrated":
		sub(&p.Orchestrated)
		or(&p.Orchestrated.Key, "disagg_prefill_resp")
		or(&p.Orchestrated.HandOver, "answer")
	}
	for _, e := range p.Endpoints {
		if p.KvTransfer == "lmcache" && decodes(e) {
			sub(&e.Lmcache)
			or(&e.Lmcache.InitPort, 7300)
			or(&e.Lmcache.AllocPort, 7400)
		}
		if usesP2P(p) && prefills(e) {
			sub(&e.Transfer)
			or(&e.Transfer.P2PPort, 5710)
		}
	}
}

func or[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func sub[T any](m **T) {
	if *m == nil {
		*m = new(T)
	}
}

func orList(list *[]string, defaults ...string) {
	if len(*list) == 0 {
		*list = defaults
	}
}
