package extproc

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
)

// answerLeg serves the filter of the listener answer-leg, which D's answer comes through where the client's is made of it.
// Only requests that need it go that way: such an answer hangs on the replica that writes it, and costs a message for
// every piece. An answer with another status than 200 goes on as it is, so that the main route can try again.
func (x *exchange) answerLeg() error {
	if err := x.receive(); err != nil {
		return err
	}
	if x.msg.phase != phaseResponseHeaders {
		return errors.New("the first message of an answer leg was not response headers")
	}
	a := &x.msg.attributes
	x.requestID = string(a.requestID)
	if len(a.clientID) > 0 {
		x.requestID = string(a.clientID)
	}
	t, err := x.s.keys().Open(string(a.ticket), x.requestID, time.Now())
	if t == nil { // an expired one will do: the answer is under way
		x.s.metrics.forgedTickets.Inc()
		return fmt.Errorf("opening the ticket of an answer leg: %w", err)
	}
	if code, _ := strconv.Atoi(string(x.msg.headers.status)); code != 200 {
		return x.passAnswer()
	}
	rewriter, err := x.rewriter(t)
	if err != nil {
		return err
	}
	if kind := x.msg.headers.contentType; bytes.HasPrefix(bytes.ToLower(kind), []byte("text/event-stream")) {
		return x.rewriteStream(rewriter)
	}
	return x.rewriteWhole(rewriter)
}

// rewriter is what the ticket says is to become of D's answer.
func (x *exchange) rewriter(t *kvtransfer.Ticket) (openai.Rewriter, error) {
	switch {
	case t.Stage == kvtransfer.PairLegs:
		return &joined{x: x, t: t}, nil
	case t.Stage == kvtransfer.DecodeLeg && t.Turn.Answers:
		return x.turnAnswer(t), nil
	case t.Stage == kvtransfer.DecodeLeg && t.Params != nil:
		c, err := kvtransfer.ReadContinuation(t.Params)
		if err != nil {
			return nil, fmt.Errorf("the ticket of an answer leg: %w", err)
		}
		return c, nil
	case t.Stage == kvtransfer.DecodeLeg && t.Cached > 0:
		return openai.CachedTokens{N: t.Cached - 1}, nil
	}
	x.s.metrics.forgedTickets.Inc()
	return nil, fmt.Errorf("an answer leg came with a ticket of stage %v that says nothing of its answer", t.Stage)
}

// joined puts what P answered into D's answer, when legs run at once. Whichever replica serves P's leg keeps that under the
// attempt's id before it lets the leg end, and the leg's end is told to all of them; D has no token before. So what is
// waited for here is about to be there.
type joined struct {
	x    *exchange
	t    *kvtransfer.Ticket
	with *openai.InputLogprobs
}

func (j *joined) wait() {
	if j.with != nil {
		return
	}
	j.with = &openai.InputLogprobs{}
	x := j.x
	p := x.s.pairs.enter(j.t.ID)
	defer x.s.pairs.leave(j.t.ID)
	timer := time.NewTimer(x.prefillLimit(j.t))
	defer timer.Stop()
	select {
	case <-p.ended:
	case <-timer.C:
	case <-x.s.draining:
	case <-x.stream.Context().Done():
	}
	var ok bool
	if j.with.Prefill, ok = x.s.State.TakeHandOver(j.t.ID); !ok && x.stream.Context().Err() == nil {
		x.s.Log.Warn("prefill's log probabilities are not known here: the client gets decode's alone", "request_id", x.requestID, "prefill", j.t.Prefill)
	}
}

func (*joined) Begin(dst []byte) []byte { return dst }

func (j *joined) Whole(dst, answer []byte) ([]byte, error) {
	j.wait()
	return j.with.Whole(dst, answer)
}

func (j *joined) Event(dst, event []byte) []byte {
	j.wait()
	return j.with.Event(dst, event)
}

// rewriteWhole answers with what is made of D's answer once that is complete.
func (x *exchange) rewriteWhole(c openai.Rewriter) error {
	if err := x.receiveAnswer(); err != nil {
		return err
	}
	switch {
	case x.noMemory:
		return serverBusy()
	case x.msg.over:
		return openai.Unavailable("answer_too_large", fmt.Sprintf("an answer of more than %d bytes cannot be joined with prefill's", maxAnswer), 0)
	}
	x.spare.grow(x.body.len() + 4096)
	out, err := c.Whole(x.spare.data[:0], x.body.bytes())
	if err != nil {
		x.s.Log.Error("decode's answer stays as it is", "request_id", x.requestID, "err", err)
		out = append(x.spare.data[:0], x.body.bytes()...)
	}
	x.spare.data = out
	x.headers.drop("content-length")
	if err := x.send(&reply{phase: phaseResponseHeaders, headers: &x.headers}); err != nil {
		return err
	}
	if trailers := x.msg.phase == phaseResponseTrailers; trailers {
		if err := x.sendBody(&x.spare, false); err != nil {
			return err
		}
		return x.send(&reply{phase: phaseResponseTrailers})
	}
	return x.sendBody(&x.spare, true)
}

// rewriteStream sends each event on as soon as it is complete, however its bytes came.
func (x *exchange) rewriteStream(c openai.Rewriter) error {
	x.headers.drop("content-length")
	if err := x.send(&reply{phase: phaseResponseHeaders, headers: &x.headers}); err != nil {
		return err
	}
	var events openai.Events
	begun := false
	each := func(event []byte) { x.spare.data = c.Event(x.spare.data, event) }
	for !x.msg.endOfStream {
		x.body.reset()
		x.msg.body, x.msg.bodyLimit, x.msg.over = &x.body, maxAnswer, false
		if err := x.receive(); err != nil {
			return err
		}
		if x.msg.over {
			return fmt.Errorf("a piece of decode's answer of more than %d bytes", maxAnswer)
		}
		x.spare.grow(2*x.body.len() + 1024)
		if !begun && x.body.len() > 0 { // not before: Envoy (1.40) ends the stream for a body message that answers none
			begun, x.spare.data = true, c.Begin(x.spare.data)
		}
		if err := events.Feed(x.body.bytes(), each); err != nil {
			return fmt.Errorf("decode's answer: %w", err)
		}
		if x.msg.endOfStream {
			events.End(each)
		}
		trailers := x.msg.phase == phaseResponseTrailers
		if len(x.spare.data) > 0 || x.msg.endOfStream && !trailers {
			if err := x.sendBody(&x.spare, x.msg.endOfStream && !trailers); err != nil {
				return err
			}
		}
		if trailers {
			return x.send(&reply{phase: phaseResponseTrailers})
		}
	}
	return nil
}
