package extproc

import (
	"google.golang.org/grpc/mem"

	"tandem/kvstate"
)

// phase says which part of the exchange a message is about, with the field numbers of ProcessingRequest's oneof
// (envoy/service/ext_proc/v3/external_processor.proto).
type phase uint8

const (
	phaseNone             phase = 0
	phaseRequestHeaders   phase = 2
	phaseResponseHeaders  phase = 3
	phaseRequestBody      phase = 4
	phaseResponseBody     phase = 5
	phaseRequestTrailers  phase = 6
	phaseResponseTrailers phase = 7
)

// bodyMode is how Envoy sends a body, as it states in the first message of a stream (ProcessingMode.BodySendMode).
type bodyMode uint8

const (
	bodyNone       bodyMode = 0
	bodyStreamed   bodyMode = 1
	bodyBuffered   bodyMode = 2
	bodyPartial    bodyMode = 3
	bodyFullDuplex bodyMode = 4
)

// headers are the header fields that the server reads; everything else in a header message is skipped unread.
// All of them point into the message's arena and live as long as the stream.
type headers struct {
	method, path, status                        []byte
	contentType, contentEncoding, contentLength []byte
	requestID, ticket, upgrade                  []byte
	traceparent, tracestate                     []byte
	authority, clientID                         []byte // of legs that run at once
	load                                        []byte // what P says about itself (ORCA)
	objective, selection, authorization         []byte // endpoint picker and direct prefill alone
	fairness, ttft, tpot                        []byte // what the request wants, where the pool listens
	explain                                     []byte // an operator's token
	final                                       []byte // of an answer: not to be tried elsewhere
	prefilled                                   []byte // P's answer, where it was short enough to come by itself

	names  []string // more headers to read: those that name sessions
	values [][]byte // theirs
}

// extra is the value of one of the headers in names.
func (h *headers) extra(name string) []byte {
	for i, n := range h.names {
		if n == name && i < len(h.values) && h.values[i] != nil {
			return h.values[i]
		}
	}
	if name == "authorization" { // has a place of its own
		return h.authorization
	}
	return nil
}

// slot returns where a header's value belongs, nil for one that nobody reads.
func (h *headers) slot(name []byte) *[]byte {
	switch string(name) { // does not allocate
	case ":method":
		return &h.method
	case ":path":
		return &h.path
	case ":status":
		return &h.status
	case "content-type":
		return &h.contentType
	case "content-encoding":
		return &h.contentEncoding
	case "content-length":
		return &h.contentLength
	case "x-request-id":
		return &h.requestID
	case headerTicket:
		return &h.ticket
	case headerPrefilled:
		return &h.prefilled
	case "upgrade":
		return &h.upgrade
	case headerTraceparent:
		return &h.traceparent
	case headerTracestate:
		return &h.tracestate
	case ":authority":
		return &h.authority
	case headerClientID:
		return &h.clientID
	case kvstate.ORCAHeader:
		return &h.load
	case "authorization":
		return &h.authorization
	case "x-gateway-inference-objective", "x-llm-d-inference-objective":
		return &h.objective
	case headerTestSelection:
		return &h.selection
	case headerFairness, "x-gateway-inference-fairness-id":
		return &h.fairness
	case headerTTFT:
		return &h.ttft
	case headerTPOT:
		return &h.tpot
	case headerExplain:
		return &h.explain
	case headerFinal:
		return &h.final
	}
	for i, n := range h.names {
		if n == string(name) {
			if h.values == nil {
				h.values = make([][]byte, len(h.names))
			}
			return &h.values[i]
		}
	}
	return nil
}

// attributes are what the prefill leg's filter is configured to send along with P's answer (response_attributes).
type attributes struct {
	ticket, requestID, clientID, path, authority []byte
}

func (a *attributes) slot(name []byte) *[]byte {
	switch string(name) {
	case "request.headers['x-tandem-ticket']":
		return &a.ticket
	case "request.headers['x-tandem-request-id']":
		return &a.clientID
	case "request.headers['x-request-id']":
		return &a.requestID
	case "request.path":
		return &a.path
	case "request.host":
		return &a.authority
	}
	return nil
}

// message is one ProcessingRequest. It is decoded into memory that its stream keeps: the arena for texts, body for body
// bytes, which are appended, so that after the last message body holds the whole of it.
type message struct {
	phase       phase
	endOfStream bool
	mode        protocolConfig
	headers     headers
	attributes  attributes
	hints       hints
	arena       []byte
	body        *bodyBuffer // nil: body bytes are skipped
	bodyLimit   int         // body bytes beyond it are counted in over but not kept
	over        bool
}

// protocolConfig is ProtocolConfiguration, which comes with the first message of a stream.
type protocolConfig struct {
	known             bool
	request, response bodyMode
}

func (m *message) unmarshal(data mem.BufferSlice) error {
	c := newCursor(data)
	m.phase, m.endOfStream = phaseNone, false
	for {
		number, wire := c.field(c.end)
		switch {
		case number == 0:
			return c.finish()
		case wire != wireBytes:
			c.skip(wire, c.end)
		case phase(number) == phaseRequestHeaders || phase(number) == phaseResponseHeaders:
			m.phase = phase(number)
			m.readHeaders(&c, c.length(c.end))
		case phase(number) == phaseRequestBody || phase(number) == phaseResponseBody:
			m.phase = phase(number)
			m.readBody(&c, c.length(c.end))
		case phase(number) == phaseRequestTrailers || phase(number) == phaseResponseTrailers:
			m.phase, m.endOfStream = phase(number), true
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

// readHeaders reads HttpHeaders{1: HeaderMap{1: repeated HeaderValue{1: key, 2: value, 3: raw_value}}, 3: end_of_stream}.
func (m *message) readHeaders(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			mapEnd := c.length(end)
			for number, wire := c.field(mapEnd); number != 0; number, wire = c.field(mapEnd) {
				if number == 1 && wire == wireBytes {
					m.readHeader(c, c.length(mapEnd))
				} else {
					c.skip(wire, mapEnd)
				}
			}
		case number == 3 && wire == wireVarint:
			m.endOfStream = c.varint() != 0
		default:
			c.skip(wire, end)
		}
	}
}

func (m *message) readHeader(c *cursor, end int) {
	var slot *[]byte
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			mark := len(m.arena)
			slot = m.headers.slot(c.text(&m.arena, end))
			m.arena = m.arena[:mark] // the name is not needed again
		case (number == 2 || number == 3) && wire == wireBytes && slot != nil && *slot == nil:
			if v := c.text(&m.arena, end); len(v) > 0 {
				*slot = v
			}
		default:
			c.skip(wire, end)
		}
	}
}

// readBody reads HttpBody{1: body, 2: end_of_stream, 3: end_of_stream_without_message}.
func (m *message) readBody(c *cursor, end int) {
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			bodyEnd := c.length(end)
			if m.body == nil {
				c.discard(bodyEnd, end)
				continue
			}
			if n := bodyEnd - c.pos; m.over || m.body.len()+n > m.bodyLimit {
				m.over = true
				c.discard(bodyEnd, end)
				continue
			}
			m.body.read(c, bodyEnd)
		case (number == 2 || number == 3) && wire == wireVarint:
			m.endOfStream = c.varint() != 0 || m.endOfStream
		default:
			c.skip(wire, end)
		}
	}
}

// readAttributes reads one entry of map<string, Struct>: every filter's attributes are looked at, whatever its name.
func (m *message) readAttributes(c *cursor, end int) {
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
func (m *message) readAttribute(c *cursor, end int) {
	var slot *[]byte
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireBytes:
			mark := len(m.arena)
			slot = m.attributes.slot(c.text(&m.arena, end))
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

func (m *message) readProtocolConfig(c *cursor, end int) {
	m.mode.known = true
	for number, wire := c.field(end); number != 0; number, wire = c.field(end) {
		switch {
		case number == 1 && wire == wireVarint:
			m.mode.request = bodyMode(c.varint())
		case number == 2 && wire == wireVarint:
			m.mode.response = bodyMode(c.varint())
		default:
			c.skip(wire, end)
		}
	}
}
