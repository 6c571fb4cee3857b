package extproc

import (
	"crypto/rand"
	"fmt"
	"slices"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/picker"
)

// blockBytes is the number of bytes of a prompt in one block of the prefix index, maxBlocks the number of blocks
// that it covers.
const (
	blockBytes = 512
	maxBlocks  = 2048
)

// firstPass plans a request from its body alone: in pass 1 and, after a failed hop, in another attempt.
type firstPass struct{ *planning }

// first plans pass 1 of a request to one of the APIs that can be split.
func (x firstPass) first(api openai.API) (*plan.Decision, error) {
	h := &x.msg.Headers
	if err := openai.CheckHeaders(string(h.ContentType), string(h.ContentEncoding)); err != nil {
		return nil, err
	}
	if err := fitsRedirect(h); err != nil {
		return nil, err
	}
	if x.msg.EndOfStream {
		return nil, openai.BadRequest("empty_body", "", "the request has no body; a JSON object is expected")
	}
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return nil, err
	}
	return x.plan(api, plan.Attempt{Started: time.Now()})
}

// plan scans the body, picks the endpoints, and decides on the next leg. x.body is the client's body.
func (x firstPass) plan(api openai.API, a plan.Attempt) (*plan.Decision, error) {
	if err := x.scan(api); err != nil {
		return nil, err
	}
	x.EndPhase(telemetry.PhaseScan)
	pool := x.s.State.PoolFor(x.req.Model())
	if pool == nil {
		return nil, openai.ModelNotFound(x.req.Model())
	}
	if a.Redirects == 0 { // an admitted request is served to the end
		if err := closed(pool); err != nil {
			return nil, err
		}
	}
	policy, ok := x.s.policy(pool.Spec.Name)
	if !ok {
		return nil, fmt.Errorf("pool %q has no policy", pool.Spec.Name)
	}
	if policy.Dialect.Concurrent != nil {
		return x.concurrent(pool, policy, a)
	}
	if err := policy.MaySplit(&a, &x.req, x.body.Len(), x.s.limits()); err != nil {
		return nil, err
	}
	if d := x.encodeFirst(pool, &policy, &a); d != nil {
		return d, nil
	}
	if holder, stored := x.holder(pool); stored {
		return x.toHolder(pool, holder)
	}
	x.hashes = x.req.PromptHash(x.hashes[:0], blockBytes, maxBlocks)
	if a.Redirects == 0 {
		x.s.State.CountPrompt(pool, x.hashes)
	}
	x.s.State.View(pool, x.hashes, &x.view)
	if x.session = x.sessionOf(policy.Session); x.session != 0 {
		x.s.State.MarkSession(pool, x.session, &x.view)
	}
	tokens := x.countTokens(pool, &policy, pool.PromptTokens(x.body.Len()))
	request := picker.Request{
		PromptTokens: tokens, Blocks: len(x.hashes), Model: x.req.Model(), Split: !a.Alone, Excluded: a.Excluded, Rand: random(),
	}
	if err := x.applyObjectives(pool, &policy, &request); err != nil {
		return nil, err
	}
	choice, err := x.chooseOther(pool, &policy, &request, &a)
	x.explain(pool, &request)
	if err != nil {
		return nil, policy.NoEndpoint(pool, err)
	}
	if err := a.Exhausted(&policy.Policy, x.view.Endpoints[choice.Decode].Endpoint.Addr); err != nil {
		return nil, err
	}
	if choice.Prefill >= 0 && policy.Handoff != plan.HandoffEnvoy {
		return x.oneHop(pool, policy, choice, tokens, a)
	}
	if choice.Prefill >= 0 {
		d, why := x.split(pool, policy, choice, tokens, a)
		if why == "" {
			return d, nil
		}
		a.Why = why
	} else if a.Why == "" {
		a.Why = x.unpairedReason()
	}
	return x.decodeAlone(pool, policy, choice, tokens, a)
}

// split decides for two hops, the first of which is the prefill leg, or returns why that is not possible.
func (x firstPass) split(pool *kvstate.Pool, policy Policy, c picker.Choice, tokens int64, a plan.Attempt) (_ *plan.Decision, why string) {
	p, d := x.view.Endpoints[c.Prefill], x.view.Endpoints[c.Decode]
	x.pair = pairOf(x.requestID, newTicketID(), sideOf(p.Endpoint), sideOf(d.Endpoint))
	x.setSource(policy, c.Prefill)
	perTry := policy.PrefillTimeout + pool.PrefillTime(tokens+p.PromptTokens, policy.PerToken)
	var turn kvtransfer.TurnLeg
	turn.Conversation, turn.OwnIDs = x.conversation(pool, &policy)
	if a.Prefills == 0 && !a.ConversationFailed {
		x.pair.Turn, x.pair.TurnIDs = x.lastTurn(pool, turn.Conversation, p.Endpoint, perTry)
		turn.Told = x.pair.Turn != nil
	}
	x.patch.Reset(&x.req)
	policy.Dialect.Prefill(&x.req, &x.patch, &x.pair)
	x.insertEncoded(&a)
	learn := x.learns(policy)
	if learn && !slices.Contains(policy.Dialect.TokenIDs, x.req.API()) {
		x.patch.Set("return_token_ids", openai.FieldReturnTokenIDs, []byte("true"))
	}
	x.setPriority(&policy)
	edits := x.patch.Edits()
	x.undo = edits.Inverse(x.undo[:0], x.body.Bytes())
	if x.undo.Size() > kvtransfer.MaxUndoBytes {
		return nil, "undo_too_large"
	}
	out := plan.Decision{
		Leg: envoywire.LegPrefill, Pool: pool, Endpoint: p.Endpoint, Edits: edits, PerTry: perTry, Inline: x.inlines(&policy),
		Prefill: plan.Reservation{Endpoint: p.Endpoint, Booking: c.PrefillBooking()}, Decode: plan.Reservation{Endpoint: d.Endpoint, Booking: c.DecodeBooking()},
		Computes: p.Endpoint, // not D: pass 2 may choose another
		Affinity: plan.Affinity{Session: x.session, Prefill: p.Endpoint},
		Report:   plan.Report{Route: "split", Prefill: p.Endpoint, Decode: d.Endpoint},
		Ticket: kvtransfer.Ticket{
			ID: x.pair.Attempt, Stage: kvtransfer.PrefillLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: a.Started,
			Pool: pool.Spec.Name, Prefill: p.Endpoint.Addr, Decode: d.Endpoint.Addr, Split: true,
			Redirects: a.Redirects, Prefills: a.Prefills + 1, Excluded: a.Excluded,
			Undo: x.undo, BodyBytes: edits.Len(x.body.Len()), PromptTokens: tokens,
			Stream: x.req.True(openai.FieldStream), StreamUsage: x.req.WantsUsage(), Session: x.session,
			ExpectedCached: tokens - c.Uncached, ExpectedPrefill: kvstate.Seconds(c.PrefillTime).Truncate(time.Microsecond), AnswerTokens: c.AnswerTokens, Model: x.namedModel(&c), Prompt: x.lastBlock(),
			Turn: turn,
		},
	}
	if learn {
		out.Ticket.Learn = x.toLearn(pool)
	}
	push := policy.Dialect.Push
	out.Decode.Booking.Tentative = push == nil // pass 2 chooses D again, and reserves it for the answer
	if push != nil {
		out.PerTry += push.Patience // the leg answers when the KV has arrived at D
		if out.Decode.Buffer = d.Endpoint.Transfer.BufferTokens; out.Decode.Buffer > 0 {
			out.Decode.Patience = push.Patience
			out.Otherwise = x.orAlone(pool, policy, c, tokens, a)
		}
	}
	return x.decided(&out), ""
}

// orAlone returns decodeAlone for a request that cannot be split after all. It is a function of its own, so that
// only such requests allocate its closure.
func (x firstPass) orAlone(pool *kvstate.Pool, policy Policy, c picker.Choice, tokens int64, a plan.Attempt) func(why string) (*plan.Decision, error) {
	return func(why string) (*plan.Decision, error) {
		a.Why = why
		return x.decodeAlone(pool, policy, c, tokens, a)
	}
}

// decodeAlone decides for the one hop that answers the whole request.
func (x firstPass) decodeAlone(pool *kvstate.Pool, policy Policy, c picker.Choice, tokens int64, a plan.Attempt) (*plan.Decision, error) {
	if err := policy.RefuseAlone(pool, a.Why); err != nil {
		return nil, err
	}
	d := x.view.Endpoints[c.Decode]
	c.Prefill = -1
	out := plan.Decision{
		Leg: envoywire.LegDecode, Pool: pool, Endpoint: d.Endpoint,
		PerTry:   policy.AnswerStart(x.req.True(openai.FieldStream), pool.PrefillTime(tokens+d.PromptTokens, policy.PerToken)),
		Decode:   plan.Reservation{Endpoint: d.Endpoint, Booking: c.DecodeBooking()},
		Computes: d.Endpoint, Affinity: plan.Affinity{Session: x.session, Decode: d.Endpoint},
		Report: plan.Report{Route: "decode_alone", Reason: a.Why, Decode: d.Endpoint},
	}
	if a.Redirects+1 >= x.s.MaxRedirects || x.body.Len() > x.s.SplitBodyBytes {
		out.Leg = envoywire.LegPass // Envoy could not follow one more redirect, or could not replay the body
	}
	id := newTicketID()
	var undo openai.Edits
	if out.Leg == envoywire.LegDecode {
		out.Edits, undo = x.aloneEdits(policy, id, c.Decode, &a)
	}
	out.Ticket = kvtransfer.Ticket{
		ID: id, Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: a.Started,
		Pool: pool.Spec.Name, Decode: d.Endpoint.Addr,
		Redirects: a.Redirects, Prefills: a.Prefills, Excluded: a.Excluded,
		Undo: undo, BodyBytes: out.Edits.Len(x.body.Len()), PromptTokens: tokens,
		Stream: x.req.True(openai.FieldStream), LeastBytes: policy.LeastBytes(x.req.API(), x.requestID, x.req.True(openai.FieldStream)),
	}
	return x.decided(&out), nil
}

// insertEncoded adds the location of the prompt's encoded media for the engine that computes the prompt.
func (x *planning) insertEncoded(a *plan.Attempt) {
	if a.Encoded != nil {
		x.patch.Insert(kvtransfer.EncodedMember, a.Encoded) // a client's own was cut
	}
}

func newTicketID() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails (crypto/rand)
	return id
}
