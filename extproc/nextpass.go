package extproc

import (
	"encoding/base64"
	"fmt"
	"log/slog"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// nextPass continues a request whose leg has ended, by its ticket.
type nextPass struct {
	*planning
	prefilled *prefillAnswer
}

// resume is pass 2: the body is the one that the leg was sent, and the ticket says what to do with it.
func (x nextPass) resume(t *kvtransfer.Ticket, ticketErr error) (*plan.Decision, error) {
	if err := x.receiveBody(x.s.MaxBodyBytes + kvtransfer.MaxUndoBytes + plan.MaxDecodeMember); err != nil {
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
	attempt := t.ID // an inline answer gets another
	if t.Stage == kvtransfer.PrefillLeg {
		t = x.inlineAnswer(t)
	}
	x.s.releasePass(x.reservedAs, t.Redirects, x.s.State.Release) // of a stream that Envoy gave up and retries
	pool := x.s.State.Pool(t.Pool)                                // nil if the configuration changed between the hops
	if t.Expires.Sub(x.s.now()) > x.s.HandOverTTL+time.Second && t.Stage != kvtransfer.Failed {
		ticketErr = kvtransfer.ErrTicketExpired // it is from the future: the fleet's clock was set back
	}
	if t.Stage == kvtransfer.HandOver && ticketErr == nil && pool != nil && x.s.State.Consume(t.ID) {
		return x.decode(pool, t, attempt)
	}
	x.s.release(t)
	a := plan.Next(t)
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
			t.Cause = kvtransfer.CausePoolGone
			x.s.reclaim.Orphaned(t, x.requestID, t.Cause)
		}
	}
	x.Replanned(x.requestID, t)
	policy, _ := x.s.policy(t.Pool)
	if err := a.Failed(&policy.Policy, pool, t); err != nil {
		return nil, err
	}
	return x.again(t, a)
}

// restoreTarget replaces the host and path of the redirect with the client's.
func (x nextPass) restoreTarget(t *kvtransfer.Ticket) {
	x.msg.Headers.Authority = []byte(t.Authority)
	if t.Path != "" && t.Path != string(x.msg.Headers.Path) { // a redirect has no query, and an engine can make one
		x.msg.Headers.Path, x.stripped = []byte(t.Path), true
	}
}

// again plans a request again after one of its hops failed.
func (x nextPass) again(t *kvtransfer.Ticket, a plan.Attempt) (*plan.Decision, error) {
	x.restoreBody(t)
	switch api := x.clientAPI(); {
	case api == openai.PassThrough && t.Cause == kvtransfer.CauseRouter && t.Pool == "": // pass 1 again
		return firstPass{x.planning}.passThrough()
	case api == openai.PassThrough || api == openai.Models:
		return nil, openai.NotServed() // no hop of such a path comes back
	default:
		return firstPass{x.planning}.plan(api, a)
	}
}

// restoreBody makes the client's body of the leg's.
func (x nextPass) restoreBody(t *kvtransfer.Ticket) {
	x.spare.Grow(t.Undo.Len(x.body.Len()))
	x.spare.Data = t.Undo.Apply(x.spare.Data[:0], x.body.Bytes())
	x.swapBody()
}

// decode plans the decode leg with the KV parameters from prefill's answer. It chooses D again: the load has
// changed since pass 1, and pull dialects allow it.
func (x nextPass) decode(pool *kvstate.Pool, t *kvtransfer.Ticket, attempt [16]byte) (*plan.Decision, error) {
	policy, _ := x.s.policy(t.Pool)
	h := plan.HandOver{Ticket: t, Attempt: attempt, Params: x.handedOver(t), API: x.clientAPI()}
	// if the reservation is not ours, the prefill leg released it
	x.s.State.Release(kvstate.ReservationID(t.Reservations[0]))
	defer x.s.releaseAnywhere(t, 1) // D's: until then P's memory counts as held
	x.describe(pool, plan.Attempt{})
	x.recallPrompt(pool, t)
	if !h.Bound(pool, &policy.Policy) {
		x.req.Labels = x.labelsOf(policy)
		waited, err := policy.queue.UntilFree(x.stream.Context(), t.Expires, func() error {
			x.s.State.View(pool, x.req.Hashes, &x.view)
			x.req.MatchReported(&x.view, t.PromptTokens)
			if t.Session != 0 {
				x.s.State.MarkSession(pool, t.Session, &x.view)
			}
			return h.Choose(&x.req, &x.view, &x.picker, &policy.Policy)
		})
		x.LeaveOut(waited)
		if err != nil {
			return nil, policy.NoEndpoint(pool, err)
		}
	}
	if h.Restored = h.Restores(&policy.Policy, x.req.Limits); h.Restored {
		x.restoreBody(t)
		h.Invalid = x.req.Scan(h.API, x.body.Bytes(), openai.Limits{})
	}
	h.Body = x.body.Bytes()
	d, err := plan.Resume(&x.req, &h, &policy.Policy)
	if err != nil {
		return nil, err
	}
	if d.Lost != nil {
		x.log(slog.LevelWarn, "decode cannot use prefill's answer: it computes the prompt", "err", d.Lost)
	}
	x.HandedOver(x.requestID, t, h.Decode, d.Ticket.Loads)
	if h.AtPrefill() {
		x.s.reclaim.Unfetched(t, x.requestID, h.Params)
	} else if h.Paired && x.s.reclaim.Enabled(t.Pool) {
		x.s.reclaim.Record(t, x.requestID, h.Params, h.Decode.Addr, true)
	}
	return d, nil
}

// A short answer of P's travels inline: if pass 1 allows it (HeaderCarry), Envoy makes the redirect by itself, with
// the answer in a header, and pass 2 reads it there. That saves the prefill leg's stream and the sealing of a
// second ticket. An answer longer than the configured limit, and any answer but a 200, passes the leg's filter
// (prefillleg.go).

// inlineAnswer makes the ticket of pass 2 from P's answer, which came with pass 1's ticket, as the leg's filter
// does from a longer one. The hand-over's id is derived from the ticket's: it is good for one pass 2.
func (x nextPass) inlineAnswer(t *kvtransfer.Ticket) *kvtransfer.Ticket {
	x.prefilled.observe(t)
	answer := x.msg.Headers.Prefilled
	// in place: the write position stays behind the read position
	n, err := base64.StdEncoding.Decode(answer, answer)
	next, _ := x.prefilled.settlePrefill(t, 200, answer[:n], err != nil)
	next.ID = inlineID(t.ID)
	return next
}

// inlineID derives the id of an inline hand-over from that of the prefill leg's ticket. It differs from the id that
// the leg's filter would use: if it is consumed, pass 2 began with an inline answer.
func inlineID(id [16]byte) [16]byte {
	id[0] ^= 0x40
	return id
}
