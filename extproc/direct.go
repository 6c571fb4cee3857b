package extproc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
	"tandem/picker"
)

// maxDirectCalls bounds the concurrent prefill calls; further requests are decoded alone.
const maxDirectCalls = 1024

// directCalls makes the prefill hop in place of Envoy.
type directCalls struct {
	places chan struct{}
	client *enginehttp.Client
}

func newDirectCalls() *directCalls {
	return &directCalls{places: make(chan struct{}, maxDirectCalls), client: enginehttp.New(0, func(t *http.Transport) {
		t.MaxIdleConnsPerHost, t.IdleConnTimeout, t.DisableCompression = 64, time.Minute, true
	})}
}

// prefillDirectly calls P to compute the prompt, and returns the edits that turn the client's body into D's. If a
// prefill fails it tries another, according to the pool's policy. Without edits D computes the prompt itself. The
// call ends with the stream, so a client that leaves ends its prefill.
func (x firstPass) prefillDirectly(policy *Policy, c picker.Choice, model string) (openai.Edits, error) {
	a := &x.req.Attempt
	select {
	case x.s.direct.places <- struct{}{}:
		defer func() { <-x.s.direct.places }()
	default:
		a.Why = "direct_calls_spent"
		return nil, nil
	}
	for {
		p := x.view.Endpoints[c.Prefill]
		edits, err := x.callPrefill(policy, c, model)
		a.Prefills++
		if err == nil {
			return edits, nil
		}
		var answer *openai.Error
		if errors.As(err, &answer) || x.stream.Context().Err() != nil {
			return nil, err
		}
		x.s.Log.Warn("prefill failed", "request_id", x.requestID, "endpoint", p.Endpoint.Addr, "err", err)
		a.Excluded = append(a.Excluded, p.Endpoint.Addr)
		if policy.OnFailure == plan.Fail {
			return nil, openai.Unavailable("prefill_failed", "the prefill of this request failed", time.Second)
		}
		a.Why = "prefill_failed"
		if policy.OnFailure == plan.DecodeAlone || a.Prefills >= policy.PrefillAttempts || a.Late(&policy.Policy) {
			return nil, nil
		}
		again, err := x.picker.Pick(&picker.Request{
			PromptTokens: x.req.Tokens, Blocks: len(x.req.Hashes), Model: x.req.Model(), Labels: x.labelsOf(policy), Split: true, Excluded: a.Excluded, Rand: random(),
		}, &x.view)
		if err != nil || again.Prefill < 0 || x.view.Endpoints[again.Prefill].Endpoint.Group != x.view.Endpoints[c.Decode].Endpoint.Group {
			return nil, nil
		}
		again.Decode = c.Decode
		c = again
	}
}

// callPrefill makes one prefill call, from the reservation to the parameters. An error that wraps *openai.Error is
// the client's.
func (x firstPass) callPrefill(policy *Policy, c picker.Choice, model string) (openai.Edits, error) {
	r, pool := &x.req, x.req.Pool
	p, d, before := x.view.Endpoints[c.Prefill].Endpoint, x.view.Endpoints[c.Decode].Endpoint, x.view.Endpoints[c.Prefill].PromptTokens
	booked := x.s.State.ReserveAs(0, p, c.PrefillBooking(), sourceOf(x.stream.Context()))
	x.committed()
	defer x.s.State.Release(booked)
	x.s.State.Routed(pool, p, r.Hashes)
	r.Sides = kvtransfer.Pair{RequestID: x.requestID, Attempt: plan.NewID(), Prefill: plan.SideOf(p), Decode: plan.SideOf(d)}
	r.SetSource(&x.view, &policy.Policy, c.Prefill)
	r.Patch.Reset(&r.Request)
	policy.Dialect.Prefill(&r.Request, &r.Patch, &r.Sides)
	if model != "" {
		r.Patch.Set("model", openai.FieldModel, strconv.AppendQuote(nil, model))
	}
	edits := r.Patch.Edits()
	ctx, cancel := context.WithTimeout(x.stream.Context(), policy.PrefillTimeout+pool.PrefillTime(r.Tokens+before, policy.PerToken))
	defer cancel()
	began := time.Now()
	status, body, err := x.post(ctx, p, edits.Apply(nil, x.body.Bytes()))
	took := time.Since(began)
	x.s.metrics.HopEnded(pool.Spec.Name, "prefill", p.Addr, directResult(status, err), took, x.Exemplar)
	switch {
	case x.stream.Context().Err() != nil:
		return nil, x.stream.Context().Err()
	case err != nil:
		t := &kvtransfer.Ticket{Pool: pool.Spec.Name, Stage: kvtransfer.PrefillLeg}
		x.s.markFailed(p, t, overdue(took, x.s.limit(t)))
		return nil, err
	case clientsFault(status):
		return nil, &openai.Error{Status: status, Type: "invalid_request_error", Code: "prefill_refused", Message: printableAnswer(body)}
	case status >= http.StatusInternalServerError:
		x.s.State.MarkFailed(p)
		return nil, fmt.Errorf("status %d", status)
	case status != http.StatusOK:
		return nil, fmt.Errorf("status %d", status)
	}
	got, err := policy.Dialect.ReadAnswer(body, &r.Sides)
	if err != nil {
		return nil, err
	}
	x.s.State.Complete(booked)
	x.s.State.MarkGood(p)
	x.s.metrics.Prompt(pool.Spec.Name, got)
	if got.PromptTokens > 0 {
		pool.ObservePrompt(int64(edits.Len(x.body.Len())), got.PromptTokens)
		pool.ObservePrefill(got.PromptTokens-max(got.CachedTokens, 0), took)
	}
	if got.Params == nil {
		return openai.Edits{}, nil
	}
	member := append(policy.Dialect.DecodeMember(nil, got.Params), ',')
	// P answered 200, so its body is not an empty object and the comma is valid
	at := bytes.IndexByte(x.body.Bytes(), '{') + 1
	return openai.Edits{{Start: at, End: at, New: member}}, nil
}

// post sends a body to an endpoint, on the client's path, and reads the answer.
func (x firstPass) post(ctx context.Context, e *kvstate.Endpoint, body []byte) (status int, answer []byte, err error) {
	h := &x.msg.Headers
	header := http.Header{http.CanonicalHeaderKey(envoywire.HeaderRequestID): {x.requestID}}
	if len(h.Authorization) > 0 {
		header.Set("Authorization", string(h.Authorization))
	}
	resp, err := x.s.direct.client.Post(ctx, e, string(h.Path), body, header) //nolint:bodyclose // ReadAll closes it
	if err != nil {
		return 0, nil, err
	}
	answer, err = enginehttp.ReadAll(resp, maxAnswer)
	return resp.StatusCode, answer, err
}

func directResult(status int, err error) string {
	switch {
	case errors.Is(err, context.Canceled):
		return "client_gone"
	case err != nil || !clientsFault(status) && status != http.StatusOK:
		return "failed"
	case status != http.StatusOK:
		return "refused"
	}
	return "ok"
}

// printableAnswer returns the beginning of an engine's refusal, without line breaks, for a message.
func printableAnswer(body []byte) string {
	const longest = 500
	text := bytes.Map(func(r rune) rune {
		if r < ' ' {
			return ' '
		}
		return r
	}, body[:min(len(body), longest)])
	return "the prefill endpoint refused the request: " + string(bytes.ToValidUTF8(text, nil))
}
