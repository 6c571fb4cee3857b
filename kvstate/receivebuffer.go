package kvstate

import "context"

// ReserveBuffer is [Bookings.ReserveAs] for a request whose KV will be pushed into the endpoint's buffer of limit
// tokens. It waits, first come, first served, until the buffer has space for the prompt, and holds the space until
// the reservation is released. It reserves nothing and returns false if ctx ends first, or if the prompt is larger
// than the buffer. Replicas do not coordinate their use of a buffer.
func (s *Bookings) ReserveBuffer(ctx context.Context, id ReservationID, e *Endpoint, b Booking, limit int64,
	from *Source) (ReservationID, bool) {
	promptTokens := max(b.PromptTokens, 0)
	if !e.memory.buffer.Acquire(ctx, promptTokens, limit) {
		return 0, false
	}
	id = s.reserve(id, e, b, promptTokens, from)
	if id == 0 {
		e.memory.buffer.Release(promptTokens)
	}
	return s.unlessEnded(id), true
}
