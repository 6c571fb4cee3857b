package extproc

import (
	"tandem/extproc/envoywire"
	"tandem/extproc/names"
	"tandem/extproc/plan"
)

// setPairHeaders sets the headers that the two legs need in addition to every route's, or, without p, removes those of an
// earlier pass, which the request's headers in show.
func setPairHeaders(h *envoywire.HeaderEdits, in *envoywire.Headers, requestID string, p *plan.Pair) {
	set := func(name, value string) {
		if value != "" {
			h.Set(name, []byte(value))
		} else if len(in.ClientID) > 0 {
			h.Remove(name)
		}
	}
	if p == nil {
		if len(in.ClientID) == 0 {
			return
		}
		for _, name := range [...]string{
			names.HeaderPrefillEndpoint, names.HeaderPrefillScheme, names.HeaderMirror,
			names.HeaderClientID, names.HeaderLegID, names.HeaderPrefillRank, names.HeaderDecodeRank,
			names.HeaderAnswer,
		} {
			h.Remove(name)
		}
		return
	}
	scheme := p.Prefill.Scheme
	if scheme == "http" {
		scheme = ""
	}
	set(names.HeaderPrefillEndpoint, p.Prefill.HostPort())
	set(names.HeaderPrefillScheme, scheme)
	if p.Prefill.Scheme == "https" {
		set(names.HeaderPrefillName, p.Prefill.ServerNameSent())
	}
	mirror := names.MirrorKeep
	if p.Cancel {
		mirror = names.MirrorCancel
	}
	set(names.HeaderMirror, mirror)
	set(names.HeaderClientID, requestID)
	set(names.HeaderLegID, p.Plan.RequestID)
	set(names.HeaderPrefillRank, p.Plan.PrefillRank)
	set(names.HeaderDecodeRank, p.Plan.DecodeRank)
	joined := ""
	if p.Plan.Joined {
		joined = "joined"
	}
	set(names.HeaderAnswer, joined)
}
