package extproc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"

	"google.golang.org/grpc"

	"tandem/extproc/concurrent"
	"tandem/extproc/ended"
	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/replan"
	"tandem/internal/guard"
)

// Envoy's gRPC access log reports the end of each hop: one long stream per Envoy worker, one entry per pass of a
// request, sent when the pass has ended, to the replica that decided it if that suffices (envoywire.Loggers). So no
// ext_proc stream has to stay open for it, and a server that dies cuts no running answer.

// streamAccessLogs serves envoy.service.accesslog.v3.AccessLogService. Such a stream never ends by itself, so the
// server ends it when it drains: the reservations that the entries would release end with the server.
func (s *Server) streamAccessLogs(stream grpc.ServerStream) error {
	over := make(chan error, 1)
	defer s.loggers.Opened(stream.Context())()
	defer s.faults.Opened()()
	ctx := guard.With(stream.Context(), s.guard)
	go func() {
		_, err := guard.Try(ctx, "access log", func() (struct{}, error) { return struct{}{}, s.readAccessLogs(ctx, stream) })
		over <- err
	}()
	select {
	case err := <-over:
		return err
	case <-s.draining:
		return nil
	}
}

func (s *Server) readAccessLogs(ctx context.Context, stream grpc.ServerStream) error {
	var batch envoywire.LogBatch
	batch.Tenant = s.observer.Usage.Header()
	named := false
	for {
		err := stream.RecvMsg(&batch)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if batch.Risk != "" && !named {
			named = true
			if s.Risky.Risk() == "" { // an Envoy has several streams
				s.Log.WarnContext(ctx, "an Envoy should be replaced", "why", batch.Risk)
			}
			defer s.Risky.Opened(batch.Risk)()
		}
		for i := range batch.Entries {
			s.logged(ctx, batch.Name, &batch.Entries[i])
		}
	}
}

// logged handles an entry of a log. A panic costs this entry alone: the others of its batch are other requests'.
func (s *Server) logged(ctx context.Context, log string, e *envoywire.LogEntry) {
	defer guard.Recover(ctx, "access log")
	e.Ended.SetTime(s.passes.Now())
	switch log {
	case envoywire.LogNameMirror:
		s.mirrorEnded(e)
	case envoywire.LogNameFailed:
		s.tryFailed(e)
	default:
		s.hopEnded(e)
	}
}

// hopEnded handles the end of one pass and releases its reservations. Every pass makes its own, so this also holds
// for a pass that ended in a redirect. The entry of such a pass shows the redirect's ticket, because Envoy writes
// it into the request before it logs. Any other entry is the end of the request and shows the ticket of its own
// pass. If the client left before Envoy had received the server's answer, it shows the ticket of the pass before;
// then what is held follows from the request.
func (s *Server) hopEnded(entry *envoywire.LogEntry) {
	e, t := &entry.Ended, s.ticketOf(entry)
	if t == nil {
		return
	}
	if ctx := context.Background(); s.Log.Enabled(ctx, slog.LevelDebug) {
		s.Log.DebugContext(ctx, "pass ended", "request_id", string(e.RequestID), "stage", t.Stage.String(), "status", e.Status, "details", string(e.Details),
			"duration", e.Duration, "first_byte", e.FirstByte, "client_gone", e.ClientGone, "tries", e.Tries, "asked", e.Asked())
	}
	redirected := string(e.Details) == "internal_redirect" // the next pass follows
	pair := t.Stage == kvtransfer.PairLegs || t.Stage == kvtransfer.Failed
	if pair && (redirected || e.ClientGone) {
		s.pairs.GiveUp(t.ID) // with concurrent legs: nobody waits for P's leg any more
	}
	if redirected {
		s.passes.Release(pass.HeldBy(t))
		return
	}
	s.requestEnded(t, e)
}

// requestEnded ends a request, once it is clear which pass was its last.
func (s *Server) requestEnded(t *kvtransfer.Ticket, e *ended.Pass) {
	over := journey.Ending{Ticket: t, Ended: e, Here: s.passes.HeldHere(t, reservedAs(e))}
	if t.Stage == kvtransfer.PrefillLeg { // pass 2 may have read P's inline answer, but Envoy did not receive its decision
		s.bar(e, t.Redirects+1)
		over.HandedOver = e.ClientGone && over.Here && !s.State.HandOvers.Consume(t.ID.Inline())
	}
	mine := s.journeys.End(&over)
	if !over.Here {
		s.passes.ReleaseElsewhere(t)
	}
	if len(e.Unfollowed) > 0 {
		s.notFollowed(t, e, mine)
	}
	if t.Stage.Redirects() {
		s.bar(e, t.Redirects)
	}
}

// bar releases what this replica holds for a pass of a request that is over. If Envoy names the request, nothing is
// reserved for that pass any more. A request id alone may belong to other requests, too.
func (s *Server) bar(e *ended.Pass, number int) {
	held := s.passes.Held(reservedAs(e), number)
	if len(e.Reservation) == 0 {
		s.passes.Release(held)
	} else {
		s.passes.Bar(held)
	}
}

// ticketOf opens the ticket of an entry. Without one, or with one that cannot be read, it releases what the request has
// reserved, and returns nil.
func (s *Server) ticketOf(entry *envoywire.LogEntry) *kvtransfer.Ticket {
	e := &entry.Ended
	t, err := s.passes.Keys().Open(string(entry.Ticket), string(e.RequestID), s.passes.Now())
	switch {
	case len(entry.Ticket) == 0 || t != nil && t.Stage == kvtransfer.Undecided:
		if !bytes.HasPrefix(e.Details, []byte(names.DetailsPrefix)) { // else Tandem answered it by itself
			s.bar(e, 0)
		}
		return nil
	case t == nil:
		s.observer.EntryRefused(e)
		s.passes.Revoke(reservedAs(e)) // an engine may have forged it
		s.Log.Debug("access log entry with a ticket that is not ours", "request_id", string(e.RequestID), "err", err)
	}
	return t
}

// tryFailed handles the access log entry of a failed try.
func (s *Server) tryFailed(entry *envoywire.LogEntry) {
	e := &entry.Ended
	t, _ := s.passes.Keys().Open(string(entry.Ticket), string(e.RequestID), s.passes.Now())
	if t == nil || e.Replan || entry.Mirror {
		return
	}
	if t.Stage == kvtransfer.PrefillLeg && e.Pod { // of the leg's listener: P's answer broke off after it had begun
		if s.passes.HeldHere(t, reservedAs(e)) {
			s.prefillCut(t)
		}
		return
	}
	s.faults.Report(t, e)
	s.replan.TryFailed(t.ID)
	if t.Stage == kvtransfer.DecodeLeg && e.Pod && !e.Began && e.Sent == 0 {
		s.reclaim.NotConnected(t, string(e.RequestID), s.passes.HeldHere(t, reservedAs(e)))
	}
}

// prefillCut counts a prefill leg whose answer broke off after it had begun, once. A short answer passes no filter of
// Tandem's, so Envoy's log tells of it.
func (s *Server) prefillCut(t *kvtransfer.Ticket) {
	if s.State.HandOvers.Consume(t.ID.Cut()) {
		s.passes.Cut(t)
	}
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
func reservedAs(e *ended.Pass) string { return reservationKey(e.Reservation, e.RequestID) }

// notFollowed logs and counts a redirect that Envoy did not follow. Every replica receives the entry; mine reports
// whether this one made the reservation, and counts it.
func (s *Server) notFollowed(t *kvtransfer.Ticket, e *ended.Pass, mine bool) {
	why := replan.NotFollowed(t, e, s.MaxRedirects)
	s.Log.Warn("Envoy did not follow a redirect", "request_id", string(e.RequestID), "reason", why, "stage", t.Stage.String(), "prefill", t.Prefill,
		"decode", t.Decode, "redirects", t.Redirects, "body_bytes", t.BodyBytes, "sent_bytes", e.Sent, "sent_header_bytes", e.SentHeaders, "duration", e.Duration)
	if mine {
		s.observer.NotFollowed(why)
	}
}

// mirrorEnded handles the access log entry of a mirrored leg, which every replica receives. The replica that
// reserved it releases it; the one that watches D learns how it ended.
func (s *Server) mirrorEnded(entry *envoywire.LogEntry) {
	e := &entry.Ended
	t, err := s.passes.Keys().Open(string(entry.Ticket), string(entry.ClientID), s.passes.Now())
	if t == nil {
		s.observer.TicketRefused()
		s.Log.Debug("access log entry of a leg with a ticket that is not ours", "request_id", string(entry.ClientID), "err", err)
		return
	}
	s.State.Bookings.Release(pass.HeldBy(t).Prefill)
	f := faults.Of(e.Status, string(e.Details), string(e.RetryAfter))
	s.pairs.Report(t.ID, concurrent.Outcome{
		Status: f.Status, RetryAfter: f.RetryAfter, Unreached: f.Unreached, OK: e.Status == 200,
	})
}
