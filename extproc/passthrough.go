package extproc

import (
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/models"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
)

// passThrough routes requests that are never split (tokenize, embeddings, uploads, health, a stored response) in
// one hop, with the body unchanged.
func (x firstPass) passThrough() (*plan.Decision, error) {
	h := &x.msg.Headers
	if !x.s.served(string(h.Method), string(h.Path)) {
		return nil, openai.NotServed()
	}
	if err := x.checkBody(); err != nil {
		return nil, err
	}
	if x.msg.Mode.Request != envoywire.ModeNone {
		if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
			return nil, err
		}
	}
	model, err := x.scanOther()
	if err != nil {
		return nil, err
	}
	if id, ok := plan.StoredResponse(string(h.Path)); ok {
		if pool, e := plan.FindHolder(x.s.State.Pools(), id); e != nil && x.serves(pool) {
			x.describe(pool, plan.Attempt{})
			return plan.Pass(&x.req, e, x.body.Len(), "stored_response"), nil
		}
	}
	if model == "" {
		model = models.NameIn(string(h.Path))
	}
	pool := x.s.State.PoolFor(model)
	switch {
	case pool == nil && model != "":
		return nil, openai.ModelNotFound(model)
	case pool == nil:
		return nil, openai.Unavailable("no_pool", "no pool is configured", time.Second)
	}
	if !x.serves(pool) {
		return nil, openai.NotServed()
	}
	if err := closed(pool); err != nil {
		return nil, err
	}
	x.describe(pool, plan.Attempt{})
	policy, _ := x.s.policy(pool.Spec.Name)
	e, err := x.pickAny(policy, model)
	if err != nil {
		return nil, err
	}
	return plan.Pass(&x.req, e, x.body.Len(), "pass_through"), nil
}

// serves reports whether clients may use the request's path on the pool's engines.
func (x firstPass) serves(pool *kvstate.Pool) bool {
	policy, _ := x.s.policy(pool.Spec.Name)
	return policy.Paths.Allow(string(x.msg.Headers.Method), string(x.msg.Headers.Path))
}

// toHolder routes a request to the endpoint that holds, or will hold, its response.
func (x firstPass) toHolder(policy *Policy, e *kvstate.Endpoint) (*plan.Decision, error) {
	if e == nil {
		var err error
		if e, err = x.pickAny(policy, x.req.Model()); err != nil {
			return nil, err
		}
	}
	return plan.ToHolder(&x.req, e), nil
}

// pickAny chooses an endpoint for a request without a prompt.
func (x *planning) pickAny(policy *Policy, model string) (*kvstate.Endpoint, error) {
	pool := x.req.Pool
	x.s.State.View(pool, nil, &x.view)
	x.picker.Policy = policy.Placement()
	x.req.Labels, x.req.Hashes = x.labelsOf(policy), x.req.Hashes[:0]
	request := x.req.Ask(&policy.Policy, pool.PromptTokens(x.body.Len()), false)
	request.Model, request.Targets, request.MinAnswer, request.MaxAnswer = model, picker.Targets{}, 0, 0
	choice, err := x.picker.Pick(&request, &x.view)
	if err != nil {
		return nil, policy.NoEndpoint(pool, err)
	}
	return x.view.Endpoints[choice.Decode].Endpoint, nil
}

// served reports whether any pool serves a path.
func (s *Server) served(method, path string) bool {
	for _, policy := range s.settings.Load().Pools {
		if policy.Paths.Allow(method, path) {
			return true
		}
	}
	return false
}

// checkBody refuses a body that an engine might read otherwise than Tandem; see [openai.CheckOther].
func (x *planning) checkBody() error {
	if x.msg.EndOfStream && x.body.Len() == 0 {
		return nil
	}
	h := &x.msg.Headers
	return openai.CheckOther(string(h.ContentType), string(h.ContentEncoding), x.msg.Mode.Request != envoywire.ModeNone)
}

// listModels answers GET /v1/models, and GET /v1/models/NAME if the name is known; an engine answers of others.
func (x mainRole) listModels() (*plan.Decision, error) {
	body := models.Answer(x.s.State, string(x.msg.Headers.Path), x.s.started)
	if body == nil {
		return firstPass{x.planning}.passThrough()
	}
	i := &envoywire.Immediate{Status: 200, Body: body, Details: envoywire.DetailsPrefix + "_models"}
	i.Headers.Set("content-type", []byte(envoywire.ContentTypeJSON))
	i.Headers.Set(envoywire.HeaderRequestID, []byte(x.requestID))
	if err := x.send(&envoywire.Reply{Immediate: i}); err != nil {
		return nil, err
	}
	return nil, errAnswered
}
