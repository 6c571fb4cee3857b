package extproc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
)

// Envoy's gRPC access log is how the server learns that a hop ended: one long stream per Envoy worker, one entry per
// pass of a request, sent when the pass is over. No ext_proc stream has to stay open for it, so a server that dies cuts
// no running answer.

// logBatch is one StreamAccessLogsMessage, reduced to what the server reads.
type logBatch struct {
	name    string // log_name of the stream, which its first message tells
	entries []logEntry
	arena   []byte
}

// Names of logs that are not the main listener's: that of the mirrored prefill leg's, and that of tries which reached nobody.
const (
	logNameMirror    = "tandem-prefill-mirror"
	logNameUnreached = "tandem-unreached"
)

// clusterPod is what the names of the clusters begin with that go to an endpoint itself.
const clusterPod = "tandem-pod"

// logEntry is one HTTPAccessLogEntry of the main listener.
type logEntry struct {
	requestID, ticket []byte
	clientID          []byte // of a mirrored leg: the request id as the client knows it
	traceparent       []byte // where the configuration has tracing
	details           []byte // response_code_details
	status            int    // 0: no answer was sent
	start             time.Time
	duration          time.Duration // from start, which is that of the request's first pass
	firstByte         time.Duration // from start to the first byte of the endpoint's answer; 0: none came
	clientGone        bool          // response flag DC or DR
	unfollowed        []byte        // the answer was a redirect that Envoy did not follow: what its script says of that
	sent, sentHeaders uint64        // bytes to the endpoint, by the last try
	tries             uint64
	began             bool // the last try had a connection, and something was written to it
	pod               bool // the last try was one at an endpoint, not at the replan port or an internal listener
}

// asked reports whether an endpoint may have got anything of the pass. A try that waits for a connection has begun nothing and sent
// nothing (Envoy 1.40); of tries before the last an entry does not tell, so a second one counts.
func (e *logEntry) asked() bool { return e.tries > 1 || e.began || e.sent > 0 }

func (b *logBatch) unmarshal(data mem.BufferSlice) error {
	c := newCursor(data)
	b.entries, b.arena = b.entries[:0], b.arena[:0]
	for number, wire := c.field(c.end); number != 0; number, wire = c.field(c.end) {
		if number == 1 && wire == wireBytes {
			b.readIdentifier(&c, c.length(c.end))
			continue
		}
		if number != 2 || wire != wireBytes { // http_logs
			c.skip(wire, c.end)
			continue
		}
		end := c.length(c.end)
		for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
			if number == 1 && wire == wireBytes {
				b.entries = append(b.entries, logEntry{})
				b.readEntry(&c, c.length(end), &b.entries[len(b.entries)-1])
			} else {
				c.skip(wire, end)
			}
		}
	}
	return c.finish()
}

// readIdentifier reads Identifier{2: log_name}.
func (b *logBatch) readIdentifier(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number == 2 && wire == wireBytes {
			b.name = string(c.text(&b.arena, end))
		} else {
			c.skip(wire, end)
		}
	}
}

func (b *logBatch) readEntry(c *cursor, end int, e *logEntry) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if wire != wireBytes {
			c.skip(wire, end)
			continue
		}
		switch number {
		case 1:
			b.readCommon(c, c.length(end), e)
		case 3:
			b.readRequest(c, c.length(end), e)
		case 4:
			b.readResponse(c, c.length(end), e)
		default:
			c.skip(wire, end)
		}
	}
}

// readCommon reads AccessLogCommon{5: start_time, 7: time_to_first_upstream_tx_byte, 9: time_to_first_upstream_rx_byte, 15:
// upstream_cluster, 16: response_flags, 22: map<string, string> custom_tags, 23: duration, 24: upstream_request_attempt_count,
// 31: upstream_wire_bytes_sent}.
func (b *logBatch) readCommon(c *cursor, end int, e *logEntry) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 5 && wire == wireBytes:
			e.start = time.Unix(0, 0).Add(readDuration(c, c.length(end))) // a Timestamp has a Duration's fields
		case number == 7 && wire == wireBytes:
			e.began = true
			c.skip(wire, end)
		case number == 9 && wire == wireBytes:
			e.firstByte = readDuration(c, c.length(end))
		case number == 15 && wire == wireBytes:
			mark := len(b.arena)
			e.pod = strings.HasPrefix(string(c.text(&b.arena, end)), clusterPod)
			b.arena = b.arena[:mark] // the name is not needed again
		case number == 24 && wire == wireVarint:
			e.tries = c.varint()
		case number == 23 && wire == wireBytes:
			e.duration = readDuration(c, c.length(end))
		case number == 22 && wire == wireBytes:
			b.readPair(c, c.length(end), func(name []byte) *[]byte {
				if string(name) == tagUnfollowed {
					return &e.unfollowed
				}
				return nil
			})
		case number == 31 && wire == wireVarint:
			e.sent = c.varint()
		case number == 16 && wire == wireBytes:
			flagsEnd := c.length(end)
			for number, wire := c.field(flagsEnd); number != 0; number, wire = c.field(flagsEnd) {
				if (number == 15 || number == 28) && wire == wireVarint { // downstream connection termination, remote reset
					e.clientGone = c.varint() != 0 || e.clientGone
				} else {
					c.skip(wire, flagsEnd)
				}
			}
		default:
			c.skip(wire, end)
		}
	}
}

// readRequest reads HTTPRequestProperties{9: request_id, 13: map<string, string> request_headers, 14: upstream_header_bytes_sent}.
func (b *logBatch) readRequest(c *cursor, end int, e *logEntry) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 9 && wire == wireBytes:
			e.requestID = c.text(&b.arena, end)
		case number == 13 && wire == wireBytes:
			b.readPair(c, c.length(end), func(name []byte) *[]byte {
				switch string(name) {
				case headerTicket:
					return &e.ticket
				case headerClientID:
					return &e.clientID
				case headerTraceparent:
					return &e.traceparent
				}
				return nil
			})
		case number == 14 && wire == wireVarint:
			e.sentHeaders = c.varint()
		default:
			c.skip(wire, end)
		}
	}
}

// readPair reads one entry of a map<string, string> to where its name belongs; nil: nowhere.
func (b *logBatch) readPair(c *cursor, end int, place func(name []byte) *[]byte) {
	var to *[]byte
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			to = place(c.text(&b.arena, end))
		case number == 2 && wire == wireBytes && to != nil:
			*to = c.text(&b.arena, end)
		default:
			c.skip(wire, end)
		}
	}
}

// readResponse reads HTTPResponseProperties{1: UInt32Value response_code, 6: response_code_details}.
func (b *logBatch) readResponse(c *cursor, end int, e *logEntry) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			valueEnd := c.length(end)
			for number, wire := c.field(valueEnd); number != 0; number, wire = c.field(valueEnd) {
				if number == 1 && wire == wireVarint {
					e.status = int(c.varint())
				} else {
					c.skip(wire, valueEnd)
				}
			}
		case number == 6 && wire == wireBytes:
			e.details = c.text(&b.arena, end)
		default:
			c.skip(wire, end)
		}
	}
}

// readDuration reads google.protobuf.Duration{1: seconds, 2: nanos}.
func readDuration(c *cursor, end int) time.Duration {
	var d time.Duration
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireVarint:
			d += time.Duration(c.varint()) * time.Second
		case number == 2 && wire == wireVarint:
			d += time.Duration(c.varint())
		default:
			c.skip(wire, end)
		}
	}
	return d
}

// streamAccessLogs serves envoy.service.accesslog.v3.AccessLogService. Such a stream has no end of its own, so it is let
// go when the server drains: what the entries would release goes with the server.
func (s *Server) streamAccessLogs(stream grpc.ServerStream) error {
	ended := make(chan error, 1)
	go func() { ended <- s.readAccessLogs(stream) }()
	select {
	case err := <-ended:
		return err
	case <-s.draining:
		return nil
	}
}

func (s *Server) readAccessLogs(stream grpc.ServerStream) error {
	var batch logBatch
	for {
		err := stream.RecvMsg(&batch)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for i := range batch.entries {
			switch batch.name {
			case logNameMirror:
				s.mirrorEnded(&batch.entries[i])
			case logNameUnreached:
				s.decodeUnreached(&batch.entries[i])
			default:
				s.hopEnded(&batch.entries[i])
			}
		}
		if cap(batch.arena) > 1<<20 {
			batch.arena = nil
		}
	}
}

// hopEnded settles one pass of a request: what was booked for it is released. Every pass books anew, so that holds for a
// pass that ended in a redirect too; such an entry shows the ticket that the redirect carried, because Envoy writes it into
// the request before it logs. Any other entry is the end of the request and shows the ticket of its own pass, or, where
// the client left before Envoy had taken the server's answer in, the one before: then the ids are worked out.
func (s *Server) hopEnded(e *logEntry) {
	redirected := string(e.details) == "internal_redirect"
	if len(e.ticket) == 0 {
		if e.clientGone {
			s.releasePass(string(e.requestID), 0)
		}
		return // answered by Tandem itself, or never got to it
	}
	t, err := s.keys().Open(string(e.ticket), string(e.requestID), time.Now())
	if t == nil {
		s.metrics.forgedTickets.Inc()
		s.Log.Debug("access log entry with a ticket that is not ours", "request_id", string(e.requestID), "err", err)
		return
	}
	if ctx := context.Background(); s.Log.Enabled(ctx, slog.LevelDebug) {
		s.Log.DebugContext(ctx, "pass ended", "request_id", string(e.requestID), "stage", t.Stage.String(), "status", e.status, "details", string(e.details),
			"duration", e.duration, "first_byte", e.firstByte, "client_gone", e.clientGone, "tries", e.tries, "asked", e.asked())
	}
	if !redirected {
		s.handOverEnded(t, e)
	}
	if t.Stage == kvtransfer.PrefillLeg && !redirected { // P's answer may have been carried into a pass 2 of which Envoy took nothing in
		s.releasePass(string(e.requestID), t.Redirects+1)
		if e.clientGone && s.bookedHere(t, string(e.requestID)) && !s.State.Spend(carriedID(t.ID)) {
			t.Stage, t.Redirects = kvtransfer.HandOver, t.Redirects+1
		}
	}
	mine := s.release(t) || s.bookedHere(t, string(e.requestID))
	if pair := t.Stage == kvtransfer.PairLegs || t.Stage == kvtransfer.Failed; pair && (redirected || e.clientGone) {
		s.pairs.giveUp(t.ID) // of legs that run at once: nobody waits for P's any more
	}
	if redirected {
		return
	}
	if len(e.unfollowed) > 0 {
		s.unfollowed(t, e, mine)
	}
	if t.Stage.Redirects() {
		s.releasePass(string(e.requestID), t.Redirects)
	}
	var took, first time.Duration
	if t.Stage == kvtransfer.DecodeLeg || t.Stage == kvtransfer.PairLegs {
		began := s.sealedAt(t)
		took = max(e.start.Add(e.duration).Sub(began), 0)
		if e.firstByte > 0 {
			first = max(e.start.Add(e.firstByte).Sub(began), 0)
		}
	}
	if mine { // every replica sees every entry: the one that booked the hop counts it
		s.metrics.requestEnded(t, e, took, first)
		if policy, _ := s.policy(t.Pool); t.Stage == kvtransfer.HandOver && e.clientGone && !policy.CleanupDecode {
			s.metrics.stranded.WithLabelValues(t.Pool, t.Prefill, strandedClientGone).Inc()
		}
	}
	s.recent.change(string(e.requestID), func(trace *Trace) { trace.DecodeTime, trace.Status = took, e.status })
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
		s.State.ReleaseWherever(pool, id)
	} else {
		s.State.Release(id)
	}
}

// bookedHere reports whether this replica booked what a ticket names, although it may have let go of it since: in time,
// or because the next pass began.
func (s *Server) bookedHere(t *kvtransfer.Ticket, requestID string) bool {
	pass := t.Redirects
	if t.Stage.Redirects() {
		pass-- // it was the pass before that booked
	}
	return t.Reservations[1] == uint64(s.reservationID(requestID, pass, kvstate.RoleDecode))
}

// releasePass gives back what this server booked for a pass of a request that it has no ticket of.
func (s *Server) releasePass(requestID string, redirects int) {
	s.State.Release(s.reservationID(requestID, redirects, kvstate.RolePrefill))
	s.State.Release(s.reservationID(requestID, redirects, kvstate.RoleDecode))
}

// reservationID is the id under which a pass of a request books: it can be worked out again here, and nowhere else.
func (s *Server) reservationID(requestID string, redirects int, role kvstate.Role) kvstate.ReservationID {
	h := xxhash.Sum64String(requestID) ^ s.seed
	h = (h ^ uint64(redirects)<<8 ^ uint64(role)) * 0x9E3779B185EBCA87
	return kvstate.ReservationID(h ^ h>>32 | 1)
}

// sealedAt is when the ticket of a leg was made, which is when the hop began.
func (s *Server) sealedAt(t *kvtransfer.Ticket) time.Time { return t.Expires.Add(-s.TicketTTL) }
