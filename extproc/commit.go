package extproc

import (
	"context"
	"fmt"

	"tandem/extproc/plan"
	"tandem/kvstate"
)

// route is a committed decision.
type route struct {
	*plan.Decision
	ticket []byte // sealed
	booked [2]kvstate.ReservationID
}

// commit makes a decision's reservations, records it, reports it and seals its ticket. It is the only place where a
// pass changes the state because of its decision. If the ticket cannot be sealed, the reservations are released.
func (x *planning) commit(d *plan.Decision) (r route, err error) {
	r.Decision = d
	t := &d.Ticket
	if d.Decode.Buffer > 0 {
		var why string
		if r.booked[1], why = x.reserveBuffer(t.Redirects, &d.Decode); why != "" {
			if d, err = d.Otherwise(why); err != nil {
				return route{}, err
			}
			return x.commit(d)
		}
	} else if d.Decode.Endpoint != nil {
		r.booked[1] = x.reserve(d.Decode.Endpoint, kvstate.RoleDecode, t.Redirects, d.Decode.Booking)
	}
	if d.Prefill.Endpoint != nil {
		x.s.State.ClaimTrial(d.Pool, d.Prefill.Endpoint.Addr, d.Decode.Endpoint.Addr, t.ID)
		r.booked[0] = x.reserve(d.Prefill.Endpoint, kvstate.RolePrefill, t.Redirects, d.Prefill.Booking)
	}
	if t.Loads && d.Decode.Endpoint != nil {
		x.s.State.LoadStarted(d.Pool, t.Prefill, d.Decode.Endpoint.Addr)
	}
	t.Reservations = [2]uint64{uint64(r.booked[0]), uint64(r.booked[1])}
	if d.Computes != nil {
		x.s.State.Routed(d.Pool, d.Computes, x.req.Hashes)
	}
	x.setAffinity(d.Pool, d.Affinity.Session, d.Affinity.Prefill, d.Affinity.Decode)
	if d.Report.Route != "" {
		x.planned(d.Pool, d.Report.Route, d.Report.Reason, d.Report.Prefill, d.Report.Decode, t.PromptTokens,
			t.Started, t.Redirects)
	}
	t.Authority, t.Path = string(x.msg.Headers.Authority), string(x.msg.Headers.Path)
	if r.ticket, err = x.s.keys().Seal(make([]byte, 0, 512), t, x.requestID); err != nil {
		r.release(x.s.State)
		return route{}, fmt.Errorf("sealing the ticket of a %s leg: %w", d.Leg, err)
	}
	return r, nil
}

// release releases the reservations of a route.
func (r route) release(state *kvstate.State) {
	for _, id := range r.booked {
		state.Release(id)
	}
}

// reserve reserves an endpoint for this pass.
func (x *planning) reserve(e *kvstate.Endpoint, role kvstate.Role, redirects int, b kvstate.Booking) kvstate.ReservationID {
	id := x.s.State.ReserveAs(x.s.reservationID(x.reservedAs, redirects, role), e, b, sourceOf(x.stream.Context()))
	if b.For&kvstate.RolePrefill != 0 {
		x.waiter.Committed()
	}
	return id
}

// reserveBuffer reserves D once its receive buffer has space for what P will push, or returns why it has none.
// Nothing is sent before.
func (x *planning) reserveBuffer(redirects int, d *plan.Reservation) (id kvstate.ReservationID, why string) {
	if d.Booking.PromptTokens > d.Buffer {
		return 0, "buffer_too_small"
	}
	ctx, cancel := context.WithTimeout(x.stream.Context(), d.Patience)
	defer cancel()
	id, ok := x.s.State.ReserveBuffer(ctx, x.s.reservationID(x.reservedAs, redirects, kvstate.RoleDecode), d.Endpoint, d.Booking, d.Buffer, sourceOf(x.stream.Context()))
	if !ok {
		return 0, "buffer_full"
	}
	return id, ""
}
