package extproc

import (
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/mem"

	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// PickerOptions are what the Endpoint Picker protocol needs beside the rest.
type PickerOptions struct {
	Fallbacks    int  // endpoints named behind the picked one
	WatchBody    bool // keep the stream until the answer's end, not only until it begins
	ShedRequests int  // booked on every endpoint that decodes: from here on requests of negative priority get 429
	Conformance  bool // honour and write the headers of the Inference Extension's conformance suite; for tests alone
}

// picked is what became of one request in the Endpoint Picker protocol.
type picked struct {
	pool      *kvstate.Pool // nil: nothing was picked
	endpoint  *kvstate.Endpoint
	prefill   *kvstate.Endpoint // for the sidecar beside endpoint
	list      string            // the endpoint and its fallbacks, as the gateway is told
	edits     openai.Edits
	booked    kvstate.ReservationID
	tokens    int64
	rewritten string // the model that the request was sent to; "": the one that it asks for
	asked     string
}

// serveAsPicker serves one request of a gateway that knows nothing of Tandem but the Endpoint Picker protocol: one pass, in
// which the destination is said in a header and in dynamic metadata, and then the answer, of which the server wants to know
// who gave it and when it ended. What is booked is released with the stream, however that ends.
func (x *exchange) serveAsPicker() error {
	if err := x.receive(); err != nil {
		return err
	}
	if x.msg.phase != phaseRequestHeaders {
		return errors.New("the first message of a stream was not request headers")
	}
	began := time.Now()
	x.identify()
	p, err := x.pick()
	defer func() { x.s.State.Release(p.booked) }()
	if err != nil {
		return err
	}
	h := &x.headers
	h.add(headerEndpoint, []byte(p.list))
	if x.newID {
		h.add(headerRequestID, []byte(x.requestID))
	}
	h.sidecar(p.prefill)
	if err := x.sendOn(p.edits, destination(p.list)); err != nil {
		return err
	}
	x.s.metrics.processed("endpoint-picker", time.Since(began), x.busy)
	_ = x.followAnswer(&p) // however it ends: what it says is said
	return errAnswered
}

// pick chooses where a request goes.
func (x *exchange) pick() (picked, error) {
	h := &x.msg.headers
	if len(h.upgrade) > 0 {
		return picked{}, openai.BadRequest("upgrade_not_supported", "", "protocol upgrades are not supported here")
	}
	if operatorPath(string(h.path)) {
		return picked{}, openai.NotServed()
	}
	api := openai.Classify(string(h.method), string(h.path))
	if x.msg.endOfStream || api == openai.PassThrough || api == openai.Models {
		return x.pickOther()
	}
	if err := openai.CheckHeaders(string(h.contentType), string(h.contentEncoding)); err != nil {
		return picked{}, err
	}
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return picked{}, err
	}
	if err := x.scan(api); err != nil {
		return picked{}, err
	}
	pool := x.s.State.PoolFor(x.req.Model())
	if pool == nil {
		return picked{}, openai.ModelNotFound(x.req.Model())
	}
	a := attempt{started: time.Now()}
	policy, _ := x.s.policy(pool.Spec.Name)
	if err := x.whetherToSplit(&a, policy); err != nil {
		return picked{}, err
	}
	return x.pickSplit(pool, policy, &a)
}

// pickOther chooses for what is not understood, or has no body: any endpoint that decodes.
func (x *exchange) pickOther() (picked, error) {
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return picked{}, err
	}
	model, err := x.scanOther()
	if err != nil {
		return picked{}, err
	}
	pool := x.s.State.PoolFor(model)
	if pool == nil {
		pool = x.s.State.PoolFor("")
	}
	if pool == nil {
		return picked{}, openai.Unavailable("no_pool", "no pool is configured", time.Second)
	}
	x.hashes = x.hashes[:0]
	policy, _ := x.s.policy(pool.Spec.Name)
	return x.pickSplit(pool, policy, &attempt{started: time.Now(), alone: true, why: "pass_through"})
}

// pickSplit chooses among those that the gateway allows.
func (x *exchange) pickSplit(pool *kvstate.Pool, policy Policy, a *attempt) (picked, error) {
	p := picked{pool: pool, tokens: pool.PromptTokens(x.body.len())}
	if a.why != "pass_through" {
		x.hashes = x.req.PromptHash(x.hashes[:0], blockBytes, maxBlocks)
	}
	x.s.State.View(pool, x.hashes, &x.view)
	if x.session = x.sessionOf(policy.Session); x.session != 0 {
		x.s.State.MarkSession(pool, x.session, &x.view)
	}
	p.tokens = x.countTokens(pool, &policy, p.tokens)
	x.allow()
	if err := x.shed(pool); err != nil {
		return p, err
	}
	request := picker.Request{PromptTokens: p.tokens, Blocks: len(x.hashes), Model: x.req.Model(), Rand: random()}
	if err := x.toHolderOf(pool, a); err != nil {
		return p, err
	}
	request.Split = !a.alone
	x.picker.Policy = policy.place()
	choice, err := x.picker.Pick(&request, &x.view)
	x.explain(pool, &request)
	if err != nil {
		return p, noEndpoint(pool, err)
	}
	d := x.view.Endpoints[choice.Decode].Endpoint
	p.endpoint = d
	p.booked = x.reserve(d, kvstate.RoleDecode, 0, choice.DecodeBooking())
	p.list = x.withFallbacks(&request, choice)
	x.rewriteModel(&p)
	split := "decode_alone"
	if choice.Prefill >= 0 {
		var edits openai.Edits
		if p.prefill, edits, err = x.handOver(pool, policy, choice, p.tokens, p.rewritten, a); err != nil {
			return p, err
		}
		p.edits = merge(edits, p.edits)
		if p.prefill != nil || edits != nil {
			split = "split"
		}
	}
	x.s.State.Routed(pool, d, x.hashes)
	var at *kvstate.Endpoint
	if choice.Prefill >= 0 {
		at = x.view.Endpoints[choice.Prefill].Endpoint
	}
	x.stick(pool, x.session, at, d)
	x.planned(pool, split, a.why, at, d, p.tokens)
	return p, nil
}

// allow takes out of the view what the gateway's subset, or a conformance test, does not name. Prefill endpoints stay when
// the subset is of endpoints that decode: the gateway never connects to them.
func (x *exchange) allow() {
	hint := &x.msg.hints
	subset, limited := hint.subset, hint.hasSubset
	if s := x.msg.headers.selection; x.s.Picker.Conformance && len(s) > 0 {
		subset, limited = addresses(nil, string(s)), true
	}
	if !limited {
		return
	}
	x.view.Endpoints = slices.DeleteFunc(x.view.Endpoints, func(c kvstate.Candidate) bool {
		return c.Endpoint.Role&kvstate.RoleDecode != 0 && !named(subset, c.Endpoint.Addr)
	})
}

// toHolderOf leaves nothing in the view but the endpoint that holds the stored response which the request goes on from. A
// response that is stored from here on is found again only where one endpoint decodes, or by the gateway's own session
// affinity: in this protocol its id is the engine's.
func (x *exchange) toHolderOf(pool *kvstate.Pool, a *attempt) error {
	if a.why == "pass_through" {
		return nil
	}
	holder, stored := x.holder(pool)
	a.alone = a.alone || stored
	if holder == nil {
		return nil
	}
	x.view.Endpoints = slices.DeleteFunc(x.view.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint != holder })
	if len(x.view.Endpoints) == 0 {
		return openai.Unavailable("no_endpoint", "the endpoint that holds this response is not among those allowed", time.Second)
	}
	return nil
}

// named reports whether a subset names an endpoint, by its address or by its host alone.
func named(subset []string, addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	return slices.ContainsFunc(subset, func(s string) bool { return s == addr || s == host })
}

// shed refuses a request of negative priority when the pool is full.
func (x *exchange) shed(pool *kvstate.Pool) error {
	if x.s.State.Priority(pool.Spec.Name, string(x.msg.headers.objective)) >= 0 {
		return nil
	}
	for _, c := range x.view.Endpoints {
		if c.Usable && c.Endpoint.Role&kvstate.RoleDecode != 0 && c.Requests < int64(x.s.Picker.ShedRequests) {
			return nil
		}
	}
	return openai.Overloaded("the pool is full, and this request gives way to others", time.Second)
}

// withFallbacks is the list of endpoints for the gateway: the picked one, then those that would have been picked without it.
func (x *exchange) withFallbacks(r *picker.Request, c picker.Choice) string {
	list := []string{x.view.Endpoints[c.Decode].Endpoint.Addr}
	others := *r
	for range x.s.Picker.Fallbacks {
		others.Excluded = append(others.Excluded, list[len(list)-1])
		i, err := x.picker.PickDecode(&others, &x.view, c.Prefill)
		if err != nil || slices.Contains(list, x.view.Endpoints[i].Endpoint.Addr) {
			break
		}
		list = append(list, x.view.Endpoints[i].Endpoint.Addr)
	}
	return strings.Join(list, ",")
}

// rewriteModel sends the request to another model, where the cluster wants that.
func (x *exchange) rewriteModel(p *picked) {
	asked := x.req.Model()
	if asked == "" || x.body.len() == 0 {
		return
	}
	p.rewritten = x.s.State.Rewritten(p.pool.Spec.Name, asked, random())
	if p.rewritten == "" || p.rewritten == asked {
		p.rewritten = ""
		return
	}
	p.asked = asked
	x.patch.Reset(&x.req)
	x.patch.Set("model", openai.FieldModel, strconv.AppendQuote(nil, p.rewritten))
	p.edits = slices.Clone(x.patch.Edits())
}

// merge joins two lists of edits of one body in their order. They do not overlap: what a only inserts stands first.
func merge(a, b openai.Edits) openai.Edits {
	if len(a) == 0 {
		return b
	}
	out := append(slices.Clone(a), b...)
	slices.SortStableFunc(out, func(a, b openai.Edit) int { return a.Start - b.Start })
	return out
}

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
	return x.sendPieces(end)
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
	return x.sendPieces(false)
}

func (x *exchange) sendPieces(end bool) error {
	x.pieces.cut(&x.body, nil)
	shared := x.body.share()
	defer shared.Free()
	return x.pieces.each(shared, func(parts mem.BufferSlice, last bool) error {
		return x.send(&reply{phase: phaseResponseBody, kind: bodyStreamed62, parts: parts, end: last && end})
	})
}

// dropped says in the Inference Extension's words why a request was not served.
func (i *immediate) dropped(e *openai.Error) {
	switch e.Status {
	case 429:
		i.headers.add(headerDropped, []byte(reasonSaturated))
	case 503:
		i.headers.add(headerDropped, []byte(reasonNoEndpoints))
	}
}
