package extproc

import (
	"cmp"
	"errors"
	"io"
	"strconv"
	"time"

	"google.golang.org/grpc/mem"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// route is where a pass of a request goes, and what becomes of its body on the way.
type route struct {
	leg      string
	endpoint *kvstate.Endpoint
	ticket   []byte        // sealed; nil: the hop needs none
	edits    openai.Edits  // of the body as it lies in exchange.body
	perTry   time.Duration // time limit of the prefill hop
	path     string        // of the leg, where it is not the client's
	booked   [2]kvstate.ReservationID
	pair     *pairRoute // of the leg "pair"
	carry    bool       // of the leg "prefill": a short answer comes by itself (carried.go)

	handoff Handoff
	orders  sidecarOrders // with handoff sidecar
}

// route is the main role: it serves pass 1 and pass 2 of a request.
func (x *exchange) route() error {
	if err := x.receive(); err != nil {
		return err
	}
	if x.msg.phase != phaseRequestHeaders {
		return errors.New("the first message of a stream was not request headers")
	}
	x.identify()
	x.startSpan(spanDecide, true)
	r, err := x.decide()
	if err != nil {
		return err
	}
	x.did(workDecide)
	err = x.answer(r)
	x.did(workAnswer)
	if err == nil && x.stream.Context().Err() != nil {
		err = io.EOF // Envoy let go before it had the answer
	}
	if err != nil {
		for _, id := range r.booked {
			x.s.State.Release(id)
		}
		return err
	}
	return nil
}

// identify settles the request id: the client's own if it is fit to be passed around and logged, else a new one.
func (x *exchange) identify() {
	x.bookedAs = string(x.msg.headers.requestID)
	if openai.RequestID(x.bookedAs) {
		x.requestID = x.bookedAs
		return
	}
	x.requestID, x.newID = newRequestID(), true
}

func newRequestID() string {
	id := make([]byte, 0, 32)
	for range 2 {
		const digits = "0123456789abcdef"
		for v, i := random(), 0; i < 16; i, v = i+1, v>>4 {
			id = append(id, digits[v&15])
		}
	}
	return string(id)
}

// decide finds the route, receiving the body where it matters.
func (x *exchange) decide() (route, error) {
	h := &x.msg.headers
	if len(h.upgrade) > 0 {
		return route{}, openai.BadRequest("upgrade_not_supported", "", "protocol upgrades are not supported here")
	}
	if len(h.ticket) > 0 {
		t, err := x.openTicket()
		if t == nil {
			return route{}, err
		}
		return x.resume(t, err)
	}
	switch api := openai.Classify(string(h.method), string(h.path)); api {
	case openai.Models:
		return route{}, x.listModels()
	case openai.PassThrough:
		return x.passThrough()
	case openai.SGLangGenerate:
		if !x.isSGLang() {
			return x.passThrough()
		}
		return x.first(api)
	default:
		return x.first(api)
	}
}

// openTicket opens the ticket of pass 2. Envoy takes every ticket off a request that comes in, so one that is here came
// with a redirect, and the body with it is a leg's. If it cannot be read (another key, another release, or an Envoy that
// lets clients' tickets in), nobody knows what the client's body was: the request ends here. Tickets that go out with a
// leg, where engines see them, do not open this door either, but for pass 1's together with P's answer (carried.go). An expired
// ticket comes with its error.
func (x *exchange) openTicket() (*kvtransfer.Ticket, error) {
	t, err := x.s.keys().Open(string(x.msg.headers.ticket), x.requestID, time.Now())
	carried := len(x.msg.headers.prefilled) > 0
	if t != nil && (t.Stage.Redirects() || carried && t.Stage == kvtransfer.PrefillLeg) {
		return t, err
	}
	x.s.metrics.forgedTickets.Inc()
	x.s.Log.Warn("ticket refused", "request_id", x.requestID, "err", err)
	return nil, openai.Unavailable("ticket_refused", "the state of this request cannot be read here; send it again", time.Second)
}

// receiveBody reads the body to its end into x.body, at most limit bytes.
func (x *exchange) receiveBody(limit int) error {
	defer x.did(workReceive)
	if x.msg.endOfStream {
		return nil
	}
	if x.msg.mode.known && x.msg.mode.request == bodyNone {
		return errors.New("Envoy does not send this request's body (request_body_mode NONE): the route is not one that `tandem envoy` writes") //nolint:staticcheck // a name
	}
	if x.msg.mode.request == bodyBuffered {
		// Envoy sends a buffered body only after the headers are answered; what is decided goes with the body's answer.
		if err := x.send(&reply{phase: phaseRequestHeaders}); err != nil {
			return err
		}
	}
	x.msg.body, x.msg.bodyLimit, x.msg.over = &x.body, limit, false
	if n, err := strconv.Atoi(string(x.msg.headers.contentLength)); err == nil && n > 0 && n <= limit {
		x.body.grow(min(n, 1<<20) + 1024) // room for what is put in; a false length costs at most this
	}
	x.limitBodyTime()
	defer x.stopBodyTime()
	for !x.msg.endOfStream {
		if err := x.receive(); err != nil {
			return err
		}
		if x.msg.over {
			return openai.TooLarge(limit) // at once: the rest may be endless
		}
		if err := x.hold(); err != nil {
			return err
		}
		if x.msg.mode.request == bodyBuffered && x.msg.phase == phaseRequestBody {
			return nil // the whole body is in one message, also where trailers follow, which then has no end of stream
		}
	}
	return nil
}

// answer tells Envoy the route and sends the body on.
func (x *exchange) answer(r route) error {
	x.setHeaders(r)
	return x.sendOn(r.edits, x.decision)
}

// answerBody sends the headers as they are set, and the body, edited, on.
func (x *exchange) answerBody(edits openai.Edits) error { return x.sendOn(edits, nil) }

// sendOn is answerBody with metadata, where there is any.
func (x *exchange) sendOn(edits openai.Edits, metadata []byte) error {
	if !x.hasBody() {
		return x.send(&reply{phase: phaseRequestHeaders, headers: &x.headers, clearRoute: true, metadata: metadata})
	}
	x.pieces.cut(&x.body, edits)
	shared := x.body.share()
	defer shared.Free()
	if x.msg.mode.request == bodyBuffered {
		out := reply{phase: phaseRequestBody, headers: &x.headers, clearRoute: true, metadata: metadata}
		if len(edits) > 0 || x.other {
			x.headers.add("content-length", itoa(x.pieces.total)) // Envoy holds it against the body and refuses a mismatch
			out.kind, out.parts = bodyReplace, x.pieces.whole(shared)
		}
		return x.send(&out)
	}
	if err := x.send(&reply{phase: phaseRequestHeaders, headers: &x.headers, clearRoute: true, metadata: metadata}); err != nil {
		return err
	}
	trailers := x.msg.phase == phaseRequestTrailers
	err := x.pieces.each(shared, func(parts mem.BufferSlice, last bool) error {
		return x.send(&reply{phase: phaseRequestBody, kind: bodyStreamed62, parts: parts, end: last && !trailers})
	})
	if err == nil && trailers {
		err = x.send(&reply{phase: phaseRequestTrailers})
	}
	return err
}

// hasBody reports whether the body came through here; otherwise Envoy passes it on by itself, or there is none.
func (x *exchange) hasBody() bool { return x.msg.phase != phaseRequestHeaders }

// setHeaders writes what Envoy and the next hop are to see. Everything that steers is set or removed, whatever the
// client sent.
func (x *exchange) setHeaders(r route) {
	h := &x.headers
	h.add(headerEndpoint, []byte(r.endpoint.Addr))
	h.add(headerLeg, []byte(r.leg))
	if r.path != "" {
		h.add(":path", []byte(r.path))
	}
	if x.newID {
		h.add(headerRequestID, []byte(x.requestID))
	}
	if r.ticket != nil {
		h.add(headerTicket, r.ticket)
		h.add(headerBodyBytes, itoa(r.edits.Len(x.body.len())))
	} else {
		h.drop(headerTicket)
		h.drop(headerBodyBytes)
	}
	if r.perTry > 0 {
		h.add(headerPerTry, itoa(int(r.perTry.Milliseconds())))
	} else {
		h.drop(headerPerTry)
	}
	if r.carry {
		h.add(headerCarry, location(x.msg.headers.authority, []byte(cmp.Or(r.path, string(x.msg.headers.path)))))
	} else {
		h.drop(headerCarry)
	}
	if len(x.msg.headers.prefilled) > 0 {
		h.drop(headerPrefilled)
		h.drop(kvstate.ORCAHeader)
	}
	x.setTrace()
	if r.leg != legEncode { // the pass behind it decides
		x.setExplanation()
	}
	x.setPairHeaders(r.pair)
	if r.handoff == HandoffSidecar {
		h.sidecar(r.orders)
	}
	if s := r.endpoint.Scheme; s != "" && s != "http" {
		h.add(headerScheme, []byte(s))
	} else {
		h.drop(headerScheme)
	}
}

// setExplanation has the answer explain the decision, where an operator asked; the operator's token goes no further.
func (x *exchange) setExplanation() {
	if len(x.msg.headers.explain) > 0 {
		x.headers.drop(headerExplain)
	}
	if x.explanation != nil {
		x.headers.add(headerExplanation, x.explanation)
	}
}
