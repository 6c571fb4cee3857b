package config

import (
	"slices"
	"strings"

	configv1 "tandem/protos/config/v1"
)

func setUsageDefaults(u *configv1.Usage) {
	if u != nil {
		u.TenantHeader = strings.ToLower(u.TenantHeader)
	}
}

// RecordDefaults returns the settings of a recording that the configuration does not set.
func RecordDefaults() *configv1.Record {
	c := &configv1.Config{Record: &configv1.Record{}}
	setAbsent(c.ProtoReflect())
	return c.Record
}

// secretHeaders are request headers that must not be kept.
var secretHeaders = []string{"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"}

func checkUsage(v *validator, c *configv1.Config) {
	u := c.Usage
	if u == nil {
		return
	}
	if c.ExtProc.Protocol == ProtocolEndpointPicker {
		v.m.add("usage",
			"does not go with extProc.protocol endpointPicker: the gateway's Envoy is not configured by Tandem")
	}
	h := u.TenantHeader
	switch {
	case h == "":
	case !headerName.MatchString(h) || h == "*" || len(h) > 100,
		strings.HasPrefix(h, "x-tandem-"), strings.HasPrefix(h, "x-envoy-"):
		v.m.add("usage.tenantHeader", "%.100q is not the name of a header that a gateway may set", h)
	case slices.Contains(secretHeaders, h):
		v.m.add("usage.tenantHeader", "%s is a secret: have what checks it set another header, such as x-tenant", h)
	}
}
