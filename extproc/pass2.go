package extproc

import (
	"bytes"
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

// nextPass continues a request whose leg has ended, by its ticket.
type nextPass struct {
	*planning
	prefilled *prefillAnswer
}

// resume is pass 2: the body is the one that the leg was sent, and the ticket says what to do with it.
func (x nextPass) resume(t *kvtransfer.Ticket, ticketErr error) (*plan.Decision, error) {
	if err := x.receiveBody(x.s.MaxBodyBytes + kvtransfer.MaxUndoBytes + maxDecodeMember); err != nil {
		return nil, err
	}
	if x.body.Len() != t.BodyBytes {
		return nil, fmt.Errorf("the body of pass 2 has %d bytes, its leg was sent %d", x.body.Len(), t.BodyBytes)
	}
	if err := t.Undo.Check(x.body.Len()); err != nil {
		return nil, fmt.Errorf("undoing a leg's edits: %w", err)
	}
	x.restoreTarget(t)
	x.SpanTicket(t)
	if t.Stage == kvtransfer.PrefillLeg {
		t = x.inlineAnswer(t)
	}
	x.s.releasePass(x.reservedAs, t.Redirects, x.s.State.Release) // of a stream that Envoy gave up and retries
	pool := x.s.State.Pool(t.Pool)                                // nil if the configuration changed between the hops
	if t.Stage == kvtransfer.HandOver && ticketErr == nil && pool != nil && x.s.State.Consume(t.ID) {
		return x.decode(pool, t)
	}
	x.s.release(t)
	a := plan.Resume(t)
	if a.PairFailed != ([2]string{}) && pool != nil {
		x.s.State.LoadFailed(pool, t.Prefill, t.Decode) // another replica may have seen it
	}
	if t.Stage == kvtransfer.Encoded {
		if ticketErr == nil && x.s.State.Consume(t.ID) {
			a.Encoded = x.handedOver(t)
		}
		return x.again(t, a)
	}
	if t.Stage == kvtransfer.HandOver {
		t.Cause = "hand_over_spent"
		switch {
		case ticketErr != nil:
			t.Cause = "hand_over_expired"
			x.s.reclaim.Orphaned(t, x.requestID, t.Cause)
		case pool == nil:
			t.Cause = "pool_gone"
			x.s.reclaim.Orphaned(t, x.requestID, t.Cause)
		}
	}
	x.s.metrics.Replanned(t)
	policy, _ := x.s.policy(t.Pool)
	if err := a.Failed(&policy.Policy, t); err != nil {
		return nil, err
	}
	return x.again(t, a)
}

// restoreTarget replaces the host and path of the redirect with the client's.
func (x nextPass) restoreTarget(t *kvtransfer.Ticket) {
	x.msg.Headers.Authority = []byte(t.Authority)
	if t.Path != "" {
		x.msg.Headers.Path = []byte(t.Path)
	}
}

// again plans a request again after one of its hops failed.
func (x nextPass) again(t *kvtransfer.Ticket, a plan.Attempt) (*plan.Decision, error) {
	x.spare.Grow(t.Undo.Len(x.body.Len()))
	x.spare.Data = t.Undo.Apply(x.spare.Data[:0], x.body.Bytes())
	x.swapBody()
	h := &x.msg.Headers
	return firstPass{x.planning}.plan(openai.Classify(string(h.Method), string(h.Path)), a)
}

// decode plans the decode leg with the KV parameters from prefill's answer. It chooses D again: the load has
// changed since pass 1, and pull dialects allow it.
func (x nextPass) decode(pool *kvstate.Pool, t *kvtransfer.Ticket) (*plan.Decision, error) {
	params := x.handedOver(t)
	// if the reservation is not ours, the prefill leg released it
	x.s.State.Release(kvstate.ReservationID(t.Reservations[0]))
	x.s.releaseAnywhere(t, 1)
	x.recallTokens(pool, t)
	d, paired, err := x.pickDecode(pool, t)
	policy, _ := x.s.policy(t.Pool)
	if err != nil {
		return nil, policy.NoEndpoint(pool, err)
	}
	if !paired {
		params = nil
	}
	out := plan.Decision{
		Leg: envoywire.LegDecode, Pool: pool, Endpoint: d, Edits: t.Undo, PerTry: policy.AnswerStart(t.Stream, pool.PrefillTime(t.PromptTokens, policy.PerToken)),
		Decode: plan.Reservation{Endpoint: d, Booking: plan.Decoding(t.PromptTokens)}, Affinity: plan.Affinity{Session: t.Session, Decode: d},
	}
	if len(x.hashes) > 0 {
		out.Computes = d
	}
	var undo openai.Edits
	var answer []byte
	var turn kvtransfer.TurnLeg
	if params != nil && policy.Dialect.Continue != nil {
		answer, undo = x.continueAt(&out, t, &policy.Dialect, params)
	} else if params != nil && policy.Dialect.DecodeMember != nil {
		var more []byte
		turn, more = x.setConversation(&out, t, &policy, paired)
		out.Edits, undo, err = x.decodeEdits(t.Undo, &policy.Dialect, params, more)
		if err != nil {
			return nil, err
		}
	}
	if t.Redirects+1 >= x.s.MaxRedirects {
		out.Leg = envoywire.LegPass
	}
	cached, written := x.addCachedTokens(&out, t, &policy)
	x.s.recent.Change(x.requestID, func(trace *telemetry.Trace) { trace.Decode = d.Addr })
	x.SpanHandOver(d, paired && params != nil)
	if x.s.reclaim.Enabled(t.Pool) {
		x.s.reclaim.Record(t, x.requestID, params, d.Addr, true)
	}
	out.Ticket = kvtransfer.Ticket{
		ID: t.ID, Stage: kvtransfer.DecodeLeg, Expires: time.Now().Add(x.s.TicketTTL), Started: t.Started,
		Pool: t.Pool, Prefill: t.Prefill, Decode: d.Addr, Split: true,
		Redirects: t.Redirects, Prefills: t.Prefills, Excluded: t.Excluded,
		Undo: undo, BodyBytes: out.Edits.Len(x.body.Len()), PromptTokens: t.PromptTokens,
		Params: answer, Cached: cached, Written: written, Turn: turn, Stream: t.Stream,
		Loads: params != nil, LeastBytes: policy.LeastBytes(x.clientAPI(), x.requestID, t.Stream && out.Leg != envoywire.LegAnswer),
	}
	return x.decided(&out), nil
}

// pickDecode chooses D among those that may pair with the prefill endpoint that holds the blocks, by the same price
// as pass 1: the part of the prompt (x.hashes) that a D holds from an earlier turn need not be transferred. If the
// prefill endpoint, or every endpoint that pairs with it, has left the pool between the hops, it chooses any other;
// paired is then false, and D must not get the parameters. Pushed blocks are only at the D of pass 1.
func (x nextPass) pickDecode(pool *kvstate.Pool, t *kvtransfer.Ticket) (d *kvstate.Endpoint, paired bool, err error) {
	policy, _ := x.s.policy(t.Pool)
	pushed := policy.Dialect.Push != nil
	if d := pool.Endpoint(t.Decode); pushed && d != nil && !d.Failed() {
		return d, true, nil
	}
	if d := pool.Endpoint(t.Decode); d != nil && !d.Failed() && pool.LoadTrial(t.Prefill, t.Decode, t.ID) {
		return d, true, nil
	}
	x.s.State.View(pool, x.hashes, &x.view)
	x.addReportedHits(pool, t.PromptTokens)
	if t.Session != 0 {
		x.s.State.MarkSession(pool, t.Session, &x.view)
	}
	r := picker.Request{PromptTokens: t.PromptTokens, Blocks: len(x.hashes), Model: t.Model, Labels: x.labelsOf(&policy), Excluded: t.Excluded, Rand: random()}
	r.MinAnswer, r.MaxAnswer = t.AnswerTokens, t.AnswerTokens
	prefill := slices.IndexFunc(x.view.Endpoints, func(c kvstate.Candidate) bool { return c.Endpoint.Addr == t.Prefill })
	x.picker.Policy = policy.Placement()
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

// maxDecodeMember bounds the difference in length between a decode body and the client's: the KV parameters, mostly
// block ids.
const maxDecodeMember = 8 << 20

// decodeEdits turns the undo of a prefill body into the edits that make the decode body, and returns the undo of
// those. D's parameters follow the opening brace, where the undo's first edit usually is too, and then more, which
// ends with a comma. P answered 200, so its body is not an empty object, and a comma always follows.
func (x nextPass) decodeEdits(undo openai.Edits, dialect *kvtransfer.Dialect, params, more []byte) (edits, back openai.Edits, err error) {
	x.params = append(append(dialect.DecodeMember(x.params[:0], params), ','), more...)
	n := len(x.params)
	if n > maxDecodeMember {
		return nil, nil, fmt.Errorf("a decode member of %d bytes", n)
	}
	front := bytes.IndexByte(x.body.Bytes(), '{') + 1
	if len(undo) > 0 && undo[0].Start == front {
		x.params = append(x.params, undo[0].New...)
		edits = slices.Clone(undo)
		edits[0].New = x.params
	} else {
		edits = append(openai.Edits{{Start: front, End: front, New: x.params}}, undo...)
	}
	return edits, openai.Edits{{Start: front, End: front + n}}, nil
}
