package status

import (
	"fmt"
	"slices"
	"strings"

	"tandem/kvstate"
)

// Pairing is what engines say of themselves, as far as it decides which of them are paired.
type Pairing struct {
	// Apart are the facts in which engines differ that therefore are never paired, in words.
	Apart []string `json:"apart,omitempty"`
	// Allowed are those in which engines differ that are paired all the same, since pairUnlike has them.
	Allowed []string `json:"unlike_allowed,omitempty"`
	// Unknown are facts that engines do not report, so that it is not known whether pairs share them.
	Unknown []string `json:"not_reported,omitempty"`
	// Waiting are endpoints that are not paired yet, since their engines have not said what they are.
	Waiting []string `json:"waiting_for_report,omitempty"`
}

// pairingOf returns what the engines of a pool say.
func pairingOf(s *kvstate.State, p *kvstate.Pool) (out Pairing) {
	silent := map[string][]string{} // facts by the endpoints that do not report them
	var order []string
	for f := range kvstate.Facts {
		if !p.Spec.Facts.Has(f) {
			continue
		}
		if text := unlikeIn(p, f); text != "" && p.Spec.Alike.Has(f) {
			out.Apart = append(out.Apart, text)
		} else if text != "" {
			out.Allowed = append(out.Allowed, text)
		}
		if who := silentOn(p, f); who != "" {
			if silent[who] == nil {
				order = append(order, who)
			}
			silent[who] = append(silent[who], f.String())
		}
	}
	for _, who := range order {
		out.Unknown = append(out.Unknown, strings.Join(silent[who], ", ")+" ("+who+")")
	}
	for _, e := range p.Endpoints() {
		if s.AwaitsReport(e) && !e.Failed() {
			out.Waiting = append(out.Waiting, e.DisplayName())
		}
	}
	return out
}

// unlikeIn names the values of a fact, with the endpoints, if some that could be paired differ in it.
func unlikeIn(p *kvstate.Pool, f kvstate.Fact) string {
	differ := false
	var values []string
	at := map[string][]string{}
	for _, e := range p.Endpoints() {
		mine := said(e, f)
		if mine == "" {
			continue
		}
		if at[mine] == nil {
			values = append(values, mine)
		}
		at[mine] = append(at[mine], e.DisplayName())
		differ = differ || slices.ContainsFunc(p.Endpoints(), func(o *kvstate.Endpoint) bool {
			return e != o && e.Role&kvstate.RolePrefill != 0 && o.Role&kvstate.RoleDecode != 0 && e.Group == o.Group &&
				!kvstate.FactFits(f, mine, said(o, f))
		})
	}
	if !differ {
		return ""
	}
	slices.Sort(values)
	parts := make([]string, 0, len(values))
	for _, v := range values {
		parts = append(parts, fmt.Sprintf("%s (%s)", v, some(at[v])))
	}
	return fmt.Sprintf("%s %s", f, strings.Join(parts, ", "))
}

// silentOn names the endpoints of pairs whose engines have reported, but not this fact; "": there are none.
func silentOn(p *kvstate.Pool, f kvstate.Fact) string {
	var names []string
	asked := 0
	for _, e := range p.Endpoints() {
		if e.Role&kvstate.RoleBoth == 0 || e.Said() == nil {
			continue
		}
		asked++
		if said(e, f) == "" {
			names = append(names, e.DisplayName())
		}
	}
	switch {
	case len(names) == 0:
		return ""
	case len(names) == asked:
		return "all"
	}
	return some(names)
}

// some joins names, the first of them only if there are many.
func some(names []string) string {
	const most = 4
	if more := len(names) - most; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), more)
	}
	return strings.Join(names, ", ")
}

func said(e *kvstate.Endpoint, f kvstate.Fact) string {
	if r := e.Said(); r != nil && e.Role&kvstate.RoleBoth != 0 {
		return r[f]
	}
	return ""
}

// pairingAttention adds the notices about it.
func pairingAttention(p *Pool, add func(bad bool, doc, format string, values ...any)) {
	const doc = "protocols.md#which-engines-fit-each-other"
	for _, text := range p.Apart {
		add(false, doc, "%s: engines that differ in this are never paired: %s.", p.Name, text)
	}
	for _, text := range p.Allowed {
		add(false, doc, "%s: engines that differ are paired, since pairUnlike says so, although nobody has shown that their "+
			"answers are right: %s.", p.Name, text)
	}
}
