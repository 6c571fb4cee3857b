package endpointpicker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"tandem/extproc/envoywire"
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

// Direct makes the prefill hop in place of Envoy. It is safe for concurrent use.
type Direct struct {
	state  *kvstate.State
	faults *faults.Faults
	places chan struct{}
	client *enginehttp.Client
}

// NewDirect returns a Direct that has no calls in progress.
func NewDirect(state *kvstate.State, f *faults.Faults) *Direct {
	client := enginehttp.New(0, func(t *http.Transport) {
		t.MaxIdleConnsPerHost, t.IdleConnTimeout, t.DisableCompression = 64, time.Minute, true
	})
	return &Direct{state: state, faults: f, places: make(chan struct{}, maxDirectCalls), client: client}
}

// Call is a request whose prompt P is asked to compute.
type Call struct {
	Request             *plan.Request
	View                *kvstate.View
	Picker              *picker.Picker
	Policy              *plan.Policy
	Model               string // to ask P for; "": the client's
	Path, Authorization string // of the client's request
	Source              *kvstate.Source
	Observer            Observer
}

// Observer learns what becomes of the calls for a request.
type Observer interface {
	Reserved() // P is reserved
	PrefillCalled(endpoint, result string, took time.Duration)
	PromptCounted(got kvtransfer.Answer)
}

// Prefill calls P to compute the prompt, and returns the edits that turn the client's body into D's. If a prefill fails
// it tries another, according to the pool's policy. Without edits D computes the prompt itself. The call ends with ctx,
// so a client that leaves ends its prefill.
func (d *Direct) Prefill(ctx context.Context, call *Call, c picker.Choice) (openai.Edits, error) {
	r, p, v := call.Request, call.Policy, call.View
	select {
	case d.places <- struct{}{}:
		defer func() { <-d.places }()
	default:
		r.Why = "direct_calls_spent"
		return nil, nil
	}
	for {
		e := v.Endpoints[c.Prefill].Endpoint
		edits, err := d.call(ctx, call, c)
		r.Prefills++
		if err == nil {
			return edits, nil
		}
		var answer *openai.Error
		if errors.As(err, &answer) || ctx.Err() != nil {
			return nil, err
		}
		d.faults.Log.Warn("prefill failed", "request_id", r.ID, "endpoint", e.Addr, "err", err)
		r.Excluded = append(r.Excluded, e.Addr)
		if p.OnFailure == plan.Fail {
			return nil, openai.Unavailable("prefill_failed", "the prefill of this request failed", time.Second)
		}
		r.Why = "prefill_failed"
		if p.OnFailure == plan.DecodeAlone || r.Prefills >= p.PrefillAttempts || r.Late(p) {
			return nil, nil
		}
		want := r.Ask(p, r.Tokens, true)
		for i := range v.Endpoints { // the view is of before the call
			c := &v.Endpoints[i]
			full, _ := c.Endpoint.FullFor(time.Now())
			c.Usable = c.Usable && full == 0
		}
		again, err := call.Picker.Pick(&want, v)
		group := v.Endpoints[c.Decode].Endpoint.Group
		if err != nil || again.Prefill < 0 || v.Endpoints[again.Prefill].Endpoint.Group != group {
			return nil, nil
		}
		again.Decode = c.Decode
		c = again
	}
}

// call makes one prefill call, from the reservation to the parameters. An error that wraps *openai.Error is the
// client's.
func (d *Direct) call(ctx context.Context, call *Call, c picker.Choice) (openai.Edits, error) {
	r, p, pool := call.Request, call.Policy, call.Request.Pool
	e, before := call.View.Endpoints[c.Prefill].Endpoint, call.View.Endpoints[c.Prefill].PromptTokens
	decode := call.View.Endpoints[c.Decode].Endpoint
	booked := d.state.ReserveAs(0, e, c.PrefillBooking(), call.Source)
	call.Observer.Reserved()
	defer d.state.Release(booked)
	d.state.Routed(pool, e, r.Hashes)
	r.Sides = kvtransfer.Pair{
		RequestID: r.ID, Attempt: plan.NewID(), Prefill: plan.SideOf(e), Decode: plan.SideOf(decode),
	}
	r.SetSource(call.View, p, c.Prefill)
	r.Patch.Reset(&r.Request)
	p.Dialect.Prefill(&r.Request, &r.Patch, &r.Sides)
	if call.Model != "" {
		r.Patch.Set("model", openai.FieldModel, strconv.AppendQuote(nil, call.Model))
	}
	edits := r.Patch.Edits()
	limited, cancel := context.WithTimeout(ctx, p.PrefillTimeout+pool.PrefillTime(r.Tokens+before, p.PerToken))
	defer cancel()
	began := time.Now()
	status, after, body, err := d.post(limited, call, e, edits.Apply(nil, r.Body()))
	took := time.Since(began)
	call.Observer.PrefillCalled(e.Addr, directResult(status, err), took)
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		overdue := p.PrefillTimeout > 0 && took >= p.PrefillTimeout
		d.faults.Hop(pool.Spec.Name, r.ID, e.Addr, &faults.Failure{Overdue: overdue, Unreached: !overdue})
		return nil, err
	case plan.ClientsFault(status):
		return nil, &openai.Error{
			Status: status, Type: "invalid_request_error", Code: "prefill_refused", Message: printableAnswer(body),
		}
	case status != http.StatusOK:
		f := faults.Of(status, "", after)
		d.faults.Hop(pool.Spec.Name, r.ID, e.Addr, &f)
		return nil, fmt.Errorf("status %d", status)
	}
	got, err := p.Dialect.ReadAnswer(body, &r.Sides)
	if err != nil {
		return nil, err
	}
	d.state.Complete(booked)
	d.state.MarkGood(e)
	call.Observer.PromptCounted(got)
	if got.PromptTokens > 0 {
		pool.ObservePrompt(int64(edits.Len(len(r.Body()))), got.PromptTokens)
		pool.ObservePrefill(got.PromptTokens-max(got.CachedTokens, 0), took)
	}
	if got.Params == nil {
		return openai.Edits{}, nil
	}
	member := append(p.Dialect.DecodeMember(nil, got.Params), ',')
	// P answered 200, so its body is not an empty object and the comma is valid
	at := bytes.IndexByte(r.Body(), '{') + 1
	return openai.Edits{{Start: at, End: at, New: member}}, nil
}

// post sends a body to an endpoint, on the client's path, and reads the answer and its Retry-After.
func (d *Direct) post(
	ctx context.Context, call *Call, e *kvstate.Endpoint, body []byte,
) (status int, after string, answer []byte, err error) {
	// the client's own key, or none: Tandem's is not for clients
	header := http.Header{http.CanonicalHeaderKey(envoywire.HeaderRequestID): {call.Request.ID}, "Authorization": nil}
	if call.Authorization != "" {
		header.Set("Authorization", call.Authorization)
	}
	resp, err := d.client.Post(ctx, e, call.Path, body, header) //nolint:bodyclose // ReadAll closes it
	if err != nil {
		return 0, "", nil, err
	}
	answer, err = enginehttp.ReadAll(resp, maxAnswer)
	return resp.StatusCode, resp.Header.Get("Retry-After"), answer, err
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
