package configv1

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// validate judges the values of a configuration whose shape is right.
func validate(m *Mistakes, c *Config) (warnings []string) {
	v := validator{m: m, listens: map[string]string{}, addresses: map[string]string{}, models: map[string]string{}}
	v.listen("extProc.listen", c.ExtProc.Listen)
	v.listen("replan.listen", c.Replan.Listen)
	v.listen("admin.listen", c.Admin.Listen)
	v.listen("envoy.listen", c.Envoy.Listen)
	v.listen("envoy.admin", c.Envoy.Admin)
	v.tls(c.ExtProc.Tls)
	v.envoy(c)
	if r := c.State.GetRedis(); r != nil {
		v.redis(r)
		warnings = append(warnings, "state.redis: this release keeps its state in memory; replicas do not share it yet")
	}
	if c.Tickets != nil && c.Tickets.KeyFile == "" {
		m.add("tickets.keyFile", "is empty: name a file, or leave tickets out")
	}
	if len(c.Envoy.ExtProcs) > 1 && c.Tickets.GetKeyFile() == "" {
		m.add("tickets.keyFile", "is missing: several replicas (envoy.extProcs) need one key to read each other's tickets")
	}
	if len(c.Pools) == 0 {
		m.add("pools", "is missing: at least one pool is needed")
	}
	for i, p := range c.Pools {
		v.pool(fmt.Sprintf("pools[%d]", i), p)
	}
	return warnings
}

type validator struct {
	m         *Mistakes
	listens   map[string]string // address to path
	addresses map[string]string
	models    map[string]string
	names     []string
}

func (v *validator) listen(path, address string) {
	if host, port, ok := v.address(path, address); ok {
		if port == "0" {
			return // the system's choice clashes with nothing
		}
		at := net.JoinHostPort(host, port)
		if other, taken := v.listens[at]; taken {
			v.m.add(path, "%s is already %s", at, other)
		}
		v.listens[at] = path
	}
}

// address checks host:port.
func (v *validator) address(path, address string) (host, port string, ok bool) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		v.m.add(path, "%q is not an address: ip:port, [ip]:port or name:port", address)
		return "", "", false
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil {
		v.m.add(path, "%q has no port between 0 and 65535", address)
		return "", "", false
	} else if port = strconv.FormatUint(n, 10); host == "" {
		v.m.add(path, "%q has no host; 0.0.0.0 or [::] means every interface", address)
		return "", "", false
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.String(), port, true
	}
	if !isName(host) {
		v.m.add(path, "%q is neither an IP address nor a name", host)
		return "", "", false
	}
	return host, port, true
}

func isName(host string) bool {
	for _, label := range strings.Split(strings.TrimSuffix(host, "."), ".") {
		if label == "" || len(label) > 63 {
			return false
		}
		for _, c := range []byte(label) {
			if c-'0' > 9 && c|0x20-'a' > 25 && c != '-' && c != '_' {
				return false
			}
		}
	}
	return strings.ContainsFunc(host, func(r rune) bool { return r|0x20-'a' <= 25 && r|0x20 >= 'a' }) && len(host) <= 253
}

func (v *validator) tls(t *Tls) {
	if t == nil {
		return
	}
	if t.CertFile == "" {
		v.m.add("extProc.tls.certFile", "is missing")
	}
	if t.KeyFile == "" {
		v.m.add("extProc.tls.keyFile", "is missing")
	}
}

func (v *validator) envoy(c *Config) {
	e := c.Envoy
	for i, a := range e.ExtProcs {
		v.address(fmt.Sprintf("envoy.extProcs[%d]", i), a)
	}
	for i, a := range e.Replans {
		v.address(fmt.Sprintf("envoy.replans[%d]", i), a)
	}
	if len(e.Replans) != len(e.ExtProcs) {
		v.m.add("envoy.replans", "has %d entries, envoy.extProcs has %d: every replica has both", len(e.Replans), len(e.ExtProcs))
	}
	if e.MaxBodyBytes < 1<<10 || e.MaxBodyBytes > 64<<20 {
		v.m.add("envoy.maxBodyBytes", "%d is not between 1024 and 67108864", e.MaxBodyBytes)
	}
	if c.ExtProc.MaxMessageBytes <= e.MaxBodyBytes || c.ExtProc.MaxMessageBytes > 1<<30 {
		v.m.add("extProc.maxMessageBytes", "%d is not above envoy.maxBodyBytes (%d) and at most 1 GiB: a whole body comes in one message", c.ExtProc.MaxMessageBytes, e.MaxBodyBytes)
	}
	v.oneOf("envoy.bodyMode", e.BodyMode, "auto", "duplex", "buffered")
	v.duration("envoy.decodeIdleTimeout", e.DecodeIdleTimeout, time.Second)
}

func (v *validator) redis(r *Redis) {
	u, err := url.Parse(r.Url)
	if err != nil || u.Host == "" || !slices.Contains([]string{"redis", "rediss"}, u.Scheme) {
		v.m.add("state.redis.url", "is not of the form redis://[user:password@]host:port/db")
	}
}

func (v *validator) pool(path string, p *Pool) {
	switch {
	case p.Name == "":
		v.m.add(path+".name", "is missing")
	case slices.Contains(v.names, p.Name):
		v.m.add(path+".name", "%q names two pools", p.Name)
	}
	v.names = append(v.names, p.Name)
	for i, model := range p.Models {
		at := fmt.Sprintf("%s.models[%d]", path, i)
		if model == "" {
			v.m.add(at, "is empty")
		} else if other, taken := v.models[model]; taken {
			v.m.add(at, "%q is served by %s too; a model belongs to one pool", model, other)
		}
		v.models[model] = path
	}
	if p.KvTransfer == "" {
		v.m.add(path+".kvTransfer", "is missing: nixl, or none for engines that prefill and decode by themselves")
	} else {
		v.dialect(path+".kvTransfer", p.KvTransfer)
	}
	v.oneOf(path+".split", p.Split, "always", "auto", "never")
	v.oneOf(path+".longPrompts", p.LongPrompts, "decodeAlone", "refuse")
	v.oneOf(path+".onPrefillFailure", p.OnPrefillFailure, "otherPrefill", "decodeAlone", "fail")
	if p.PrefillAttempts < 1 || p.PrefillAttempts > 5 {
		v.m.add(path+".prefillAttempts", "%d is not between 1 and 5", p.PrefillAttempts)
	}
	v.duration(path+".prefillTimeout.base", p.PrefillTimeout.Base, time.Millisecond)
	v.duration(path+".prefillTimeout.perToken", p.PrefillTimeout.PerToken, 0)
	v.endpoints(path, p)
}

// dialects that the wire notes describe and a later release speaks.
var laterDialects = []string{"nixl-push", "lmcache", "mooncake", "sglang", "offload", "moriio", "p2p-nccl", "shared", "orchestrated", "trtllm", "multi"}

func (v *validator) dialect(path, name string) {
	if slices.Contains(laterDialects, name) {
		v.m.add(path, "%s is not spoken by this release: one of nixl, none", name)
		return
	}
	v.oneOf(path, name, "nixl", "none")
}

func (v *validator) endpoints(path string, p *Pool) {
	decodes, prefills := false, false
	for i, e := range p.Endpoints {
		at := fmt.Sprintf("%s.endpoints[%d]", path, i)
		if e.Address == "" {
			v.m.add(at+".address", "is missing: ip:port, [ip]:port or name:port")
		} else if host, port, ok := v.address(at+".address", e.Address); ok {
			key := net.JoinHostPort(host, port)
			if port == "0" {
				v.m.add(at+".address", "%q has no port between 1 and 65535", e.Address)
			} else if other, taken := v.addresses[key]; taken {
				v.m.add(at+".address", "%s is already %s", key, other)
			}
			v.addresses[key] = at
		}
		if e.Role == "" {
			v.m.add(at+".role", "is missing: one of prefill, decode, both")
		} else {
			v.oneOf(at+".role", e.Role, "prefill", "decode", "both")
		}
		v.oneOf(at+".scheme", e.Scheme, "http", "https", "h2c")
		decodes = decodes || e.Role == "decode" || e.Role == "both"
		prefills = prefills || e.Role == "prefill" || e.Role == "both"
	}
	switch {
	case len(p.Endpoints) == 0:
		v.m.add(path+".endpoints", "is missing: at least one endpoint is needed")
	case !decodes:
		v.m.add(path+".endpoints", "none of them decodes: at least one needs the role decode or both")
	case !prefills && p.KvTransfer != "none" && p.Split == "always":
		v.m.add(path+".endpoints", "none of them prefills, but split is always: at least one needs the role prefill or both")
	}
}

func (v *validator) oneOf(path, value string, allowed ...string) {
	if !slices.Contains(allowed, value) {
		v.m.add(path, "%.40q is not one of %s", value, strings.Join(allowed, ", "))
	}
}

func (v *validator) duration(path, value string, least time.Duration) {
	d, err := time.ParseDuration(value)
	if err != nil {
		v.m.add(path, "%.40q is not a duration such as 300s, 5m or 250ms", value)
	} else if d < least || d > 24*time.Hour {
		v.m.add(path, "%s is not between %s and 24h", value, least)
	}
}

// Duration is a validated duration of the configuration.
func Duration(text string) time.Duration {
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0 // Load refuses it
	}
	return d
}
