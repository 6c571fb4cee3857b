package openai

import (
	"bytes"
	"errors"
	"strings"
)

// EventStream is the media type of server-sent events.
const EventStream = "text/event-stream"

// IsEventStream reports whether a content-type is that of server-sent events, in any case and with any parameters.
func IsEventStream(contentType string) bool {
	kind, _, _ := strings.Cut(contentType, ";")
	return strings.EqualFold(strings.TrimSpace(kind), EventStream)
}

// IsComment reports whether bytes of a stream are comments and empty lines alone, with which servers keep a connection
// alive. The engine may have done nothing yet.
func IsComment(b []byte) bool {
	for line := range bytes.FieldsFuncSeq(b, func(r rune) bool { return r == '\n' || r == '\r' }) {
		if line[0] != ':' {
			return false
		}
	}
	return true
}

// Events cuts a stream of server-sent events (text/event-stream, WHATWG HTML 9.2) into events: one may arrive in
// pieces, several may arrive at once, and lines may end in LF, CR LF or CR. The zero value is ready. It is for one
// stream.
type Events struct {
	held []byte // an incomplete event
	next int    // held is scanned up to here
	line int    // start of the line that contains next
	cr   bool   // the byte before next was a CR: a following LF belongs to it
}

// maxEvent bounds the bytes that are buffered of an incomplete event.
const maxEvent = 8 << 20

// keepHeld is the largest buffer, in bytes, that is kept when its event is complete: a stream may last for minutes.
const keepHeld = 64 << 10

// ErrEventTooLong means that a stream has an event of more than 8 MiB.
var ErrEventTooLong = errors.New("a server-sent event of more than 8 MiB")

// Feed takes the stream's next bytes and calls each with every event that they complete: its lines unchanged, without
// the empty line behind them. The event is valid until each returns.
func (e *Events) Feed(chunk []byte, each func(event []byte)) error {
	e.held = append(e.held, chunk...)
	b, start := e.held, 0
	for ; e.next < len(b); e.next++ {
		c := b[e.next]
		if c == '\n' && e.cr { // the second half of a line end
			e.cr = false
			if e.line = e.next + 1; start == e.next {
				start = e.line
			}
			continue
		}
		if e.cr = c == '\r'; c != '\n' && c != '\r' {
			continue
		}
		if e.line == e.next { // an empty line: the event is complete
			if event := bytes.TrimRight(b[start:e.next], "\r\n"); len(event) > 0 {
				each(event)
			}
			start = e.next + 1
		}
		e.line = e.next + 1
	}
	if start > 0 {
		if rest := b[start:]; cap(b) > keepHeld && len(rest) <= keepHeld {
			e.held = bytes.Clone(rest) // nil of none
		} else {
			e.held = append(b[:0], rest...)
		}
		e.next, e.line = e.next-start, e.line-start
	}
	if len(e.held) > maxEvent {
		return ErrEventTooLong
	}
	return nil
}

// Between reports whether the next byte begins an event: nothing waits.
func (e *Events) Between() bool { return len(e.held) == 0 && !e.cr }

// Release appends to dst what waits for its end, as it came, and forgets it.
func (e *Events) Release(dst []byte) []byte {
	dst = append(dst, e.held...)
	*e = Events{}
	return dst
}

// End calls each with the bytes behind the last empty line, if there are any: some servers leave the last empty line
// out.
func (e *Events) End(each func(event []byte)) {
	if event := bytes.TrimRight(e.held, "\r\n"); len(event) > 0 {
		each(event)
	}
	*e = Events{}
}

// EventData appends the data of an event to dst: its data lines, with LF between them.
func EventData(dst, event []byte) []byte {
	first := true
	for len(event) > 0 {
		end := bytes.IndexAny(event, "\r\n")
		line := event
		if end < 0 {
			event = nil
		} else {
			line, event = event[:end], event[end+1:]
		}
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue
		}
		if !first {
			dst = append(dst, '\n')
		}
		first = false
		dst = append(dst, bytes.TrimPrefix(data, []byte(" "))...)
	}
	return dst
}
