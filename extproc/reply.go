package extproc

import (
	"strconv"
	"time"

	"google.golang.org/grpc/mem"
)

// headerSet is one header to overwrite.
type headerSet struct {
	name  string
	value []byte
}

// headerEdits are the header changes of one answer. Every set overwrites; order does not matter to Envoy.
type headerEdits struct {
	set    []headerSet
	remove []string
}

func (h *headerEdits) add(name string, value []byte) { h.set = append(h.set, headerSet{name, value}) }
func (h *headerEdits) drop(name string)              { h.remove = append(h.remove, name) }
func (h *headerEdits) reset()                        { h.set, h.remove = h.set[:0], h.remove[:0] }

// HeaderValueOption.append_action OVERWRITE_IF_EXISTS_OR_ADD.
const overwriteOrAdd = 2

func headerSetLen(h headerSet) int {
	value := bytesLen(len(h.name)) + bytesLen(len(h.value)) // HeaderValue{1: key, 3: raw_value}
	return bytesLen(value) + 2                              // HeaderValueOption{1: header, 3: append_action}
}

// len is the size of a HeaderMutation{1: set_headers, 2: remove_headers}.
func (h *headerEdits) len() int {
	n := 0
	for _, s := range h.set {
		n += bytesLen(headerSetLen(s))
	}
	for _, name := range h.remove {
		n += bytesLen(len(name))
	}
	return n
}

func (h *headerEdits) append(b []byte) []byte {
	for _, s := range h.set {
		b = appendLen(b, 1, headerSetLen(s))
		b = appendLen(b, 1, bytesLen(len(s.name))+bytesLen(len(s.value)))
		b = appendText(b, 1, s.name)
		b = appendText(b, 3, s.value)
		b = append(appendTag(b, 3, wireVarint), overwriteOrAdd)
	}
	for _, name := range h.remove {
		b = appendText(b, 2, name)
	}
	return b
}

// bodyKind is what a reply does to the body.
type bodyKind uint8

const (
	bodyKeep       bodyKind = iota // no mutation: Envoy goes on with what it has
	bodyReplace                    // BodyMutation.body, for BUFFERED
	bodyStreamed62                 // BodyMutation.streamed_response, for FULL_DUPLEX_STREAMED
)

// reply is one ProcessingResponse. The codec writes it in one pass; parts are sent as they lie.
type reply struct {
	phase      phase
	headers    *headerEdits // nil: no mutation
	clearRoute bool
	kind       bodyKind
	parts      mem.BufferSlice // the body, in order; the codec hands these references to gRPC
	end        bool            // end_of_stream of a streamed body
	immediate  *immediate      // not nil: this is an ImmediateResponse and nothing above counts
	patience   time.Duration   // not 0: no answer yet, but Envoy's message timeout begins anew with this; nothing above counts
}

// immediate is an answer that Tandem gives itself.
type immediate struct {
	status  int
	headers headerEdits
	body    []byte
	details string // response_code_details in Envoy's access log; always starts with "tandem"
}

// responseField maps a phase to its field of ProcessingResponse.
func (p phase) responseField() int {
	switch p {
	case phaseRequestHeaders:
		return 1
	case phaseResponseHeaders:
		return 2
	case phaseRequestBody:
		return 3
	case phaseResponseBody:
		return 4
	case phaseRequestTrailers:
		return 5
	default:
		return 6
	}
}

// marshal writes the reply. Everything but the body goes into one pooled buffer in front of it and, where fields follow
// the body, a second one behind; the order of fields in a protobuf message is free, so there seldom is one.
func (r *reply) marshal() mem.BufferSlice {
	if r.immediate != nil {
		return r.immediate.marshal()
	}
	if r.patience != 0 {
		return mem.BufferSlice{mem.SliceBuffer(appendPatience(nil, r.patience))}
	}
	if r.phase == phaseRequestTrailers || r.phase == phaseResponseTrailers {
		b := appendLen(make([]byte, 0, 2), r.phase.responseField(), 0) // TrailersResponse{}
		return mem.BufferSlice{mem.SliceBuffer(b)}
	}
	body := 0
	for _, part := range r.parts {
		body += part.Len()
	}
	// BodyMutation{1: body} or {3: StreamedBodyResponse{1: body, 2: end_of_stream}}
	streamed, mutation := 0, 0
	switch r.kind {
	case bodyReplace:
		mutation = bytesLen(body)
	case bodyStreamed62:
		if body > 0 {
			streamed = bytesLen(body)
		}
		if r.end {
			streamed += 2
		}
		mutation = bytesLen(streamed)
	}
	common, edits := 0, 0 // CommonResponse{2: header_mutation, 3: body_mutation, 5: clear_route_cache}
	if r.headers != nil {
		edits = r.headers.len()
		common += bytesLen(edits)
	}
	if r.clearRoute {
		common += 2
	}
	if r.kind != bodyKeep {
		common += bytesLen(mutation)
	}
	outer := bytesLen(common) // HeadersResponse or BodyResponse{1: response}
	total := bytesLen(outer)

	slot := bodies.Get(total - body)
	b := (*slot)[:0]
	b = appendLen(b, r.phase.responseField(), outer)
	b = appendLen(b, 1, common)
	if r.headers != nil {
		b = r.headers.append(appendLen(b, 2, edits))
	}
	if r.clearRoute {
		b = append(appendTag(b, 5, wireVarint), 1)
	}
	switch r.kind {
	case bodyReplace:
		b = appendLen(appendLen(b, 3, mutation), 1, body)
	case bodyStreamed62:
		b = appendLen(appendLen(b, 3, mutation), 3, streamed)
		if r.end {
			b = append(appendTag(b, 2, wireVarint), 1)
		}
		if body > 0 {
			b = appendLen(b, 1, body)
		}
	}
	*slot = b
	out := make(mem.BufferSlice, 0, 1+len(r.parts))
	out = append(out, mem.NewBuffer(slot, bodies))
	if r.kind != bodyKeep {
		out = append(out, r.parts...)
	}
	r.parts = nil
	return out
}

// marshal writes ProcessingResponse{7: ImmediateResponse{1: HttpStatus{1: code}, 2: headers, 3: body, 5: details}}.
func (i *immediate) marshal() mem.BufferSlice {
	code := 1 + varintLen(uint64(i.status))
	edits := i.headers.len()
	n := bytesLen(code) + bytesLen(edits) + bytesLen(len(i.body)) + bytesLen(len(i.details))
	b := appendLen(make([]byte, 0, bytesLen(n)), 7, n)
	b = appendVarint(appendTag(appendLen(b, 1, code), 1, wireVarint), uint64(i.status))
	b = i.headers.append(appendLen(b, 2, edits))
	b = appendText(b, 3, i.body)
	b = appendText(b, 5, i.details)
	return mem.BufferSlice{mem.SliceBuffer(b)}
}

// appendPatience writes ProcessingResponse{10: override_message_timeout Duration{1: seconds, 2: nanos}}.
func appendPatience(b []byte, d time.Duration) []byte {
	var inner []byte
	if s := d / time.Second; s > 0 {
		inner = appendVarint(appendTag(inner, 1, wireVarint), uint64(s))
	}
	if n := d % time.Second; n > 0 {
		inner = appendVarint(appendTag(inner, 2, wireVarint), uint64(n))
	}
	return append(appendLen(b, 10, len(inner)), inner...)
}

func itoa(n int) []byte { return strconv.AppendInt(nil, int64(n), 10) }
