package configv1

// setDefaults fills in what a configuration leaves out. The values are those of config.proto's comments.
func setDefaults(c *Config) {
	sub(&c.ExtProc)
	sub(&c.Replan)
	sub(&c.Admin)
	sub(&c.Envoy)
	or(&c.ExtProc.Listen, "127.0.0.1:9002")
	or(&c.Replan.Listen, "127.0.0.1:9003")
	or(&c.Admin.Listen, "127.0.0.1:9090")
	e := c.Envoy
	or(&e.Listen, "127.0.0.1:8080")
	or(&e.Admin, "127.0.0.1:9901")
	or(&e.MaxBodyBytes, 16<<20)
	or(&e.BodyMode, "auto")
	or(&e.DecodeIdleTimeout, "300s")
	if len(e.ExtProcs) == 0 {
		e.ExtProcs = []string{c.ExtProc.Listen}
	}
	if len(e.Replans) == 0 {
		e.Replans = []string{c.Replan.Listen}
	}
	or(&c.ExtProc.MaxMessageBytes, 4*e.MaxBodyBytes+16<<20)
	for _, p := range c.Pools {
		if len(p.Models) == 0 {
			p.Models = []string{"*"}
		}
		or(&p.Split, "auto")
		or(&p.LongPrompts, "decodeAlone")
		or(&p.OnPrefillFailure, "otherPrefill")
		or(&p.PrefillAttempts, 3)
		sub(&p.PrefillTimeout)
		or(&p.PrefillTimeout.Base, "10s")
		or(&p.PrefillTimeout.PerToken, "2ms")
		for _, ep := range p.Endpoints {
			or(&ep.Scheme, "http")
			if p.KvTransfer == "none" {
				or(&ep.Role, "both")
			}
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
