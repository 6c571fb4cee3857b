package envoywire

import (
	"bytes"
	"strings"
	"time"

	"google.golang.org/grpc/mem"
)

// TagUnfollowed tags the entry of a redirect that Envoy did not follow. Its value is UnfollowedLocation if the
// redirect had no usable location.
const (
	TagUnfollowed      = "unfollowed"
	UnfollowedLocation = "location"
)

// LogBatch is one StreamAccessLogsMessage, reduced to the fields that Tandem uses.
type LogBatch struct {
	Name    string // log_name of the stream, from its first message
	Entries []LogEntry
	Tenant  string // name of the request header with the tenant, in lower case; "": none
	arena   []byte
}

// Names of the logs other than the main listener's: of mirrored prefill legs, and of failed tries.
const (
	LogNameMirror = "tandem-prefill-mirror"
	LogNameFailed = "tandem-failed"
)

// clusterPod is the prefix of the clusters that connect to an endpoint itself; clusterReplan is the cluster of the
// replan port, clusterMirror that of mirrored legs.
const (
	clusterPod    = "tandem-pod"
	clusterReplan = "tandem-replan"
	clusterMirror = "tandem-mirror-loop"
)

// LogEntry is one HTTPAccessLogEntry of the main listener.
type LogEntry struct {
	RequestID, Ticket []byte
	Reservation       []byte // Envoy's own id of the request
	ClientID          []byte // of a mirrored leg: the client's request id
	Traceparent       []byte // if the configuration enables tracing
	Details           []byte // response_code_details
	RetryAfter        []byte // of the answer
	Own               []byte // of an answer of Envoy's own on a leg's listener, its details there; empty: the engine's
	Status            int    // 0: no answer was sent
	Start             time.Time
	Duration          time.Duration // from start, the beginning of the request's first pass
	ClientGone        bool          // response flag DC or DR
	Unfollowed        []byte        // the answer was a redirect that Envoy did not follow: the tag that its script set
	Sent, SentHeaders uint64        // bytes to the endpoint, by the last try
	Tries             uint64
	Began             bool // the last try had a connection, and sent something
	Pod               bool // the last try went to an endpoint, not to the replan port or an internal listener
	Replan            bool // the last try went to the replan port
	Mirror            bool // the try is a mirrored leg's: Envoy (1.40) logs it as one of the request that it mirrors
	Outdated          bool // Tandem refused the answer: its KV may have been another prompt's
	Answered
}

// Asked reports whether an endpoint may have received anything of the pass. A try that waits for a connection has sent
// nothing (Envoy 1.40). An entry describes only its last try, so a second try counts as received.
func (e *LogEntry) Asked() bool { return e.Tries > 1 || e.Began || e.Sent > 0 }

// CodeTicketRefused is the code of the error for a request whose ticket a replica cannot read.
const CodeTicketRefused = "ticket_refused"

// Refusal returns the code of the error with which Tandem itself ended the request; "" if it did not.
func (e *LogEntry) Refusal() string {
	code, ours := bytes.CutPrefix(e.Details, []byte(DetailsPrefix+"_"))
	if !ours || e.Status < 400 {
		return ""
	}
	return string(code)
}

// maxKeptBatch is the largest arena that is kept for another batch, in bytes.
const maxKeptBatch = 1 << 20

// Unmarshal decodes a message. It reuses the memory of the previous message, whose entries become invalid.
func (b *LogBatch) Unmarshal(data mem.BufferSlice) error {
	c := newCursor(data)
	if cap(b.arena) > maxKeptBatch {
		b.arena = nil
	}
	b.Entries, b.arena = b.Entries[:0], b.arena[:0]
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
				b.Entries = append(b.Entries, LogEntry{})
				b.readEntry(&c, c.length(end), &b.Entries[len(b.Entries)-1])
			} else {
				c.skip(wire, end)
			}
		}
	}
	return c.finish()
}

// readIdentifier reads Identifier{2: log_name}.
func (b *LogBatch) readIdentifier(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number == 2 && wire == wireBytes {
			b.Name = string(c.text(&b.arena, end))
		} else {
			c.skip(wire, end)
		}
	}
}

func (b *LogBatch) readEntry(c *cursor, end int, e *LogEntry) {
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

// readTag reads one of the custom tags.
func (b *LogBatch) readTag(c *cursor, end int, e *LogEntry) {
	var firstBody []byte
	b.readPair(c, end, func(name []byte) *[]byte {
		switch string(name) {
		case TagUnfollowed:
			return &e.Unfollowed
		case TagFirstBody:
			return &firstBody
		}
		return nil
	})
	if firstBody != nil {
		e.Usage.FirstBody = micros(firstBody)
	}
}

// readCommon reads AccessLogCommon{5: start_time, 7: time_to_first_upstream_tx_byte, 9: time_to_first_upstream_rx_byte,
// 10: time_to_last_upstream_rx_byte, 15: upstream_cluster, 16: response_flags, 17: metadata, 22: map<string, string>
// custom_tags, 23: duration, 24:
// upstream_request_attempt_count, 31: upstream_wire_bytes_sent}.
func (b *LogBatch) readCommon(c *cursor, end int, e *LogEntry) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 5 && wire == wireBytes:
			e.Start = time.Unix(0, 0).Add(readDuration(c, c.length(end))) // a Timestamp has a Duration's fields
		case number == 7 && wire == wireBytes:
			e.Began = true
			c.skip(wire, end)
		case number == 17 && wire == wireBytes:
			b.readFilterMetadata(c, c.length(end), e)
		case number == 15 && wire == wireBytes:
			mark := len(b.arena)
			cluster := string(c.text(&b.arena, end))
			e.Pod, e.Replan = strings.HasPrefix(cluster, clusterPod), cluster == clusterReplan
			e.Mirror = cluster == clusterMirror
			b.arena = b.arena[:mark] // the name is not needed again
		case number == 24 && wire == wireVarint:
			e.Tries = c.varint()
		case wire == wireBytes && e.time(number) != nil:
			*e.time(number) = readDuration(c, c.length(end))
		case number == 22 && wire == wireBytes:
			b.readTag(c, c.length(end), e)
		case number == 31 && wire == wireVarint:
			e.Sent = c.varint()
		case number == 16 && wire == wireBytes:
			flagsEnd := c.length(end)
			for number, wire := c.field(flagsEnd); number != 0; number, wire = c.field(flagsEnd) {
				// 15: downstream connection termination, 28: downstream remote reset
				if (number == 15 || number == 28) && wire == wireVarint {
					e.ClientGone = c.varint() != 0 || e.ClientGone
				} else {
					c.skip(wire, flagsEnd)
				}
			}
		default:
			c.skip(wire, end)
		}
	}
}

// time returns the field for a duration of AccessLogCommon; nil: it is none of those that are read.
func (e *LogEntry) time(number int) *time.Duration {
	switch number {
	case 9:
		return &e.FirstByte
	case 10:
		return &e.Usage.LastByte
	case 23:
		return &e.Duration
	}
	return nil
}

// readRequest reads HTTPRequestProperties{9: request_id, 13: map<string, string> request_headers, 14:
// upstream_header_bytes_sent}.
func (b *LogBatch) readRequest(c *cursor, end int, e *LogEntry) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 9 && wire == wireBytes:
			e.RequestID = c.text(&b.arena, end)
		case number == 13 && wire == wireBytes:
			b.readPair(c, c.length(end), func(name []byte) *[]byte {
				switch string(name) {
				case HeaderTicket:
					return &e.Ticket
				case HeaderReservation:
					return &e.Reservation
				case HeaderClientID:
					return &e.ClientID
				case HeaderTraceparent:
					return &e.Traceparent
				}
				if b.Tenant != "" && string(name) == b.Tenant {
					return &e.Usage.Tenant
				}
				return nil
			})
		case number == 14 && wire == wireVarint:
			e.SentHeaders = c.varint()
		default:
			c.skip(wire, end)
		}
	}
}

// readPair reads one entry of a map<string, string> into the field that place returns for its name; nil: the entry is
// skipped.
func (b *LogBatch) readPair(c *cursor, end int, place func(name []byte) *[]byte) {
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

// readResponse reads HTTPResponseProperties{1: UInt32Value response_code, 3: response_body_bytes, 4: map<string,
// string> response_headers, 6: response_code_details}.
func (b *LogBatch) readResponse(c *cursor, end int, e *LogEntry) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			valueEnd := c.length(end)
			for number, wire := c.field(valueEnd); number != 0; number, wire = c.field(valueEnd) {
				if number == 1 && wire == wireVarint {
					e.Status = int(c.varint())
				} else {
					c.skip(wire, valueEnd)
				}
			}
		case number == 3 && wire == wireVarint:
			e.Body = c.varint()
		case number == 4 && wire == wireBytes:
			b.readPair(c, c.length(end), func(name []byte) *[]byte {
				switch string(name) {
				case HeaderRetryAfter:
					return &e.RetryAfter
				case HeaderDetails:
					return &e.Own
				}
				return nil
			})
		case number == 6 && wire == wireBytes:
			e.Details = c.text(&b.arena, end)
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

// BrokeOff reports whether an answer ended before it was complete. Its status was sent long before; Envoy (1.40)
// writes the cause into the details: the endpoint's connection broke, or a time limit expired.
func (e *LogEntry) BrokeOff() bool {
	for _, why := range [...]string{
		"upstream_reset_after_response_started", "stream_idle_timeout",
		"upstream_per_try_idle_timeout", "response_timeout",
		"max_duration_timeout", "upstream_max_stream_duration_reached",
	} {
		if len(e.Details) >= len(why) && string(e.Details[:len(why)]) == why { // Envoy may add more in braces
			return true
		}
	}
	return false
}

// TooShort reports whether an answer is a stream that its engine ended before it was complete: it has fewer bytes than
// any complete one. Failures after the status was sent end like this, above all failed KV loads.
func (e *LogEntry) TooShort(leastBytes int) bool {
	return e.Status == 200 && e.Body < uint64(leastBytes) && !e.ClientGone && !e.BrokeOff()
}

// maxLogDelay is how late an entry of the access log may come; Envoy sends them every 0.2 s.
const maxLogDelay = 2 * time.Second

// SetTime replaces the start of an entry that is read now, if Envoy's clock cannot be right.
func (e *LogEntry) SetTime(now time.Time) {
	if late := now.Sub(e.Start.Add(e.Duration)); late < 0 || late > maxLogDelay {
		e.Start = now.Add(-e.Duration)
	}
}
