package plan

import (
	"errors"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/picker"
)

// BothLegs decides for a request whose two legs are to run concurrently. It returns nil if they cannot; r.Why is the
// reason. If nobody knows yet which engine P is, its legs run one after the other: P's answer shows it.
func BothLegs(r *Request, v *kvstate.View, legs *kvtransfer.Legs, c picker.Choice, p *Policy) (*Decision, error) {
	if c.Prefill < 0 {
		if r.Why = p.Unpaired(v, c.Uncached); len(r.Excluded) > 0 {
			r.Why = "prefill_failed"
		}
		return nil, nil
	}
	d, err := bothLegs(r, legs, c, p)
	if !errors.Is(err, kvtransfer.ErrUnknownPeer) {
		return d, err
	}
	r.Why = "unknown_peer"
	if p.Dialect.Prefill == nil || r.Redirects+2 >= r.MaxRedirects {
		return nil, nil
	}
	d, why := Split(r, v, c, p)
	if why != "" {
		r.Why = why
	}
	return d, nil
}

// bothLegs returns nil if the undo of P's leg does not fit a ticket. The error is the dialect's.
func bothLegs(r *Request, legs *kvtransfer.Legs, c picker.Choice, p *Policy) (*Decision, error) {
	dialect, prefill, decode := p.Dialect.Concurrent, legs.Prefill, legs.Decode
	r.Patch.Reset(&r.Client)
	how, err := dialect.Plan(&r.Client, &r.Patch, legs)
	if err != nil {
		return nil, err
	}
	if p.Dialect.VLLM && how.DecodeRank == "" {
		how.DecodeRank = decode.RankName()
	}
	edits, undo, ok := r.Edits(p)
	if !ok {
		r.Why = "undo_too_large"
		return nil, nil
	}
	d := r.Decided(&Decision{
		Leg: LegPair, Pool: r.Pool, Endpoint: decode, Edits: edits,
		Pair:     &Pair{Prefill: prefill, Cancel: dialect.CancelsPrefill, Plan: how},
		Prefill:  Reservation{Endpoint: prefill, Booking: c.PrefillBooking()},
		Decode:   Reservation{Endpoint: decode, Booking: bookingAfter(prefill, c.PromptTokens, c.AnswerTokens)},
		Computes: prefill, Report: Report{Route: "pair", Prefill: prefill, Decode: decode},
		Ticket: r.ticket(kvtransfer.PairLegs, edits.Len(len(r.Client.Body()))),
	})
	t := &d.Ticket
	t.ID, t.Prefill, t.Decode, t.Split, t.Prefills = legs.ID, prefill.Addr, decode.Addr, true, r.Prefills+1
	t.Undo, t.Params, t.Prompt, t.Loads = undo, how.Decode, r.LastBlock(), true
	t.LeastBytes = p.LeastBytes(r.Client.API(), r.ID, r.Streams() && !how.Joined)
	return d, nil
}
