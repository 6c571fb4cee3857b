package pass

import (
	"time"

	"github.com/cespare/xxhash/v2"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
)

// Held is what one pass of a request has reserved: at the endpoint of prefill, and at that of decode, or of any other
// one hop; 0: nothing. Whoever learns of the pass's end has it: from the pass's ticket ([HeldBy]) or, without one,
// from the request's name and the number of the pass ([Shared.Held]), of which the ids are made. Each is released
// once, whoever is first.
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
	prefill, decode := s.State.Release(h.Prefill), s.State.Release(h.Decode)
	return prefill || decode
}

// ReleaseForGood is Release for a pass of a request that is over: what it has not reserved yet, because its stream
// waits behind others' bodies, it does not reserve any more.
func (s *Shared) ReleaseForGood(h Held) {
	s.State.End(h.Prefill)
	s.State.End(h.Decode)
}

// ReleaseAll releases what this replica has reserved for any pass of a request whose ticket nobody can read.
func (s *Shared) ReleaseAll(name string) {
	for pass := range s.Limits.MaxRedirects + 1 {
		s.Release(s.Held(name, pass))
	}
}

// releaseDecode releases what a ticket's pass has reserved for decode, here or at the replica that served it.
func (s *Shared) releaseDecode(t *kvtransfer.Ticket) {
	if pool := s.State.Pool(t.Pool); pool != nil {
		s.State.ReleaseAnywhere(pool, HeldBy(t).Decode)
	} else {
		s.State.Release(HeldBy(t).Decode)
	}
}

// SealedAt returns when a leg's ticket was made: the start of the hop.
func (s *Shared) SealedAt(t *kvtransfer.Ticket) time.Time { return t.Expires.Add(-s.Limits.TicketTTL) }

// Since returns how long ago that was.
func (s *Shared) Since(t *kvtransfer.Ticket) time.Duration { return max(s.Now().Sub(s.SealedAt(t)), 0) }
