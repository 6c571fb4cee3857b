package envoywire

import (
	"bytes"

	"google.golang.org/grpc/mem"

	"tandem/extproc/names"
)

// Phase is the part of an HTTP stream that a message belongs to, with the field numbers of ProcessingRequest's oneof
// (envoy/service/ext_proc/v3/external_processor.proto).
type Phase uint8

// The phases of a stream.
const (
	PhaseNone             Phase = 0
	PhaseRequestHeaders   Phase = 2
	PhaseResponseHeaders  Phase = 3
	PhaseRequestBody      Phase = 4
	PhaseResponseBody     Phase = 5
	PhaseRequestTrailers  Phase = 6
	PhaseResponseTrailers Phase = 7
)

// BodyMode is the way in which Envoy sends a body (ProcessingMode.BodySendMode). The first message of a stream has it.
type BodyMode uint8

// The body modes of Envoy.
const (
	ModeNone       BodyMode = 0
	ModeStreamed   BodyMode = 1
	ModeBuffered   BodyMode = 2
	ModePartial    BodyMode = 3
	ModeFullDuplex BodyMode = 4
)

// Headers are the header fields that Tandem reads. All others are skipped. The values point into the message's arena
// and live as long as the stream.
type Headers struct {
	Method, Path, Status                        []byte
	ContentType, ContentEncoding, ContentLength []byte
	RequestID, Ticket, Upgrade                  []byte
	// Envoy's own id of the request; absent behind other gateways
	Reservation                         []byte
	Traceparent, Tracestate             []byte
	Authority                           []byte
	ClientID                            []byte // of legs that run at once
	Rank                                []byte // x-data-parallel-rank
	Load                                []byte // load of the engine (ORCA)
	Objective, Selection, Authorization []byte // only for the endpoint picker and direct prefill
	Fairness, TTFT, TPOT                []byte // inference objectives
	Explain                             []byte // an operator's token
	Final                               []byte // of an answer: Envoy must not retry
	Prefilled                           []byte // inline prefill response

	Count int // number of all headers
	Size  int // bytes of all headers, as they are encoded in the message

	Twice string // a header that must have one value ([names.OneValue], Names), and has several; "": none

	Names   []string // more headers to read: those of sessions and labels
	Lenient []string // others, of which the first value counts
	values  [][]byte // by position in Names, and then in Lenient
}

// Extra returns the value of one of the headers in Names.
func (h *Headers) Extra(name string) []byte {
	if i := h.position([]byte(name)); i >= 0 && i < len(h.values) && h.values[i] != nil {
		return h.values[i]
	}
	if name == "authorization" { // has its own field
		return h.Authorization
	}
	return nil
}

// position returns where the value of a header is in h.values; -1: it is not read.
func (h *Headers) position(name []byte) int {
	for i, n := range h.Names {
		if n == string(name) {
			return i
		}
	}
	for i, n := range h.Lenient {
		if n == string(name) {
			return len(h.Names) + i
		}
	}
	return -1
}

// Set sets a header that Tandem reads; others are ignored.
func (h *Headers) Set(name string, value []byte) {
	if slot := h.slot([]byte(name)); slot != nil {
		*slot = value
	}
}

// slot returns the field for a header's value, nil if the header is not read.
func (h *Headers) slot(name []byte) *[]byte {
	switch string(name) { // does not allocate
	case ":method":
		return &h.Method
	case ":path":
		return &h.Path
	case ":status":
		return &h.Status
	case "content-type":
		return &h.ContentType
	case "content-encoding":
		return &h.ContentEncoding
	case "content-length":
		return &h.ContentLength
	case "x-request-id":
		return &h.RequestID
	case names.HeaderTicket:
		return &h.Ticket
	case names.HeaderReservation:
		return &h.Reservation
	case names.HeaderPrefilled:
		return &h.Prefilled
	case "upgrade":
		return &h.Upgrade
	case names.HeaderTraceparent:
		return &h.Traceparent
	case names.HeaderTracestate:
		return &h.Tracestate
	case ":authority":
		return &h.Authority
	case names.HeaderClientID:
		return &h.ClientID
	case names.HeaderRank:
		return &h.Rank
	case names.HeaderLoad:
		return &h.Load
	case "authorization":
		return &h.Authorization
	case names.HeaderGatewayObjective, names.HeaderObjective:
		return &h.Objective
	case headerTestSelection:
		return &h.Selection
	case names.HeaderFairness, names.HeaderGatewayFairness:
		return &h.Fairness
	case names.HeaderTTFT:
		return &h.TTFT
	case names.HeaderTPOT:
		return &h.TPOT
	case names.HeaderExplain:
		return &h.Explain
	case names.HeaderFinal:
		return &h.Final
	}
	if i := h.position(name); i >= 0 {
		if h.values == nil {
			h.values = make([][]byte, len(h.Names)+len(h.Lenient))
		}
		return &h.values[i]
	}
	return nil
}

// Attributes are sent with the first response message of a leg (response_attributes in Envoy's configuration).
type Attributes struct {
	Ticket, RequestID, ClientID, Path []byte
	Details                           []byte // response_code_details
	RetryAfter                        []byte
}

func (a *Attributes) slot(name []byte) *[]byte {
	switch string(name) {
	case "request.headers['x-tandem-ticket']":
		return &a.Ticket
	case "request.headers['x-tandem-request-id']":
		return &a.ClientID
	case "request.headers['x-request-id']":
		return &a.RequestID
	case "request.path":
		return &a.Path
	case "response.code_details":
		return &a.Details
	case "response.headers['retry-after']":
		return &a.RetryAfter
	}
	return nil
}

// Message is one ProcessingRequest. It is decoded into memory of its stream: texts go into the arena, body bytes are
// appended to Body, which holds the whole body after the last message.
type Message struct {
	Phase       Phase
	EndOfStream bool
	Mode        protocolConfig
	Headers     Headers
	Attributes  Attributes
	Hints       Hints
	arena       []byte
	Body        *Body // nil: body bytes are skipped
	BodyLimit   int   // longer bodies set Over and are not kept
	Over        bool
}

// protocolConfig is ProtocolConfiguration, a field of a stream's first message.
type protocolConfig struct {
	Known             bool
	Request, Response BodyMode
}

// maxKeptArena is the largest arena that a message keeps for the next stream, in bytes.
const maxKeptArena = 64 << 10

// Reset empties the message for another stream; a small arena stays.
func (m *Message) Reset() {
	arena := m.arena[:0]
	if cap(arena) > maxKeptArena {
		arena = nil
	}
	*m = Message{arena: arena}
}

// Unmarshal decodes one ProcessingRequest.
func (m *Message) Unmarshal(data mem.BufferSlice) error {
	c := newCursor(data)
	m.Phase, m.EndOfStream = PhaseNone, false
	for {
		number, wire := c.field(c.end)
		switch {
		case number == 0:
			return c.finish()
		case wire != wireBytes:
			c.skip(wire, c.end)
		case Phase(number) == PhaseRequestHeaders || Phase(number) == PhaseResponseHeaders:
			m.Phase = Phase(number)
			m.readHeaders(&c, c.length(c.end))
		case Phase(number) == PhaseRequestBody || Phase(number) == PhaseResponseBody:
			m.Phase = Phase(number)
			m.readBody(&c, c.length(c.end))
		case Phase(number) == PhaseRequestTrailers || Phase(number) == PhaseResponseTrailers:
			m.Phase, m.EndOfStream = Phase(number), true
			c.discard(c.length(c.end), c.end)
		case number == 8: // metadata_context
			m.readMetadata(&c, c.length(c.end))
		case number == 9: // attributes: map<string, Struct>
			m.readAttributes(&c, c.length(c.end))
		case number == 11:
			m.readProtocolConfig(&c, c.length(c.end))
		default:
			c.skip(wire, c.end)
		}
	}
}

// readHeaders reads HttpHeaders{1: HeaderMap{1: repeated HeaderValue{1: key, 2: value, 3: raw_value}}, 3:
// end_of_stream}.
func (m *Message) readHeaders(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			mapEnd := c.length(end)
			m.Headers.Size += mapEnd - c.pos
			for number, wire := c.field(mapEnd); number != 0; number, wire = c.field(mapEnd) {
				if number == 1 && wire == wireBytes {
					m.Headers.Count++
					m.readHeader(c, c.length(mapEnd))
				} else {
					c.skip(wire, mapEnd)
				}
			}
		case number == 3 && wire == wireVarint:
			m.EndOfStream = c.varint() != 0
		default:
			c.skip(wire, end)
		}
	}
}

func (m *Message) readHeader(c *cursor, end int) {
	var slot *[]byte
	var name []byte
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			mark := len(m.arena)
			name = c.text(&m.arena, end)
			if slot = m.Headers.slot(name); slot == nil || *slot == nil {
				m.arena = m.arena[:mark] // the name is not needed again
			}
		case (number == 2 || number == 3) && wire == wireBytes && slot != nil && *slot == nil:
			if v := c.text(&m.arena, end); len(v) > 0 {
				*slot = v
			}
		case (number == 2 || number == 3) && wire == wireBytes && slot != nil && names.OneValue(name, m.Headers.Names):
			if v := c.text(&m.arena, end); len(v) > 0 && !bytes.Equal(v, *slot) {
				m.Headers.Twice = string(name)
			}
		default:
			c.skip(wire, end)
		}
	}
	if slot == &m.Headers.Ticket && *slot == nil {
		*slot = []byte{} // present, so the request came with a redirect, if with none of ours
	}
}

// readBody reads HttpBody{1: body, 2: end_of_stream, 3: end_of_stream_without_message}.
func (m *Message) readBody(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			bodyEnd := c.length(end)
			if m.Body == nil {
				c.discard(bodyEnd, end)
				continue
			}
			if n := bodyEnd - c.pos; m.Over || m.Body.Len()+n > m.BodyLimit {
				m.Over = true
				c.discard(bodyEnd, end)
				continue
			}
			m.Body.read(c, bodyEnd)
		case (number == 2 || number == 3) && wire == wireVarint:
			m.EndOfStream = c.varint() != 0 || m.EndOfStream
		default:
			c.skip(wire, end)
		}
	}
}

// readAttributes reads one entry of map<string, Struct>: every filter's attributes are looked at, whatever its name.
func (m *Message) readAttributes(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		if number != 2 || wire != wireBytes {
			c.skip(wire, end)
			continue
		}
		structEnd := c.length(end) // Struct{1: map<string, Value>}
		for number, wire := c.field(structEnd); number != 0; number, wire = c.field(structEnd) {
			if number == 1 && wire == wireBytes {
				m.readAttribute(c, c.length(structEnd))
			} else {
				c.skip(wire, structEnd)
			}
		}
	}
}

// readAttribute reads {1: name, 2: Value{3: string_value}}.
func (m *Message) readAttribute(c *cursor, end int) {
	var slot *[]byte
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			mark := len(m.arena)
			slot = m.Attributes.slot(c.text(&m.arena, end))
			m.arena = m.arena[:mark]
		case number == 2 && wire == wireBytes && slot != nil:
			valueEnd := c.length(end)
			for number, wire := c.field(valueEnd); number != 0; number, wire = c.field(valueEnd) {
				if number == 3 && wire == wireBytes {
					*slot = c.text(&m.arena, valueEnd)
				} else {
					c.skip(wire, valueEnd)
				}
			}
		default:
			c.skip(wire, end)
		}
	}
}

func (m *Message) readProtocolConfig(c *cursor, end int) {
	m.Mode.Known = true
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireVarint:
			m.Mode.Request = BodyMode(c.varint())
		case number == 2 && wire == wireVarint:
			m.Mode.Response = BodyMode(c.varint())
		default:
			c.skip(wire, end)
		}
	}
}
