package pass

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/latebinding"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/reclaim"
	"tandem/kvstate"
)

// Returns checks that the body that came with a ticket is the one that was sent to the ticket's leg.
func (x *Pass) Returns(t *kvtransfer.Ticket) error {
	if x.size() != t.BodyBytes {
		return fmt.Errorf("the body of pass 2 has %d bytes, its leg was sent %d", x.size(), t.BodyBytes)
	}
	if err := t.Undo.Check(x.size()); err != nil {
		return fmt.Errorf("undoing a leg's edits: %w", err)
	}
	x.Meter.SpanTicket(t)
	return nil
}

// Resume continues a request whose leg has ended, by the ticket that this has led to, after [Pass.Returns]. attempt is
// the id of the leg's own ticket. ticketErr says why the ticket is too old to be used.
func (x *Pass) Resume(
	ctx context.Context, t *kvtransfer.Ticket, attempt kvtransfer.ID, ticketErr error,
) (*plan.Decision, error) {
	s := x.shared
	s.Release(s.Held(x.ReservedAs, t.Redirects)) // of a stream that Envoy gave up and retries
	pool := s.State.Pool(t.Pool)                 // nil if the configuration changed between the hops
	if t.Expires.Sub(s.Now()) > s.HandOverTTL+time.Second && t.Stage != kvtransfer.Failed {
		ticketErr = kvtransfer.ErrTicketExpired // it is from the future: the fleet's clock was set back
	}
	if t.Stage == kvtransfer.HandOver && ticketErr == nil && pool != nil && s.consume(t.ID) {
		return x.decode(ctx, pool, t, attempt)
	}
	s.Release(HeldBy(t))
	a := plan.Next(t)
	if t.Stage == kvtransfer.Encoded {
		if ticketErr == nil && s.consume(t.ID) {
			a.Encoded = s.Params(t)
		}
		return x.again(ctx, t, a)
	}
	if t.Stage == kvtransfer.HandOver {
		t.Cause = kvtransfer.CauseSpent
		switch {
		case ticketErr != nil:
			t.Cause = kvtransfer.CauseExpired
			s.Reclaim.Orphaned(t, x.ID, t.Cause)
		case pool == nil:
			t.Cause = kvtransfer.CausePoolGone
			s.Reclaim.Orphaned(t, x.ID, t.Cause)
		}
	}
	x.Meter.Replanned(x.ID, t)
	policy, _ := s.Policy(t.Pool)
	if err := a.Failed(&policy.Policy, pool, t); err != nil {
		return nil, err
	}
	return x.again(ctx, t, a)
}

// again plans a request again after one of its hops failed.
func (x *Pass) again(ctx context.Context, t *kvtransfer.Ticket, a plan.Attempt) (*plan.Decision, error) {
	x.restoreBody(t)
	switch api := x.shared.API(&x.Head); api {
	case openai.PassThrough:
		return x.other(ctx, a)
	case openai.Models:
		return nil, openai.NotServed() // no hop of such a path comes back
	default:
		return x.First(ctx, api, a)
	}
}

// restoreBody makes the client's body of the leg's.
func (x *Pass) restoreBody(t *kvtransfer.Ticket) {
	leg := x.Body.Bytes()
	x.Body.Rewrite(t.Undo.Len(len(leg)), func(to []byte) []byte { return t.Undo.Apply(to, leg) })
}

// decode plans the decode leg with the KV parameters from prefill's answer. If the request is refused, its KV is not
// fetched. If its client has left, the end of the request records that.
func (x *Pass) decode(
	ctx context.Context, pool *kvstate.Pool, t *kvtransfer.Ticket, attempt kvtransfer.ID,
) (*plan.Decision, error) {
	d, err := x.toDecode(ctx, pool, t, attempt)
	if err != nil && !errors.Is(err, latebinding.ErrWaits) && ctx.Err() == nil && !x.shared.Reclaim.Enabled(t.Pool) {
		x.shared.Reclaim.Left(t, reclaim.NoDecode)
	}
	return d, err
}

// toDecode chooses D again: the load has changed since pass 1, and pull dialects allow it.
func (x *Pass) toDecode(
	ctx context.Context, pool *kvstate.Pool, t *kvtransfer.Ticket, attempt kvtransfer.ID,
) (*plan.Decision, error) {
	s, r := x.shared, &x.Req
	h := plan.HandOver{Ticket: t, Attempt: attempt, Params: s.Params(t), API: x.shared.API(&x.Head)}
	held := HeldBy(t)
	s.State.Bookings.ReleaseAnywhere(pool, held.Prefill)
	defer s.State.Bookings.ReleaseAnywhere(pool, held.Decode) // until then P's memory counts as held
	x.begin(pool, plan.Attempt{})
	p := &x.policy.Policy
	// the prompt's text blocks: none, if this replica does not receive updates from the one that routed it
	if text := pool.TextOf(r.Hashes, t.Prompt, plan.MaxBlocks); text != nil {
		r.Hashes = text
	}
	if err := x.chooseDecode(ctx, &h); err != nil {
		if errors.Is(err, latebinding.ErrWaits) {
			x.Rest = func(ctx context.Context) (*plan.Decision, error) { return x.decode(ctx, pool, t, attempt) }
		}
		return nil, err
	}
	if h.Restored = h.Restores(p, r.Limits); h.Restored {
		x.restoreBody(t)
		h.Invalid = r.Client.Scan(h.API, x.Body.Bytes(), openai.Limits{})
	}
	h.Body = x.Body.Bytes()
	d, err := plan.Resume(r, &h, p)
	if err != nil {
		return nil, err
	}
	if d.Lost != nil {
		s.Reclaim.Strand(t)
		x.log(slog.LevelWarn, "decode cannot use prefill's answer: it computes the prompt", "err", d.Lost)
	}
	x.Meter.HandedOver(x.ID, t, h.Decode, d.Ticket.Loads)
	if h.AtPrefill() {
		s.Reclaim.Unfetched(t, x.ID, h.Params, reclaim.NoRoom)
	} else if h.Late {
		s.Reclaim.Unfetched(t, x.ID, h.Params, reclaim.Standstill)
	} else if h.Paired && s.Reclaim.Enabled(t.Pool) {
		s.Reclaim.Record(t, x.ID, h.Params, h.Decode.Addr, true)
	}
	return d, nil
}

// Params returns the parameters that a ticket contains or refers to; nil if there are none, or if they are
// gone: then the engine computes the prompt by itself.
func (s *Shared) Params(t *kvtransfer.Ticket) []byte {
	if t.ParamsRef == ([16]byte{}) {
		return t.Params
	}
	if kept, ok := s.State.HandOvers.TakeHandOver(t.ParamsRef); ok {
		return kept
	}
	return nil
}
