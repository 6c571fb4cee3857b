package pass

import (
	"cmp"
	"context"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/plan"
	"tandem/internal/guard"
	"tandem/kvstate"
)

// readChosen reads what is known of the engines that were chosen for two legs at once.
func (x *Pass) readChosen(ctx context.Context) {
	w := &x.want
	if x.choice.Prefill < 0 || w.way != atOnce {
		return
	}
	p, d := x.view.Endpoints[x.choice.Prefill].Endpoint, x.view.Endpoints[x.choice.Decode].Endpoint
	w.legs = kvtransfer.Legs{ID: plan.NewID(), RequestID: x.ID, Prefill: p, Decode: d}
	if peers := x.policy.Peers; peers != nil {
		w.legs.Peer, _ = peers.Lookup(guard.With(ctx, x.shared.Guard), p)
	}
}

// decide decides what the pass does next, from what was read and chosen. It returns nil if both legs were to run at
// once and cannot: then one endpoint is chosen.
func (x *Pass) decide() (*plan.Decision, error) {
	r, v, c, p, w := &x.Req, &x.view, x.choice, &x.policy.Policy, &x.want
	if err := x.unserved(); err != nil {
		return nil, err
	}
	if w.way == atOnce {
		d, err := plan.BothLegs(r, v, &w.legs, c, p)
		if d == nil && err == nil {
			w.way = alone
		}
		return d, err
	}
	e := w.bound
	if e == nil {
		e = v.Endpoints[c.Decode].Endpoint
	}
	switch w.way {
	case storedAt:
		return plan.Pass(r, e, x.size(), "stored_response", p), nil
	case other, storing:
		return x.decideOnce(e), nil
	case encoding:
		return plan.Encode(r, e, p), nil
	case alone:
		if err := r.Attempt.Exhausted(p, e.Addr); err != nil {
			return nil, err
		}
		return plan.Alone(r, v, c, p)
	case gateway:
		return x.decideForGateway()
	}
	if c.Prefill >= 0 && p.Handoff != plan.HandoffEnvoy {
		return plan.OneHop(r, v, c, p)
	}
	return plan.First(r, v, c, p)
}

// decideOnce decides for a request that is never split. Without a model, a 404 is about the path or about something
// that the endpoint alone may have.
func (x *Pass) decideOnce(e *kvstate.Endpoint) (d *plan.Decision) {
	r, w, p := &x.Req, &x.want, &x.policy.Policy
	if w.way == storing {
		d = plan.ToHolder(r, e, p)
	} else {
		d = plan.Pass(r, e, x.size(), passThrough, p)
	}
	if w.model != "" && w.bound == nil {
		d = plan.OrOther(d, r, x.size())
	}
	return d
}

// unserved ends a request that every endpoint which may have its model has answered with 404: see
// [plan.Attempt.Unserved].
func (x *Pass) unserved() error {
	w, a := &x.want, &x.Req.Attempt
	if !a.LacksModel || w.way != oneByOne && w.way != atOnce && w.way != alone {
		return nil
	}
	err := a.Unserved(&x.policy.Policy, x.view.Endpoints[x.choice.Decode].Endpoint, x.Req.Client.Model())
	if err == nil && a.Last {
		x.choice.Prefill = -1
	}
	return err
}

// decideForGateway decides for the one hop of a gateway's request, and which endpoints it may take instead.
func (x *Pass) decideForGateway() (*plan.Decision, error) {
	r, v, c, p := &x.Req, &x.view, x.choice, &x.policy.Policy
	if c.Prefill < 0 {
		if err := p.RefuseAlone(r.Pool, &r.Attempt, cmp.Or(r.Attempt.Why, p.Unpaired(v, c.Uncached))); err != nil {
			return nil, err
		}
	}
	d, err := plan.OneHop(r, v, c, p)
	if err != nil {
		return nil, err
	}
	d.Gateway = &plan.Gateway{List: plan.Fallbacks(&x.picker, &x.asked, v, c, x.shared.Gateway)}
	d.Edits = d.Gateway.Rewrite(r, x.want.model, p, d.Edits)
	return d, nil
}
