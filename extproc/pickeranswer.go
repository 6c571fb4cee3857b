package extproc

import (
	"io"
	"strconv"
	"strings"

	"google.golang.org/grpc/mem"

	"tandem/kvstate"
)

// How the endpoint picker follows an answer: who gave it, whether it came, and when it ended.

// followAnswer reads what the gateway says of the answer, and passes it on, until it ends.
func (x *exchange) followAnswer(p *picked) error {
	var back *replacer
	if p.rewritten != "" {
		back = newReplacer(p.rewritten, p.asked)
	}
	x.msg.body, x.msg.bodyLimit, x.msg.endOfStream = &x.body, maxAnswer, false
	for {
		if err := x.receive(); err != nil {
			return err
		}
		switch x.msg.phase {
		case phaseResponseHeaders:
			x.answerBegins(p)
			if err := x.send(x.answerHeaders(p, back)); err != nil {
				return err
			}
			if x.msg.endOfStream || !x.s.Picker.WatchBody && back == nil {
				return nil
			}
		case phaseResponseBody:
			if err := x.passPiece(back); err != nil || x.msg.endOfStream {
				return err
			}
		case phaseResponseTrailers:
			if err := x.flush(back); err != nil {
				return err
			}
			return x.send(&reply{phase: phaseResponseTrailers})
		case phaseRequestTrailers:
			if err := x.send(&reply{phase: phaseRequestTrailers}); err != nil {
				return err
			}
		case phaseRequestBody: // after its end: Envoy 1.35 to 1.37 sends the last piece of a large body twice (envoy#46237)
			x.body.free()
		default:
			return io.EOF
		}
	}
}

// answerBegins takes in who answered, and how.
func (x *exchange) answerBegins(p *picked) {
	code, _ := strconv.Atoi(string(x.msg.headers.status))
	served := p.endpoint
	if e := p.pool.Endpoint(x.msg.hints.served); e != nil {
		served = e
	}
	if served != p.endpoint { // the gateway went down the list
		x.s.State.MarkFailed(p.endpoint)
		x.s.State.Release(p.booked)
		p.booked = x.reserve(served, kvstate.RoleDecode, 1, decoding(p.tokens))
		p.endpoint = served
	}
	if code > 0 && code < 500 {
		x.s.State.MarkGood(served)
	} else if code == 503 && x.msg.hints.served == "" && !strings.Contains(p.list, ",") {
		x.s.State.MarkFailed(served) // nobody answered: the gateway could not connect
	}
	x.s.recent.change(x.requestID, func(trace *Trace) { trace.Decode, trace.Status = served.Addr, code })
}

// answerHeaders is what becomes of the answer's headers.
func (x *exchange) answerHeaders(_ *picked, back *replacer) *reply {
	x.headers.reset()
	if back != nil {
		x.headers.drop("content-length") // models' names have different lengths
	}
	if x.s.Picker.Conformance {
		x.headers.add(headerTestSelected, []byte(x.msg.hints.served))
	}
	return &reply{phase: phaseResponseHeaders, headers: &x.headers}
}

// passPiece passes a piece of the answer on.
func (x *exchange) passPiece(back *replacer) error {
	end := x.msg.endOfStream
	if x.msg.mode.response != bodyFullDuplex {
		x.body.free()
		return x.send(&reply{phase: phaseResponseBody}) // Envoy has it, and goes on with it
	}
	if back != nil {
		x.spare.grow(x.body.len() + 64)
		x.spare.data = back.append(x.spare.data[:0], x.body.bytes(), end)
		x.body, x.spare = x.spare, x.body
		x.spare.free()
	}
	return x.sendBody(&x.body, end)
}

// flush sends what the replacer kept back: the answer ends with trailers.
func (x *exchange) flush(back *replacer) error {
	if back == nil || x.msg.mode.response != bodyFullDuplex {
		return nil
	}
	x.body.grow(64)
	x.body.data = back.append(x.body.data[:0], nil, true)
	if x.body.len() == 0 {
		return nil
	}
	return x.sendBody(&x.body, false)
}

// sendBody sends what a buffer holds as the next part of an answer's body, end being whether it is the last, and empties it.
func (x *exchange) sendBody(b *bodyBuffer, end bool) error {
	x.pieces.cut(b, nil)
	shared := b.share()
	defer shared.Free()
	return x.pieces.each(shared, func(parts mem.BufferSlice, last bool) error {
		return x.send(&reply{phase: phaseResponseBody, kind: bodyStreamed62, parts: parts, end: last && end})
	})
}
