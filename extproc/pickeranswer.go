package extproc

import (
	"errors"
	"io"
	"strconv"
	"strings"

	"tandem/extproc/answer"
	"tandem/extproc/envoywire"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// How the endpoint picker observes an answer: which endpoint gave it, whether it came, and when it ended.

// followAnswer reads the gateway's messages about the answer, and passes it on, until it ends.
func (x endpointPicker) followAnswer(p *picked) error {
	var back *answer.Replacer
	if p.rewritten != "" {
		back = answer.NewReplacer(p.rewritten, p.asked)
	}
	x.msg.Body, x.msg.BodyLimit, x.msg.EndOfStream = &x.body, maxAnswer, false
	for begun := p.pool == nil; ; {
		if err := x.receive(); err != nil {
			return err
		}
		switch x.msg.Phase {
		case envoywire.PhaseResponseHeaders:
			if begun {
				return errors.New("an answer has headers twice")
			}
			begun = true
			x.answerBegins(p)
			if err := x.send(x.answerHeaders(p, back)); err != nil {
				return err
			}
			if x.msg.EndOfStream || !x.s.Picker.WatchBody && back == nil {
				return nil
			}
		case envoywire.PhaseResponseBody:
			if err := x.passPiece(back); err != nil || x.msg.EndOfStream {
				return err
			}
		case envoywire.PhaseResponseTrailers:
			if err := x.flush(back); err != nil {
				return err
			}
			return x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseTrailers})
		case envoywire.PhaseRequestTrailers:
			if err := x.send(&envoywire.Reply{Phase: envoywire.PhaseRequestTrailers}); err != nil {
				return err
			}
		// after the end: Envoy 1.35 to 1.37 sends the last piece of a large body twice (envoy#46237)
		case envoywire.PhaseRequestBody:
			x.body.Free()
		default:
			return io.EOF
		}
	}
}

// passAnswer passes on an answer whose request this server has not seen: an earlier filter gave it (401, 403, 429).
func (x endpointPicker) passAnswer() error {
	x.headers.Reset()
	if err := x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders}); err != nil || x.msg.EndOfStream {
		return errors.Join(errAnswered, err)
	}
	_ = x.followAnswer(&picked{}) // however it ends, nothing is reserved for it
	return errAnswered
}

// answerBegins records which endpoint answered, and with what status.
func (x endpointPicker) answerBegins(p *picked) {
	code, _ := strconv.Atoi(string(x.msg.Headers.Status))
	served := p.endpoint
	if e := p.pool.Endpoint(x.msg.Hints.Served); e != nil {
		served = e
	}
	if served != p.endpoint { // the gateway used a fallback
		x.s.State.MarkFailed(p.endpoint)
		x.s.State.Release(p.booked)
		p.booked = x.reserve(served, kvstate.RoleDecode, 1, plan.Decoding(p.tokens))
		p.endpoint = served
	}
	if code > 0 && code < 500 {
		x.s.State.MarkGood(served)
	} else if code == 503 && x.msg.Hints.Served == "" && !strings.Contains(p.list, ",") {
		x.s.State.MarkFailed(served) // no endpoint answered: the gateway could not connect
	}
	if code >= 500 && p.prefill != nil && x.s.Check != nil {
		x.s.Check(p.prefill) // the sidecar may have failed for want of it
	}
	x.AnswerBegan(x.requestID, x.req.Started, served, code)
}

// answerHeaders returns the changes to the answer's headers.
func (x endpointPicker) answerHeaders(_ *picked, back *answer.Replacer) *envoywire.Reply {
	x.headers.Reset()
	if back != nil {
		x.headers.Remove("content-length") // the models' names have different lengths
	}
	if x.s.Picker.Conformance {
		x.headers.Set(envoywire.HeaderTestSelected, []byte(x.msg.Hints.Served))
	}
	return &envoywire.Reply{Phase: envoywire.PhaseResponseHeaders, Headers: &x.headers}
}

// passPiece sends a piece of the answer on.
func (x endpointPicker) passPiece(back *answer.Replacer) error {
	end := x.msg.EndOfStream
	if x.msg.Mode.Response != envoywire.ModeFullDuplex {
		x.body.Free()
		return x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseBody}) // Envoy has it already
	}
	if back != nil {
		x.spare.Grow(x.body.Len() + 64)
		x.spare.Data = back.Append(x.spare.Data[:0], x.body.Bytes(), end)
		x.body, x.spare = x.spare, x.body
		x.spare.Free()
	}
	return x.sendBody(&x.body, end)
}

// flush sends what the replacer held back: the answer ends with trailers.
func (x endpointPicker) flush(back *answer.Replacer) error {
	if back == nil || x.msg.Mode.Response != envoywire.ModeFullDuplex {
		return nil
	}
	x.body.Grow(64)
	x.body.Data = back.Append(x.body.Data[:0], nil, true)
	if x.body.Len() == 0 {
		return nil
	}
	return x.sendBody(&x.body, false)
}
