package config

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"tandem/extproc/kvtransfer"
	"tandem/picker"
	configv1 "tandem/protos/config/v1"
)

// SetDefaults fills in missing settings, as [Load] does. What does not depend on other settings is in config.proto.
func SetDefaults(c *configv1.Config) {
	sub(&c.ExtProc)
	sub(&c.Replan)
	sub(&c.Admin)
	sub(&c.Envoy)
	sub(&c.Tickets)
	setAbsent(c.ProtoReflect())
	setUsageDefaults(c.Usage)
	setEnvoyDefaults(c)
	setPickerDefaults(c.ExtProc)
	c.ExtProc.MaxMessageBytes = cmp.Or(c.ExtProc.MaxMessageBytes, messageBytes(c.Envoy.MaxBodyBytes))
	for _, p := range c.Pools {
		setPoolDefaults(p)
		setWaitDefault(p, c.Envoy.BodyMode)
		setDiscoveryDefaults(p.Discovery)
		p.Handoff = cmp.Or(p.Handoff, defaultHandoff(c.ExtProc))
		if TakesNotices(p) {
			sub(&c.Notices)
		}
	}
	setGatewayDefaults(c)
}

// messageBytes returns the default of extProc.maxMessageBytes.
func messageBytes(maxBody int64) int64 { return 4*maxBody + 16<<20 }

func setGatewayDefaults(c *configv1.Config) {
	g := c.EnvoyGateway
	if g == nil {
		return
	}
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
	e.BodyMode = cmp.Or(e.BodyMode, bodyMode(c))
	if c := e.Cors; c != nil {
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

// besides returns the replan ports of replicas of which only the main port is configured: all replicas use the same
// ports.
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
	if p.Split == "always" {
		return "fallback"
	}
	return "byCost"
}

func setPoolDefaults(p *configv1.Pool) {
	if len(p.Models) == 0 {
		p.Models = []string{"*"}
	}
	d := DialectOf(p)
	p.Engine = cmp.Or(p.Engine, d.Engine, kvtransfer.EngineAny)
	if d.PairsOnly() {
		p.LongPrompts = cmp.Or(p.LongPrompts, "refuse")
	}
	p.LongPrompts = cmp.Or(p.LongPrompts, "decodeAlone")
	p.DecodeAlone = cmp.Or(p.DecodeAlone, decodeAlone(p))
	p.AnswerWeight = cmp.Or(p.AnswerWeight, picker.DefaultAnswerWeight)
	sub(&p.Targets)
	sub(&p.PrefillTimeout)
	if p.KvEvents != nil {
		sub(&p.KvEvents.LoadBandwidth)
		rates := picker.DefaultModel().LoadBandwidth
		for tier, rate := range loadBandwidth(p) {
			*rate = cmp.Or(*rate, int64(rates[tier]))
		}
	}
	if p.KvTransfer == "none" {
		for _, e := range p.Endpoints {
			e.Role = cmp.Or(e.Role, "both")
		}
	}
	setDialectDefaults(p)
	setObjectiveDefaults(p)
}

func setDialectDefaults(p *configv1.Pool) {
	switch p.KvTransfer {
	case "lmcache":
		sub(&p.Lmcache)
	case "orchestrated":
		sub(&p.Orchestrated)
	}
	for _, e := range p.Endpoints {
		if p.KvTransfer == "lmcache" && decodes(e) {
			sub(&e.Lmcache)
			e.Lmcache.InitPort = cmp.Or(e.Lmcache.InitPort, 7300)
			e.Lmcache.AllocPort = cmp.Or(e.Lmcache.AllocPort, 7400)
		}
		if usesP2P(p) && prefills(e) {
			sub(&e.Transfer)
			e.Transfer.P2PPort = cmp.Or(e.Transfer.P2PPort, 5710)
		}
	}
}

// setAbsent sets what a message lacks, and those within it, to what config.proto has for it.
func setAbsent(m protoreflect.Message) {
	for i := range m.Descriptor().Fields().Len() {
		f := m.Descriptor().Fields().Get(i)
		switch text, _ := proto.GetExtension(f.Options(), configv1.E_Absent).(string); {
		case f.IsList() && f.Kind() == protoreflect.MessageKind:
			for i := range m.Get(f).List().Len() {
				setAbsent(m.Get(f).List().Get(i).Message())
			}
		case f.Kind() == protoreflect.MessageKind && m.Has(f):
			setAbsent(m.Get(f).Message())
		case text != "" && !m.Has(f):
			m.Set(f, valueOf(f.Kind(), text))
		}
	}
}

// valueOf returns the value of a text.
func valueOf(kind protoreflect.Kind, text string) protoreflect.Value {
	n, _ := bytesOf(text)
	switch kind {
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(n))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(n)
	case protoreflect.DoubleKind:
		number, _ := strconv.ParseFloat(text, 64)
		return protoreflect.ValueOfFloat64(number)
	}
	return protoreflect.ValueOfString(text)
}

// sub makes a message with its defaults where there is none.
func sub[T any](m **T) {
	if *m == nil {
		*m = new(T)
		setAbsent(any(*m).(proto.Message).ProtoReflect())
	}
}

func orList(list *[]string, defaults ...string) {
	if len(*list) == 0 {
		*list = defaults
	}
}
