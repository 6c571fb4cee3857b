package extproc

import (
	"context"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"

	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
	"tandem/internal/guard"
	"tandem/internal/memory"
)

// stream is one ext_proc stream: the messages that it receives and sends, and the memory of their bodies. It knows nothing
// of decisions.
type stream struct {
	s    *Server
	grpc grpc.ServerStream
	msg  envoywire.Message

	body    envoywire.Body // as received, then as the client sent it
	spare   envoywire.Body // the next body while it is made
	changed bool           // body is not what Envoy has: control members were cut, or the edits of a leg undone
	pieces  envoywire.Pieces
	headers envoywire.HeaderEdits

	held     int64 // bytes counted for the body ...
	beside   int64 // ... and of these, the bytes of what is kept beside it
	noMemory bool  // for the rest of an answer (receiveAnswer)

	requestID string
	timer     *time.Timer // limits the time of the request's body
	sending   sync.Mutex  // between this timer and the handler
	answered  bool        // by the timer
}

// Context returns the context of the gRPC stream.
func (x *stream) Context() context.Context { return x.grpc.Context() }

// begin starts another stream, of which the named headers are read too.
func (x *stream) begin(grpc grpc.ServerStream, headers []string) {
	x.sending.Lock() // a deadline of the stream before may just be finding out that it came too late
	defer x.sending.Unlock()
	x.grpc, x.answered = grpc, false
	x.msg.Headers.Names = headers
}

// reset gives the memory of the bodies back.
func (x *stream) reset() {
	x.body.Free()
	x.spare.Free()
	x.s.Memory.Add(-x.held)
	x.held, x.beside = 0, 0
	x.msg.Reset()
	x.headers.Reset()
	x.requestID, x.changed = "", false
}

// received is a message that was read beside the handler.
type received struct {
	envoywire.Message
	err error
}

// receive reads the next message.
func (x *stream) receive() error { return x.grpc.RecvMsg(&x.msg) }

// receiveAnswer reads an engine's answer to its end. msg.over says that it is not all in x.body: it is too long or, if x.noMemory says
// so too, there is no memory for it now.
func (x *stream) receiveAnswer() error {
	x.msg.Body, x.msg.BodyLimit, x.msg.Over, x.noMemory = &x.body, maxAnswer, false, false
	for !x.msg.EndOfStream {
		if err := x.receive(); err != nil {
			return err
		}
		if x.hold() != nil {
			x.noMemory = x.noMemory || !x.msg.Over
			x.msg.Over = true
		}
	}
	return nil
}

// receiveLater reads the next message in a goroutine, which ends with the stream. The message has memory of its own: the
// stream may serve another stream by the time it comes.
func (x *stream) receiveLater() <-chan *received {
	stream, ctx, out := x.grpc, guard.With(x.grpc.Context(), x.s.guard), make(chan *received, 1)
	go func() {
		r := new(received)
		_, r.err = guard.Try(ctx, "ext_proc message", func() (struct{}, error) { return struct{}{}, stream.RecvMsg(&r.Message) })
		out <- r
	}()
	return out
}

// take makes a message that was read beside the handler the current one. What came with the request stays.
func (x *stream) take(r *received) {
	x.msg.Phase, x.msg.EndOfStream = r.Phase, r.EndOfStream
	x.msg.Headers.Status, x.msg.Headers.Final = r.Headers.Status, r.Headers.Final
}

// send writes one reply, unless the deadline has already answered.
func (x *stream) send(r *envoywire.Reply) error {
	x.sending.Lock()
	defer x.sending.Unlock()
	if x.answered {
		r.Parts.Free()
		return io.EOF
	}
	return x.grpc.SendMsg(r)
}

// sendOn is answerBody with metadata, where there is any.
func (x *stream) sendOn(edits openai.Edits, metadata []byte) error {
	if !x.hasBody() {
		return x.send(&envoywire.Reply{Phase: envoywire.PhaseRequestHeaders, Headers: &x.headers, ClearRoute: true, Metadata: metadata})
	}
	x.pieces.Cut(&x.body, edits)
	shared := x.body.Share()
	defer shared.Free()
	if x.msg.Mode.Request == envoywire.ModeBuffered {
		out := envoywire.Reply{Phase: envoywire.PhaseRequestBody, Headers: &x.headers, ClearRoute: true, Metadata: metadata}
		if len(edits) > 0 || x.changed {
			x.headers.SetInt("content-length", x.pieces.Total) // Envoy holds it against the body and refuses a mismatch
			out.Kind, out.Parts = envoywire.ReplaceBody, x.pieces.Whole(shared)
		}
		return x.send(&out)
	}
	if err := x.send(&envoywire.Reply{Phase: envoywire.PhaseRequestHeaders, Headers: &x.headers, ClearRoute: true, Metadata: metadata}); err != nil {
		return err
	}
	trailers := x.msg.Phase == envoywire.PhaseRequestTrailers
	err := x.pieces.Each(shared, func(parts mem.BufferSlice, last bool) error {
		return x.send(&envoywire.Reply{Phase: envoywire.PhaseRequestBody, Kind: envoywire.StreamBody, Parts: parts, End: last && !trailers})
	})
	if err == nil && trailers {
		err = x.send(&envoywire.Reply{Phase: envoywire.PhaseRequestTrailers})
	}
	return err
}

// answerBody sends the headers as they are set, and the body, edited, on.
func (x *stream) answerBody(edits openai.Edits) error { return x.sendOn(edits, nil) }

// hasBody reports whether the body came through here; otherwise Envoy passes it on by itself, or there is none.
func (x *stream) hasBody() bool { return x.msg.Phase != envoywire.PhaseRequestHeaders }

// sendBody sends what a buffer holds as the next part of an answer's body, end being whether it is the last, and empties it.
func (x *stream) sendBody(b *envoywire.Body, end bool) error {
	x.pieces.Cut(b, nil)
	shared := b.Share()
	defer shared.Free()
	return x.pieces.Each(shared, func(parts mem.BufferSlice, last bool) error {
		return x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseBody, Kind: envoywire.StreamBody, Parts: parts, End: last && end})
	})
}

// passAnswer lets P's answer through to the client, byte for byte.
func (x *stream) passAnswer() error {
	if err := x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders, Headers: &x.headers}); err != nil {
		return err
	}
	for !x.msg.EndOfStream {
		x.msg.Body, x.msg.BodyLimit = &x.body, maxAnswer
		if err := x.receive(); err != nil {
			return err
		}
		if x.msg.Phase == envoywire.PhaseResponseTrailers {
			return x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseTrailers})
		}
		x.pieces.Cut(&x.body, nil)
		shared := x.body.Share()
		end := x.msg.EndOfStream
		err := x.pieces.Each(shared, func(parts mem.BufferSlice, last bool) error {
			return x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseBody, Kind: envoywire.StreamBody, Parts: parts, End: last && end})
		})
		shared.Free()
		if err != nil {
			return err
		}
	}
	return nil
}

// dropInline removes the headers that the leg's route puts on each answer in case it travels inline: a client must not see the ticket.
func (x *stream) dropInline() {
	x.headers.Remove(envoywire.HeaderTicket)
	x.headers.Remove(envoywire.HeaderCarry)
}

// sendError answers with an error of OpenAI's shape and ends the stream. With final, Envoy is not to try another endpoint: the one
// that has answered is not at fault.
func (x *stream) sendError(e *openai.Error, final bool) error {
	i := &envoywire.Immediate{Status: e.Status, Body: e.JSON(), Details: envoywire.DetailsPrefix + "_" + e.Code}
	i.Headers.Set("content-type", []byte(envoywire.ContentTypeJSON))
	if e.RetryAfter > 0 {
		i.Headers.SetInt(envoywire.HeaderRetryAfter, int((e.RetryAfter+time.Second-1)/time.Second))
	}
	if x.s.Picker != nil {
		dropped(i, e)
	}
	if final {
		i.Headers.Set(envoywire.HeaderFinal, []byte("true"))
	}
	if x.requestID != "" {
		i.Headers.Set(envoywire.HeaderRequestID, []byte(x.requestID))
	}
	return x.send(&envoywire.Reply{Immediate: i})
}

// swapBody makes spare the body.
func (x *stream) swapBody() {
	x.body, x.spare = x.spare, x.body
	x.spare.Free()
	x.changed = true
}

// smallShare of the budget is so little that it is kept although others have spent the budget.
const smallShare = 1024

// hold counts the memory of the body, and of what else the stream keeps, against what all streams together may hold.
func (x *stream) hold() error {
	n := int64(x.body.Len()) + x.beside
	total, limit := x.s.Memory.Add(n-x.held), x.s.Memory.Limit()
	if total > limit && (n > limit/smallShare || total > 2*limit) {
		x.held = n
		return serverBusy()
	}
	x.held = n
	return nil
}

// holdBeside counts so many bytes beside the body from now on; false where there is no memory for them.
func (x *stream) holdBeside(n int) bool {
	x.beside = int64(n)
	return x.hold() == nil
}

// limitBodyTime makes the stream end with a 408 if the body is not complete in time, and with a 503 if there is no memory to
// receive it.
func (x *stream) limitBodyTime() {
	stream, requestID := x.grpc, x.requestID
	x.sending.Lock()
	x.timer = time.AfterFunc(x.s.BodyTimeout, func() { x.endEarly(stream, requestID, openai.Timeout()) })
	x.sending.Unlock()
	memory.OnFull(stream.Context(), func() { x.endEarly(stream, requestID, serverBusy()) })
}

// endEarly answers a stream that waits for its body. Its handler is blocked in receive; the answer makes Envoy end the
// stream, which wakes it.
func (x *stream) endEarly(stream grpc.ServerStream, requestID string, e *openai.Error) {
	x.sending.Lock()
	defer x.sending.Unlock()
	if x.timer == nil || x.answered || x.grpc != stream {
		return
	}
	x.answered = true
	x.s.metrics.Refused(e)
	i := &envoywire.Immediate{Status: e.Status, Body: e.JSON(), Details: envoywire.DetailsPrefix + "_" + e.Code}
	i.Headers.Set("content-type", []byte(envoywire.ContentTypeJSON))
	if e.RetryAfter > 0 {
		i.Headers.SetInt(envoywire.HeaderRetryAfter, int((e.RetryAfter+time.Second-1)/time.Second))
	}
	i.Headers.Set(envoywire.HeaderRequestID, []byte(requestID))
	_ = stream.SendMsg(&envoywire.Reply{Immediate: i})
}

// stopBodyTime ends the deadline: what is sent from here on is the answer.
func (x *stream) stopBodyTime() {
	if x.timer == nil {
		return
	}
	x.timer.Stop()
	x.sending.Lock()
	x.timer = nil // a deadline that is just firing sees this and does nothing
	x.sending.Unlock()
}
