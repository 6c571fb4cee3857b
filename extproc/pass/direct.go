package pass

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
	"tandem/picker"
)

const (
	maxDirectCalls = 1024     // concurrent prefill calls; further requests are decoded alone
	maxAnswer      = 16 << 20 // of a prefill endpoint's answer, bytes: one token, and the KV parameters
)

// direct makes the prefill hop in place of Envoy. It is safe for concurrent use.
type direct struct {
	places chan struct{}
	client *enginehttp.Client
}

func newDirect() *direct {
	client := enginehttp.New(0, func(t *http.Transport) {
		t.MaxIdleConnsPerHost, t.IdleConnTimeout, t.DisableCompression = 64, time.Minute, true
	})
	return &direct{places: make(chan struct{}, maxDirectCalls), client: client}
}

// prefillCall is the prefill of a request in place of Envoy's hop.
type prefillCall struct {
	pass     *Pass
	decision *plan.Decision
}

// complete asks P to compute the prompt, and completes the decision. If no prefill succeeds, D computes the prompt, and
// is reserved again for that work: held is D's reservation.
func (k prefillCall) complete(ctx context.Context, held kvstate.ReservationID) (kvstate.ReservationID, error) {
	x, d := k.pass, k.decision
	edits, err := k.prefill(ctx)
	if err != nil {
		return held, err
	}
	d.Report.Reason = x.Req.Attempt.Why
	d.Edits = plan.Merge(edits, d.Edits)
	d.Ticket.BodyBytes, d.Ticket.Undo = d.Edits.Len(x.size()), d.Edits.Inverse(nil, x.Body.Bytes())
	if edits != nil {
		return held, nil
	}
	alone := x.choice
	alone.Prefill = -1
	d.Report.Route, d.Decode.Booking = "decode_alone", alone.DecodeBooking(&x.view)
	d.Decode.Booking.Of = x.Req.Conversation
	x.shared.State.Bookings.Release(held)
	return x.shared.State.Bookings.ReserveAs(held, d.Decode.Endpoint, d.Decode.Booking, x.Source), nil
}

// prefill calls P to compute the prompt, and returns the edits that turn the client's body into D's. If a prefill fails
// it tries another, according to the pool's policy. Without edits D computes the prompt itself. The call ends with ctx,
// so a client that leaves ends its prefill.
func (k prefillCall) prefill(ctx context.Context) (openai.Edits, error) {
	x := k.pass
	r, p, v, c := &x.Req, &x.policy.Policy, &x.view, x.choice
	select {
	case x.shared.direct.places <- struct{}{}:
		defer func() { <-x.shared.direct.places }()
	default:
		r.Attempt.Why = "direct_calls_spent"
		return nil, nil
	}
	for {
		e := v.Endpoints[c.Prefill].Endpoint
		edits, err := k.once(ctx, c)
		r.Attempt.Prefills++
		if err == nil {
			return edits, nil
		}
		if errors.Is(err, errDecodeDecides) {
			r.Attempt.Why = "prefill_refused"
			return nil, nil
		}
		var answer *openai.Error
		if errors.As(err, &answer) || ctx.Err() != nil {
			return nil, err
		}
		x.shared.Log.Warn("prefill failed", "request_id", r.ID, "endpoint", e.Addr, "err", err)
		r.Attempt.Excluded = append(r.Attempt.Excluded, e.Addr)
		if p.OnFailure == plan.Fail {
			return nil, plan.PrefillFailed(": " + e.Addr)
		}
		r.Attempt.Why = "prefill_failed"
		if p.OnFailure == plan.DecodeAlone || r.Attempt.Prefills >= p.PrefillAttempts || r.Attempt.Late(p) {
			return nil, nil
		}
		want := r.Ask(p, r.Tokens, true)
		for i := range v.Endpoints { // the view is of before the call
			c := &v.Endpoints[i]
			full, _ := c.Endpoint.FullFor(time.Now())
			c.Usable = c.Usable && full == 0
		}
		again, err := x.picker.Pick(&want, v)
		group := v.Endpoints[c.Decode].Endpoint.Group
		if err != nil || again.Prefill < 0 || v.Endpoints[again.Prefill].Endpoint.Group != group {
			return nil, nil
		}
		again.Decode = c.Decode
		c = again
	}
}

// errDecodeDecides: P has refused the request, but perhaps not because of the client's own body.
var errDecodeDecides = errors.New("prefill refused what it was sent: decode alone decides")

// once makes one prefill call, from the reservation to the parameters. An error that wraps *openai.Error is the
// client's.
func (k prefillCall) once(ctx context.Context, c picker.Choice) (openai.Edits, error) {
	x, d := k.pass, k.decision
	s, r, p, pool := x.shared, &x.Req, &x.policy.Policy, x.Req.Pool
	e, before := x.view.Endpoints[c.Prefill].Endpoint, x.view.Endpoints[c.Prefill].PromptTokens
	booking := c.PrefillBooking()
	booking.Media = r.Size.Media.Any()
	booked := s.State.Bookings.ReserveAs(0, e, booking, x.Source)
	defer s.State.Bookings.Release(booked)
	x.waiter.Committed()
	s.State.Routed(pool, e, r.Hashes)
	r.AskPrefill(&x.view, p, c.Prefill, d.Endpoint)
	t := d.Ticket // as that of a prefill leg
	t.Stage, t.Prefill, t.Params = kvtransfer.PrefillLeg, e.Addr, nil
	r.Expect(&t, c, p)
	if d.Gateway != nil && d.Gateway.Model != "" {
		r.Patch.Set("model", openai.FieldModel, strconv.AppendQuote(nil, d.Gateway.Model))
	}
	edits, _, _ := r.Edits(p)
	limited, cancel := context.WithTimeout(ctx, p.PrefillTimeout+pool.PrefillTime(r.Tokens+before, p.PerToken))
	defer cancel()
	began := time.Now()
	t.BodyBytes = edits.Len(len(r.Client.Body()))
	a, err := k.post(limited, e, edits.Apply(nil, r.Client.Body()))
	took, status := time.Since(began), a.Code
	x.Prefilled.ObserveLoad(&t, a.Load)
	x.Meter.Observer.HopEnded(pool.Spec.Name, "prefill", e.Addr, directResult(status, err), took, x.Meter.Exemplar)
	if err != nil && status == http.StatusOK {
		s.Cut(&t)
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil || status != http.StatusOK:
		return nil, k.failed(e, &a, took, err)
	}
	got, err := p.Dialect.ReadAnswer(a.Body, &r.Sides)
	if err != nil {
		return nil, err
	}
	s.State.Bookings.Complete(booked)
	x.Prefilled.ID = x.ID
	x.Prefilled.Computed(pool, &t, &got, took)
	if got.Params == nil {
		return openai.Edits{}, nil
	}
	member := append(p.Dialect.DecodeMember(nil, got.Params), ',')
	// P answered 200, so its body is not an empty object and the comma is valid
	at := bytes.IndexByte(r.Client.Body(), '{') + 1
	return openai.Edits{{Start: at, End: at, New: member}}, nil
}

// failed records what a failed call says of P, and returns what it means for the request. broke is why it has no whole
// answer; nil: it has.
func (k prefillCall) failed(e *kvstate.Endpoint, a *Answer, took time.Duration, broke error) error {
	x, p := k.pass, &k.pass.policy.Policy
	f := faults.Of(a.Code, "", string(a.RetryAfter))
	if broke != nil {
		overdue := p.PrefillTimeout > 0 && took >= p.PrefillTimeout
		f = faults.Failure{Overdue: overdue, Unreached: !overdue}
	}
	m := faults.Means(faults.Prefill, &f, faults.Facts{
		DecodeDecides: p.DecodeDecides(f.Status, x.Req.Client.Shaped()),
	})
	switch {
	case m.Client:
		return &openai.Error{
			Status: a.Code, Type: "invalid_request_error", Code: "prefill_refused", Message: printableAnswer(a.Body),
		}
	case m.Cause == kvtransfer.CauseRefused:
		return errDecodeDecides
	case m.Blames:
		x.shared.Faults.Hop(x.Req.Pool.Spec.Name, x.Req.ID, e.Addr, &f)
	}
	if broke != nil {
		return broke
	}
	return fmt.Errorf("status %d", a.Code)
}

// post sends a body to an endpoint, on the client's path, and reads the answer. If the answer breaks off, it has its
// status, and err is not nil.
func (k prefillCall) post(ctx context.Context, e *kvstate.Endpoint, body []byte) (a Answer, err error) {
	x, client := k.pass, k.pass.shared.direct.client
	// the client's own key, or none: Tandem's is not for clients
	header := http.Header{"X-Request-Id": {x.ID}, "Authorization": nil}
	header.Set(enginehttp.ORCARequestHeader, "JSON")
	if len(x.Head.Authorization) > 0 {
		header.Set("Authorization", string(x.Head.Authorization))
	}
	resp, err := client.Post(ctx, e, string(x.Head.Path), body, header) //nolint:bodyclose // ReadAll closes it
	if err != nil {
		return Answer{}, err
	}
	a = Answer{
		Code: resp.StatusCode, RetryAfter: []byte(resp.Header.Get("Retry-After")),
		Load: []byte(resp.Header.Get(enginehttp.ORCAHeader)),
	}
	a.Body, err = enginehttp.ReadAll(resp, maxAnswer)
	return a, err
}

func directResult(status int, err error) string {
	switch {
	case errors.Is(err, context.Canceled):
		return "client_gone"
	case err != nil || !plan.ClientsFault(status) && status != http.StatusOK:
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
