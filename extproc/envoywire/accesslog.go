package envoywire

import (
	"strings"
	"time"

	"google.golang.org/grpc/mem"

	"tandem/extproc/ended"
	"tandem/extproc/names"
)

// LogBatch is one StreamAccessLogsMessage, reduced to the fields that Tandem uses.
type LogBatch struct {
	Name    string // log_name of the stream, from its first message
	Risk    string // what the Envoy's release risks, likewise; "": nothing that is known
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

// LogEntry is one HTTPAccessLogEntry.
type LogEntry struct {
	Ended    ended.Pass
	Ticket   []byte
	ClientID []byte // of a mirrored leg: the client's request id
	Mirror   bool   // the try is a mirrored leg's: Envoy (1.40) logs it as one of the request that it mirrors
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

// readIdentifier reads Identifier{1: node, 2: log_name}.
func (b *LogBatch) readIdentifier(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			b.readNode(c, c.length(end))
		case number == 2 && wire == wireBytes:
			b.Name = string(c.text(&b.arena, end))
		default:
			c.skip(wire, end)
		}
	}
}

// readNode reads the release of Node{8: user_agent_build_version{1: version{1: major, 2: minor, 3: patch}}}.
func (b *LogBatch) readNode(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number != 8 || wire != wireBytes {
			c.skip(wire, end)
			continue
		}
		build := c.length(end)
		for number, wire := c.field(build); number != 0; number, wire = c.field(build) {
			if number != 1 || wire != wireBytes {
				c.skip(wire, build)
				continue
			}
			var release [4]uint32
			version := c.length(build)
			for number, wire := c.field(version); number != 0; number, wire = c.field(version) {
				if number <= 3 && wire == wireVarint {
					release[number] = uint32(min(c.varint(), 9999))
				} else {
					c.skip(wire, version)
				}
			}
			b.Risk = Risk(release[1], release[2], release[3])
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
		case names.TagUnfollowed:
			return &e.Ended.Unfollowed
		case names.TagFirstBody:
			return &firstBody
		}
		return nil
	})
	if firstBody != nil {
		e.Ended.Usage.FirstBody = micros(firstBody)
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
			e.Ended.Start = time.Unix(0, 0).Add(readDuration(c, c.length(end))) // a Timestamp has a Duration's fields
		case number == 7 && wire == wireBytes:
			e.Ended.Began = true
			c.skip(wire, end)
		case number == 17 && wire == wireBytes:
			b.readFilterMetadata(c, c.length(end), e)
		case number == 15 && wire == wireBytes:
			mark := len(b.arena)
			cluster := string(c.text(&b.arena, end))
			e.Ended.Pod, e.Ended.Replan = strings.HasPrefix(cluster, clusterPod), cluster == clusterReplan
			e.Mirror = cluster == clusterMirror
			b.arena = b.arena[:mark] // the name is not needed again
		case number == 24 && wire == wireVarint:
			e.Ended.Tries = c.varint()
		case wire == wireBytes && e.time(number) != nil:
			*e.time(number) = readDuration(c, c.length(end))
		case number == 22 && wire == wireBytes:
			b.readTag(c, c.length(end), e)
		case number == 31 && wire == wireVarint:
			e.Ended.Sent = c.varint()
		case number == 16 && wire == wireBytes:
			flagsEnd := c.length(end)
			for number, wire := c.field(flagsEnd); number != 0; number, wire = c.field(flagsEnd) {
				// 15: downstream connection termination, 28: downstream remote reset
				if (number == 15 || number == 28) && wire == wireVarint {
					e.Ended.ClientGone = c.varint() != 0 || e.Ended.ClientGone
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
		return &e.Ended.FirstByte
	case 10:
		return &e.Ended.Usage.LastByte
	case 23:
		return &e.Ended.Duration
	}
	return nil
}

// readRequest reads HTTPRequestProperties{9: request_id, 13: map<string, string> request_headers, 14:
// upstream_header_bytes_sent}.
func (b *LogBatch) readRequest(c *cursor, end int, e *LogEntry) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 9 && wire == wireBytes:
			e.Ended.RequestID = c.text(&b.arena, end)
		case number == 13 && wire == wireBytes:
			b.readPair(c, c.length(end), func(name []byte) *[]byte {
				switch string(name) {
				case names.HeaderTicket:
					return &e.Ticket
				case names.HeaderReservation:
					return &e.Ended.Reservation
				case names.HeaderClientID:
					return &e.ClientID
				case names.HeaderTraceparent:
					return &e.Ended.Traceparent
				}
				if b.Tenant != "" && string(name) == b.Tenant {
					return &e.Ended.Usage.Tenant
				}
				return nil
			})
		case number == 14 && wire == wireVarint:
			e.Ended.SentHeaders = c.varint()
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
					e.Ended.Status = int(c.varint())
				} else {
					c.skip(wire, valueEnd)
				}
			}
		case number == 3 && wire == wireVarint:
			e.Ended.Body = c.varint()
		case number == 4 && wire == wireBytes:
			b.readPair(c, c.length(end), func(name []byte) *[]byte {
				switch string(name) {
				case names.HeaderRetryAfter:
					return &e.Ended.RetryAfter
				case names.HeaderDetails:
					return &e.Ended.Own
				}
				return nil
			})
		case number == 6 && wire == wireBytes:
			e.Ended.Details = c.text(&b.arena, end)
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
