package extproc

import (
	"errors"
	"slices"

	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
)

// choose picks the endpoints of a request in x.view: at once or, if its pool makes requests wait, when it is its
// turn. A view that lacks some of the pool's endpoints cannot be filled again, so its requests do not wait.
func (x *planning) choose(policy *Policy, r *picker.Request) (picker.Choice, error) {
	r.MinAnswer, r.MaxAnswer = x.req.AnswerTokens()
	c, err := x.chooseNow(policy, r)
	x.req.Priority, x.req.Targets, x.req.Foreseen = r.Priority, r.Targets, plan.Foresee(&c)
	return c, plan.Missed(r, &c, err)
}

func (x *planning) chooseNow(policy *Policy, r *picker.Request) (picker.Choice, error) {
	x.picker.Policy = policy.Placement()
	if policy.queue == nil || x.req.Redirects > 0 || len(x.view.Endpoints) != len(x.req.Pool.Endpoints()) {
		if r.OnMiss == picker.MissWait {
			r.OnMiss = picker.MissGoOn
		}
		if policy.Dialect.PairsOnly() {
			x.view.Endpoints = slices.DeleteFunc(x.view.Endpoints, func(c kvstate.Candidate) bool {
				return c.Endpoint.Role == kvstate.RoleBoth
			})
		}
		return x.picker.Pick(r, &x.view)
	}
	c, waited, err := policy.queue.Choose(x.stream.Context(), &x.waiter, &x.req, &x.view, r)
	x.LeaveOut(waited) // waiting is no part of deciding
	return c, err
}

// chooseOther is choose with regard to failed KV loads. A request that is not streamed may try an avoided pair
// again. A request whose last pair failed excludes that pair's decode endpoint. It gets a pair without either
// endpoint; else, after the first failure, one with another prefill endpoint; else one with another decode
// endpoint. If all pairs are avoided and there is no other way to answer, it gets an avoided pair, which may fail
// again: the alternative is a certain error.
func (x *planning) chooseOther(policy *Policy, r *picker.Request) (picker.Choice, error) {
	if !x.req.True(openai.FieldStream) {
		x.view.AllowTrials()
	}
	if x.req.PairFailed != ([2]string{}) && r.Split {
		excluded, prefill := r.Excluded, x.req.PairFailed[0]
		tries := [][]string{append([]string{prefill}, excluded...)}
		if len(excluded) == 1 {
			tries = append(tries, []string{prefill})
		}
		for _, r.Excluded = range tries {
			if c, err := x.choose(policy, r); err == nil && c.Prefill >= 0 {
				return c, nil
			}
		}
		r.Excluded = excluded
	}
	c, err := x.choose(policy, r)
	refused := err == nil && c.Prefill < 0 && r.Split && policy.MustSplit()
	if (refused || errors.Is(err, picker.ErrNoEndpoint)) && x.view.ForgetFaults() {
		return x.choose(policy, r)
	}
	return c, err
}

// shortOfMemory reports whether so much of the memory for bodies is in use that no request should wait with its
// body.
func (s *Server) shortOfMemory() bool { return s.Memory.Load() > s.Memory.Limit()/4*3 }
