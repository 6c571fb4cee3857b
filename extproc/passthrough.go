package extproc

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
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
	if id, ok := storedResponse(string(h.Path)); ok {
		if pool, e := x.findHolder(id); e != nil && x.serves(pool) {
			return x.pass(pool, e, pool.PromptTokens(x.body.Len()), "stored_response"), nil
		}
	}
	pool := x.s.State.PoolFor(model)
	if pool == nil {
		pool = x.s.State.PoolFor("")
	}
	if pool == nil {
		return nil, openai.Unavailable("no_pool", "no pool is configured", time.Second)
	}
	if !x.serves(pool) {
		return nil, openai.NotServed()
	}
	if err := closed(pool); err != nil {
		return nil, err
	}
	tokens := pool.PromptTokens(x.body.Len())
	x.s.State.View(pool, nil, &x.view)
	policy, _ := x.s.policy(pool.Spec.Name)
	x.picker.Policy = policy.Placement()
	choice, err := x.picker.Pick(&picker.Request{PromptTokens: tokens, Model: model, Labels: x.labelsOf(&policy), Rand: random()}, &x.view)
	if err != nil {
		return nil, policy.NoEndpoint(pool, err)
	}
	return x.pass(pool, x.view.Endpoints[choice.Decode].Endpoint, tokens, "pass_through"), nil
}

// serves reports whether clients may use the request's path on the pool's engines.
func (x firstPass) serves(pool *kvstate.Pool) bool {
	policy, _ := x.s.policy(pool.Spec.Name)
	return policy.Paths.Allow(string(x.msg.Headers.Method), string(x.msg.Headers.Path))
}

// pass decides for one hop straight to an endpoint, without retry or redirect.
func (x firstPass) pass(pool *kvstate.Pool, e *kvstate.Endpoint, tokens int64, kind string) *plan.Decision {
	return x.decided(&plan.Decision{
		Leg: envoywire.LegPass, Pool: pool, Endpoint: e, Decode: plan.Reservation{Endpoint: e, Booking: plan.Decoding(tokens)},
		Report: plan.Report{Route: kind, Decode: e},
		Ticket: kvtransfer.Ticket{
			ID: newTicketID(), Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: time.Now(),
			Pool: pool.Spec.Name, Decode: e.Addr, BodyBytes: x.body.Len(), PromptTokens: tokens,
		},
	})
}

// Stored responses (OpenAI's Responses API: store, background, previous_response_id) stay in the engine that made
// them. Engines take the id of a new response from the body's request_id (vLLM and SGLang:
// ResponsesRequest.request_id). So Tandem puts the endpoint's name into it, and every replica finds the endpoint
// again without storing anything.

// holder finds the endpoint that a request to the Responses API is bound to. stored is false if it is not bound.
func (x *planning) holder(pool *kvstate.Pool) (e *kvstate.Endpoint, stored bool) {
	if x.req.API() != openai.Responses {
		return nil, false
	}
	if id, ok := x.req.String(openai.FieldPreviousResponseID); ok {
		if e := holderOf(pool, id); e != nil {
			return e, true
		}
	}
	return nil, x.req.True(openai.FieldStore) || x.req.True(openai.FieldBackground)
}

// toHolder routes a request to the endpoint that holds, or will hold, its response.
func (x firstPass) toHolder(pool *kvstate.Pool, e *kvstate.Endpoint) (*plan.Decision, error) {
	tokens := pool.PromptTokens(x.body.Len())
	if e == nil {
		x.s.State.View(pool, nil, &x.view)
		policy, _ := x.s.policy(pool.Spec.Name)
		x.picker.Policy = policy.Placement()
		choice, err := x.picker.Pick(&picker.Request{PromptTokens: tokens, Model: x.req.Model(), Labels: x.labelsOf(&policy), Rand: random()}, &x.view)
		if err != nil {
			return nil, policy.NoEndpoint(pool, err)
		}
		e = x.view.Endpoints[choice.Decode].Endpoint
	}
	d := x.pass(pool, e, tokens, "stored_response")
	if !x.req.Has(openai.FieldRequestID) {
		x.patch.Reset(&x.req)
		x.patch.Set("request_id", openai.FieldRequestID, strconv.AppendQuote(nil, newResponseID(e)))
		d.Edits = x.patch.Edits()
	}
	return d, nil
}

// newResponseID makes an id that names the endpoint: 16 random hexadecimal digits and 16 of the address's hash.
func newResponseID(e *kvstate.Endpoint) string {
	return fmt.Sprintf("resp_%016x%016x", random(), xxhash.Sum64String(e.Addr))
}

// holderOf finds the endpoint that a response id names; nil if it is not one of the pool's.
func holderOf(pool *kvstate.Pool, id string) *kvstate.Endpoint {
	digits, ok := strings.CutPrefix(id, "resp_")
	if !ok || len(digits) != 32 {
		return nil
	}
	sum, err := strconv.ParseUint(digits[16:], 16, 64)
	if err != nil {
		return nil
	}
	all := pool.Endpoints()
	i := slices.IndexFunc(all, func(e *kvstate.Endpoint) bool { return xxhash.Sum64String(e.Addr) == sum })
	if i < 0 {
		return nil
	}
	return all[i]
}

func (x firstPass) findHolder(id string) (*kvstate.Pool, *kvstate.Endpoint) {
	for _, pool := range x.s.State.Pools() {
		if e := holderOf(pool, id); e != nil {
			return pool, e
		}
	}
	return nil, nil
}

// storedResponse extracts the id from /v1/responses/{id} and the paths below it.
func storedResponse(path string) (id string, ok bool) {
	rest, ok := strings.CutPrefix(path, "/v1/responses/")
	if !ok {
		return "", false
	}
	if i := strings.IndexAny(rest, "/?"); i >= 0 {
		rest = rest[:i]
	}
	return rest, rest != ""
}

// listModels answers GET /v1/models with the union over all pools.
func (x mainRole) listModels() error {
	var ids []string
	for _, pool := range x.s.State.Pools() {
		ids = append(ids, x.s.State.Models(pool)...)
	}
	slices.Sort(ids)
	i := &envoywire.Immediate{Status: 200, Body: openai.ModelList(slices.Compact(ids), x.s.started.Unix()), Details: envoywire.DetailsPrefix + "_models"}
	i.Headers.Set("content-type", []byte(envoywire.ContentTypeJSON))
	i.Headers.Set(envoywire.HeaderRequestID, []byte(x.requestID))
	if err := x.send(&envoywire.Reply{Immediate: i}); err != nil {
		return err
	}
	return errAnswered
}
