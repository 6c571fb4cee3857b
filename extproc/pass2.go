package extproc

import (
	"bytes"
	"fmt"
	"slices"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// resume is pass 2: the body is the one a leg was sent, and the ticket says what to do with it.
func (x *exchange) resume(t *kvtransfer.Ticket, ticketErr error) (route, error) {
	if err := x.receiveBody(x.s.MaxBodyBytes + kvtransfer.MaxUndoBytes + maxDecodeMember); err != nil {
		return route{}, err
	}
	if x.body.len() != t.BodyBytes {
		return route{}, fmt.Errorf("the body of pass 2 has %d bytes, its leg was sent %d", x.body.len(), t.BodyBytes)
	}
	if err := t.Undo.Check(x.body.len()); err != nil {
		return route{}, fmt.Errorf("undoing a leg's edits: %w", err)
	}
	x.spanTicket(t)
	if t.Stage == kvtransfer.PrefillLeg {
		t = x.carried(t)
	}
	x.s.releasePass(x.requestID, t.Redirects) // of a stream that Envoy gave up on and tries again
	pool := x.s.State.Pool(t.Pool)            // gone where the configuration changed between the hops
	if t.Stage == kvtransfer.HandOver && ticketErr == nil && pool != nil && x.spend(t) {
		return x.decode(pool, t)
	}
	x.s.release(t)
	a := attempt{
		redirects: t.Redirects, prefills: t.Prefills, started: t.Started, excluded: t.Excluded,
		decodeFailed: t.Cause == kvtransfer.CauseDecode, turnFailed: t.Cause == kvtransfer.CauseTurn,
	}
	if t.Stage == kvtransfer.Encoded {
		if ticketErr == nil && x.spend(t) {
			a.encoded = x.handedOver(t)
		}
		return x.again(t, a)
	}
	if t.Stage == kvtransfer.HandOver {
		t.Cause = "hand_over_spent"
		switch {
		case ticketErr != nil:
			t.Cause = "hand_over_expired"
			x.mayAskOthers()
			x.s.stranded(t, x.requestID, t.Cause)
		case pool == nil:
			t.Cause = "pool_gone"
			x.mayAskOthers()
			x.s.stranded(t, x.requestID, t.Cause)
		}
	}
	x.s.metrics.replanned(t)
	if t.Split && t.Cause != kvtransfer.CauseDecode && t.Cause != kvtransfer.CauseTurn {
		policy, _ := x.s.policy(t.Pool)
		switch policy.OnFailure {
		case DecodeAlone:
			a.alone, a.why = true, "prefill_failed"
		case Fail:
			return route{}, openai.Unavailable("prefill_failed", "the prefill of this request failed", time.Second)
		}
	}
	return x.again(t, a)
}

// again plans a request anew after a hop of it failed.
func (x *exchange) again(t *kvtransfer.Ticket, a attempt) (route, error) {
	x.spare.grow(t.Undo.Len(x.body.len()))
	x.spare.data = t.Undo.Apply(x.spare.data[:0], x.body.bytes())
	x.swapBody()
	h := &x.msg.headers
	return x.plan(openai.Classify(string(h.method), string(h.path)), a)
}

// decode writes the decode leg with the KV parameters that prefill answered. D is chosen again: the load has changed
// since pass 1, and pull dialects allow it.
func (x *exchange) decode(pool *kvstate.Pool, t *kvtransfer.Ticket) (route, error) {
	params := x.handedOver(t)
	x.s.State.Release(kvstate.ReservationID(t.Reservations[0])) // the prefill leg did that, if it is not ours
	x.s.releaseWherever(t, 1)
	x.recall(pool, t)
	d, paired, err := x.pickDecode(pool, t)
	if err != nil {
		return route{}, noEndpoint(pool, err)
	}
	if !paired {
		params = nil
	}
	policy, _ := x.s.policy(t.Pool)
	r := route{leg: legDecode, endpoint: d, edits: t.Undo, perTry: answerStart(policy, t.Stream, pool.PrefillTime(t.PromptTokens, policy.PerToken))}
	var undo openai.Edits
	var answer []byte
	var turn kvtransfer.TurnLeg
	if c, ok := policy.Dialect.(kvtransfer.Continuer); ok && params != nil {
		answer, undo = x.continueAt(&r, t, c, params)
	} else if params != nil && policy.Dialect != nil {
		var more []byte
		turn, more = x.tellTurn(&r, t, &policy, paired)
		r.edits, undo, err = x.decodeEdits(t.Undo, policy.Dialect, params, more)
		if err != nil {
			return route{}, err
		}
	}
	if t.Redirects+1 >= x.s.MaxRedirects {
		r.leg = legPass
	}
	cached := x.tellCached(&r, t, &policy)
	r.booked[1] = x.reserve(d, kvstate.RoleDecode, t.Redirects, decoding(t.PromptTokens))
	if len(x.hashes) > 0 {
		x.s.State.Routed(pool, d, x.hashes)
	}
	x.stick(pool, t.Session, nil, d)
	x.s.recent.change(x.requestID, func(trace *Trace) { trace.Decode = d.Addr })
	x.spanHandOver(d, paired && params != nil)
	if policy.cleansUp() {
		x.s.keep(t, x.requestID, params, d.Addr, true)
	}
	return x.seal(r, &kvtransfer.Ticket{
		ID: t.ID, Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: t.Started,
		Pool: t.Pool, Prefill: t.Prefill, Decode: d.Addr, Reservations: [2]uint64{0, uint64(r.booked[1])}, Split: true,
		Redirects: t.Redirects, Prefills: t.Prefills, Excluded: t.Excluded,
		Undo: undo, BodyBytes: r.edits.Len(x.body.len()), PromptTokens: t.PromptTokens,
		Params: answer, Path: x.clientPath(&r), Cached: cached, Turn: turn,
	})
}

// handedOver are the parameters that a ticket carries or refers to; nil if there are none, or they are gone: then the engine
// that they are for computes by itself.
func (x *exchange) handedOver(t *kvtransfer.Ticket) []byte {
	if t.ParamsRef == ([16]byte{}) {
		return t.Params
	}
	if kept, ok := x.takeHandOver(t); ok {
		return kept
	}
	return nil
}

// recall finds the text blocks of a ticket's prompt, whose last it names. There are none where the prompt was routed by a replica
// that this one does not hear.
func (x *exchange) recall(pool *kvstate.Pool, t *kvtransfer.Ticket) {
	x.hashes = x.hashes[:0]
	if text := pool.TextOf(x.hashes, t.Prompt, maxBlocks); text != nil {
		x.hashes = text
	}
}

// toldHits raises hits to what engines said that they hold of a prompt of so many tokens, as countTokens does in pass 1, which
// has the request's text.
func (x *exchange) toldHits(pool *kvstate.Pool, tokens int64) {
	sizes := pool.TokenBlockSizes()
	if len(sizes) == 0 || len(x.hashes) == 0 {
		return
	}
	known := pool.KnownTokens(x.hashes)
	if known.TextBlocks == 0 {
		return
	}
	pool.TrustEngines(x.hashes, known.TextBlocks, &x.view)
	for _, size := range sizes {
		pool.TokenHits(known.Blocks(size), size, tokens, len(x.hashes), &x.view)
	}
}

// pickDecode chooses D among those that may pair with the prefill endpoint that holds the blocks, by the price that pass 1 has
// for them: what of the prompt (x.hashes) a D holds from an earlier turn need not be moved. Where it left the pool
// between the hops, or everything that pairs with it did, any other will do (paired is false), which must not be told of
// the blocks. What P pushed lies with the D of pass 1 and nowhere else.
func (x *exchange) pickDecode(pool *kvstate.Pool, t *kvtransfer.Ticket) (d *kvstate.Endpoint, paired bool, err error) {
	policy, _ := x.s.policy(t.Pool)
	_, pushed := policy.Dialect.(kvtransfer.Pusher)
	if d := pool.Endpoint(t.Decode); pushed && d != nil && !d.Failed() {
		return d, true, nil
	}
	x.s.State.View(pool, x.hashes, &x.view)
	x.toldHits(pool, t.PromptTokens)
	if t.Session != 0 {
		x.s.State.MarkSession(pool, t.Session, &x.view)
	}
	r := picker.Request{PromptTokens: t.PromptTokens, Blocks: len(x.hashes), Model: t.Model, Labels: x.labels(&policy), Excluded: t.Excluded, Rand: random()}
	prefill := slices.IndexFunc(x.view.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint.Addr == t.Prefill })
	x.picker.Policy = policy.place()
	i, err := x.picker.PickDecode(&r, &x.view, prefill)
	if err != nil && prefill >= 0 {
		prefill = -1
		i, err = x.picker.PickDecode(&r, &x.view, prefill)
	}
	if err != nil {
		return nil, false, err
	}
	return x.view.Endpoints[i].Endpoint, prefill >= 0 && !pushed, nil
}

// maxDecodeMember bounds what a decode body may be longer than the client's: the KV parameters, mostly block ids.
const maxDecodeMember = 8 << 20

// decodeEdits turns the undo of a prefill body into the edits that make the decode body, and gives the undo of those. What
// D is told stands right after the opening brace, where the undo's first edit mostly is too, and more behind it, with a comma at its
// end. A body that P answered with 200 is not an empty object, so a comma always follows.
func (x *exchange) decodeEdits(undo openai.Edits, dialect kvtransfer.Dialect, params, more []byte) (edits, back openai.Edits, err error) {
	x.params = append(append(dialect.DecodeMember(x.params[:0], params), ','), more...)
	n := len(x.params)
	if n > maxDecodeMember {
		return nil, nil, fmt.Errorf("a decode member of %d bytes", n)
	}
	front := bytes.IndexByte(x.body.bytes(), '{') + 1
	if len(undo) > 0 && undo[0].Start == front {
		x.params = append(x.params, undo[0].New...)
		edits = slices.Clone(undo)
		edits[0].New = x.params
	} else {
		edits = append(openai.Edits{{Start: front, End: front, New: x.params}}, undo...)
	}
	return edits, openai.Edits{{Start: front, End: front + n}}, nil
}
