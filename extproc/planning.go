package extproc

import (
	"errors"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/latebinding"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
)

// planning plans one pass of a request: it reads the body and the state, has endpoints chosen, and lets package plan
// decide; commit.go carries the decision out. Later streams reuse the memory.
type planning struct {
	handler
	req    plan.Request
	view   kvstate.View
	picker picker.Picker
	waiter latebinding.Waiter

	reservedAs string // see reservationKey
	newID      bool   // the client's request id was missing or invalid
	stripped   bool   // the path is not as Envoy has it: a gateway's prefix was removed, or a ticket has the client's

	explanation []byte // for a header; nil: no operator asked for it
	decision    []byte // dynamic metadata; nil: none
}

// reset clears the request; the memory stays.
func (x *planning) reset() {
	x.waiter.Reset()
	x.req.Reset()
	x.reservedAs, x.newID, x.stripped = "", false, false
	x.explanation, x.decision = nil, nil
}

// identify sets the request id: the client's own if it is valid, else a new one.
func (x *planning) identify() {
	id := string(x.msg.Headers.RequestID)
	x.reservedAs = reservationKey(x.msg.Headers.Reservation, x.msg.Headers.RequestID)
	if openai.RequestID(id) {
		x.requestID = id
		return
	}
	x.requestID, x.newID = openai.NewRequestID(random(), random()), true
}

// clientAPI returns the API of a request.
func (x *planning) clientAPI() openai.API {
	api := openai.Classify(string(x.msg.Headers.Method), string(x.msg.Headers.Path))
	if api == openai.SGLangGenerate && !x.isSGLang() {
		return openai.PassThrough
	}
	return api
}

// describe begins to plan a request to a pool.
func (x *planning) describe(pool *kvstate.Pool, a plan.Attempt) {
	r := &x.req
	r.Pool, r.Attempt, r.Limits, r.Clock = pool, a, x.s.limits(), x.s.now
	r.ID, r.Began, r.Traced = x.requestID, x.Began, x.Recording()
}

// read reads what the state has of a request's prompt and session, and of the endpoints.
func (x *planning) read(policy *Policy) {
	r := &x.req
	r.Hash()
	if r.Redirects == 0 {
		x.s.State.CountPrompt(r.Pool, r.Hashes)
	}
	x.s.State.View(r.Pool, r.Hashes, &x.view)
	if r.Session = x.sessionOf(policy.Session); r.Session != 0 {
		x.s.State.MarkSession(r.Pool, r.Session, &x.view)
	}
	x.countTokens(policy)
}

// scan reads the body. In the rare case that it has members which a client must not send, it cuts them.
func (x *planning) scan(api openai.API) error {
	if err := x.req.Scan(api, x.body.Bytes(), openai.Limits{}); err != nil {
		return err
	}
	if !x.req.HasControl() {
		return nil
	}
	x.ControlFieldsCut()
	x.spare.Grow(x.body.Len())
	x.spare.Data = x.req.Clean(x.spare.Data[:0])
	x.swapBody()
	return x.req.Scan(api, x.body.Bytes(), openai.Limits{})
}

// scanOther reads a form for its model, and a JSON body of another API for that and for members that a client must not send: engines
// accept chat requests on more paths than the well-known ones. Ambiguous JSON is refused. JSON that is not an
// object has neither model nor members; the engine validates it.
func (x *planning) scanOther() (model string, err error) {
	kind := string(x.msg.Headers.ContentType)
	switch {
	case x.body.Len() == 0:
		return "", nil
	case openai.IsForm(kind):
		return openai.FormModel(kind, x.body.Bytes()) //nolint:wrapcheck // the client's answer
	}
	// Engines check the media type only: vLLM 0.32.0 reads {"do_remote_prefill":true} with charset=latin1, or any
	// other parameter, on /invocations, and crashes.
	if err := openai.CheckHeaders(kind, ""); err != nil {
		return "", err
	}
	err = x.scan(openai.PassThrough)
	if e := (*openai.Error)(nil); errors.As(err, &e) && e.Code == "invalid_body" {
		return "", nil
	}
	return x.req.Model(), err
}

// recallPrompt finds the text blocks of a ticket's prompt by its last block. There are none if this replica does
// not receive updates from the replica that routed the prompt.
func (x *planning) recallPrompt(pool *kvstate.Pool, t *kvtransfer.Ticket) {
	x.req.Hashes = x.req.Hashes[:0]
	if text := pool.TextOf(x.req.Hashes, t.Prompt, plan.MaxBlocks); text != nil {
		x.req.Hashes = text
	}
}
