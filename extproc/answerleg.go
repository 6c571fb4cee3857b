package extproc

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"tandem/extproc/answer"
	"tandem/extproc/envoywire"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
)

// answerLeg handles the filter of the answer leg.
type answerLeg struct{ pairLeg }

// serve serves the filter of the listener answer-leg. Only requests whose answer is rewritten take that route,
// because such an answer depends on this replica and costs a message for every piece. An answer with a status other
// than 200 passes unchanged, so that the main route can retry.
func (x answerLeg) serve() error {
	if err := x.stream.receive(); err != nil {
		return err
	}
	if x.stream.msg.Phase != envoywire.PhaseResponseHeaders {
		return errors.New("the first message of an answer leg was not response headers")
	}
	a := &x.stream.msg.Attributes
	x.stream.requestID = string(a.RequestID)
	if len(a.ClientID) > 0 {
		x.stream.requestID = string(a.ClientID)
	}
	t, err := x.s.passes.Keys().Open(string(a.Ticket), x.stream.requestID, x.s.passes.Now())
	if t == nil { // an expired ticket is accepted: the answer has begun
		x.meter.Observer.TicketRefused()
		return fmt.Errorf("opening the ticket of an answer leg: %w", err)
	}
	if code, _ := strconv.Atoi(string(x.stream.msg.Headers.Status)); code != 200 {
		return x.stream.passAnswer()
	}
	rewriter, err := x.rewriter(t)
	if err != nil {
		return err
	}
	if openai.IsEventStream(string(x.stream.msg.Headers.ContentType)) {
		return x.rewriteStream(rewriter)
	}
	return x.rewriteWhole(rewriter)
}

// rewriter returns how to rewrite D's answer, according to the ticket.
func (x answerLeg) rewriter(t *kvtransfer.Ticket) (openai.Rewriter, error) {
	r, err := x.s.journeys.Rewriter(t, &journey.Rewriting{
		Status: http.StatusOK, Joined: func() ([]byte, bool) { return x.awaitJoined(t) },
	})
	if r == nil && err == nil {
		x.meter.Observer.TicketRefused()
		return nil, fmt.Errorf("an answer leg came with a ticket of stage %v that says nothing of its answer", t.Stage)
	}
	return r, err //nolint:wrapcheck // it says all
}

// awaitJoined returns P's answer to a request whose legs run concurrently; false: it is not known here.
func (x answerLeg) awaitJoined(t *kvtransfer.Ticket) ([]byte, bool) {
	p := x.s.pairs.Enter(t.ID)
	defer x.s.pairs.Leave(t.ID)
	timer := time.NewTimer(x.s.journeys.PairLimit(t))
	defer timer.Stop()
	select {
	case <-p.Verdict.Done():
	case <-timer.C:
	case <-x.s.draining:
	case <-x.stream.Context().Done():
	}
	prefill, ok := x.s.State.HandOvers.TakeHandOver(t.ID)
	if !ok && x.stream.Context().Err() == nil {
		x.log(slog.LevelWarn, "prefill's log probabilities are not known here: the client gets decode's alone",
			"prefill", t.Prefill)
	}
	return prefill, ok
}

// rewriteWhole sends the rewritten answer when D's answer is complete.
func (x answerLeg) rewriteWhole(c openai.Rewriter) error {
	if err := x.stream.receiveAnswer(); err != nil {
		return err
	}
	switch {
	case x.stream.noMemory:
		return openai.ServerBusy()
	case x.stream.msg.Over:
		return answer.TooLarge(maxAnswer)
	}
	x.stream.spare.Grow(x.stream.body.Len() + 4096)
	out, err := c.Whole(x.stream.spare.Data[:0], x.stream.body.Bytes())
	if err != nil {
		x.log(slog.LevelError, "decode's answer stays as it is", "err", err)
		out = append(x.stream.spare.Data[:0], x.stream.body.Bytes()...)
	}
	x.stream.spare.Data = out
	x.stream.headers.Remove("content-length")
	if err := x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders, Headers: &x.stream.headers}); err != nil {
		return err
	}
	if trailers := x.stream.msg.Phase == envoywire.PhaseResponseTrailers; trailers {
		if err := x.stream.sendBody(&x.stream.spare, false); err != nil {
			return err
		}
		return x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseTrailers})
	}
	return x.stream.sendBody(&x.stream.spare, true)
}

// rewriteStream sends each event as soon as it is complete, however its bytes arrive.
func (x answerLeg) rewriteStream(c openai.Rewriter) error {
	x.stream.headers.Remove("content-length")
	if err := x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders, Headers: &x.stream.headers}); err != nil {
		return err
	}
	// Envoy (1.40) ends the stream if a body message is not a reply to one, so nothing is sent before a piece has come
	rewritten := answer.NewStream(c)
	for !x.stream.msg.EndOfStream {
		x.stream.body.Reset()
		x.stream.msg.Body, x.stream.msg.BodyLimit, x.stream.msg.Over = &x.stream.body, maxAnswer, false
		if err := x.stream.receive(); err != nil {
			return err
		}
		if x.stream.msg.Over {
			return fmt.Errorf("a piece of decode's answer of more than %d bytes", maxAnswer)
		}
		x.stream.spare.Grow(2*x.stream.body.Len() + 1024)
		// not earlier: Envoy (1.40) ends the stream if a body message is not a reply to one
		var err error
		x.stream.spare.Data, err = rewritten.Append(x.stream.spare.Data, x.stream.body.Bytes(), x.stream.msg.EndOfStream)
		if err != nil {
			return err //nolint:wrapcheck // it says all
		}
		trailers := x.stream.msg.Phase == envoywire.PhaseResponseTrailers
		if len(x.stream.spare.Data) > 0 || x.stream.msg.EndOfStream && !trailers {
			if err := x.stream.sendBody(&x.stream.spare, x.stream.msg.EndOfStream && !trailers); err != nil {
				return err
			}
		}
		if trailers {
			return x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseTrailers})
		}
	}
	return nil
}
