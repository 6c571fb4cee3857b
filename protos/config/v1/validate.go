package configv1

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// validate judges the values of a configuration whose shape is right and whose defaults are filled in.
func validate(m *Mistakes, c *Config) (warnings []string) {
	v := validator{m: m, models: map[string]string{}, bodyMode: c.Envoy.BodyMode}
	v.listeners(c)
	v.extProc(c)
	v.envoy(c)
	v.state(c)
	v.tickets(c)
	v.tracing(c.Tracing)
	if len(c.Pools) == 0 {
		m.add("pools", "is missing: at least one pool is needed")
	}
	for i, p := range c.Pools {
		v.pool(fmt.Sprintf("pools[%d]", i), p)
	}
	v.notices(c)
	v.tlsToEndpoints(c)
	return v.warnings
}

// validator collects what is wrong, and what was seen so far of the things that may be there once.
type validator struct {
	m         *Mistakes
	warnings  []string
	listens   []seenAddress
	endpoints []seenAddress
	models    map[string]string // model to the path of its pool
	names     []string
	bodyMode  string // of Envoy
}

func (v *validator) warn(path, format string, args ...any) {
	v.warnings = append(v.warnings, path+": "+fmt.Sprintf(format, args...))
}

func (v *validator) listeners(c *Config) {
	v.listen("extProc.listen", c.ExtProc.Listen)
	v.listen("replan.listen", c.Replan.Listen)
	v.listen("admin.listen", c.Admin.Listen)
	v.listen("envoy.listen", c.Envoy.Listen)
	v.listen("envoy.admin", c.Envoy.Admin)
	if c.Notices != nil {
		v.listen("notices.listen", c.Notices.Listen)
	}
}

func (v *validator) extProc(c *Config) {
	t, client := c.ExtProc.Tls, c.Envoy.ExtProcTls
	v.picker(c)
	if t != nil {
		v.oneOf("extProc.tls.mode", t.Mode, "files", "selfSigned", "plaintext")
	}
	if t.GetMode() == "files" {
		if t.CertFile == "" {
			v.m.add("extProc.tls.certFile", "is missing: a PEM file")
		}
		if t.KeyFile == "" {
			v.m.add("extProc.tls.keyFile", "is missing: a PEM file")
		}
		if t.ClientCaFile != "" && client.GetCertFile() == "" {
			v.warn("envoy.extProcTls.certFile", "is missing: extProc.tls.clientCaFile makes the server refuse an Envoy without a certificate")
		}
		if client.GetCaFile() == "" {
			v.warn("envoy.extProcTls.caFile", "is missing: Envoy will take any certificate of the external processor")
		}
	}
	v.clientTLS("envoy.extProcTls", client)
	if n := c.ExtProc.MaxMessageBytes; n <= c.Envoy.MaxBodyBytes || n > 1<<30 {
		v.m.add("extProc.maxMessageBytes", "%d is not above envoy.maxBodyBytes (%d) and at most %d: a whole body comes in one message", n, c.Envoy.MaxBodyBytes, 1<<30)
	}
}

func (v *validator) clientTLS(path string, t *ClientTls) {
	if (t.GetCertFile() == "") != (t.GetKeyFile() == "") {
		v.m.add(path+".keyFile", "certFile and keyFile belong together: set both or none")
	}
	if t.GetServerName() != "" && t.GetCaFile() == "" {
		v.m.add(path+".serverName", "has no effect without caFile: set that too")
	}
}

func (v *validator) envoy(c *Config) {
	e := c.Envoy
	v.reachable("envoy.extProcs", e.ExtProcs)
	v.reachable("envoy.replans", e.Replans)
	if e.MaxBodyBytes < 1<<10 || e.MaxBodyBytes > 128<<20 {
		v.m.add("envoy.maxBodyBytes", "%d is not between %d and %d", e.MaxBodyBytes, 1<<10, 128<<20)
	}
	for i, prefix := range e.PathPrefixes {
		if !pathPrefix.MatchString(prefix) {
			v.m.add(fmt.Sprintf("envoy.pathPrefixes[%d]", i), "%.100q is not a path without a slash at its end, such as /llm", prefix)
		}
	}
	v.oneOf("envoy.bodyMode", e.BodyMode, "auto", "duplex", "buffered")
	v.duration("envoy.decodeIdleTimeout", e.DecodeIdleTimeout, time.Second)
	v.clientTLS("envoy.endpointTls", e.EndpointTls)
}

// reachable checks a list of servers that Envoy connects to.
func (v *validator) reachable(path string, addresses []string) {
	var seen []seenAddress
	for i, a := range addresses {
		seen = v.add(seen, fmt.Sprintf("%s[%d]", path, i), a)
	}
}

func (v *validator) tickets(c *Config) {
	if len(c.Envoy.ExtProcs) > 1 && c.Tickets.KeyFile == "" && c.State.GetRedis() == nil {
		v.m.add("tickets.keyFile", "is missing: several replicas (envoy.extProcs) need the same keys to read each other's tickets; or set state.redis, and they share them")
	}
	v.duration("tickets.ttl", c.Tickets.Ttl, time.Second)
}

func (v *validator) tracing(t *Tracing) {
	if t == nil {
		return
	}
	v.add(nil, "tracing.endpoint", t.Endpoint)
	if r := t.GetSampleRatio(); r < 0 || r > 1 || math.IsNaN(r) {
		v.m.add("tracing.sampleRatio", "%v is not between 0 and 1", r)
	}
}

func (v *validator) oneOf(path, value string, allowed ...string) {
	if slices.Contains(allowed, value) {
		return
	}
	near := engineWord(value)
	if !slices.Contains(allowed, near) {
		near = nearest(value, allowed)
	}
	if near != "" {
		near = " (" + near + "?)"
	}
	v.m.add(path, "%.40q is not one of %s%s", value, strings.Join(allowed, ", "), near)
}

// engineWord translates what engines call a connector or a role, as it stands in their flags; "" where it is no such word.
func engineWord(value string) string {
	return map[string]string{
		"nixlconnector": "nixl", "nixlpushconnector": "nixl-push", "mooncakeconnector": "mooncake", "moriioconnector": "moriio",
		"p2pncclconnector": "p2p-nccl", "lmcacheconnectorv1": "lmcache", "lmcacheconnector": "lmcache", "lmcachempconnector": "lmcache",
		"multiconnector": "multi", "offloadingconnector": "offload", "mooncakestoreconnector": "shared", "sharedstorageconnector": "shared",
		"exampleconnector": "shared", "hf3fskvconnector": "shared", "flexkvconnectorv1": "shared", "tensorrt-llm": "trtllm", "vllm": "nixl",
		"kv_producer": "prefill", "ec_producer": "encode", "kv_consumer": "decode", "kv_both": "both",
		"prefiller": "prefill", "decoder": "decode", "prefill-decode": "both",
	}[strings.ToLower(value)]
}

// longest is the longest duration that a setting may have.
const longest = 24 * time.Hour

func (v *validator) duration(path, value string, least time.Duration) {
	d, err := time.ParseDuration(value)
	if err != nil {
		v.m.add(path, "%.40q is not a duration such as 300s, 5m or 250ms", value)
	} else if d < least || d > longest {
		v.m.add(path, "%.40s is not between %s and %s", value, least, longest)
	}
}

// Duration is a duration of a configuration that [Load] accepted.
func Duration(text string) time.Duration {
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0 // Load refuses it
	}
	return d
}
