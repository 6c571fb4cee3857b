package extproc

import (
	"crypto/rand"
	"fmt"
	"slices"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/telemetry"
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
	encoded   []byte   // what prefill is told of media that were encoded; nil: nothing
	alone     bool     // do not split, whatever the policy
	why       string   // of alone

	pairFailed   [2]string // addresses of the pair that failed last, where it is not known which of the two it was
	decodeFailed bool      // the hop that failed last was to decode
	turnFailed   bool      // it was a prefill leg that was to fetch the last turn
}

// late reports whether the time for further attempts is over. What a failed prefill needs is not another attempt but the
// first of a decode endpoint, so that is always left.
func (a *attempt) late(policy Policy) bool {
	return time.Since(a.started) > policy.AttemptsTime
}

// firstPass plans a request from its body alone: pass 1 and, where a hop failed, another attempt.
type firstPass struct{ *planning }

// first plans pass 1 of a request to one of the APIs that can be split.
func (x firstPass) first(api openai.API) (route, error) {
	h := &x.msg.Headers
	if err := openai.CheckHeaders(string(h.ContentType), string(h.ContentEncoding)); err != nil {
		return route{}, err
	}
	if err := fitsRedirect(h); err != nil {
		return route{}, err
	}
	if x.msg.EndOfStream {
		return route{}, openai.BadRequest("empty_body", "", "the request has no body; a JSON object is expected")
	}
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return route{}, err
	}
	return x.plan(api, attempt{started: time.Now()})
}

// plan scans the body, picks and books the endpoints, and writes the leg that comes next. The body in x.body is the
// client's.
func (x firstPass) plan(api openai.API, a attempt) (route, error) {
	if err := x.scan(api); err != nil {
		return route{}, err
	}
	x.EndPhase(telemetry.PhaseScan)
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
	if policy.Dialect.Concurrent != nil {
		return x.concurrent(pool, policy, a)
	}
	if err := x.whetherToSplit(&a, policy); err != nil {
		return route{}, err
	}
	if r, err := x.encodeFirst(pool, &policy, &a); r.leg != "" || err != nil {
		return r, err
	}
	if holder, stored := x.holder(pool); stored {
		return x.toHolder(pool, holder)
	}
	x.hashes = x.req.PromptHash(x.hashes[:0], blockBytes, maxBlocks)
	if a.redirects == 0 {
		x.s.State.Asked(pool, x.hashes)
	}
	x.s.State.View(pool, x.hashes, &x.view)
	if x.session = x.sessionOf(policy.Session); x.session != 0 {
		x.s.State.MarkSession(pool, x.session, &x.view)
	}
	tokens := x.countTokens(pool, &policy, pool.PromptTokens(x.body.Len()))
	request := picker.Request{
		PromptTokens: tokens, Blocks: len(x.hashes), Model: x.req.Model(), Split: !a.alone, Excluded: a.excluded, Rand: random(),
	}
	if err := x.aim(pool, &policy, &request); err != nil {
		return route{}, err
	}
	choice, err := x.chooseOther(pool, &policy, &request, &a)
	if err != nil && x.view.ForgetFaults() { // all pairs are avoided: one that may fail again is better than none
		choice, err = x.choose(pool, &policy, &request, &a)
	}
	x.explain(pool, &request)
	if err != nil {
		return route{}, noEndpoint(pool, policy.Source, err)
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
		a.why = x.whyUnpaired()
	}
	return x.decodeAlone(pool, policy, choice, tokens, a)
}

// exhausted is why a request is not sent to one more decode endpoint; nil if it is.
func (a *attempt) exhausted(policy Policy, decode string) error {
	switch {
	case a.decodeFailed && a.late(policy):
		return openai.Unavailable("endpoint_failed", "no endpoint answered this request in the time there is for it", time.Second)
	case failures(a.excluded, decode) > 0 && slices.ContainsFunc(a.excluded, func(e string) bool { return failures(a.excluded, e) >= maxTries }):
		return openai.Unavailable("endpoint_failed", "every endpoint that could answer this request has failed it", time.Second)
	}
	return nil
}

// maxTries is how often one endpoint may fail a request. Where every endpoint has failed it, one of them is tried a second
// time, since it may be back; the others are not, since they would only fail it again.
const maxTries = 2

// failures is how often an endpoint has failed the request.
func failures(excluded []string, addr string) (times int) {
	for _, e := range excluded {
		if e == addr {
			times++
		}
	}
	return times
}

// prefill writes the prefill leg, or says why there is none.
func (x firstPass) prefill(pool *kvstate.Pool, policy Policy, c picker.Choice, tokens int64, a attempt) (r route, why string, err error) {
	p, d := x.view.Endpoints[c.Prefill], x.view.Endpoints[c.Decode]
	x.pair = pairOf(x.requestID, newTicketID(), sideOf(p.Endpoint), sideOf(d.Endpoint))
	x.setSource(policy, c.Prefill)
	perTry := policy.PrefillTimeout + pool.PrefillTime(tokens+p.PromptTokens, policy.PerToken)
	var turn kvtransfer.TurnLeg
	turn.Conversation, turn.OwnIDs = x.conversation(pool, &policy)
	if a.prefills == 0 && !a.turnFailed {
		x.pair.Turn, x.pair.TurnIDs = x.lastTurn(pool, turn.Conversation, p.Endpoint, perTry)
		turn.Told = x.pair.Turn != nil
	}
	x.patch.Reset(&x.req)
	policy.Dialect.Prefill(&x.req, &x.patch, &x.pair)
	x.tellEncoded(&a)
	learn := x.learns(policy)
	if learn && !slices.Contains(policy.Dialect.TokenIDs, x.req.API()) {
		x.patch.Set("return_token_ids", openai.FieldReturnTokenIDs, []byte("true"))
	}
	x.setPriority(&policy)
	edits := x.patch.Edits()
	x.undo = edits.Inverse(x.undo[:0], x.body.Bytes())
	if x.undo.Size() > kvtransfer.MaxUndoBytes {
		return route{}, "undo_too_large", nil
	}
	push := policy.Dialect.Push
	decodes := c.DecodeBooking()
	decodes.Coming = push == nil // pass 2 chooses D again, and books it when there is an answer to write
	if room := d.Endpoint.Transfer.BufferTokens; push != nil && room > 0 {
		if r.booked[1], why = x.reserveRoom(d.Endpoint, a.redirects, decodes, room, push.Patience); why != "" {
			return route{}, why, nil
		}
	} else {
		r.booked[1] = x.reserve(d.Endpoint, kvstate.RoleDecode, a.redirects, decodes)
	}
	t := kvtransfer.Ticket{
		ID: x.pair.Attempt, Stage: kvtransfer.PrefillLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: a.started,
		Pool: pool.Spec.Name, Prefill: p.Endpoint.Addr, Decode: d.Endpoint.Addr, Split: true,
		Redirects: a.redirects, Prefills: a.prefills + 1, Excluded: a.excluded,
		Undo: x.undo, BodyBytes: edits.Len(x.body.Len()), PromptTokens: tokens,
		Stream: x.req.True(openai.FieldStream), StreamUsage: x.req.WantsUsage(), Session: x.session,
		ExpectedCached: tokens - c.Uncached, ExpectedPrefill: kvstate.Seconds(c.PrefillTime).Truncate(time.Microsecond), AnswerTokens: c.AnswerTokens, Model: x.namedModel(&c), Prompt: x.lastBlock(),
		Turn: turn,
	}
	r.leg, r.endpoint, r.edits, r.carry = envoywire.LegPrefill, p.Endpoint, edits, x.carries(&policy)
	r.perTry = perTry
	if push != nil {
		r.perTry += push.Patience // the leg answers when the KV is with D
	}
	x.s.State.ClaimLoad(pool, p.Endpoint.Addr, d.Endpoint.Addr, t.ID)
	r.booked[0] = x.reserve(p.Endpoint, kvstate.RolePrefill, a.redirects, c.PrefillBooking())
	t.Reservations = [2]uint64{uint64(r.booked[0]), uint64(r.booked[1])}
	x.s.State.Routed(pool, p.Endpoint, x.hashes) // not D: pass 2 may take another
	if learn {
		t.Learn = x.toLearn(pool)
	}
	x.stick(pool, x.session, p.Endpoint, nil)
	x.planned(pool, "split", "", p.Endpoint, d.Endpoint, tokens)
	r, err = x.seal(r, &t)
	return r, "", err
}

// decodeAlone writes the one hop that answers the whole request.
func (x firstPass) decodeAlone(pool *kvstate.Pool, policy Policy, c picker.Choice, tokens int64, a attempt) (route, error) {
	if err := policy.refusesAlone(pool, a.why); err != nil {
		return route{}, err
	}
	d := x.view.Endpoints[c.Decode]
	r := route{leg: envoywire.LegDecode, endpoint: d.Endpoint, perTry: answerStart(policy, x.req.True(openai.FieldStream), pool.PrefillTime(tokens+d.PromptTokens, policy.PerToken))}
	if a.redirects+1 >= x.s.MaxRedirects || x.body.Len() > x.s.SplitBodyBytes {
		r.leg = envoywire.LegPass // Envoy could not follow one more redirect, or could not replay the body
	}
	c.Prefill = -1
	id := newTicketID()
	var undo openai.Edits
	if r.leg == envoywire.LegDecode {
		r.edits, undo = x.aloneEdits(policy, id, c.Decode, &a)
	}
	r.booked[1] = x.reserve(d.Endpoint, kvstate.RoleDecode, a.redirects, c.DecodeBooking())
	x.s.State.Routed(pool, d.Endpoint, x.hashes)
	x.stick(pool, x.session, nil, d.Endpoint)
	x.planned(pool, "decode_alone", a.why, nil, d.Endpoint, tokens)
	return x.seal(r, &kvtransfer.Ticket{
		ID: id, Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: a.started,
		Pool: pool.Spec.Name, Decode: d.Endpoint.Addr, Reservations: [2]uint64{0, uint64(r.booked[1])},
		Redirects: a.redirects, Prefills: a.prefills, Excluded: a.excluded,
		Undo: undo, BodyBytes: r.edits.Len(x.body.Len()), PromptTokens: tokens,
		Stream: x.req.True(openai.FieldStream), LeastBytes: policy.leastBytes(x.req.API(), x.requestID, x.req.True(openai.FieldStream)),
	})
}

// answerStart is the time limit of a hop that answers the client, until the headers of its answer come, which is all that Envoy's
// limit per try counts; computing is what D has to compute before. An answer that is not streamed has no headers until it is
// complete: 0, no such limit, unless the pool has one for whole answers.
func answerStart(policy Policy, stream bool, computing time.Duration) time.Duration {
	switch {
	case stream:
		return policy.StreamStart + computing
	case policy.WholeAnswer > 0:
		return policy.WholeAnswer + computing
	}
	return 0
}

// tellEncoded tells whoever computes the prompt of its media that were encoded.
func (x *planning) tellEncoded(a *attempt) {
	if a.encoded != nil {
		x.patch.Insert(kvtransfer.EncodedMember, a.encoded) // the client's own, if there was one, was cut
	}
}

// decoding is what an answer to so many tokens is booked as.
func decoding(tokens int64) kvstate.Booking {
	return kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: tokens}
}

func newTicketID() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails (crypto/rand)
	return id
}
