package picker

import (
	"slices"

	"tandem/kvstate"
)

// Why an endpoint is excluded from a decision.
const (
	outFailed   = "failed"         // it failed recently, or its probe did
	outFull     = "full"           // it refused a request and asked for a pause
	outPaused   = "paused"         // by its configuration or by an operator
	outExcluded = "failed_request" // it failed this request
	outModel    = "model"          // others report the model, this one reports others
	outLoRA     = "lora"           // others are configured with the adapter, this one is not
	outLabels   = "labels"         // it lacks labels that the request asks for
)

// why returns the reason for which an endpoint is excluded; "" if it is not.
func (k *Picker) why(r *Request, c *kvstate.Candidate) string {
	switch {
	case !c.Usable && c.Endpoint.Paused():
		return outPaused
	case !c.Usable && c.Full:
		return outFull
	case !c.Usable:
		return outFailed
	case len(k.excluded) > 0 && slices.Contains(k.excluded, c.Endpoint.Addr):
		return outExcluded
	case k.learned && k.partly && !k.placed && !serves(c, r.Model):
		return outModel
	}
	return k.unmet(r, c)
}

// unmet returns what an endpoint lacks to serve the request at all, whatever happens to the others; "" if nothing.
func (k *Picker) unmet(r *Request, c *kvstate.Candidate) string {
	if k.placed && !c.Endpoint.HasLoRA(r.Model) && !named(c, r.Model) {
		return outLoRA
	}
	if !bears(c, r.Labels) {
		return outLabels
	}
	return ""
}

// named is true for an endpoint that reported a model or an adapter.
func named(c *kvstate.Candidate, model string) bool {
	return slices.Contains(c.Endpoint.Models(), model)
}

// serves returns named, but also true for an endpoint that has not reported yet.
func serves(c *kvstate.Candidate, model string) bool {
	return len(c.Endpoint.Models()) == 0 || named(c, model)
}

// bears reports whether an endpoint has all of the labels.
func bears(c *kvstate.Candidate, labels []string) bool {
	for _, l := range labels {
		if !c.Endpoint.HasLabel(l) {
			return false
		}
	}
	return true
}

// survey counts the usable endpoints of each role, and records whether any reports the model, or is configured with
// it as an adapter. If none does, the reports exclude nobody. What an endpoint has reported that has answered
// otherwise does not count.
func (k *Picker) survey(r *Request, v *kvstate.View) (prefills, decodes int) {
	k.learned, k.partly, k.placed = false, false, false
	prefills, decodes = v.Load.Prefills, v.Load.Decodes
	if prefills+decodes == 0 {
		prefills, decodes = countRoles(v)
	}
	if r.Model == "" {
		return prefills, decodes
	}
	var last []string // the list of models before this one; most endpoints share one
	has := false      // the model is in it
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		k.placed = k.placed || c.Endpoint.LoRAs != "" && c.Endpoint.HasLoRA(r.Model)
		models := c.Endpoint.Models()
		if len(models) == 0 {
			continue // it may serve the model
		}
		if r.LacksModel && slices.Contains(r.Excluded, c.Endpoint.Addr) {
			continue
		}
		if len(last) != len(models) || &last[0] != &models[0] {
			last, has = models, slices.Contains(models, r.Model)
		}
		k.partly = k.partly || !has
		k.learned = k.learned || has && c.Usable
	}
	return prefills, decodes
}

// countRoles counts the usable endpoints of each role.
func countRoles(v *kvstate.View) (prefills, decodes int) {
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if !c.Usable {
			continue
		}
		if c.Used()&kvstate.RolePrefill != 0 {
			prefills++
		}
		if c.Used()&kvstate.RoleDecode != 0 {
			decodes++
		}
	}
	return prefills, decodes
}

// kind is what both endpoints of a pair must share.
type kind struct {
	group, engine string
	report        *kvstate.Report
	awaits        bool // its report, and pairs with none before
}

func kindOf(c *kvstate.Candidate) kind {
	return kind{c.Endpoint.Group, c.Endpoint.Engine, c.Report, c.Awaits}
}

// Pairs reports whether two endpoints may pair, whatever their roles and states.
func Pairs(a, b *kvstate.Endpoint) bool {
	return a.Group == b.Group && agree(a.Engine, b.Engine) && a.Report().Fits(b.Report())
}

// pairs reports whether endpoints of two kinds may pair. Unknown values do not prevent it.
func (a *kind) pairs(b *kind) bool {
	return a.group == b.group && agree(a.engine, b.engine) && !a.awaits && !b.awaits && a.report.Fits(b.report)
}

// pairsWith is pairs with an endpoint.
func (a *kind) pairsWith(c *kvstate.Candidate) bool {
	b := kindOf(c)
	return a.pairs(&b)
}

// is reports whether an endpoint is of this kind.
func (a *kind) is(c *kvstate.Candidate) bool { return *a == kindOf(c) }

func agree(a, b string) bool { return a == b || a == "" || b == "" }
