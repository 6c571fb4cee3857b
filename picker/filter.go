package picker

import (
	"slices"

	"tandem/kvstate"
)

// Why an endpoint is left out of a decision.
const (
	outFailed   = "failed"         // it, or its probe, failed lately
	outPaused   = "paused"         // by its configuration or by an operator
	outExcluded = "failed_request" // it failed this request
	outModel    = "model"          // others say that they serve the model, it says that it does not
)

// why says for what reason an endpoint is left out; "" if it is not.
func (k *Picker) why(r *Request, c *kvstate.Candidate) string {
	switch {
	case !c.Usable && c.Endpoint.Paused():
		return outPaused
	case !c.Usable:
		return outFailed
	case len(r.Excluded) > 0 && slices.Contains(r.Excluded, c.Endpoint.Addr):
		return outExcluded
	case k.told && !serves(c, r.Model):
		return outModel
	}
	return ""
}

// serves reports whether an endpoint said that it serves a model or an adapter. One that was not asked yet may.
func serves(c *kvstate.Candidate, model string) bool {
	ids := c.Endpoint.Models()
	return len(ids) == 0 || slices.Contains(ids, model)
}

// survey counts the endpoints that can serve either leg, and notes whether any of them said that it serves the model:
// where none did, what they say is no reason to refuse all.
func (k *Picker) survey(r *Request, v *kvstate.View) (prefills, decodes int) {
	k.told = false
	if v.Load.Prefills+v.Load.Decodes > 0 && r.Model == "" {
		return v.Load.Prefills, v.Load.Decodes
	}
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if !c.Usable {
			continue
		}
		if c.Endpoint.Role&kvstate.RolePrefill != 0 {
			prefills++
		}
		if c.Endpoint.Role&kvstate.RoleDecode != 0 {
			decodes++
		}
		if r.Model != "" && !k.told {
			k.told = slices.Contains(c.Endpoint.Models(), r.Model)
		}
	}
	return prefills, decodes
}

// kind is what both endpoints of a pair must have in common.
type kind struct{ group, engine, layout string }

func kindOf(c *kvstate.Candidate) kind {
	e := &c.Endpoint.EndpointSpec
	return kind{e.Group, e.Engine, e.Layout}
}

// pairs reports whether endpoints of two kinds may pair. What is not known of one is no reason against it.
func (a *kind) pairs(b *kind) bool {
	return a.group == b.group && agree(a.engine, b.engine) && agree(a.layout, b.layout)
}

// pairsWith is pairs with an endpoint.
func (a *kind) pairsWith(c *kvstate.Candidate) bool {
	e := &c.Endpoint.EndpointSpec
	return a.group == e.Group && agree(a.engine, e.Engine) && agree(a.layout, e.Layout)
}

// is reports whether an endpoint is of this kind.
func (a *kind) is(c *kvstate.Candidate) bool {
	e := &c.Endpoint.EndpointSpec
	return a.engine == e.Engine && a.layout == e.Layout && a.group == e.Group
}

func agree(a, b string) bool { return a == b || a == "" || b == "" }
