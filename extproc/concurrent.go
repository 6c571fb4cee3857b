package extproc

import (
	"errors"
	"slices"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/picker"
)

// Some engines hand KV over while both legs run: P sends, D receives, each needs the other. For those pass 1 names both
// endpoints at once, and Envoy sends the request to D through the listener decode-leg and a copy of it to P through the
// listener prefill-mirror (docs/adr/0010). The body that leaves pass 1 is P's; decode-leg's filter makes D's of it with
// the ticket's undo, as pass 2 does where the legs follow each other.
//
// concurrent.go plans the attempt, decodeleg.go and mirroredleg.go serve the legs, pairs.go is where they meet.

// isSGLang reports whether POST /generate, which names no model, is SGLang's here.
func (x mainRole) isSGLang() bool {
	pool := x.s.State.PoolFor("")
	if pool == nil {
		return false
	}
	policy, _ := x.s.policy(pool.Spec.Name)
	return policy.Dialect.Concurrent != nil && policy.Dialect.Concurrent.OwnGenerate
}

// concurrent plans a request to a pool whose legs run concurrently.
func (x firstPass) concurrent(pool *kvstate.Pool, policy Policy, a plan.Attempt) (*plan.Decision, error) {
	dialect := policy.Dialect.Concurrent
	if err := policy.MayPair(&a, &x.req, x.body.Len(), x.s.limits()); err != nil {
		return nil, err
	}
	if dialect.DecodesAlone {
		if holder, stored := x.holder(pool); stored {
			return x.toHolder(pool, holder)
		}
	}
	x.hashes = x.req.PromptHash(x.hashes[:0], blockBytes, maxBlocks)
	if a.Redirects == 0 {
		x.s.State.CountPrompt(pool, x.hashes)
	}
	tokens := pool.PromptTokens(x.body.Len())
	if !a.Alone {
		d, err := x.pairUp(pool, policy, tokens, &a)
		if d != nil || err != nil {
			return d, err
		}
	}
	x.s.State.View(pool, x.hashes, &x.view)
	if !dialect.DecodesAlone { // then only an engine with both roles can
		x.view.Endpoints = slices.DeleteFunc(x.view.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint.Role != kvstate.RoleBoth })
		if len(x.view.Endpoints) == 0 {
			return nil, plan.RefusePair(&a, x.s.limits())
		}
	}
	x.picker.Policy = policy.Placement()
	choice, err := x.picker.Pick(&picker.Request{
		PromptTokens: tokens, Blocks: len(x.hashes), Model: x.req.Model(), Labels: x.labelsOf(&policy), Excluded: a.Excluded, Rand: random(),
	}, &x.view)
	if err != nil {
		return nil, policy.NoEndpoint(pool, err)
	}
	if err := a.Exhausted(&policy.Policy, x.view.Endpoints[choice.Decode].Endpoint.Addr); err != nil {
		return nil, err
	}
	return x.decodeAlone(pool, policy, choice, tokens, a)
}

// pairUp decides for both legs. It returns nil if there is no pair, or if the undo of P's leg does not fit a
// ticket; a.Why is the reason.
func (x firstPass) pairUp(pool *kvstate.Pool, policy Policy, tokens int64, a *plan.Attempt) (*plan.Decision, error) {
	dialect := policy.Dialect.Concurrent
	x.s.State.View(pool, x.hashes, &x.view)
	c, ok, err := x.pickPair(pool, &policy, tokens, a)
	if err != nil {
		return nil, err
	}
	if !ok {
		a.Why = x.unpairedReason()
		if len(a.Excluded) > 0 {
			a.Why = "prefill_failed"
		}
		return nil, nil
	}
	p, d := x.view.Endpoints[c.Prefill], x.view.Endpoints[c.Decode]
	legs := kvtransfer.Legs{ID: newTicketID(), RequestID: x.requestID, Prefill: p.Endpoint, Decode: d.Endpoint}
	if policy.Peers != nil {
		legs.Peer, _ = policy.Peers.Lookup(guard.With(x.stream.Context(), x.s.guard), p.Endpoint)
		legs.DecodePeer = policy.Peers.Known(d.Endpoint.Addr)
	}
	x.patch.Reset(&x.req)
	var legsPlan kvtransfer.PairPlan
	legsPlan, err = dialect.Plan(&x.req, &x.patch, &legs)
	if errors.Is(err, kvtransfer.ErrUnknownPeer) {
		a.Why = "unknown_peer"
		if policy.Dialect.Prefill == nil || a.Redirects+2 >= x.s.MaxRedirects {
			return nil, nil
		}
		d, why := x.split(pool, policy, c, tokens, *a) // one leg after the other: P's answer shows which engine P is
		if why != "" {
			a.Why = why
		}
		return d, nil
	}
	if err != nil {
		return nil, err
	}
	if policy.Dialect.VLLM && legsPlan.DecodeRank == "" {
		legsPlan.DecodeRank = d.Endpoint.RankName()
	}
	x.setPriority(&policy)
	edits := x.patch.Edits()
	x.undo = edits.Inverse(x.undo[:0], x.body.Bytes())
	if x.undo.Size() > kvtransfer.MaxUndoBytes {
		a.Why = "undo_too_large"
		return nil, nil
	}
	mirror := envoywire.MirrorKeep
	if dialect.CancelsPrefill {
		mirror = envoywire.MirrorCancel
	}
	return x.decided(&plan.Decision{
		Leg: envoywire.LegPair, Pool: pool, Endpoint: d.Endpoint, Edits: edits, Pair: &plan.Pair{Prefill: p.Endpoint, Mirror: mirror, Plan: legsPlan},
		Prefill: plan.Reservation{Endpoint: p.Endpoint, Booking: c.PrefillBooking()}, Decode: plan.Reservation{Endpoint: d.Endpoint, Booking: c.DecodeBooking()},
		Computes: p.Endpoint, Report: plan.Report{Route: "pair", Prefill: p.Endpoint, Decode: d.Endpoint},
		Ticket: kvtransfer.Ticket{
			ID: legs.ID, Stage: kvtransfer.PairLegs, Expires: time.Now().Add(x.s.TicketTTL), Started: a.Started,
			Pool: pool.Spec.Name, Prefill: p.Endpoint.Addr, Decode: d.Endpoint.Addr, Split: true,
			Redirects: a.Redirects, Prefills: a.Prefills + 1, Excluded: a.Excluded,
			Undo: x.undo, BodyBytes: edits.Len(x.body.Len()), PromptTokens: tokens, Params: legsPlan.Decode, Prompt: x.lastBlock(),
			Loads: true, LeastBytes: policy.LeastBytes(x.req.API(), x.requestID, x.req.True(openai.FieldStream) && !legsPlan.Joined),
		},
	}), nil
}

// pickPair chooses a pair of the view. It chooses endpoints that failed the request only if there are no others,
// and no more often than [plan.Attempt.Retries] allows.
func (x firstPass) pickPair(pool *kvstate.Pool, policy *Policy, tokens int64, a *plan.Attempt) (c picker.Choice, ok bool, err error) {
	r := picker.Request{PromptTokens: tokens, Blocks: len(x.hashes), Model: x.req.Model(), Split: true, Excluded: a.Excluded, Rand: random()}
	if err := x.applyObjectives(pool, policy, &r); err != nil {
		return c, false, err
	}
	c, err = x.chooseOther(pool, policy, &r, a)
	if err == nil && c.Prefill >= 0 {
		return c, true, nil
	}
	if err != nil && !errors.Is(err, picker.ErrNoEndpoint) {
		return c, false, err
	}
	if r.Excluded = a.Retries(); len(r.Excluded) == len(a.Excluded) {
		return c, false, nil
	}
	c, err = x.picker.Pick(&r, &x.view)
	return c, err == nil && c.Prefill >= 0, nil
}

// setPairHeaders sets the headers that the two legs need in addition to every route's, or removes those of an
// earlier pass.
func (x mainRole) setPairHeaders(p *plan.Pair) {
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
	scheme := p.Prefill.Scheme
	if scheme == "http" {
		scheme = ""
	}
	set(envoywire.HeaderPrefillEndpoint, p.Prefill.HostPort())
	set(envoywire.HeaderPrefillScheme, scheme)
	set(envoywire.HeaderMirror, p.Mirror)
	set(envoywire.HeaderClientID, x.requestID)
	set(envoywire.HeaderLegID, p.Plan.RequestID)
	set(envoywire.HeaderPrefillRank, p.Plan.PrefillRank)
	set(envoywire.HeaderDecodeRank, p.Plan.DecodeRank)
	joined := ""
	if p.Plan.Joined {
		joined = "joined"
	}
	set(envoywire.HeaderAnswer, joined)
}
