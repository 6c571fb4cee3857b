package extproc

import (
	"errors"

	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
)

// choose picks the endpoints of a request in x.view, and explains the choice to whoever asks. It does so at once or, if
// its pool makes requests wait, when it is its turn. A view that lacks some of the pool's endpoints cannot be filled
// again, so its requests do not wait. Nor do requests of later passes, unless the endpoints for them are full.
func (x *planning) choose(policy *Policy, r *picker.Request) (picker.Choice, error) {
	c, err := x.chooseNow(policy, r)
	x.req.Priority, x.req.Targets, x.req.Foreseen = r.Priority, r.Targets, plan.Foresee(&c)
	x.explain(x.req.Pool, r)
	return c, plan.Missed(r, &c, err)
}

func (x *planning) chooseNow(policy *Policy, r *picker.Request) (c picker.Choice, err error) {
	x.picker.Policy = policy.Placement()
	waits := policy.queue != nil && len(x.view.Endpoints) == len(x.req.Pool.Endpoints())
	if !waits || x.req.Redirects > 0 {
		miss := r.OnMiss
		if miss == picker.MissWait {
			r.OnMiss = picker.MissGoOn
		}
		if policy.Dialect.PairsOnly() {
			for i := range x.view.Endpoints {
				x.view.Endpoints[i].LeaveOut(kvstate.RoleBoth)
			}
		}
		if c, err = x.picker.Pick(r, &x.view); !waits || !errors.Is(err, picker.ErrFull) {
			return c, err
		}
		r.OnMiss = miss
	}
	c, waited, err := policy.queue.Choose(x.stream.Context(), &x.waiter, &x.req, &x.view, r)
	x.LeaveOut(waited) // waiting is no part of deciding
	return c, err
}

// shortOfMemory reports whether so much of the memory for bodies is in use that no request should wait with its
// body.
func (s *Server) shortOfMemory() bool { return s.Memory.Load() > s.Memory.Limit()/4*3 }
