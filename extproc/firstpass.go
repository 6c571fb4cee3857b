package extproc

import (
	"fmt"

	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/replan"
	"tandem/extproc/telemetry"
	"tandem/picker"
)

// firstPass plans a request from its body alone: in pass 1 and, after a failed hop, in another attempt.
type firstPass struct{ *planning }

// first plans pass 1 of a request to one of the APIs that can be split.
func (x firstPass) first(api openai.API) (*plan.Decision, error) {
	h := &x.msg.Headers
	if err := openai.CheckHeaders(string(h.ContentType), string(h.ContentEncoding)); err != nil {
		return nil, err
	}
	if err := replan.Fits(h); err != nil {
		return nil, err
	}
	if x.msg.EndOfStream || string(h.ContentLength) == "0" { // the latter may have trailers, which end no BUFFERED body
		return nil, openai.BadRequest("empty_body", "", "the request has no body; a JSON object is expected")
	}
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return nil, err
	}
	return x.plan(api, plan.Attempt{Started: x.s.now()})
}

// plan reads what the decision needs, lets the picker choose the endpoints, which may take a while, and decides on
// the next leg. x.body is the client's body.
func (x firstPass) plan(api openai.API, a plan.Attempt) (*plan.Decision, error) {
	if err := x.scan(api); err != nil {
		return nil, err
	}
	x.EndPhase(telemetry.PhaseScan)
	r := &x.req
	pool := x.s.State.PoolFor(r.Model())
	if pool == nil {
		return nil, openai.ModelNotFound(r.Model())
	}
	if a.Redirects == 0 { // an admitted request is served to the end
		if err := closed(pool); err != nil {
			return nil, err
		}
	}
	policy, ok := x.s.policy(pool.Spec.Name)
	if !ok {
		return nil, fmt.Errorf("pool %q has no policy", pool.Spec.Name)
	}
	x.describe(pool, a)
	if policy.Dialect.Concurrent != nil {
		return x.concurrent(policy)
	}
	if err := policy.MaySplit(&r.Attempt, &r.Request, x.body.Len(), r.Limits); err != nil {
		return nil, err
	}
	if plan.EncodesFirst(r, &policy.Policy) {
		x.s.State.View(pool, nil, &x.view)
		if d := plan.Encode(r, &x.view, &policy.Policy); d != nil {
			return d, nil
		}
	}
	if holder, stored := r.Holder(pool); stored {
		return x.toHolder(policy, holder)
	}
	x.read(policy)
	request := r.Ask(&policy.Policy, r.Tokens, !r.Alone)
	if err := x.applyObjectives(policy, &request); err != nil {
		return nil, err
	}
	choice, err := x.choose(policy, &request)
	if err != nil {
		return nil, policy.NoEndpoint(pool, err)
	}
	if choice.Prefill >= 0 && policy.Handoff != plan.HandoffEnvoy {
		return x.oneHop(policy, choice)
	}
	if choice.Prefill >= 0 {
		x.readConversation(policy, choice)
	}
	return plan.First(r, &x.view, choice, &policy.Policy)
}

// oneHop decides for the one hop of a split request whose prefill bypasses Envoy.
func (x firstPass) oneHop(policy *Policy, c picker.Choice) (*plan.Decision, error) {
	if err := x.req.Exhausted(&policy.Policy, x.view.Endpoints[c.Decode].Endpoint.Addr); err != nil {
		return nil, err
	}
	prefill, edits, err := x.handOver(policy, c, "")
	if err != nil {
		return nil, err
	}
	return plan.OneHop(&x.req, &x.view, c, &policy.Policy, prefill, edits), nil
}
