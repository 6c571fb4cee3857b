package extproc

import (
	"errors"
	"slices"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/plan"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/picker"
)

// isSGLang reports whether POST /generate, which names no model, is SGLang's here.
func (x *planning) isSGLang() bool {
	pool := x.s.State.PoolFor("")
	if pool == nil {
		return false
	}
	policy, _ := x.s.policy(pool.Spec.Name)
	return policy.Dialect.Concurrent != nil && policy.Dialect.Concurrent.OwnGenerate
}

// concurrent plans a request to a pool whose legs run concurrently.
func (x firstPass) concurrent(policy *Policy) (*plan.Decision, error) {
	r, dialect := &x.req, policy.Dialect.Concurrent
	if err := policy.MayPair(&r.Attempt, &r.Request, x.body.Len(), r.Limits); err != nil {
		return nil, err
	}
	if dialect.DecodesAlone {
		if holder, stored := r.Holder(r.Pool); stored {
			return x.toHolder(policy, holder)
		}
	}
	r.Hash()
	if r.Redirects == 0 {
		x.s.State.CountPrompt(r.Pool, r.Hashes)
	}
	r.Tokens = r.Pool.PromptTokens(x.body.Len())
	if !r.Alone {
		d, err := x.pairUp(policy)
		if d != nil || err != nil {
			return d, err
		}
	}
	x.s.State.View(r.Pool, r.Hashes, &x.view)
	if !dialect.DecodesAlone { // then only an engine with both roles can
		x.view.Endpoints = slices.DeleteFunc(x.view.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint.Role != kvstate.RoleBoth })
		if len(x.view.Endpoints) == 0 {
			return nil, policy.RefusePair(r.Pool, &r.Attempt, r.Limits)
		}
	}
	x.picker.Policy, r.Labels = policy.Placement(), x.labelsOf(policy)
	request := r.Ask(&policy.Policy, r.Tokens, false)
	choice, err := x.picker.Pick(&request, &x.view)
	if err != nil {
		return nil, policy.NoEndpoint(r.Pool, err)
	}
	if err := r.Exhausted(&policy.Policy, x.view.Endpoints[choice.Decode].Endpoint.Addr); err != nil {
		return nil, err
	}
	return plan.Alone(r, &x.view, choice, &policy.Policy)
}

// pairUp decides for both legs. It returns nil if there is no pair, or if the undo of P's leg does not fit a
// ticket; Why is the reason.
func (x firstPass) pairUp(policy *Policy) (*plan.Decision, error) {
	r := &x.req
	x.s.State.View(r.Pool, r.Hashes, &x.view)
	c, ok, err := x.pickPair(policy)
	if err != nil {
		return nil, err
	}
	if !ok {
		r.Why = policy.Unpaired(&x.view, c.Uncached)
		if len(r.Excluded) > 0 {
			r.Why = "prefill_failed"
		}
		return nil, nil
	}
	p, d := x.view.Endpoints[c.Prefill].Endpoint, x.view.Endpoints[c.Decode].Endpoint
	legs := kvtransfer.Legs{ID: plan.NewID(), RequestID: x.requestID, Prefill: p, Decode: d}
	if policy.Peers != nil {
		legs.Peer, _ = policy.Peers.Lookup(guard.With(x.stream.Context(), x.s.guard), p)
		legs.DecodePeer = policy.Peers.Known(d.Addr)
	}
	out, err := plan.BothLegs(r, &legs, c, &policy.Policy)
	if !errors.Is(err, kvtransfer.ErrUnknownPeer) {
		return out, err
	}
	r.Why = "unknown_peer"
	if policy.Dialect.Prefill == nil || r.Redirects+2 >= r.MaxRedirects {
		return nil, nil
	}
	out, why := plan.Split(r, &x.view, c, &policy.Policy) // one leg after the other: P's answer shows which engine P is
	if why != "" {
		r.Why = why
	}
	return out, nil
}

// pickPair chooses a pair of the view.
func (x firstPass) pickPair(policy *Policy) (c picker.Choice, ok bool, err error) {
	want := x.req.Ask(&policy.Policy, x.req.Tokens, true)
	if err := x.applyObjectives(policy, &want); err != nil {
		return c, false, err
	}
	c, err = x.choose(policy, &want)
	if errors.Is(err, picker.ErrNoEndpoint) || errors.Is(err, picker.ErrFull) {
		return c, false, nil
	}
	return c, c.Prefill >= 0, err
}
