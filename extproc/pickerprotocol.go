package extproc

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"tandem/extproc/answer"
	"tandem/extproc/endpointpicker"
	"tandem/extproc/envoywire"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/paths"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// endpointPicker handles streams of gateways that speak the Endpoint Picker protocol.
type endpointPicker struct {
	handler
	pass *pass.Pass
}

// picked is what was decided for a gateway's request.
type picked struct {
	pass.Routed
	endpoint *kvstate.Endpoint // that answers
}

// serve serves one request of a gateway that knows the Endpoint Picker protocol only. It has one pass, which writes
// the destination into a header and into dynamic metadata. Then the answer follows, from which the server learns
// which endpoint gave it and when it ended. The reservations are released with the stream, however that ends.
func (x endpointPicker) serve() error {
	if err := x.stream.receive(); err != nil {
		return err
	}
	switch x.stream.msg.Phase {
	case envoywire.PhaseRequestHeaders:
	case envoywire.PhaseResponseHeaders:
		return x.passAnswer()
	default:
		return errors.New("the first message of a stream was neither request headers nor response headers")
	}
	began := time.Now()
	x.identify(x.pass)
	ctx := x.stream.Context()
	d, err := x.decide(ctx)
	if err != nil {
		return err
	}
	r, err := x.pass.Commit(ctx, d)
	if err != nil {
		return err
	}
	p := picked{r, d.Endpoint}
	defer func() { x.s.passes.Release(p.Held) }()
	h := &x.stream.headers
	h.Set(names.HeaderEndpoint, []byte(d.Gateway.List))
	if x.stream.newID {
		h.Set(names.HeaderRequestID, []byte(x.stream.requestID))
	}
	endpointpicker.SetSidecar(h, d.Sidecar)
	x.explain(x.pass)
	metadata := append(envoywire.Destination(d.Gateway.List), x.decision(x.pass)...)
	if err := x.stream.sendOn(d.Edits, metadata); err != nil {
		return err
	}
	x.s.observer.Processed(names.RolePicker, time.Since(began), x.meter.Busy, nil)
	_ = x.followAnswer(&p) // however it ends, nothing more can be reported
	return errAnswered
}

// decide decides which endpoints a request may go to.
func (x endpointPicker) decide(ctx context.Context) (*plan.Decision, error) {
	h := &x.stream.msg.Headers
	if len(h.Upgrade) > 0 {
		return nil, openai.NoUpgrade()
	}
	h.Path, _ = paths.WithoutPrefix(x.s.PathPrefixes, h.Path) // for the decision only: the gateway rewrites paths itself
	x.pass.Head = x.head()
	api := openai.Classify(string(h.Method), string(h.Path))
	if (api == openai.PassThrough || api == openai.SGLangGenerate) && !x.s.passes.Serves(string(h.Method), string(h.Path)) {
		return nil, openai.NotServed()
	}
	whole := x.stream.msg.EndOfStream || api == openai.PassThrough || api == openai.Models
	if whole {
		if err := x.checkBody(); err != nil {
			return nil, err
		}
	} else if err := openai.CheckHeaders(string(h.ContentType), string(h.ContentEncoding)); err != nil {
		return nil, err
	}
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return nil, err
	}
	only, limited := endpointpicker.Subset(&x.stream.msg, x.s.Picker)
	return x.pass.Gateway(ctx, api, whole, only, limited)
}

// checkBody refuses a body that an engine might read otherwise than Tandem; see [openai.CheckOther].
func (x endpointPicker) checkBody() error {
	if x.stream.msg.EndOfStream && x.stream.body.Len() == 0 {
		return nil
	}
	h := &x.stream.msg.Headers
	return openai.CheckOther(string(h.ContentType), string(h.ContentEncoding), x.stream.msg.Mode.Request != envoywire.ModeNone)
}

// How the endpoint picker observes an answer: which endpoint gave it, whether it came, and when it ended.

// followAnswer reads the gateway's messages about the answer, and passes it on, until it ends.
func (x endpointPicker) followAnswer(p *picked) error {
	var back *answer.Replacer
	if p.Decision != nil && p.Gateway.Model != "" {
		back = answer.NewReplacer(p.Gateway.Model, p.Gateway.Asked)
	}
	x.stream.msg.Body, x.stream.msg.BodyLimit, x.stream.msg.EndOfStream = &x.stream.body, maxAnswer, false
	for begun := p.Decision == nil; ; {
		if err := x.stream.receive(); err != nil {
			return err
		}
		switch x.stream.msg.Phase {
		case envoywire.PhaseResponseHeaders:
			if begun {
				return errors.New("an answer has headers twice")
			}
			begun = true
			x.answerBegins(p)
			if err := x.stream.send(x.answerHeaders(back)); err != nil {
				return err
			}
			if x.stream.msg.EndOfStream || !x.s.Picker.WatchBody && back == nil {
				return nil
			}
		case envoywire.PhaseResponseBody:
			if err := x.passPiece(back); err != nil || x.stream.msg.EndOfStream {
				return err
			}
		case envoywire.PhaseResponseTrailers:
			if err := x.flush(back); err != nil {
				return err
			}
			return x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseTrailers})
		case envoywire.PhaseRequestTrailers:
			if err := x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseRequestTrailers}); err != nil {
				return err
			}
		// after the end: Envoy 1.35 to 1.37 sends the last piece of a large body twice (envoy#46237)
		case envoywire.PhaseRequestBody:
			x.stream.body.Free()
		default:
			return io.EOF
		}
	}
}

// passAnswer passes on an answer whose request this server has not seen: an earlier filter gave it (401, 403, 429).
func (x endpointPicker) passAnswer() error {
	x.stream.headers.Reset()
	if err := x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders}); err != nil || x.stream.msg.EndOfStream {
		return errors.Join(errAnswered, err)
	}
	_ = x.followAnswer(&picked{}) // however it ends, nothing is reserved for it
	return errAnswered
}

// answerBegins records which endpoint answered, and with what status.
func (x endpointPicker) answerBegins(p *picked) {
	code, _ := strconv.Atoi(string(x.stream.msg.Headers.Status))
	served := p.endpoint
	if e := p.Pool.Endpoint(x.stream.msg.Hints.Served); e != nil {
		served = e
	}
	if served != p.endpoint { // the gateway used a fallback
		x.s.State.Health.MarkFailed(p.endpoint)
		x.pass.Move(&p.Held, served, p.Ticket.PromptTokens)
		p.endpoint = served
	}
	if code > 0 && code < 500 {
		x.s.State.Health.MarkGood(served)
	} else if code == 503 && x.stream.msg.Hints.Served == "" && !strings.Contains(p.Gateway.List, ",") {
		x.s.State.Health.MarkFailed(served) // no endpoint answered: the gateway could not connect
	}
	if code >= 500 && p.Sidecar != nil && p.Sidecar.Prefill != "" && x.s.Check != nil {
		x.s.Check(p.Report.Prefill) // the sidecar may have failed for want of it
	}
	// whether the gateway retries or not, the next request for the model goes to another endpoint
	if code == http.StatusNotFound {
		x.pass.AskAgain(x.stream.Context(), served)
	}
	x.meter.Observer.AnswerBegan(x.stream.requestID, p.Ticket.Started, served, code)
}

// answerHeaders returns the changes to the answer's headers.
func (x endpointPicker) answerHeaders(back *answer.Replacer) *envoywire.Reply {
	x.stream.headers.Reset()
	if back != nil {
		x.stream.headers.Remove("content-length") // the models' names have different lengths
	}
	if x.s.Picker.Conformance {
		x.stream.headers.Set(envoywire.HeaderTestSelected, []byte(x.stream.msg.Hints.Served))
	}
	return &envoywire.Reply{Phase: envoywire.PhaseResponseHeaders, Headers: &x.stream.headers}
}

// passPiece sends a piece of the answer on.
func (x endpointPicker) passPiece(back *answer.Replacer) error {
	end := x.stream.msg.EndOfStream
	if x.stream.msg.Mode.Response != envoywire.ModeFullDuplex {
		x.stream.body.Free()
		return x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseBody}) // Envoy has it already
	}
	if back != nil {
		x.stream.spare.Grow(x.stream.body.Len() + 64)
		x.stream.spare.Data = back.Append(x.stream.spare.Data[:0], x.stream.body.Bytes(), end)
		x.stream.body, x.stream.spare = x.stream.spare, x.stream.body
		x.stream.spare.Free()
	}
	return x.stream.sendBody(&x.stream.body, end)
}

// flush sends what the replacer held back: the answer ends with trailers.
func (x endpointPicker) flush(back *answer.Replacer) error {
	if back == nil || x.stream.msg.Mode.Response != envoywire.ModeFullDuplex {
		return nil
	}
	x.stream.body.Grow(64)
	x.stream.body.Data = back.Append(x.stream.body.Data[:0], nil, true)
	if x.stream.body.Len() == 0 {
		return nil
	}
	return x.stream.sendBody(&x.stream.body, false)
}
