package pass

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
)

// Routed is a committed decision.
type Routed struct {
	*plan.Decision
	Held   Held
	Sealed []byte // its ticket; nil: a gateway's request has none, and inside Envoy none leaves the process
}

// Commit carries a decision out: it reserves, calls prefill if no hop of Envoy's does that, records, reports, and
// seals the ticket. It is the only place where a pass changes the state because of its decision. If it fails, nothing
// stays reserved.
func (x *Pass) Commit(ctx context.Context, d *plan.Decision) (r Routed, err error) {
	var why string
	if d, r.Held, why, err = reserveRoom(ctx, x, d); err != nil {
		return Routed{}, err
	}
	s, t := x.shared, &d.Ticket
	r.Decision = d
	if why != "" {
		x.Req.Attempt.Why = why
		if d, err = plan.Alone(&x.Req, &x.view, x.choice, &x.policy.Policy); err != nil {
			return Routed{}, err
		}
		return x.Commit(ctx, d)
	}
	defer func() {
		if err != nil {
			s.Release(r.Held)
			r = Routed{}
		}
	}()
	if d.Direct {
		if r.Held.Decode, err = (prefillCall{x, d}).complete(ctx, r.Held.Decode); err != nil {
			return r, err
		}
	}
	x.waiter.Committed()
	x.placed = true
	if t.Loads && d.Decode.Endpoint != nil {
		s.State.KVLoads.LoadStarted(d.Pool, t.Prefill, d.Decode.Endpoint.Addr)
	}
	if d.Sidecar != nil && d.Sidecar.Prefill != "" {
		s.State.Routed(d.Pool, d.Report.Prefill, x.Req.Hashes)
	}
	if d.Computes != nil {
		x.recomputed = s.State.Computes(d.Pool, x.Req.Conversation, d.Computes, &x.view)
		s.State.Routed(d.Pool, d.Computes, x.Req.Hashes)
	}
	if a := d.Affinity; a.Session != 0 {
		s.State.Sessions.SetAffinity(d.Pool, a.Session, a.Prefill, a.Decode)
	}
	if d.Report.Route != "" {
		x.report(ctx, d)
	}
	if d.Gateway != nil {
		return r, nil
	}
	t.Reservations = [2]uint64{uint64(r.Held.Prefill), uint64(r.Held.Decode)}
	t.Authority, t.Path = string(x.Head.Authority), string(x.Head.Path)
	if s.Inside {
		return r, nil
	}
	if r.Sealed, err = s.Keys().Seal(make([]byte, 0, 512), t, x.ID); err != nil {
		return r, fmt.Errorf("sealing the ticket of a %s leg: %w", d.Leg, err)
	}
	return r, nil
}

// chosenAgain is how often endpoints are chosen again for a request.
const chosenAgain = 3

// reserveRoom makes a decision's reservations, if D's receive buffer has space, as reserve does. Requests that are
// chosen at the same moment see the same room at engines of both roles (docs/adr/0052). If they have reserved too much
// of it together, they give it back, and are chosen again.
func reserveRoom(ctx context.Context, x *Pass, d *plan.Decision) (_ *plan.Decision, h Held, why string, err error) {
	for tries := 0; ; tries++ {
		if h, why = x.reserve(ctx, d); why != "" || tries == chosenAgain || !tooMuch(x, d) {
			return d, h, why, nil
		}
		x.shared.Release(h)
		if !x.Req.Attempt.Alone {
			x.Req.Attempt.Why = ""
		}
		if d, err = x.plan(ctx); err != nil {
			return nil, Held{}, "", err
		}
	}
}

// tooMuch reports whether a new request at an engine of both roles leaves too little room there. With a queue, requests
// are chosen one after the other, so this cannot happen. A request for which no endpoint has room is sent all the same.
func tooMuch(x *Pass, d *plan.Decision) bool {
	isBoth := func(e *kvstate.Endpoint) bool { return e != nil && e.Role&kvstate.RoleBoth == kvstate.RoleBoth }
	if x.policy.queue != nil || x.choice.NoRoom || x.want.way != oneByOne || x.Req.Attempt.Redirects > 0 ||
		d.Report.Route == "" || !isBoth(d.Decode.Endpoint) && !isBoth(d.Prefill.Endpoint) {
		return false
	}
	x.shared.State.View(d.Pool, nil, &x.reserved)
	return slices.ContainsFunc(x.reserved.Endpoints, func(c kvstate.Candidate) bool {
		return (c.Endpoint == d.Decode.Endpoint || c.Endpoint == d.Prefill.Endpoint) && picker.IsOver(&c)
	})
}

// reserve makes a decision's reservations. If D's receive buffer has no space for what P will push, it reserves nothing
// and returns why.
func (x *Pass) reserve(ctx context.Context, d *plan.Decision) (h Held, why string) {
	s, pass := x.shared, d.Ticket.Redirects
	if x.Req.Conversation == nil {
		x.Req.Conversation = d.Pool.Conversation(x.Req.Hashes)
	}
	d.Decode.Booking.Of = x.Req.Conversation
	ids := s.Held(x.ReservedAs, pass)
	switch {
	case d.Decode.Buffer > 0:
		if h.Decode, why = x.reserveBuffer(ctx, ids.Decode, &d.Decode); why != "" {
			return Held{}, why
		}
	case d.Decode.Endpoint != nil:
		h.Decode = s.State.Bookings.ReserveAs(ids.Decode, d.Decode.Endpoint, d.Decode.Booking, x.Source)
	}
	if d.Prefill.Endpoint != nil {
		s.State.KVLoads.ClaimTrial(d.Pool, d.Prefill.Endpoint.Addr, d.Decode.Endpoint.Addr, d.Ticket.ID)
		h.Prefill = s.State.Bookings.ReserveAs(ids.Prefill, d.Prefill.Endpoint, d.Prefill.Booking, x.Source)
	}
	return h, ""
}

// reserveBuffer reserves D once its receive buffer has space, or returns why it has none. Nothing is sent before.
func (x *Pass) reserveBuffer(
	ctx context.Context, id kvstate.ReservationID, d *plan.Reservation,
) (_ kvstate.ReservationID, why string) {
	if d.Booking.PromptTokens > d.Buffer {
		return 0, "buffer_too_small"
	}
	ctx, cancel := context.WithTimeout(ctx, d.Patience)
	defer cancel()
	id, ok := x.shared.State.Bookings.ReserveBuffer(ctx, id, d.Endpoint, d.Booking, d.Buffer, x.Source)
	if !ok {
		return 0, "buffer_full"
	}
	return id, ""
}

// Move makes a reservation for the endpoint to which a gateway went instead of the one that was chosen.
func (x *Pass) Move(h *Held, to *kvstate.Endpoint, tokens int64) {
	x.shared.Release(*h)
	id := x.shared.reservation(x.ReservedAs, 1, kvstate.RoleDecode)
	*h = Held{Decode: x.shared.State.Bookings.ReserveAs(id, to, plan.Decoding(tokens), x.Source)}
}

// Side returns what is known of the endpoint at an address, which may have left the pool.
func Side(pool *kvstate.Pool, addr string) kvtransfer.Side {
	if pool != nil {
		if e := pool.Endpoint(addr); e != nil {
			return plan.SideOf(e)
		}
	}
	return kvtransfer.Side{Addr: addr}
}

// Held has the reservations of one pass of a request: at the prefill endpoint, and at the decode endpoint or that of
// any other single hop; 0: none. Code that learns of the pass's end makes it from the pass's ticket ([HeldBy]) or,
// without one, from the request's name and the number of the pass ([Shared.Held]). Releasing one again does nothing.
type Held struct{ Prefill, Decode kvstate.ReservationID }

// HeldBy returns what the pass of a ticket has reserved, at this replica or another one.
func HeldBy(t *kvtransfer.Ticket) Held {
	return Held{kvstate.ReservationID(t.Reservations[0]), kvstate.ReservationID(t.Reservations[1])}
}

// Held returns what this replica may have reserved for a pass of a request.
func (s *Shared) Held(name string, pass int) Held {
	return Held{s.reservation(name, pass, kvstate.RolePrefill), s.reservation(name, pass, kvstate.RoleDecode)}
}

// HeldHere reports whether this replica made what a ticket's pass has reserved, although it may have been released
// since: because it expired, or because the next pass began.
func (s *Shared) HeldHere(t *kvtransfer.Ticket, name string) bool {
	pass := t.Redirects
	if t.Stage.Redirects() {
		pass-- // the pass before reserved
	}
	return HeldBy(t).Decode == s.reservation(name, pass, kvstate.RoleDecode)
}

// reservation derives the id of a reservation from its pass. Only this process can derive it.
func (s *Shared) reservation(name string, pass int, role kvstate.Role) kvstate.ReservationID {
	h := xxhash.Sum64String(name) ^ s.seed
	h = (h ^ uint64(pass)<<8 ^ uint64(role)) * 0x9E3779B185EBCA87
	return kvstate.ReservationID(h ^ h>>32 | 1)
}

// Release releases what is held. mine reports whether this replica held any of it.
func (s *Shared) Release(h Held) (mine bool) {
	prefill, decode := s.State.Bookings.Release(h.Prefill), s.State.Bookings.Release(h.Decode)
	return prefill || decode
}

// ReleaseElsewhere has the other replicas release what a ticket's pass holds: the request is over, and this replica
// does not hold it. Envoy tells the replica that does by itself, unless that one was added since the request's
// connection began: the connection's listener tells only those that it knew.
func (s *Shared) ReleaseElsewhere(t *kvtransfer.Ticket) {
	if pool := s.State.Pool(t.Pool); pool != nil {
		held := HeldBy(t)
		s.State.Bookings.ReleaseAnywhere(pool, held.Prefill)
		s.State.Bookings.ReleaseAnywhere(pool, held.Decode)
	}
}

// Bar is Release for a pass of a request that is over. The pass then reserves nothing more, not even if its stream
// still waits behind others' bodies.
func (s *Shared) Bar(h Held) {
	s.State.Bookings.End(h.Prefill)
	s.State.Bookings.End(h.Decode)
}

// Revoke releases what this replica has reserved for any pass of a request, if its ticket cannot be read.
func (s *Shared) Revoke(name string) {
	for pass := range s.Limits.MaxRedirects + 1 {
		s.Release(s.Held(name, pass))
	}
}

// consume consumes a ticket, and reports whether this was the first time. A ticket that no other replica can have needs
// no record.
func (s *Shared) consume(id kvtransfer.ID) bool { return s.Inside || s.State.HandOvers.Consume(id) }

// SealedAt returns when a leg's ticket was made: the start of the hop.
func (s *Shared) SealedAt(t *kvtransfer.Ticket) time.Time { return t.Expires.Add(-s.Limits.TicketTTL) }

// Since returns how long ago that was.
func (s *Shared) Since(t *kvtransfer.Ticket) time.Duration { return max(s.Now().Sub(s.SealedAt(t)), 0) }
