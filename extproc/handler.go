package extproc

import (
	"errors"
	"log/slog"
	"strconv"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
)

// handler is what the handlers of all filter roles share: the stream and its telemetry.
type handler struct {
	*stream
	*telemetry.Meter
	s *Server
}

// log writes a message about the request to the log.
func (x handler) log(level slog.Level, message string, args ...any) {
	x.s.Log.Log(x.Context(), level, message, append([]any{"request_id", x.requestID}, args...)...)
}

// receiveBody reads the whole body into x.body, at most limit bytes. A body with trailers is refused: Envoy 1.40 sends
// one twice, if it comes FULL_DUPLEX_STREAMED on a route with retries or redirects.
func (x handler) receiveBody(limit int) error {
	defer x.EndPhase(telemetry.PhaseReceive)
	if x.msg.EndOfStream {
		return nil
	}
	if x.msg.Mode.Known && x.msg.Mode.Request == envoywire.ModeNone {
		return errors.New("Envoy does not send this request's body (request_body_mode NONE): the route is not one that `tandem envoy` writes") //nolint:staticcheck // a name
	}
	if x.msg.Mode.Request == envoywire.ModeBuffered {
		// Envoy sends a buffered body only after a reply to the headers; the decision goes with the reply to the
		// body.
		err := x.send(&envoywire.Reply{Phase: envoywire.PhaseRequestHeaders, Headers: &x.headers})
		if x.headers.Reset(); err != nil {
			return err
		}
	}
	x.msg.Body, x.msg.BodyLimit, x.msg.Over = &x.body, limit, false
	if n, err := strconv.Atoi(string(x.msg.Headers.ContentLength)); err == nil && n > 0 && n <= limit {
		x.body.Grow(min(n, 1<<20) + 1024) // space for insertions; a false length costs at most this
	}
	x.limitBodyTime()
	defer x.stopBodyTime()
	for !x.msg.EndOfStream {
		if err := x.receive(); err != nil {
			return err
		}
		if x.msg.Over {
			return openai.TooLarge(limit) // at once: the rest may be endless
		}
		if err := x.hold(); err != nil {
			return err
		}
		// a buffered body is in one message; if trailers follow, that has no end of stream
		trailers := x.msg.Phase == envoywire.PhaseRequestTrailers
		if trailers || x.msg.Mode.Request == envoywire.ModeBuffered && !x.msg.EndOfStream {
			return openai.Trailers()
		}
	}
	return nil
}

// startSpan starts the span of this stream. orphan says whether it may have no parent, when Envoy does not trace.
func (x handler) startSpan(name string, orphan bool) {
	x.Meter.StartSpan(x.Context(), name, orphan, &x.msg.Headers, x.requestID)
}

// spanPairLeg starts the span of one of two concurrent legs.
func (x handler) spanPairLeg(name string, t *kvtransfer.Ticket) {
	x.startSpan(name, false)
	x.SpanTicket(t)
	x.SpanPair(t)
}

// redirect ends the leg with a 307 and its ticket, which Envoy follows. It is an immediate response, in one
// message, instead of P's answer with other headers: Envoy follows a redirect as soon as it sees the headers and
// cuts a response that has more to come, so even an empty body would cost the internal connection each time.
func (x handler) redirect(t *kvtransfer.Ticket, to []byte) error {
	sealed, err := x.sealHandOver(t)
	if err != nil {
		return err
	}
	x.TicketSealed(len(sealed))
	i := &envoywire.Immediate{Status: 307, Details: envoywire.DetailsPrefix + "_redirect"}
	i.Headers.Set("location", to)
	i.Headers.Set(envoywire.HeaderTicket, sealed)
	return x.send(&envoywire.Reply{Immediate: i})
}

// sealHandOver seals the ticket. KV parameters that do not fit a header are stored here, and the ticket refers to
// them.
func (x handler) sealHandOver(t *kvtransfer.Ticket) ([]byte, error) {
	if len(t.Params) <= maxHeaderParams {
		sealed, err := x.s.keys().Seal(nil, t, x.requestID)
		if err != nil || len(sealed) <= kvtransfer.MaxHeaderBytes {
			return sealed, err
		}
	}
	var err error
	if t.ParamsRef, err = x.s.State.PutHandOver(t.Params); err != nil {
		const message = "hand-over too large for a header and no room to keep it: decode computes the prompt"
		x.log(slog.LevelWarn, message, "err", err)
		t.ParamsRef = [16]byte{}
	}
	t.Params = nil
	return x.s.keys().Seal(nil, t, x.requestID)
}

// handedOver returns the parameters that a ticket contains or refers to; nil if there are none, or if they are
// gone: then the engine computes the prompt by itself.
func (x handler) handedOver(t *kvtransfer.Ticket) []byte {
	if t.ParamsRef == ([16]byte{}) {
		return t.Params
	}
	if kept, ok := x.s.State.TakeHandOver(t.ParamsRef); ok {
		return kept
	}
	return nil
}

// side returns what is known of the endpoint at an address, which may have left the pool.
func (x handler) side(pool *kvstate.Pool, addr string) kvtransfer.Side {
	if pool != nil {
		if e := pool.Endpoint(addr); e != nil {
			return plan.SideOf(e)
		}
	}
	return kvtransfer.Side{Addr: addr}
}

func (x handler) markGood(pool *kvstate.Pool, addr string) {
	if e := pool.Endpoint(addr); e != nil {
		x.s.State.MarkGood(e)
	}
}

// switched refuses an engine's 101, which no client has asked for.
func (x handler) switched() error {
	if err := x.receive(); err != nil {
		return err
	}
	return &openai.Error{
		Status: 502, Type: "api_error", Code: "bad_gateway",
		Message: "the endpoint's answer was not valid HTTP; try again", RetryAfter: time.Second,
	}
}

// maxHeaderParams is the length from which on KV parameters never fit a header, however they are packed.
const maxHeaderParams = 8 * kvtransfer.MaxHeaderBytes
