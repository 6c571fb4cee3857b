package extproc

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"tandem/extproc/answer"
	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
)

// answerLeg handles the filter of the answer leg.
type answerLeg struct{ pairLeg }

// serve serves the filter of the listener answer-leg. Only requests whose answer is rewritten take that route,
// because such an answer depends on this replica and costs a message for every piece. An answer with a status other
// than 200 passes unchanged, so that the main route can retry.
func (x answerLeg) serve() error {
	if err := x.receive(); err != nil {
		return err
	}
	if x.msg.Phase != envoywire.PhaseResponseHeaders {
		return errors.New("the first message of an answer leg was not response headers")
	}
	a := &x.msg.Attributes
	x.requestID = string(a.RequestID)
	if len(a.ClientID) > 0 {
		x.requestID = string(a.ClientID)
	}
	t, err := x.s.keys().Open(string(a.Ticket), x.requestID, x.s.now())
	if t == nil { // an expired ticket is accepted: the answer has begun
		x.TicketRefused()
		return fmt.Errorf("opening the ticket of an answer leg: %w", err)
	}
	if code, _ := strconv.Atoi(string(x.msg.Headers.Status)); code != 200 {
		return x.passAnswer()
	}
	rewriter, err := x.rewriter(t)
	if err != nil {
		return err
	}
	if kind := x.msg.Headers.ContentType; bytes.HasPrefix(bytes.ToLower(kind), []byte("text/event-stream")) {
		return x.rewriteStream(rewriter)
	}
	return x.rewriteWhole(rewriter)
}

// rewriter returns how to rewrite D's answer, according to the ticket.
func (x answerLeg) rewriter(t *kvtransfer.Ticket) (openai.Rewriter, error) {
	if t.Stage == kvtransfer.PairLegs {
		return &answer.Joined{Prefill: func() ([]byte, bool) { return x.awaitJoined(t) }}, nil
	}
	if t.Stage == kvtransfer.DecodeLeg && t.Turn.Answers {
		return x.recordConversation(t), nil
	}
	r, err := answer.Rewriter(t)
	if r == nil && err == nil {
		x.TicketRefused()
		return nil, fmt.Errorf("an answer leg came with a ticket of stage %v that says nothing of its answer", t.Stage)
	}
	return r, err
}

// awaitJoined returns P's answer to a request whose legs run concurrently; false: it is not known here.
func (x answerLeg) awaitJoined(t *kvtransfer.Ticket) ([]byte, bool) {
	p := x.s.pairs.Enter(t.ID)
	defer x.s.pairs.Leave(t.ID)
	timer := time.NewTimer(x.prefillLimit(t))
	defer timer.Stop()
	select {
	case <-p.Ended:
	case <-timer.C:
	case <-x.s.draining:
	case <-x.stream.Context().Done():
	}
	prefill, ok := x.s.State.TakeHandOver(t.ID)
	if !ok && x.stream.Context().Err() == nil {
		x.log(slog.LevelWarn, "prefill's log probabilities are not known here: the client gets decode's alone",
			"prefill", t.Prefill)
	}
	return prefill, ok
}

// rewriteWhole sends the rewritten answer when D's answer is complete.
func (x answerLeg) rewriteWhole(c openai.Rewriter) error {
	if err := x.receiveAnswer(); err != nil {
		return err
	}
	switch {
	case x.noMemory:
		return serverBusy()
	case x.msg.Over:
		return openai.Unavailable("answer_too_large", fmt.Sprintf("an answer of more than %d bytes cannot be joined with prefill's", maxAnswer), 0)
	}
	x.spare.Grow(x.body.Len() + 4096)
	out, err := c.Whole(x.spare.Data[:0], x.body.Bytes())
	if err != nil {
		x.log(slog.LevelError, "decode's answer stays as it is", "err", err)
		out = append(x.spare.Data[:0], x.body.Bytes()...)
	}
	x.spare.Data = out
	x.headers.Remove("content-length")
	if err := x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders, Headers: &x.headers}); err != nil {
		return err
	}
	if trailers := x.msg.Phase == envoywire.PhaseResponseTrailers; trailers {
		if err := x.sendBody(&x.spare, false); err != nil {
			return err
		}
		return x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseTrailers})
	}
	return x.sendBody(&x.spare, true)
}

// rewriteStream sends each event as soon as it is complete, however its bytes arrive.
func (x answerLeg) rewriteStream(c openai.Rewriter) error {
	x.headers.Remove("content-length")
	if err := x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders, Headers: &x.headers}); err != nil {
		return err
	}
	var events openai.Events
	begun := false
	each := func(event []byte) { x.spare.Data = c.Event(x.spare.Data, event) }
	for !x.msg.EndOfStream {
		x.body.Reset()
		x.msg.Body, x.msg.BodyLimit, x.msg.Over = &x.body, maxAnswer, false
		if err := x.receive(); err != nil {
			return err
		}
		if x.msg.Over {
			return fmt.Errorf("a piece of decode's answer of more than %d bytes", maxAnswer)
		}
		x.spare.Grow(2*x.body.Len() + 1024)
		// not earlier: Envoy (1.40) ends the stream if a body message is not a reply to one
		if !begun && x.body.Len() > 0 {
			begun, x.spare.Data = true, c.Begin(x.spare.Data)
		}
		if err := events.Feed(x.body.Bytes(), each); err != nil {
			return fmt.Errorf("decode's answer: %w", err)
		}
		if x.msg.EndOfStream {
			events.End(each)
		}
		trailers := x.msg.Phase == envoywire.PhaseResponseTrailers
		if len(x.spare.Data) > 0 || x.msg.EndOfStream && !trailers {
			if err := x.sendBody(&x.spare, x.msg.EndOfStream && !trailers); err != nil {
				return err
			}
		}
		if trailers {
			return x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseTrailers})
		}
	}
	return nil
}
