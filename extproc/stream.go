package extproc

import (
	"context"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"

	"tandem/extproc/endpointpicker"
	"tandem/extproc/envoywire"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/internal/guard"
	"tandem/internal/memory"
)

// stream is one ext_proc stream: the messages that it receives and sends, and the memory of their bodies. It makes
// no decisions.
type stream struct {
	*streamOptions
	grpc grpc.ServerStream
	msg  envoywire.Message

	body    envoywire.Body // as received, later as the client sent it
	spare   envoywire.Body // buffer in which the next body is made
	changed bool           // body differs from Envoy's: members were cut, or the edits of a leg undone
	pieces  envoywire.Pieces
	headers envoywire.HeaderEdits

	heldBytes int64 // bytes reserved for the body ...
	noMemory  bool  // for the rest of an answer (receiveAnswer)

	requestID string
	newID     bool        // the client's was missing or invalid
	newPath   bool        // msg's path is not as Envoy has it: a gateway's prefix was removed, or a ticket has the client's
	receiving memory.Body // while timer runs
	timer     *time.Timer // limits the time of the request's body
	sending   sync.Mutex  // between this timer and the handler
	answered  bool        // by the timer
}

// streamOptions are what the streams of a server share.
type streamOptions struct {
	memory      *memory.Budget // of all bodies
	bodies      *memory.Bodies // that are being received
	guard       *guard.Guard
	bodyTimeout time.Duration
	gateway     bool                // errors name the protocol's reasons, which a gateway reads
	refused     func(*openai.Error) // counts an error
}

// Context returns the context of the gRPC stream.
func (x *stream) Context() context.Context { return x.grpc.Context() }

// begin starts another stream, and also reads the named headers, and lenient ones, of which the first value counts.
func (x *stream) begin(grpc grpc.ServerStream, headers, lenient []string) {
	x.sending.Lock() // the deadline of the stream before may be firing too late at this moment
	defer x.sending.Unlock()
	x.grpc, x.answered = grpc, false
	x.msg.Headers.Names, x.msg.Headers.Lenient = headers, lenient
}

// reset releases the memory of the bodies.
func (x *stream) reset() {
	x.body.Free()
	x.spare.Free()
	x.memory.Add(-x.heldBytes)
	x.heldBytes = 0
	x.msg.Reset()
	x.headers.Reset()
	x.requestID, x.newID, x.newPath, x.changed = "", false, false, false
}

// received is a message that was read concurrently with the handler.
type received struct {
	envoywire.Message
	err error
}

// receive reads the next message.
func (x *stream) receive() error { return x.grpc.RecvMsg(&x.msg) }

// receiveAnswer reads an engine's answer to its end. msg.over means that x.body is incomplete: the answer is too
// long or, if x.noMemory is set, there is no memory for it now.
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

// receiveLater reads the next message in a goroutine, which ends with the stream. The message has its own memory:
// when it arrives, the stream may serve another one.
func (x *stream) receiveLater() <-chan *received {
	stream, ctx, out := x.grpc, guard.With(x.grpc.Context(), x.guard), make(chan *received, 1)
	go func() {
		r := new(received)
		_, r.err = guard.Try(ctx, "ext_proc message", func() (struct{}, error) {
			return struct{}{}, stream.RecvMsg(&r.Message)
		})
		out <- r
	}()
	return out
}

// take makes a message that was read concurrently the current one. The request's headers stay, but for what the answer
// has of its own.
func (x *stream) take(r *received) {
	x.msg.Phase, x.msg.EndOfStream = r.Phase, r.EndOfStream
	to, from := &x.msg.Headers, &r.Headers
	to.Status, to.Final, to.ContentType, to.Load = from.Status, from.Final, from.ContentType, from.Load
	x.msg.Attributes = r.Attributes
}

// send sends one reply, unless the deadline has already answered.
func (x *stream) send(r *envoywire.Reply) error {
	x.sending.Lock()
	defer x.sending.Unlock()
	if x.answered {
		r.Parts.Free()
		return io.EOF
	}
	return x.grpc.SendMsg(r)
}

// sendOn is answerBody with optional metadata.
func (x *stream) sendOn(edits openai.Edits, metadata []byte) error {
	out := envoywire.Reply{
		Phase: envoywire.PhaseRequestHeaders, Headers: &x.headers, ClearRoute: true, Metadata: metadata,
	}
	if !x.hasBody() {
		return x.send(&out)
	}
	x.pieces.Cut(&x.body, edits)
	shared := x.body.Share()
	defer shared.Free()
	if x.msg.Mode.Request == envoywire.ModeBuffered {
		out.Phase = envoywire.PhaseRequestBody
		if len(edits) > 0 || x.changed {
			x.headers.SetInt("content-length", x.pieces.Total) // Envoy compares it with the body and refuses a mismatch
			out.Kind, out.Parts = envoywire.ReplaceBody, x.pieces.Whole(shared)
		}
		return x.send(&out)
	}
	if err := x.send(&out); err != nil {
		return err
	}
	return x.sendPieces(envoywire.PhaseRequestBody, shared, true)
}

// sendPieces sends a body that was cut into pieces; end marks the last part of the message.
func (x *stream) sendPieces(phase envoywire.Phase, shared mem.Buffer, end bool) error {
	return x.pieces.Each(shared, func(parts mem.BufferSlice, last bool) error {
		return x.send(&envoywire.Reply{Phase: phase, Kind: envoywire.StreamBody, Parts: parts, End: last && end})
	})
}

// answerBody sends the headers as set, and the edited body.
func (x *stream) answerBody(edits openai.Edits) error { return x.sendOn(edits, nil) }

// hasBody reports whether the body was received; otherwise Envoy passes it on by itself, or there is none.
func (x *stream) hasBody() bool { return x.msg.Phase != envoywire.PhaseRequestHeaders }

// sendBody sends a buffer as the next part of an answer's body, and empties it; end marks the last part.
func (x *stream) sendBody(b *envoywire.Body, end bool) error {
	x.pieces.Cut(b, nil)
	shared := b.Share()
	defer shared.Free()
	return x.sendPieces(envoywire.PhaseResponseBody, shared, end)
}

// passAnswer passes P's answer to the client, byte for byte.
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
		err := x.sendPieces(envoywire.PhaseResponseBody, shared, x.msg.EndOfStream)
		shared.Free()
		if err != nil {
			return err
		}
	}
	return nil
}

// dropInline removes the headers that the leg's route adds to each answer in case it travels inline: a client must
// not see the ticket.
func (x *stream) dropInline() {
	x.headers.Remove(names.HeaderTicket)
	x.headers.Remove(names.HeaderCarry)
}

// sendError answers with an error in OpenAI's format and ends the stream. With final, Envoy must not try another
// endpoint: the one that answered is not at fault.
func (x *stream) sendError(e *openai.Error, final bool) error {
	path := x.msg.Headers.Path
	if len(path) == 0 { // of a leg's answer
		path = x.msg.Attributes.Path
	}
	i := errorAnswer(e.For(path))
	if x.gateway {
		endpointpicker.Dropped(i, e)
	}
	if final {
		i.Headers.Set(names.HeaderFinal, []byte("true"))
	}
	if x.requestID != "" {
		i.Headers.Set(names.HeaderRequestID, []byte(x.requestID))
	}
	return x.send(&envoywire.Reply{Immediate: i})
}

// Bytes implements [pass.Body].
func (x *stream) Bytes() []byte { return x.body.Bytes() }

// Rewrite implements [pass.Body].
func (x *stream) Rewrite(size int, write func(to []byte) []byte) {
	x.spare.Grow(size)
	x.spare.Data = write(x.spare.Data[:0])
	x.body, x.spare = x.spare, x.body
	x.spare.Free()
	x.changed = true
}

// maxAnswer bounds the part of a prefill endpoint's answer that is read: one token, and the KV parameters.
const maxAnswer = 16 << 20

// hold reserves memory for the body, and for other data of the stream, from the budget of all streams.
func (x *stream) hold() error {
	n := int64(x.body.Len())
	x.receiving.Received(n)
	if !x.memory.Replace(&x.heldBytes, n) {
		return openai.ServerBusy()
	}
	return nil
}

// limitBodyTime makes the stream end with a 408 if the body is not complete in time, or with a 503 if there is no
// memory to receive it.
func (x *stream) limitBodyTime() {
	stream, requestID, messages := x.grpc, x.requestID, openai.OfMessages(x.msg.Headers.Path)
	x.sending.Lock()
	x.timer = time.AfterFunc(x.bodyTimeout, func() { x.endEarly(stream, requestID, openai.Timeout().In(messages)) })
	x.sending.Unlock()
	busy := func() { x.endEarly(stream, requestID, openai.ServerBusy().In(messages)) }
	memory.OnFull(stream.Context(), busy)
	x.bodies.Begin(&x.receiving, busy)
}

// errorAnswer is the answer with an error in OpenAI's format.
func errorAnswer(e *openai.Error) *envoywire.Immediate {
	i := &envoywire.Immediate{Status: e.Status, Body: e.JSON(), Details: names.DetailsPrefix + "_" + e.Code}
	i.Headers.Set("content-type", []byte(names.ContentTypeJSON))
	if e.RetryAfter > 0 {
		i.Headers.SetInt(names.HeaderRetryAfter, e.RetrySeconds())
	}
	return i
}

// endEarly answers a stream that waits for its body. Its handler is blocked in receive; the answer makes Envoy end
// the stream, which wakes it.
func (x *stream) endEarly(stream grpc.ServerStream, requestID string, e *openai.Error) {
	x.sending.Lock()
	defer x.sending.Unlock()
	if x.timer == nil || x.answered || x.grpc != stream {
		return
	}
	x.answered = true
	x.refused(e)
	i := errorAnswer(e)
	i.Headers.Set(names.HeaderRequestID, []byte(requestID))
	_ = stream.SendMsg(&envoywire.Reply{Immediate: i})
}

// stopBodyTime stops the deadline: from here on the handler answers.
func (x *stream) stopBodyTime() {
	if x.timer == nil {
		return
	}
	x.timer.Stop()
	x.bodies.Done(&x.receiving)
	x.sending.Lock()
	x.timer = nil // a deadline that is firing now sees this and does nothing
	x.sending.Unlock()
}
