package config

import (
	"fmt"
	"regexp"
	"strings"
	"time"

	configv1 "tandem/protos/config/v1"
)

// validate checks the values of a configuration that has passed checkShape and has its defaults.
func validate(m *ValidationErrors, c *configv1.Config) (warnings []warning) {
	v := &validator{m: m, models: map[string]string{}, bodyMode: c.Envoy.BodyMode}
	checkFields(v, "", c.ProtoReflect())
	checkListeners(v, c)
	checkExtProc(v, c)
	checkEnvoy(v, c)
	checkState(v, c)
	checkTickets(v, c)
	checkTracing(v, c.Tracing)
	checkUsage(v, c)
	if c.Record != nil && c.ExtProc.Protocol == ProtocolEndpointPicker {
		v.m.add("record", "does not go with extProc.protocol endpointPicker: nobody reports the ends of requests there")
	}
	if len(c.Pools) == 0 {
		m.add("pools", "is missing: at least one pool is needed")
	}
	for i, p := range c.Pools {
		checkPool(v, fmt.Sprintf("pools[%d]", i), p)
	}
	checkAdapters(v, c.Pools)
	checkNotices(v, c)
	checkTLSToEndpoints(v, c)
	return v.warnings
}

// validator collects errors, and the values that must be unique.
type validator struct {
	m         *ValidationErrors
	warnings  []warning
	listens   []seenAddress
	endpoints []seenAddress
	models    map[string]string // model to the path of its pool
	names     []string
	bodyMode  string // of Envoy
}

func (v *validator) warn(path, format string, args ...any) {
	v.warnGiven(nil, path, format, args...)
}

// warnGiven warns of a setting because of the values of other settings, whose paths are given: an error in one of them
// may be the reason.
func (v *validator) warnGiven(given []string, path, format string, args ...any) {
	v.warnings = append(v.warnings, warning{path, fmt.Sprintf(format, args...), given})
}

func checkListeners(v *validator, c *configv1.Config) {
	checkListen(v, "extProc.listen", c.ExtProc.Listen)
	checkListen(v, "replan.listen", c.Replan.Listen)
	checkListen(v, "admin.listen", c.Admin.Listen)
	checkHosts(v, "admin.hosts", c.Admin.Hosts)
	checkListen(v, "envoy.listen", c.Envoy.Listen)
	checkListen(v, "envoy.admin", c.Envoy.Admin)
	if c.Envoy.Stats != "" {
		checkListen(v, "envoy.stats", c.Envoy.Stats)
	}
	if c.Notices != nil {
		checkListen(v, "notices.listen", c.Notices.Listen)
	}
	checkGateway(v, c)
}

// hostPattern is a host name, or one with *. for the first label.
var hostPattern = regexp.MustCompile(`^(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?$`)

func checkHosts(v *validator, path string, hosts []string) {
	for i, h := range hosts {
		if !hostPattern.MatchString(h) {
			v.m.add(fmt.Sprintf("%s[%d]", path, i),
				"%.100q is not a host name without port, such as tandem.example.com or *.example.com", h)
		}
	}
}

func checkGateway(v *validator, c *configv1.Config) {
	g := c.EnvoyGateway
	if g == nil {
		return
	}
	checkListen(v, "envoyGateway.listen", g.Listen)
	if len(g.Services) == 0 {
		v.m.add("envoyGateway.services",
			"is missing: name.namespace:port of Tandem's Service; envoy.extProcs names none (name.namespace.svc...)")
	}
	for i, s := range g.Services {
		host, _, ok := checkAddress(v, fmt.Sprintf("envoyGateway.services[%d]", i), s)
		if ok && strings.Count(host, ".") != 1 {
			v.m.add(fmt.Sprintf("envoyGateway.services[%d]", i), "%.100q is not name.namespace:port", s)
		}
	}
	if c.ExtProc.Protocol == "endpointPicker" {
		v.m.add("envoyGateway", "does not go with extProc.protocol endpointPicker: leave one of them out")
	}
}

func checkExtProc(v *validator, c *configv1.Config) {
	t, client := c.ExtProc.Tls, c.Envoy.ExtProcTls
	checkPicker(v, c)
	if t.GetMode() == "files" {
		if t.CertFile == "" {
			v.m.add("extProc.tls.certFile", "is missing: a PEM file")
		}
		if t.KeyFile == "" {
			v.m.add("extProc.tls.keyFile", "is missing: a PEM file")
		}
		if t.ClientCaFile != "" && client.GetCertFile() == "" {
			v.warnGiven([]string{"extProc.tls"}, "envoy.extProcTls.certFile",
				"is missing: extProc.tls.clientCaFile makes the server refuse an Envoy without a certificate")
		}
		if client.GetCaFile() == "" {
			v.warn("envoy.extProcTls.caFile", "is missing: Envoy will take any certificate of the external processor")
		}
	}
	checkClientTLS(v, "envoy.extProcTls", client)
	body := c.Envoy.MaxBodyBytes // if it is out of range, so is the default of maxMessageBytes
	if n := c.ExtProc.MaxMessageBytes; n != messageBytes(body) && (n <= body || n > 1<<30) {
		v.m.add("extProc.maxMessageBytes",
			"%s is not above envoy.maxBodyBytes (%s) and at most 1Gi: a whole body comes in one message",
			sizeText(n), sizeText(body))
	}
}

func checkClientTLS(v *validator, path string, t *configv1.ClientTls) {
	if (t.GetCertFile() == "") != (t.GetKeyFile() == "") {
		v.m.add(path+".keyFile", "certFile and keyFile belong together: set both or none")
	}
	if t.GetServerName() != "" && t.GetCaFile() == "" {
		v.m.add(path+".serverName", "has no effect without caFile: set that too")
	}
}

func checkEnvoy(v *validator, c *configv1.Config) {
	e := c.Envoy
	checkReachable(v, "envoy.extProcs", e.ExtProcs)
	checkReachable(v, "envoy.replans", e.Replans)
	checkReplicas(v, c)
	for i, prefix := range e.PathPrefixes {
		if !pathPrefix.MatchString(prefix) {
			v.m.add(fmt.Sprintf("envoy.pathPrefixes[%d]", i),
				"%.100q is not a path without a slash at its end, such as /llm", prefix)
		}
	}
	if e.Replicas == "redis" && c.State.GetRedis() == nil {
		v.m.add("envoy.replicas", "redis needs state.redis, through which replicas know each other")
	}
	checkClientTLS(v, "envoy.endpointTls", e.EndpointTls)
	checkInside(v, c)
	checkCORS(v, e.Cors)
}

func checkCORS(v *validator, c *configv1.Cors) {
	if c == nil {
		return
	}
	if len(c.AllowOrigins) == 0 {
		v.m.add("envoy.cors.allowOrigins", "is missing: origins such as https://chat.example.com, or \"*\"")
	}
	for i, o := range c.AllowOrigins {
		if o != "*" && !origin.MatchString(o) {
			v.m.add(fmt.Sprintf("envoy.cors.allowOrigins[%d]", i),
				"%.100q is not an origin: scheme://host or scheme://host:port", o)
		}
		if o == "*" && c.AllowCredentials {
			v.m.add("envoy.cors.allowCredentials",
				"does not go with \"*\": any page could use its visitors' cookies; name the origins")
		}
	}
	for name, list := range map[string][]string{"allowHeaders": c.AllowHeaders, "exposeHeaders": c.ExposeHeaders} {
		for i, h := range list {
			if !headerName.MatchString(h) {
				v.m.add(fmt.Sprintf("envoy.cors.%s[%d]", name, i), "%.100q is not the name of a header", h)
			}
		}
	}
}

// What a browser sends as Origin, and the names of headers; "*" is any of those.
var origin = regexp.MustCompile(`^[a-z][a-z0-9+.-]*://[A-Za-z0-9._\[\]:-]+$`)
var headerName = regexp.MustCompile(`^([A-Za-z0-9-]+|\*)$`)

// checkReplicas warns of several replicas that do not share what they know, or do not share the work of replanning.
func checkReplicas(v *validator, c *configv1.Config) {
	n := len(c.Envoy.ExtProcs)
	if n > 1 && c.State.GetRedis() == nil {
		v.warnGiven([]string{"envoy.extProcs"}, "state.redis",
			"is missing: each of the %d replicas (envoy.extProcs) knows only what it did itself: "+
				"load, prefixes, failures, and orders such as drain (docs/howto/redis.md)", n)
	}
	if n > 1 && len(c.Envoy.Replans) < n {
		v.warnGiven([]string{"envoy.extProcs"}, "envoy.replans",
			"names %d of the %d replicas (envoy.extProcs): without them requests that fail are "+
				"not planned again: name the replan port of each", len(c.Envoy.Replans), n)
	}
}

// checkReachable checks a list of servers that Envoy connects to.
func checkReachable(v *validator, path string, addresses []string) {
	var seen []seenAddress
	for i, a := range addresses {
		seen = addAddress(v, seen, fmt.Sprintf("%s[%d]", path, i), a)
	}
}

func checkTickets(v *validator, c *configv1.Config) {
	if len(c.Envoy.ExtProcs) > 1 && c.Tickets.KeyFile == "" && c.State.GetRedis() == nil {
		v.m.add("tickets.keyFile",
			"is missing: several replicas (envoy.extProcs) need the same keys to read each other's tickets; or set "+
				"state.redis, and they share them")
	}
}

func checkTracing(v *validator, t *configv1.Tracing) {
	if t == nil {
		return
	}
	addAddress(v, nil, "tracing.endpoint", t.Endpoint)
}

// Duration parses a duration of a configuration that [Load] accepted.
func Duration(text string) time.Duration {
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0 // Load refuses it
	}
	return d
}
