package pass

import (
	"context"
	"errors"
	"io"
	"slices"
	"time"

	"tandem/extproc/latebinding"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
)

// choose chooses the endpoints of a request that was read, whatever its way.
func (x *Pass) choose(ctx context.Context) error {
	r, p, w := &x.Req, x.policy, &x.want
	if w.way == storedAt || w.way == storing && w.bound != nil {
		return nil
	}
	x.look()
	if r.Attempt.Redirects == 0 && r.Conversation == nil && len(r.Hashes) > 0 {
		r.Conversation = x.shared.State.Arrived(r.Pool, r.Hashes, r.Tokens, r.Named, &x.view)
	}
	if w.way == encoding {
		at := plan.PickEncoder(&x.view)
		if x.choice = (picker.Choice{Prefill: -1, Decode: at}); at >= 0 {
			return nil
		}
		w.way = oneByOne
		if err := x.readRest(ctx); err != nil {
			return err
		}
		return x.choose(ctx)
	}
	if err := x.narrow(); err != nil {
		return err
	}
	x.asked = x.ask()
	c, err := x.pick(ctx, &x.asked)
	x.choice = c
	if errors.Is(err, latebinding.ErrWaits) {
		return err
	}
	if w.way.waits() {
		r.Priority, r.Targets, r.Foreseen = x.asked.Priority, x.asked.Targets, plan.Foresee(&c)
		x.explain(&x.asked)
		err = plan.Missed(&x.asked, &c, err)
	}
	switch {
	case w.way == atOnce && (errors.Is(err, picker.ErrNoEndpoint) || errors.Is(err, picker.ErrFull)):
		x.choice.Prefill = -1
	case err != nil:
		return p.NoEndpoint(r.Pool, err)
	}
	return nil
}

// look reads the endpoints as they are now, and what each holds of the prompt.
func (x *Pass) look() {
	r := &x.Req
	x.shared.State.View(r.Pool, r.Hashes, &x.view)
	if x.Continues {
		now := time.Now()
		x.view.Endpoints = slices.DeleteFunc(x.view.Endpoints, func(c kvstate.Candidate) bool {
			return !c.Endpoint.Continues(now)
		})
	}
	if r.Session != 0 {
		x.shared.State.Sessions.MarkSession(r.Pool, r.Session, &x.view)
	}
	r.MatchTokens(r.Pool, &x.view)
}

// narrow takes endpoints that must not answer the request out of the view.
func (x *Pass) narrow() error {
	r, v, w := &x.Req, &x.view, &x.want
	switch {
	case w.way == alone && x.policy.Dialect.PairsOnly(): // then only an engine with both roles can
		v.Endpoints = slices.DeleteFunc(v.Endpoints, func(c kvstate.Candidate) bool {
			return c.Endpoint.Role != kvstate.RoleBoth
		})
		if len(v.Endpoints) == 0 {
			return x.policy.RefusePair(r.Pool, &r.Attempt, r.Limits)
		}
	case w.way == gateway:
		if w.limited {
			plan.Allow(v, w.only)
		}
		if err := plan.Shed(w.priority, v, x.shared.Gateway); err != nil {
			return err
		}
		if r.Attempt.Why != passThrough {
			return plan.GatewayHolder(r, v)
		}
	}
	return nil
}

// ask returns what the picker is asked.
func (x *Pass) ask() picker.Request {
	r, w := &x.Req, &x.want
	switch {
	case w.way == alone:
		return r.Ask(&x.policy.Policy, r.Tokens, false)
	case !w.way.waits():
		ask := r.Ask(&x.policy.Policy, r.Estimate(), false)
		ask.Model, ask.MinAnswer, ask.MaxAnswer = w.model, 0, 0
		return ask
	}
	ask := r.Ask(&x.policy.Policy, r.Tokens, !r.Attempt.Alone)
	if w.way == gateway && w.model != "" {
		ask.Model = w.model
	}
	ask.Priority, ask.Targets, ask.OnMiss, ask.Flow = w.priority, w.targets, w.onMiss, w.flow
	return ask
}

// reportTick is how often a request that waits for an engine's report looks for it.
const reportTick = 20 * time.Millisecond

// pick is [Pass.pickNow]. If a request needs a pair and there is none because an engine has not reported yet what it
// is, the request waits for the report, for some seconds at most.
func (x *Pass) pick(ctx context.Context, r *picker.Request) (c picker.Choice, err error) {
	c, err = x.pickNow(ctx, r)
	var until time.Time
	for awaited := x.awaited(r, &c, err); awaited != nil; awaited = x.awaited(r, &c, err) {
		if latebinding.IsAtOnce(ctx) {
			return c, latebinding.ErrWaits
		}
		x.waiter.Committed() // the choice is not taken
		began := time.Now()
		if until.IsZero() {
			until = began.Add(kvstate.ReportWait + reportTick)
		}
		left := x.untilReport(ctx, awaited, until)
		x.Meter.LeaveOut(time.Since(began)) // waiting is no part of deciding
		if ctx.Err() != nil {
			return c, io.EOF
		}
		if !left {
			return c, err
		}
		x.look()
		if err = x.narrow(); err != nil {
			return c, err
		}
		c, err = x.pickNow(ctx, r)
	}
	return c, err
}

// awaited returns an endpoint that could be part of the pair that a request lacks, as soon as its engine has reported
// what it is; nil: there is none.
func (x *Pass) awaited(r *picker.Request, c *picker.Choice, err error) *kvstate.Endpoint {
	if !r.Split || !errors.Is(err, picker.ErrNoEndpoint) && (err != nil || c.Prefill >= 0 || !r.MustPair) {
		return nil
	}
	for i := range x.view.Endpoints {
		at := &x.view.Endpoints[i]
		if at.Awaits && at.Usable && at.Endpoint.Role&kvstate.RoleBoth != 0 &&
			!slices.Contains(r.Excluded, at.Endpoint.Addr) {
			return at.Endpoint
		}
	}
	return nil
}

// untilReport waits until an endpoint's engine has reported what it is. It returns false if nothing was waited for: the
// client has left, the replica ends, or the time is over.
func (x *Pass) untilReport(ctx context.Context, e *kvstate.Endpoint, until time.Time) bool {
	over, tick := time.NewTimer(time.Until(until)), time.NewTicker(reportTick)
	defer over.Stop()
	defer tick.Stop()
	for x.shared.State.AwaitsReport(e) && !e.Failed() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		case <-x.shared.Waiting.Draining:
			return false
		case <-over.C:
			return false
		}
	}
	return true
}

// pickNow has endpoints of the view chosen. It does so at once or, if its pool makes requests wait, in its turn. A
// view that lacks some of the pool's endpoints cannot be filled again, so its requests do not wait. Nor do requests of
// later passes, unless the endpoints for them are full. A request for one endpoint waits until one that may have it is
// no longer full.
func (x *Pass) pickNow(ctx context.Context, r *picker.Request) (c picker.Choice, err error) {
	policy := x.policy
	if x.Req.Attempt.Redirects > 0 && latebinding.IsAtOnce(ctx) { // it may rest first
		return c, latebinding.ErrWaits
	}
	x.picker.Policy = policy.Placement()
	waits := policy.queue != nil && x.want.way.waits() &&
		len(x.view.Endpoints) == len(x.Req.Pool.Endpoints())
	if !waits || x.Req.Attempt.Redirects > 0 {
		miss := r.OnMiss
		if miss == picker.MissWait {
			r.OnMiss = picker.MissGoOn
		}
		if x.want.way == atOnce && policy.Dialect.PairsOnly() {
			for i := range x.view.Endpoints {
				x.view.Endpoints[i].LeaveOut(kvstate.RoleBoth)
			}
		}
		c, err = x.picker.Pick(r, &x.view)
		switch {
		case !errors.Is(err, picker.ErrFull):
			return c, err
		case x.want.way == alone:
			left, rested := policy.queue.Rest(ctx, &x.Req)
			x.Meter.LeaveOut(rested)
			err = x.chooseOnceFree(ctx, time.Now().Add(left), func() (err error) {
				if err = x.narrow(); err == nil {
					c, err = x.picker.Pick(r, &x.view)
				}
				return err
			})
			return c, err
		case !waits:
			return c, err
		}
		r.OnMiss = miss
	}
	c, waited, err := policy.queue.Choose(ctx, &x.waiter, &x.Req, &x.view, r)
	x.Meter.LeaveOut(waited) // waiting is no part of deciding
	return c, err
}

// chooseOnceFree chooses from the endpoints as they are now. While those that may get the request are full, it chooses
// again, until a time at most.
func (x *Pass) chooseOnceFree(ctx context.Context, until time.Time, choose func() error) error {
	waited, err := x.policy.queue.UntilFree(ctx, until, func() error {
		x.look()
		return choose()
	})
	x.Meter.LeaveOut(waited) // waiting is no part of deciding
	return err
}

// chooseDecode chooses D for a prompt that P has computed, if it is not the D of pass 1. While those that may have it
// are full, it waits.
func (x *Pass) chooseDecode(ctx context.Context, h *plan.HandOver) error {
	r, p, t := &x.Req, x.policy, h.Ticket
	if h.Bound(r.Pool, &p.Policy) {
		return nil
	}
	r.Session = t.Session
	err := x.chooseOnceFree(ctx, t.Expires, func() error {
		r.MatchReported(&x.view, t.PromptTokens)
		return h.Choose(r, &x.view, &x.picker, &p.Policy)
	})
	if err != nil && !errors.Is(err, latebinding.ErrWaits) {
		return p.NoEndpoint(r.Pool, err)
	}
	return err
}
