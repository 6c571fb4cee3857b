package extproc

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// blockBytes is how much of a prompt one block of the prefix index stands for, and maxBlocks how far it looks.
const (
	blockBytes = 512
	maxBlocks  = 2048
)

// attempt is what is known about a request before a pass of it is planned.
type attempt struct {
	redirects int // Envoy has followed so far
	prefills  int // prefill legs tried so far
	started   time.Time
	excluded  []string // addresses that failed it
	alone     bool     // do not split, whatever the policy
	why       string   // of alone

	decodeFailed bool // the hop that failed last was to decode
}

// late reports whether the time for further attempts is over. What a failed prefill needs is not another attempt but the
// first of a decode endpoint, so that is always left.
func (a *attempt) late(policy Policy) bool {
	return time.Since(a.started) > policy.AttemptsTime
}

// first plans pass 1 of a request to one of the APIs that can be split.
func (x *exchange) first(api openai.API) (route, error) {
	h := &x.msg.headers
	if err := openai.CheckHeaders(string(h.contentType), string(h.contentEncoding)); err != nil {
		return route{}, err
	}
	if x.msg.endOfStream {
		return route{}, openai.BadRequest("empty_body", "", "the request has no body; a JSON object is expected")
	}
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return route{}, err
	}
	return x.plan(api, attempt{started: time.Now()})
}

// plan scans the body, picks and books the endpoints, and writes the leg that comes next. The body in x.body is the
// client's.
func (x *exchange) plan(api openai.API, a attempt) (route, error) {
	if err := x.scan(api); err != nil {
		return route{}, err
	}
	x.did(workScan)
	pool := x.s.State.PoolFor(x.req.Model())
	if pool == nil {
		return route{}, openai.ModelNotFound(x.req.Model())
	}
	if a.redirects == 0 { // what was let in is seen through
		if err := closed(pool); err != nil {
			return route{}, err
		}
	}
	policy, ok := x.s.policy(pool.Spec.Name)
	if !ok {
		return route{}, fmt.Errorf("pool %q has no policy", pool.Spec.Name)
	}
	if policy.Concurrent != nil {
		return x.concurrent(pool, policy, a)
	}
	if err := x.whetherToSplit(&a, policy); err != nil {
		return route{}, err
	}
	if holder, stored := x.holder(pool); stored {
		return x.toHolder(pool, holder)
	}
	x.hashes = x.req.PromptHash(x.hashes[:0], blockBytes, maxBlocks)
	x.s.State.View(pool, x.hashes, &x.view)
	if x.session = x.sessionOf(policy.Session); x.session != 0 {
		x.s.State.MarkSession(pool, x.session, &x.view)
	}
	tokens := x.countTokens(pool, &policy, pool.PromptTokens(x.body.len()))
	x.picker.Policy = policy.place()
	request := picker.Request{
		PromptTokens: tokens, Blocks: len(x.hashes), Model: x.req.Model(), Split: !a.alone, Excluded: a.excluded, Rand: random(),
	}
	choice, err := x.picker.Pick(&request, &x.view)
	x.explain(pool, &request)
	if err != nil {
		return route{}, noEndpoint(pool, err)
	}
	if err := a.exhausted(policy, x.view.Endpoints[choice.Decode].Endpoint.Addr); err != nil {
		return route{}, err
	}
	if choice.Prefill >= 0 && policy.Handoff != HandoffEnvoy {
		return x.oneHop(pool, policy, choice, tokens, a)
	}
	if choice.Prefill >= 0 {
		r, why, err := x.prefill(pool, policy, choice, tokens, a)
		if why == "" {
			return r, err
		}
		a.why = why
	} else if a.why == "" {
		a.why = "no_prefill"
		if x.view.Prefills() {
			a.why = "cheaper"
		}
	}
	return x.decodeAlone(pool, policy, choice, tokens, a)
}

// exhausted is why a request is not sent to one more decode endpoint; nil if it is.
func (a *attempt) exhausted(policy Policy, decode string) error {
	switch {
	case a.decodeFailed && a.late(policy):
		return openai.Unavailable("endpoint_failed", "no endpoint answered this request in the time there is for it", time.Second)
	case slices.Contains(a.excluded, decode) && triedAgain(a.excluded):
		return openai.Unavailable("endpoint_failed", "every endpoint that could answer this request has failed it", time.Second)
	}
	return nil
}

// triedAgain reports whether an endpoint has failed a request twice. Where every endpoint that decodes has failed it, one of
// them is tried a second time, since it may be back; the others are not, since they would only fail it again.
func triedAgain(excluded []string) bool {
	for i, e := range excluded {
		if slices.Contains(excluded[:i], e) {
			return true
		}
	}
	return false
}

// scan reads the body and, in the rare case that it carries members which are not the client's to send, cuts them.
func (x *exchange) scan(api openai.API) error {
	if err := x.req.Scan(api, x.body.bytes(), openai.Limits{}); err != nil {
		return err
	}
	if !x.req.HasControl() {
		return nil
	}
	x.s.metrics.controlFields.Inc()
	x.spare.grow(x.body.len())
	x.spare.data = x.req.Clean(x.spare.data[:0])
	x.swapBody()
	return x.req.Scan(api, x.body.bytes(), openai.Limits{})
}

// swapBody makes spare the body.
func (x *exchange) swapBody() {
	x.body, x.spare = x.spare, x.body
	x.spare.free()
	x.other = true
}

// whetherToSplit notes in a why the request is not split, if it is not.
func (x *exchange) whetherToSplit(a *attempt, policy Policy) error {
	switch {
	case x.body.len() > x.s.SplitBodyBytes && policy.RefuseLong:
		return openai.TooLarge(x.s.SplitBodyBytes)
	case a.alone:
	case policy.Dialect == nil:
		a.alone, a.why = true, "no_kv_transfer"
	case !policy.Split:
		a.alone, a.why = true, "policy"
	case x.body.len() > x.s.SplitBodyBytes:
		a.alone, a.why = true, "body_too_long"
	case a.redirects+2 >= x.s.MaxRedirects: // the hand-over, and a decode that fails, need one each
		a.alone, a.why = true, "redirects_spent"
	case a.prefills >= policy.PrefillAttempts:
		a.alone, a.why = true, "attempts_spent"
	case a.prefills > 0 && a.late(policy):
		a.alone, a.why = true, "time_spent"
	case !policy.Dialect.Speaks(x.req.API()):
		a.alone, a.why = true, "api_not_spoken"
	default:
		if why := x.req.Unsplittable(); why != "" {
			a.alone, a.why = true, why
		}
	}
	return nil
}

// prefill writes the prefill leg, or says why there is none.
func (x *exchange) prefill(pool *kvstate.Pool, policy Policy, c picker.Choice, tokens int64, a attempt) (r route, why string, err error) {
	p, d := x.view.Endpoints[c.Prefill], x.view.Endpoints[c.Decode]
	x.setPair(newTicketID(), kvtransfer.Side{Addr: p.Endpoint.Addr, Transfer: p.Endpoint.Transfer},
		kvtransfer.Side{Addr: d.Endpoint.Addr, Transfer: d.Endpoint.Transfer})
	x.setSource(policy, c.Prefill)
	x.patch.Reset(&x.req)
	policy.Dialect.Prefill(&x.req, &x.patch, &x.pair)
	learn := x.learns(policy)
	if asks, ok := policy.Dialect.(kvtransfer.TokenAsker); learn && !(ok && asks.AsksTokenIDs(x.req.API())) {
		x.patch.Set("return_token_ids", openai.FieldReturnTokenIDs, []byte("true"))
	}
	edits := x.patch.Edits()
	x.undo = edits.Inverse(x.undo[:0], x.body.bytes())
	if x.undo.Size() > kvtransfer.MaxUndoBytes {
		return route{}, "undo_too_large", nil
	}
	pusher, pushes := policy.Dialect.(kvtransfer.Pusher)
	if room := d.Endpoint.Transfer.BufferTokens; pushes && room > 0 {
		if r.booked[1], why = x.reserveRoom(d.Endpoint, a.redirects, c.DecodeBooking(), room, pusher.Patience()); why != "" {
			return route{}, why, nil
		}
	} else {
		r.booked[1] = x.reserve(d.Endpoint, kvstate.RoleDecode, a.redirects, c.DecodeBooking())
	}
	t := kvtransfer.Ticket{
		ID: x.pair.Attempt, Stage: kvtransfer.PrefillLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: a.started,
		Pool: pool.Spec.Name, Prefill: p.Endpoint.Addr, Decode: d.Endpoint.Addr, Split: true,
		Redirects: a.redirects, Prefills: a.prefills + 1, Excluded: a.excluded,
		Undo: x.undo, BodyBytes: edits.Len(x.body.len()), PromptTokens: tokens,
		Stream: x.req.True(openai.FieldStream), StreamUsage: x.req.WantsUsage(), Session: x.session,
		ExpectedCached: tokens - c.Uncached, ExpectedPrefill: expectedPrefill(c, &p),
	}
	r.leg, r.endpoint, r.edits = legPrefill, p.Endpoint, edits
	r.perTry = policy.PrefillTimeout + pool.PrefillTime(tokens+p.PromptTokens, policy.PerToken)
	if pushes {
		r.perTry += pusher.Patience() // the leg answers when the KV is with D
	}
	r.booked[0] = x.reserve(p.Endpoint, kvstate.RolePrefill, a.redirects, c.PrefillBooking())
	t.Reservations = [2]uint64{uint64(r.booked[0]), uint64(r.booked[1])}
	x.s.State.Routed(pool, p.Endpoint, x.hashes)
	x.s.State.Routed(pool, d.Endpoint, x.hashes)
	note := promptNote{}
	if learn {
		note = x.note(pool)
	}
	note.promised = tokens * int64(p.Hit) / int64(max(len(x.hashes), 1))
	x.s.notes.put(x.requestID, note)
	x.stick(pool, x.session, p.Endpoint, nil)
	x.planned(pool, "split", "", p.Endpoint, d.Endpoint, tokens)
	r, err = x.seal(r, &t)
	return r, "", err
}

// decodeAlone writes the one hop that answers the whole request.
func (x *exchange) decodeAlone(pool *kvstate.Pool, policy Policy, c picker.Choice, tokens int64, a attempt) (route, error) {
	d := x.view.Endpoints[c.Decode]
	r := route{leg: legDecode, endpoint: d.Endpoint, perTry: streamStart(policy, x.req.True(openai.FieldStream), pool.PrefillTime(tokens+d.PromptTokens, policy.PerToken))}
	if a.redirects+1 >= x.s.MaxRedirects || x.body.len() > x.s.SplitBodyBytes {
		r.leg = legPass // Envoy could not follow one more redirect, or could not replay the body
	}
	c.Prefill = -1
	id := newTicketID()
	var undo openai.Edits
	if r.leg == legDecode {
		r.edits, undo = x.pullPrefix(policy, id, c.Decode)
	}
	r.booked[1] = x.reserve(d.Endpoint, kvstate.RoleDecode, a.redirects, c.DecodeBooking())
	x.s.State.Routed(pool, d.Endpoint, x.hashes)
	x.stick(pool, x.session, nil, d.Endpoint)
	x.planned(pool, "decode_alone", a.why, nil, d.Endpoint, tokens)
	return x.seal(r, &kvtransfer.Ticket{
		ID: id, Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: a.started,
		Pool: pool.Spec.Name, Decode: d.Endpoint.Addr, Reservations: [2]uint64{0, uint64(r.booked[1])},
		Redirects: a.redirects, Prefills: a.prefills, Excluded: a.excluded,
		Undo: undo, BodyBytes: r.edits.Len(x.body.len()), PromptTokens: tokens,
	})
}

// streamStart is the time limit of a hop whose answer is streamed, until its headers come, which is all that Envoy's limit
// per try counts; computing is what D has to compute before. An answer that is not streamed has no headers until it is
// complete, and so no such limit.
func streamStart(policy Policy, stream bool, computing time.Duration) time.Duration {
	if !stream {
		return 0
	}
	return policy.StreamStart + computing
}

// reserve books an endpoint for this pass.
func (x *exchange) reserve(e *kvstate.Endpoint, role kvstate.Role, redirects int, b kvstate.Booking) kvstate.ReservationID {
	return x.s.State.ReserveAs(x.s.reservationID(x.bookedAs, redirects, role), e, b, sourceOf(x.stream.Context()))
}

// decoding is what an answer to so many tokens is booked as.
func decoding(tokens int64) kvstate.Booking {
	return kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: tokens}
}

// seal puts the ticket on the route. What was booked for a route that cannot be taken is released.
func (x *exchange) seal(r route, t *kvtransfer.Ticket) (route, error) {
	ticket, err := x.s.keys().Seal(make([]byte, 0, 512), t, x.requestID)
	if err != nil {
		for _, id := range r.booked {
			x.s.State.Release(id)
		}
		return route{}, fmt.Errorf("sealing the ticket of a %s leg: %w", r.leg, err)
	}
	r.ticket = ticket
	return r, nil
}

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
	x.s.releasePass(x.requestID, t.Redirects) // of a stream that Envoy gave up on and tries again
	gone := x.s.State.Pool(t.Pool) == nil     // between the hops, by a change of the configuration
	if t.Stage == kvtransfer.HandOver && ticketErr == nil && !gone && x.s.State.Spend(t.ID) {
		return x.decode(t)
	}
	x.s.release(t)
	a := attempt{
		redirects: t.Redirects, prefills: t.Prefills, started: t.Started, excluded: t.Excluded,
		decodeFailed: t.Cause == kvtransfer.CauseDecode,
	}
	if t.Stage == kvtransfer.HandOver {
		t.Cause = "hand_over_spent"
		switch {
		case ticketErr != nil:
			t.Cause = "hand_over_expired"
		case gone:
			t.Cause = "pool_gone"
			x.s.stranded(t, x.requestID, t.Cause)
		}
	}
	x.s.metrics.replanned(t)
	if t.Split && t.Cause != kvtransfer.CauseDecode {
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
func (x *exchange) decode(t *kvtransfer.Ticket) (route, error) {
	pool := x.s.State.Pool(t.Pool)
	if pool == nil {
		return route{}, openai.Unavailable("pool_gone", "the pool of this request is no longer served", time.Second)
	}
	params := t.Params
	if t.ParamsRef != ([16]byte{}) {
		params = nil // gone or too old: D computes the prompt itself
		if kept, ok := x.s.State.TakeHandOver(t.ParamsRef); ok {
			params = kept
		}
	}
	x.s.State.Release(kvstate.ReservationID(t.Reservations[0])) // the prefill leg did that, if it is not ours
	x.s.releaseWherever(t, 1)
	d, paired, err := x.pickDecode(pool, t)
	if err != nil {
		return route{}, noEndpoint(pool, err)
	}
	if !paired {
		params = nil
	}
	policy, _ := x.s.policy(t.Pool)
	r := route{leg: legDecode, endpoint: d, edits: t.Undo, perTry: streamStart(policy, t.Stream, pool.PrefillTime(t.PromptTokens, policy.PerToken))}
	var undo openai.Edits
	if dialect := policy.Dialect; params != nil && dialect != nil {
		r.edits, undo, err = x.decodeEdits(t.Undo, dialect, params)
		if err != nil {
			return route{}, err
		}
	}
	if t.Redirects+1 >= x.s.MaxRedirects {
		r.leg = legPass
	}
	r.booked[1] = x.reserve(d, kvstate.RoleDecode, t.Redirects, decoding(t.PromptTokens))
	x.stick(pool, t.Session, nil, d)
	x.s.recent.change(x.requestID, func(trace *Trace) { trace.Decode = d.Addr })
	x.spanHandOver(d, paired && params != nil)
	return x.seal(r, &kvtransfer.Ticket{
		ID: newTicketID(), Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: t.Started,
		Pool: t.Pool, Prefill: t.Prefill, Decode: d.Addr, Reservations: [2]uint64{0, uint64(r.booked[1])}, Split: true,
		Redirects: t.Redirects, Prefills: t.Prefills, Excluded: t.Excluded,
		Undo: undo, BodyBytes: r.edits.Len(x.body.len()), PromptTokens: t.PromptTokens,
	})
}

// pickDecode chooses D among those that may pair with the prefill endpoint that holds the blocks. Where it left the pool
// between the hops, or everything that pairs with it did, any other will do (paired is false), which must not be told of
// the blocks. What P pushed lies with the D of pass 1 and nowhere else.
func (x *exchange) pickDecode(pool *kvstate.Pool, t *kvtransfer.Ticket) (d *kvstate.Endpoint, paired bool, err error) {
	policy, _ := x.s.policy(t.Pool)
	_, pushed := policy.Dialect.(kvtransfer.Pusher)
	if d := pool.Endpoint(t.Decode); pushed && d != nil && !d.Failed() {
		return d, true, nil
	}
	x.s.State.View(pool, nil, &x.view)
	if t.Session != 0 {
		x.s.State.MarkSession(pool, t.Session, &x.view)
	}
	r := picker.Request{PromptTokens: t.PromptTokens, Excluded: t.Excluded, Rand: random()}
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
// D is told stands right after the opening brace, where the undo's first edit mostly is too. A body that P answered with
// 200 is not an empty object, so a comma always follows.
func (x *exchange) decodeEdits(undo openai.Edits, dialect kvtransfer.Dialect, params []byte) (edits, back openai.Edits, err error) {
	x.params = append(dialect.DecodeMember(x.params[:0], params), ',')
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

func newTicketID() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails (crypto/rand)
	return id
}

// noEndpoint turns the picker's refusal into what the client is told.
func noEndpoint(pool *kvstate.Pool, err error) error {
	if errors.Is(err, picker.ErrNoEndpoint) {
		return openai.Unavailable("no_endpoint", "no endpoint of pool "+pool.Spec.Name+" can take this request now", time.Second)
	}
	return fmt.Errorf("picking endpoints in pool %q: %w", pool.Spec.Name, err)
}
