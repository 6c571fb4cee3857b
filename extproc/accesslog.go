package extproc

import (
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
	"tandem/extproc/telemetry"
	"tandem/internal/guard"
	"tandem/kvstate"
)

// Envoy's gRPC access log is how the server learns that a hop ended: one long stream per Envoy worker, one entry per
// pass of a request, sent when the pass is over. No ext_proc stream has to stay open for it, so a server that dies cuts
// no running answer.

// streamAccessLogs serves envoy.service.accesslog.v3.AccessLogService. Such a stream has no end of its own, so it is let
// go when the server drains: what the entries would release goes with the server.
func (s *Server) streamAccessLogs(stream grpc.ServerStream) error {
	ended := make(chan error, 1)
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

// hopEnded settles one pass of a request: what was booked for it is released. Every pass books anew, so that holds for a
// pass that ended in a redirect too; such an entry shows the ticket that the redirect carried, because Envoy writes it into
// the request before it logs. Any other entry is the end of the request and shows the ticket of its own pass, or, where
// the client left before Envoy had taken the server's answer in, the one before: then the ids are worked out.
func (s *Server) hopEnded(e *envoywire.LogEntry) {
	redirected := string(e.Details) == "internal_redirect"
	if len(e.Ticket) == 0 {
		if e.ClientGone {
			s.releasePass(reservedAs(e), 0)
		}
		return // answered by Tandem itself, or never got to it
	}
	t, err := s.keys().Open(string(e.Ticket), string(e.RequestID), time.Now())
	if t == nil {
		s.metrics.TicketRefused()
		s.Log.Debug("access log entry with a ticket that is not ours", "request_id", string(e.RequestID), "err", err)
		return
	}
	if ctx := context.Background(); s.Log.Enabled(ctx, slog.LevelDebug) {
		s.Log.DebugContext(ctx, "pass ended", "request_id", string(e.RequestID), "stage", t.Stage.String(), "status", e.Status, "details", string(e.Details),
			"duration", e.Duration, "first_byte", e.FirstByte, "client_gone", e.ClientGone, "tries", e.Tries, "asked", e.Asked())
	}
	if !redirected {
		s.reclaim.Ended(t, s.endOf(t, e))
		s.loadEnded(t, e)
	} else if t.Stage == kvtransfer.Failed && t.Cause == kvtransfer.CauseDecode && t.Loads {
		if pool := s.State.Pool(t.Pool); pool != nil { // another replica may have planned again
			s.State.LoadFailed(pool, t.Prefill, t.Decode)
		}
	}
	if t.Stage == kvtransfer.PrefillLeg && !redirected { // P's answer may have come inline to a pass 2 whose decision Envoy did not take
		s.releasePass(reservedAs(e), t.Redirects+1)
		if e.ClientGone && s.bookedHere(t, reservedAs(e)) && !s.State.Consume(inlineID(t.ID)) {
			t.Stage, t.Redirects = kvtransfer.HandOver, t.Redirects+1
		}
	}
	mine := s.release(t) || s.bookedHere(t, reservedAs(e))
	if pair := t.Stage == kvtransfer.PairLegs || t.Stage == kvtransfer.Failed; pair && (redirected || e.ClientGone) {
		s.pairs.giveUp(t.ID) // of legs that run at once: nobody waits for P's any more
	}
	if redirected {
		return
	}
	if len(e.Unfollowed) > 0 {
		s.notFollowed(t, e, mine)
	}
	if t.Stage.Redirects() {
		s.releasePass(reservedAs(e), t.Redirects)
	}
	var took, first time.Duration
	if t.Stage == kvtransfer.DecodeLeg || t.Stage == kvtransfer.PairLegs {
		began := s.sealedAt(t)
		took = max(e.Start.Add(e.Duration).Sub(began), 0)
		if e.FirstByte > 0 {
			first = max(e.Start.Add(e.FirstByte).Sub(began), 0)
		}
	}
	if mine { // every replica sees every entry: the one that booked the hop counts it
		s.metrics.RequestEnded(t, e, took, first)
		if policy, _ := s.policy(t.Pool); t.Stage == kvtransfer.HandOver && e.ClientGone && !policy.CleanupDecode {
			s.metrics.Orphaned(t.Pool, t.Prefill, reclaim.ClientGone)
		}
	}
	s.recent.Change(string(e.RequestID), func(trace *telemetry.Trace) {
		trace.DecodeTime, trace.Status = took, e.Status
		if e.FirstByte > 0 {
			trace.FirstByte = max(e.Start.Add(e.FirstByte).Sub(trace.Started), 0)
		}
	})
}

// endOf returns what the reclaimer has to know of an access log entry.
func (s *Server) endOf(t *kvtransfer.Ticket, e *envoywire.LogEntry) *reclaim.End {
	return &reclaim.End{
		RequestID: string(e.RequestID), ClientGone: e.ClientGone, Asked: e.Asked(), Tried: e.Tries > 0, BookedHere: s.bookedHere(t, reservedAs(e)),
	}
}

// tryFailed handles the access log entry of a try that failed.
func (s *Server) tryFailed(e *envoywire.LogEntry) {
	t, _ := s.keys().Open(string(e.Ticket), string(e.RequestID), time.Now())
	if t == nil || e.Replan {
		return
	}
	s.hedges.fail(t.ID)
	if t.Stage == kvtransfer.DecodeLeg && e.Pod && !e.Began && e.Sent == 0 {
		s.reclaim.NotConnected(t, s.endOf(t, e))
	}
}

// release gives back what a ticket says is booked. mine is whether this replica had booked any of it.
func (s *Server) release(t *kvtransfer.Ticket) (mine bool) {
	for _, id := range t.Reservations {
		mine = s.State.Release(kvstate.ReservationID(id)) || mine
	}
	return mine
}

// releaseWherever gives back one of what a ticket says is booked, here or at the replica that served the pass before.
func (s *Server) releaseWherever(t *kvtransfer.Ticket, i int) {
	id := kvstate.ReservationID(t.Reservations[i])
	if pool := s.State.Pool(t.Pool); pool != nil {
		s.State.ReleaseAnywhere(pool, id)
	} else {
		s.State.Release(id)
	}
}

// bookedHere reports whether this replica booked what a ticket names, although it may have let go of it since: in time,
// or because the next pass began.
func (s *Server) bookedHere(t *kvtransfer.Ticket, key string) bool {
	pass := t.Redirects
	if t.Stage.Redirects() {
		pass-- // it was the pass before that booked
	}
	return t.Reservations[1] == uint64(s.reservationID(key, pass, kvstate.RoleDecode))
}

// releasePass gives back what this server booked for a pass of a request that it has no ticket of.
func (s *Server) releasePass(key string, redirects int) {
	s.State.Release(s.reservationID(key, redirects, kvstate.RolePrefill))
	s.State.Release(s.reservationID(key, redirects, kvstate.RoleDecode))
}

// reservationKey names a request for its reservations. Envoy makes the name when the request comes in and logs it with every pass, so
// it is known where no ticket is. A client's request id may be that of many requests; it counts only behind a gateway that makes no
// name (then as Envoy has it, and logs it, until it has taken the first answer in).
func reservationKey(reservation, requestID []byte) string {
	if len(reservation) > 0 {
		return string(reservation)
	}
	return string(requestID)
}

// reservedAs returns the reservation key of the request that an access log entry is about.
func reservedAs(e *envoywire.LogEntry) string { return reservationKey(e.Reservation, e.RequestID) }

// reservationID is the id under which a pass of a request books: it can be worked out again here, and nowhere else.
func (s *Server) reservationID(key string, redirects int, role kvstate.Role) kvstate.ReservationID {
	h := xxhash.Sum64String(key) ^ s.seed
	h = (h ^ uint64(redirects)<<8 ^ uint64(role)) * 0x9E3779B185EBCA87
	return kvstate.ReservationID(h ^ h>>32 | 1)
}

// sealedAt is when the ticket of a leg was made, which is when the hop began.
func (s *Server) sealedAt(t *kvtransfer.Ticket) time.Time { return t.Expires.Add(-s.TicketTTL) }
