package extproc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/grpc"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/reclaim"
	"tandem/extproc/replan"
	"tandem/internal/guard"
	"tandem/kvstate"
)

// Envoy's gRPC access log reports the end of each hop: one long stream per Envoy worker, one entry per pass of a
// request, sent when the pass has ended, to the replica that decided it if that suffices (envoywire.Loggers). So no
// ext_proc stream has to stay open for it, and a server that dies cuts no running answer.

// streamAccessLogs serves envoy.service.accesslog.v3.AccessLogService. Such a stream never ends by itself, so the
// server ends it when it drains: the reservations that the entries would release end with the server.
func (s *Server) streamAccessLogs(stream grpc.ServerStream) error {
	ended := make(chan error, 1)
	defer s.loggers.Opened(stream.Context())()
	defer s.faults.Opened()()
	ctx := guard.With(stream.Context(), s.guard)
	go func() {
		_, err := guard.Try(ctx, "access log", func() (struct{}, error) { return struct{}{}, s.readAccessLogs(stream) })
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-s.draining:
		return nil
	}
}

func (s *Server) readAccessLogs(stream grpc.ServerStream) error {
	var batch envoywire.LogBatch
	for {
		err := stream.RecvMsg(&batch)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for i := range batch.Entries {
			batch.Entries[i].SetTime(s.now())
			switch batch.Name {
			case envoywire.LogNameMirror:
				s.mirrorEnded(&batch.Entries[i])
			case envoywire.LogNameFailed:
				s.tryFailed(&batch.Entries[i])
			default:
				s.hopEnded(&batch.Entries[i])
			}
		}
	}
}

// hopEnded handles the end of one pass and releases its reservations. Every pass makes its own, so this also holds
// for a pass that ended in a redirect. The entry of such a pass shows the redirect's ticket, because Envoy writes
// it into the request before it logs. Any other entry is the end of the request and shows the ticket of its own
// pass. If the client left before Envoy had received the server's answer, it shows the ticket of the pass before;
// then the reservation ids are derived from the request.
func (s *Server) hopEnded(e *envoywire.LogEntry) {
	redirected := string(e.Details) == "internal_redirect"
	t := s.ticketOf(e)
	if t == nil {
		return
	}
	if ctx := context.Background(); s.Log.Enabled(ctx, slog.LevelDebug) {
		s.Log.DebugContext(ctx, "pass ended", "request_id", string(e.RequestID), "stage", t.Stage.String(), "status", e.Status, "details", string(e.Details),
			"duration", e.Duration, "first_byte", e.FirstByte, "client_gone", e.ClientGone, "tries", e.Tries, "asked", e.Asked())
	}
	if !redirected {
		s.reclaim.Ended(t, s.endOf(t, e))
		s.faults.DecodeEnded(t, e)
	}
	// pass 2 may have read P's inline answer, but Envoy did not receive its decision
	if t.Stage == kvtransfer.PrefillLeg && !redirected {
		s.releasePass(reservedAs(e), t.Redirects+1, releaseForGood(s.State, e))
		if e.ClientGone && s.reservedHere(t, reservedAs(e)) && !s.State.Consume(inlineID(t.ID)) {
			t.Stage, t.Redirects = kvtransfer.HandOver, t.Redirects+1
		}
	}
	mine := s.release(t) || s.reservedHere(t, reservedAs(e))
	if pair := t.Stage == kvtransfer.PairLegs || t.Stage == kvtransfer.Failed; pair && (redirected || e.ClientGone) {
		s.pairs.GiveUp(t.ID) // with concurrent legs: nobody waits for P's leg any more
	}
	if redirected {
		return
	}
	if len(e.Unfollowed) > 0 {
		s.notFollowed(t, e, mine)
	}
	if t.Stage.Redirects() {
		s.releasePass(reservedAs(e), t.Redirects, releaseForGood(s.State, e))
	}
	var took, first time.Duration
	if t.Stage == kvtransfer.DecodeLeg || t.Stage == kvtransfer.PairLegs {
		began := s.sealedAt(t)
		took = max(e.Start.Add(e.Duration).Sub(began), 0)
		if e.FirstByte > 0 {
			first = max(e.Start.Add(e.FirstByte).Sub(began), 0)
		}
	}
	s.observer.RequestEnded(t, e, took, first, mine)
	if mine { // every replica receives every entry; the one with the reservation counts the hop
		if policy, _ := s.policy(t.Pool); t.Stage == kvtransfer.HandOver && e.ClientGone && !policy.CleanupDecode {
			s.observer.Orphaned(t.Pool, t.Prefill, reclaim.ClientGone)
		}
	}
}

// ticketOf opens the ticket of an entry. Without one, or with one that cannot be read, it releases what the request has
// reserved, and returns nil.
func (s *Server) ticketOf(e *envoywire.LogEntry) *kvtransfer.Ticket {
	t, err := s.keys().Open(string(e.Ticket), string(e.RequestID), s.now())
	switch {
	case len(e.Ticket) == 0 || t != nil && t.Stage == kvtransfer.Undecided:
		if !bytes.HasPrefix(e.Details, []byte(envoywire.DetailsPrefix)) { // else Tandem answered it by itself
			s.releasePass(reservedAs(e), 0, releaseForGood(s.State, e))
		}
		return nil
	case t == nil:
		s.observer.EntryRefused(e)
		s.releasePasses(reservedAs(e), s.State.Release) // an engine may have forged it
		s.Log.Debug("access log entry with a ticket that is not ours", "request_id", string(e.RequestID), "err", err)
	}
	return t
}

// endOf returns what the reclaimer needs from an access log entry.
func (s *Server) endOf(t *kvtransfer.Ticket, e *envoywire.LogEntry) *reclaim.End {
	return &reclaim.End{
		RequestID: string(e.RequestID), ClientGone: e.ClientGone, Asked: e.Asked(), Tried: e.Tries > 0, BookedHere: s.reservedHere(t, reservedAs(e)),
	}
}

// tryFailed handles the access log entry of a failed try.
func (s *Server) tryFailed(e *envoywire.LogEntry) {
	t, _ := s.keys().Open(string(e.Ticket), string(e.RequestID), s.now())
	if t == nil || e.Replan || e.Mirror {
		return
	}
	s.faults.Report(t, e)
	s.hedges.Fail(t.ID)
	if t.Stage == kvtransfer.DecodeLeg && e.Pod && !e.Began && e.Sent == 0 {
		s.reclaim.NotConnected(t, s.endOf(t, e))
	}
}

// release releases the reservations of a ticket. mine reports whether this replica made any of them.
func (s *Server) release(t *kvtransfer.Ticket) (mine bool) {
	for _, id := range t.Reservations {
		mine = s.State.Release(kvstate.ReservationID(id)) || mine
	}
	return mine
}

// releaseAnywhere releases one reservation of a ticket, here or at the replica that served the pass before.
func (s *Server) releaseAnywhere(t *kvtransfer.Ticket, i int) {
	id := kvstate.ReservationID(t.Reservations[i])
	if pool := s.State.Pool(t.Pool); pool != nil {
		s.State.ReleaseAnywhere(pool, id)
	} else {
		s.State.Release(id)
	}
}

// reservedHere reports whether this replica made a ticket's reservation, although it may have been released since:
// because it expired, or because the next pass began.
func (s *Server) reservedHere(t *kvtransfer.Ticket, key string) bool {
	pass := t.Redirects
	if t.Stage.Redirects() {
		pass-- // the pass before made the reservation
	}
	return t.Reservations[1] == uint64(s.reservationID(key, pass, kvstate.RoleDecode))
}

// releasePass releases what this server reserved for a pass whose ticket it does not have.
func (s *Server) releasePass(key string, redirects int, release func(kvstate.ReservationID) bool) {
	release(s.reservationID(key, redirects, kvstate.RolePrefill))
	release(s.reservationID(key, redirects, kvstate.RoleDecode))
}

// releasePasses releases what this server reserved for any pass of a request whose ticket nobody can read.
func (s *Server) releasePasses(key string, release func(kvstate.ReservationID) bool) {
	for pass := range s.MaxRedirects + 1 {
		s.releasePass(key, pass, release)
	}
}

// releaseForGood is what releases the reservations of a request that is over. It may not have reserved yet: its stream
// may wait behind others' bodies. Where Envoy names the request, it does not reserve any more; a request id may be that
// of other requests.
func releaseForGood(state *kvstate.State, e *envoywire.LogEntry) func(kvstate.ReservationID) bool {
	if len(e.Reservation) == 0 {
		return state.Release
	}
	return state.End
}

// reservationKey returns the name of a request's reservations. Envoy creates the name when the request arrives and
// logs it with every pass, so it is known without a ticket. Several requests may share a client's request id. It is
// used only behind a gateway that creates no name.
func reservationKey(reservation, requestID []byte) string {
	if len(reservation) > 0 {
		return string(reservation)
	}
	return string(requestID)
}

// reservedAs returns the reservation key of the request that an access log entry is about.
func reservedAs(e *envoywire.LogEntry) string { return reservationKey(e.Reservation, e.RequestID) }

// reservationID derives the id of a reservation from its pass. Only this process can derive it.
func (s *Server) reservationID(key string, redirects int, role kvstate.Role) kvstate.ReservationID {
	h := xxhash.Sum64String(key) ^ s.seed
	h = (h ^ uint64(redirects)<<8 ^ uint64(role)) * 0x9E3779B185EBCA87
	return kvstate.ReservationID(h ^ h>>32 | 1)
}

// sealedAt returns when a leg's ticket was made: the start of the hop.
func (s *Server) sealedAt(t *kvtransfer.Ticket) time.Time { return t.Expires.Add(-s.TicketTTL) }

// since returns how long ago that was.
func (s *Server) since(t *kvtransfer.Ticket) time.Duration { return max(s.now().Sub(s.sealedAt(t)), 0) }

// notFollowed logs and counts such an end. Every replica receives the entry; mine reports whether this one made the
// reservation, and counts it.
func (s *Server) notFollowed(t *kvtransfer.Ticket, e *envoywire.LogEntry, mine bool) {
	why := replan.NotFollowed(t, e, s.MaxRedirects)
	s.Log.Warn("Envoy did not follow a redirect", "request_id", string(e.RequestID), "reason", why, "stage", t.Stage.String(), "prefill", t.Prefill,
		"decode", t.Decode, "redirects", t.Redirects, "body_bytes", t.BodyBytes, "sent_bytes", e.Sent, "sent_header_bytes", e.SentHeaders, "duration", e.Duration)
	if mine {
		s.observer.NotFollowed(why)
	}
}
