package extproc

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// Some engines hand KV over while both legs run: P sends, D receives, each needs the other. For those pass 1 names both
// endpoints at once, and Envoy sends the request to D through the listener decode-leg and a copy of it to P through the
// listener prefill-mirror (docs/adr/0010). The body that leaves pass 1 is P's; decode-leg's filter makes D's of it with
// the ticket's undo, as pass 2 does where the legs follow each other.
//
// concurrent.go plans the attempt, decodeleg.go and mirroredleg.go serve the legs, pairs.go is where they meet.

// pairRoute is what a route says of the second leg.
type pairRoute struct {
	prefill *kvstate.Endpoint
	mirror  string // one of the mirror constants
	told    kvtransfer.Told
}

// isSGLang reports whether POST /generate, which names no model, is SGLang's here.
func (x mainRole) isSGLang() bool {
	pool := x.s.State.PoolFor("")
	if pool == nil {
		return false
	}
	policy, _ := x.s.policy(pool.Spec.Name)
	return policy.Dialect.Concurrent != nil && policy.Dialect.Concurrent.OwnGenerate
}

// concurrent plans a request to a pool whose legs run at once.
func (x firstPass) concurrent(pool *kvstate.Pool, policy Policy, a attempt) (route, error) {
	dialect := policy.Dialect.Concurrent
	if x.body.Len() > x.s.SplitBodyBytes && policy.RefuseLong {
		return route{}, openai.TooLarge(x.s.SplitBodyBytes)
	}
	if why := x.whyNoPair(policy, a); why != "" && !a.alone {
		a.alone, a.why = true, why
	}
	if dialect.DecodesAlone {
		if holder, stored := x.holder(pool); stored {
			return x.toHolder(pool, holder)
		}
	}
	x.hashes = x.req.PromptHash(x.hashes[:0], blockBytes, maxBlocks)
	if a.redirects == 0 {
		x.s.State.Asked(pool, x.hashes)
	}
	tokens := pool.PromptTokens(x.body.Len())
	if !a.alone {
		r, err := x.pairUp(pool, policy, tokens, &a)
		if r.leg != "" || err != nil {
			return r, err
		}
	}
	x.s.State.View(pool, x.hashes, &x.view)
	if !dialect.DecodesAlone { // then only an engine that was not started for one leg can
		x.view.Endpoints = slices.DeleteFunc(x.view.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint.Role != kvstate.RoleBoth })
		if len(x.view.Endpoints) == 0 {
			return route{}, x.refusePair(a)
		}
	}
	x.picker.Policy = policy.place()
	choice, err := x.picker.Pick(&picker.Request{
		PromptTokens: tokens, Blocks: len(x.hashes), Model: x.req.Model(), Labels: x.labelsOf(&policy), Excluded: a.excluded, Rand: random(),
	}, &x.view)
	if err != nil {
		return route{}, noEndpoint(pool, policy.Source, err)
	}
	if err := a.exhausted(policy, x.view.Endpoints[choice.Decode].Endpoint.Addr); err != nil {
		return route{}, err
	}
	return x.decodeAlone(pool, policy, choice, tokens, a)
}

// whyNoPair says why a request does not go over two legs, "" if it may.
func (x firstPass) whyNoPair(policy Policy, a attempt) string {
	switch {
	case !policy.Split:
		return "policy"
	case x.body.Len() > x.s.SplitBodyBytes:
		return "body_too_long"
	case a.redirects+1 >= x.s.MaxRedirects: // a leg that fails needs one
		return "redirects_spent"
	case a.prefills >= cmp.Or(policy.PrefillAttempts, 3):
		return "attempts_spent"
	}
	return policy.Dialect.Concurrent.Unpairable(&x.req)
}

// refusePair is what a client is told whose request no pair can answer, and no engine alone.
func (x firstPass) refusePair(a attempt) error {
	switch a.why {
	case "body_too_long":
		return openai.TooLarge(x.s.SplitBodyBytes)
	case "attempts_spent", "redirects_spent", "prefill_failed":
		return openai.Unavailable("endpoint_failed", "every pair of endpoints that was tried has failed this request", time.Second)
	case "no_prefill", "unknown_peer", "policy":
	default:
		return openai.BadRequest("not_over_two_engines", "", "a request of this kind ("+a.why+") needs an engine that is not split into prefill and decode, and there is none here")
	}
	return openai.Unavailable("no_endpoint", "no pair of endpoints can take this request now", time.Second)
}

// pairUp plans both legs. A route without leg means that there is no pair, or that undoing P's leg would take more than a
// ticket holds; a.why says which.
func (x firstPass) pairUp(pool *kvstate.Pool, policy Policy, tokens int64, a *attempt) (route, error) {
	dialect := policy.Dialect.Concurrent
	x.s.State.View(pool, x.hashes, &x.view)
	c, ok, err := x.pickPair(pool, &policy, tokens, a)
	if err != nil {
		return route{}, err
	}
	if !ok {
		a.why = x.whyUnpaired()
		if len(a.excluded) > 0 {
			a.why = "prefill_failed"
		}
		return route{}, nil
	}
	p, d := x.view.Endpoints[c.Prefill], x.view.Endpoints[c.Decode]
	legs := kvtransfer.Legs{ID: newTicketID(), RequestID: x.requestID, Prefill: p.Endpoint, Decode: d.Endpoint}
	if policy.Peers != nil {
		legs.Peer, _ = policy.Peers.Lookup(x.stream.Context(), p.Endpoint)
		legs.DecodePeer = policy.Peers.Known(d.Endpoint.Addr)
	}
	x.patch.Reset(&x.req)
	var told kvtransfer.Told
	told, err = dialect.Plan(&x.req, &x.patch, &legs)
	if errors.Is(err, kvtransfer.ErrUnknownPeer) {
		a.why = "unknown_peer"
		if policy.Dialect.Prefill == nil || a.redirects+2 >= x.s.MaxRedirects {
			return route{}, nil
		}
		r, why, err := x.prefill(pool, policy, c, tokens, *a) // one leg after the other, which tells who P is
		if why != "" {
			a.why = why
		}
		return r, err
	}
	if err != nil {
		return route{}, err
	}
	x.setPriority(&policy)
	edits := x.patch.Edits()
	x.undo = edits.Inverse(x.undo[:0], x.body.Bytes())
	if x.undo.Size() > kvtransfer.MaxUndoBytes {
		a.why = "undo_too_large"
		return route{}, nil
	}
	r := route{leg: envoywire.LegPair, endpoint: d.Endpoint, edits: edits, pair: &pairRoute{p.Endpoint, envoywire.MirrorKeep, told}}
	if dialect.CancelsPrefill {
		r.pair.mirror = envoywire.MirrorCancel
	}
	t := kvtransfer.Ticket{
		ID: legs.ID, Stage: kvtransfer.PairLegs, Expires: time.Now().Add(x.s.TicketTTL), Started: a.started,
		Pool: pool.Spec.Name, Prefill: p.Endpoint.Addr, Decode: d.Endpoint.Addr, Split: true,
		Redirects: a.redirects, Prefills: a.prefills + 1, Excluded: a.excluded,
		Undo: x.undo, BodyBytes: edits.Len(x.body.Len()), PromptTokens: tokens, Params: told.Decode, Prompt: x.lastBlock(),
		Loads: true, LeastBytes: policy.leastBytes(x.req.API(), x.requestID, x.req.True(openai.FieldStream) && !told.Joined),
	}
	x.s.State.ClaimLoad(pool, p.Endpoint.Addr, d.Endpoint.Addr, t.ID)
	r.booked[0] = x.reserve(p.Endpoint, kvstate.RolePrefill, a.redirects, c.PrefillBooking())
	r.booked[1] = x.reserve(d.Endpoint, kvstate.RoleDecode, a.redirects, c.DecodeBooking())
	t.Reservations = [2]uint64{uint64(r.booked[0]), uint64(r.booked[1])}
	x.s.State.Routed(pool, p.Endpoint, x.hashes)
	x.planned(pool, "pair", "", p.Endpoint, d.Endpoint, tokens)
	return x.seal(r, &t)
}

// pickPair chooses a pair of the view. Endpoints that failed the request are taken where there is no other, but not
// oftener than maxTries.
func (x firstPass) pickPair(pool *kvstate.Pool, policy *Policy, tokens int64, a *attempt) (c picker.Choice, ok bool, err error) {
	r := picker.Request{PromptTokens: tokens, Blocks: len(x.hashes), Model: x.req.Model(), Split: true, Excluded: a.excluded, Rand: random()}
	if err := x.aim(pool, policy, &r); err != nil {
		return c, false, err
	}
	c, err = x.chooseOther(pool, policy, &r, a)
	if err == nil && c.Prefill >= 0 {
		return c, true, nil
	}
	if err != nil && !errors.Is(err, picker.ErrNoEndpoint) {
		return c, false, err
	}
	r.Excluded = slices.DeleteFunc(slices.Clone(a.excluded), func(addr string) bool { return failures(a.excluded, addr) < maxTries })
	if len(r.Excluded) == len(a.excluded) {
		return c, false, nil
	}
	c, err = x.picker.Pick(&r, &x.view)
	return c, err == nil && c.Prefill >= 0, nil
}

// setPairHeaders writes what the two legs need beside what every route has, or removes what an earlier pass left.
func (x mainRole) setPairHeaders(p *pairRoute) {
	h := &x.headers
	set := func(name, value string) {
		if value != "" {
			h.Set(name, []byte(value))
		} else if len(x.msg.Headers.ClientID) > 0 {
			h.Remove(name)
		}
	}
	if p == nil {
		if len(x.msg.Headers.ClientID) == 0 {
			return
		}
		for _, name := range [...]string{
			envoywire.HeaderPrefillEndpoint, envoywire.HeaderPrefillScheme, envoywire.HeaderMirror, envoywire.HeaderClientID,
			envoywire.HeaderLegID, envoywire.HeaderPrefillRank, envoywire.HeaderDecodeRank, envoywire.HeaderAnswer,
		} {
			h.Remove(name)
		}
		return
	}
	scheme := p.prefill.Scheme
	if scheme == "http" {
		scheme = ""
	}
	set(envoywire.HeaderPrefillEndpoint, p.prefill.Addr)
	set(envoywire.HeaderPrefillScheme, scheme)
	set(envoywire.HeaderMirror, p.mirror)
	set(envoywire.HeaderClientID, x.requestID)
	set(envoywire.HeaderLegID, p.told.RequestID)
	set(envoywire.HeaderPrefillRank, p.told.PrefillRank)
	set(envoywire.HeaderDecodeRank, p.told.DecodeRank)
	joined := ""
	if p.told.Joined {
		joined = "joined"
	}
	set(envoywire.HeaderAnswer, joined)
}
