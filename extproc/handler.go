package extproc

import (
	"errors"
	"log/slog"
	"strconv"
	"time"

	"google.golang.org/grpc/metadata"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/telemetry"
)

// handler is what the handlers of all filter roles share.
type handler struct {
	stream *stream
	meter  *telemetry.Meter
	s      *Server
}

// log writes a message about the request to the log.
func (x handler) log(level slog.Level, message string, args ...any) {
	x.s.Log.Log(x.stream.Context(), level, message, append([]any{"request_id", x.stream.requestID}, args...)...)
}

// receiveBody reads the whole body into x.stream.body, at most limit bytes. A body with trailers is refused: Envoy
// 1.40 sends one twice, if it comes FULL_DUPLEX_STREAMED on a route with retries or redirects.
func (x handler) receiveBody(limit int) error {
	defer x.meter.EndPhase(telemetry.PhaseReceive)
	if x.stream.msg.EndOfStream {
		return nil
	}
	if x.stream.msg.Mode.Known && x.stream.msg.Mode.Request == envoywire.ModeNone {
		return errors.New("Envoy does not send this request's body (request_body_mode NONE): the route is not one that `tandem envoy` writes") //nolint:staticcheck // a name
	}
	if x.stream.msg.Mode.Request == envoywire.ModeBuffered {
		// Envoy sends a buffered body only after a reply to the headers; the decision goes with the reply to the
		// body.
		err := x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseRequestHeaders, Headers: &x.stream.headers})
		if x.stream.headers.Reset(); err != nil {
			return err
		}
	}
	x.stream.msg.Body, x.stream.msg.BodyLimit, x.stream.msg.Over = &x.stream.body, limit, false
	if length := x.stream.msg.Headers.ContentLength; len(length) > 0 { // an error of strconv is two allocations
		if n, err := strconv.Atoi(string(length)); err == nil && n > 0 && n <= limit {
			x.stream.body.Grow(min(n, 1<<20) + 1024) // space for insertions; a false length costs at most this
		}
	}
	x.stream.limitBodyTime()
	defer x.stream.stopBodyTime()
	for !x.stream.msg.EndOfStream {
		if err := x.stream.receive(); err != nil {
			return err
		}
		if x.stream.msg.Over {
			return openai.TooLarge(limit) // without reading the rest, which may be endless
		}
		if err := x.stream.hold(); err != nil {
			return err
		}
		// a buffered body is in one message; if trailers follow, the message does not end the stream
		trailers := x.stream.msg.Phase == envoywire.PhaseRequestTrailers
		if trailers || x.stream.msg.Mode.Request == envoywire.ModeBuffered && !x.stream.msg.EndOfStream {
			return openai.Trailers()
		}
	}
	return nil
}

// identify names the request: by the client's own id if it is valid, else by a new one.
func (x handler) identify(p *pass.Pass) {
	h := &x.stream.msg.Headers
	p.ReservedAs = reservationKey(h.Reservation, h.RequestID)
	x.stream.requestID, x.stream.newID = pass.Name(string(h.RequestID))
	p.ID, p.Source = x.stream.requestID, sourceOf(x.stream.Context())
}

// head returns what a pass reads of the request's headers.
func (x handler) head() pass.Head {
	h := &x.stream.msg.Headers
	return pass.Head{
		Method: h.Method, Path: h.Path, Authority: h.Authority,
		ContentType: h.ContentType, ContentEncoding: h.ContentEncoding, Authorization: h.Authorization,
		Objective: h.Objective, Fairness: h.Fairness,
		TTFT: pass.Target{Name: names.HeaderTTFT, Value: h.TTFT}, TPOT: pass.Target{Name: names.HeaderTPOT, Value: h.TPOT},
		Explain: h.Explain, Prefilled: h.Prefilled, Load: h.Load, Twice: h.Twice, More: h,
	}
}

// explain adds the explanation of the decision, if an operator asked for it, and removes the operator's token.
func (x handler) explain(p *pass.Pass) {
	if len(x.stream.msg.Headers.Explain) > 0 {
		x.stream.headers.Remove(names.HeaderExplain)
	}
	if p.Explanation != nil {
		x.stream.headers.Set(names.HeaderExplanation, p.Explanation)
	}
}

// decision returns the decision as dynamic metadata, {"tandem": {"pool": ..., ...}}, if it is configured.
func (x handler) decision(of *pass.Pass) []byte {
	if !x.s.DecisionMetadata {
		return nil
	}
	told := of.Told()
	if told == nil {
		return nil
	}
	return envoywire.Metadata(names.Decisions, told)
}

// startSpan starts the span of this stream. orphan says whether it may have no parent, when Envoy does not trace.
func (x handler) startSpan(name string, orphan bool) {
	if !x.meter.Traces() {
		return
	}
	h := &x.stream.msg.Headers
	resumed := orphan && len(h.Ticket) > 0
	ctx := x.stream.Context()
	envoys := telemetry.TraceContext{ // copies these values only
		Traceparent: first(metadata.ValueFromIncomingContext(ctx, names.HeaderTraceparent)),
		Tracestate:  first(metadata.ValueFromIncomingContext(ctx, names.HeaderTracestate)),
	}
	x.meter.StartSpan(ctx, name, orphan, resumed, envoys,
		telemetry.TraceContext{Traceparent: string(h.Traceparent), Tracestate: string(h.Tracestate)}, x.stream.requestID)
}

// spanPairLeg starts the span of one of two concurrent legs.
func (x handler) spanPairLeg(name string, t *kvtransfer.Ticket) {
	x.startSpan(name, false)
	x.meter.SpanTicket(t)
	x.meter.SpanPair(t)
}

// redirect ends the leg with a 307 and its ticket, which Envoy follows. It is an immediate response, in one
// message, instead of P's answer with other headers: Envoy follows a redirect as soon as it sees the headers and
// cuts a response that has more to come, so even an empty body would cost the internal connection each time.
func (x handler) redirect(t *kvtransfer.Ticket, to []byte) error {
	sealed, err := x.sealHandOver(t)
	if err != nil {
		return err
	}
	x.meter.Observer.TicketSealed(len(sealed))
	i := &envoywire.Immediate{Status: 307, Details: names.DetailsPrefix + "_redirect"}
	i.Headers.Set("location", to)
	i.Headers.Set(names.HeaderTicket, sealed)
	return x.stream.send(&envoywire.Reply{Immediate: i})
}

// sealHandOver seals the ticket. KV parameters that do not fit a header are stored here, and the ticket refers to
// them.
func (x handler) sealHandOver(t *kvtransfer.Ticket) ([]byte, error) {
	if len(t.Params) <= maxHeaderParams {
		sealed, err := x.s.passes.Keys().Seal(nil, t, x.stream.requestID)
		if err != nil || len(sealed) <= kvtransfer.MaxHeaderBytes {
			return sealed, err
		}
	}
	var err error
	if t.ParamsRef, err = x.s.State.HandOvers.PutHandOver(t.Params); err != nil {
		const message = "hand-over too large for a header and no room to keep it: decode computes the prompt"
		x.log(slog.LevelWarn, message, "err", err)
		t.ParamsRef = [16]byte{}
	}
	t.Params = nil
	return x.s.passes.Keys().Seal(nil, t, x.stream.requestID)
}

// switched refuses an engine's 101, which no client has asked for.
func (x handler) switched() error {
	if err := x.stream.receive(); err != nil {
		return err
	}
	return &openai.Error{
		Status: 502, Type: "api_error", Code: "bad_gateway",
		Message: "the endpoint's answer was not valid HTTP; try again", RetryAfter: time.Second,
	}
}

// maxHeaderParams is the length from which on KV parameters never fit a header, however they are packed.
const maxHeaderParams = 8 * kvtransfer.MaxHeaderBytes

func first(values []string) string {
	if len(values) == 0 {
		return ""
	}
	return values[0]
}
