package envoywire

import (
	"encoding/binary"
	"math"
	"strconv"
	"time"

	"google.golang.org/grpc/mem"

	"tandem/extproc/names"
)

// headerSet is one header to overwrite.
type headerSet struct {
	name  string
	value []byte
}

// HeaderEdits are the header changes of one answer. Every set overwrites; order does not matter to Envoy.
type HeaderEdits struct {
	set    []headerSet
	remove []string
}

// Set overwrites a header, or adds it.
func (h *HeaderEdits) Set(name string, value []byte) { h.set = append(h.set, headerSet{name, value}) }

// SetInt is Set with a number.
func (h *HeaderEdits) SetInt(name string, n int) { h.Set(name, strconv.AppendInt(nil, int64(n), 10)) }

// Remove removes a header.
func (h *HeaderEdits) Remove(name string) { h.remove = append(h.remove, name) }

// Reset drops all changes.
func (h *HeaderEdits) Reset() { h.set, h.remove = h.set[:0], h.remove[:0] }

// HeaderValueOption.append_action OVERWRITE_IF_EXISTS_OR_ADD.
const overwriteOrAdd = 2

func headerSetLen(h headerSet) int {
	value := bytesLen(len(h.name)) + bytesLen(len(h.value)) // HeaderValue{1: key, 3: raw_value}
	return bytesLen(value) + 2                              // HeaderValueOption{1: header, 3: append_action}
}

// len returns the size of a HeaderMutation{1: set_headers, 2: remove_headers}.
func (h *HeaderEdits) len() int {
	n := 0
	for _, s := range h.set {
		n += bytesLen(headerSetLen(s))
	}
	for _, name := range h.remove {
		n += bytesLen(len(name))
	}
	return n
}

func (h *HeaderEdits) append(b []byte) []byte {
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

// bodyKind is the effect of a reply on the body.
type bodyKind uint8

// Kinds of body replies.
const (
	KeepBody    bodyKind = iota // no mutation: Envoy keeps the body
	ReplaceBody                 // BodyMutation.body, for BUFFERED
	StreamBody                  // BodyMutation.streamed_response, for FULL_DUPLEX_STREAMED
)

// Reply is one ProcessingResponse. The codec writes it in one pass; body parts are sent without copying.
type Reply struct {
	Phase      Phase
	Headers    *HeaderEdits // nil: no mutation
	ClearRoute bool
	Kind       bodyKind
	Parts      mem.BufferSlice // the body, in order; the codec hands these references to gRPC
	End        bool            // end_of_stream of a streamed body
	Metadata   []byte          // dynamic_metadata, as a Struct's bytes; nil: none
	Immediate  *Immediate      // not nil: an ImmediateResponse; the fields above are ignored
	// not 0: only Envoy's message timeout is restarted with this; the fields above are ignored
	Patience time.Duration
}

// Immediate is an answer that Tandem gives in place of an engine.
type Immediate struct {
	Status  int
	Headers HeaderEdits
	Body    []byte
	Details string // response_code_details in Envoy's access log; always starts with "tandem"
}

// responseField maps a phase to its field of ProcessingResponse.
func (p Phase) responseField() int {
	switch p {
	case PhaseRequestHeaders:
		return 1
	case PhaseResponseHeaders:
		return 2
	case PhaseRequestBody:
		return 3
	case PhaseResponseBody:
		return 4
	case PhaseRequestTrailers:
		return 5
	default:
		return 6
	}
}

// Marshal writes the reply. Everything but the body goes into one pooled buffer in front of it, and fields that follow
// the body into a second one. The order of fields in a protobuf message is free, so a second buffer is rarely needed.
func (r *Reply) Marshal() mem.BufferSlice {
	if r.Immediate != nil {
		return r.Immediate.Marshal()
	}
	if r.Patience != 0 {
		return mem.BufferSlice{mem.SliceBuffer(appendPatience(nil, r.Patience))}
	}
	if r.Phase == PhaseRequestTrailers || r.Phase == PhaseResponseTrailers {
		b := appendLen(make([]byte, 0, 2), r.Phase.responseField(), 0) // TrailersResponse{}
		return mem.BufferSlice{mem.SliceBuffer(b)}
	}
	body := 0
	for _, part := range r.Parts {
		body += part.Len()
	}
	// BodyMutation{1: body} or {3: StreamedBodyResponse{1: body, 2: end_of_stream}}
	streamed, mutation := 0, 0
	switch r.Kind {
	case ReplaceBody:
		mutation = bytesLen(body)
	case StreamBody:
		if body > 0 {
			streamed = bytesLen(body)
		}
		if r.End {
			streamed += 2
		}
		mutation = bytesLen(streamed)
	}
	common, edits := 0, 0 // CommonResponse{2: header_mutation, 3: body_mutation, 5: clear_route_cache}
	if r.Headers != nil {
		edits = r.Headers.len()
		common += bytesLen(edits)
	}
	if r.ClearRoute {
		common += 2
	}
	if r.Kind != KeepBody {
		common += bytesLen(mutation)
	}
	outer := bytesLen(common) // HeadersResponse or BodyResponse{1: response}
	total := bytesLen(outer)
	if r.Metadata != nil {
		total += bytesLen(len(r.Metadata))
	}

	slot := bodies.Get(total - body)
	b := (*slot)[:0]
	if r.Metadata != nil {
		b = appendText(b, 8, r.Metadata)
	}
	b = appendLen(b, r.Phase.responseField(), outer)
	b = appendLen(b, 1, common)
	if r.Headers != nil {
		b = r.Headers.append(appendLen(b, 2, edits))
	}
	if r.ClearRoute {
		b = append(appendTag(b, 5, wireVarint), 1)
	}
	switch r.Kind {
	case ReplaceBody:
		b = appendLen(appendLen(b, 3, mutation), 1, body)
	case StreamBody:
		b = appendLen(appendLen(b, 3, mutation), 3, streamed)
		if r.End {
			b = append(appendTag(b, 2, wireVarint), 1)
		}
		if body > 0 {
			b = appendLen(b, 1, body)
		}
	}
	*slot = b
	out := make(mem.BufferSlice, 0, 2+len(r.Parts)) // the server may add one
	out = append(out, mem.NewBuffer(slot, bodies))
	if r.Kind != KeepBody {
		out = append(out, r.Parts...)
	}
	r.Parts = nil
	return out
}

// Marshal writes ProcessingResponse{7: ImmediateResponse{1: HttpStatus{1: code}, 2: headers, 3: body, 5: details}}.
func (i *Immediate) Marshal() mem.BufferSlice {
	code := 1 + varintLen(uint64(i.Status))
	edits := i.Headers.len()
	n := bytesLen(code) + bytesLen(edits) + bytesLen(len(i.Body)) + bytesLen(len(i.Details))
	b := appendLen(make([]byte, 0, bytesLen(n)), 7, n)
	b = binary.AppendUvarint(appendTag(appendLen(b, 1, code), 1, wireVarint), uint64(i.Status))
	b = i.Headers.append(appendLen(b, 2, edits))
	b = appendText(b, 3, i.Body)
	b = appendText(b, 5, i.Details)
	return mem.BufferSlice{mem.SliceBuffer(b)}
}

// appendPatience writes ProcessingResponse{10: override_message_timeout Duration{1: seconds, 2: nanos}}.
func appendPatience(b []byte, d time.Duration) []byte {
	var inner []byte
	if s := d / time.Second; s > 0 {
		inner = binary.AppendUvarint(appendTag(inner, 1, wireVarint), uint64(s))
	}
	if n := d % time.Second; n > 0 {
		inner = binary.AppendUvarint(appendTag(inner, 2, wireVarint), uint64(n))
	}
	return append(appendLen(b, 10, len(inner)), inner...)
}

// Destination returns dynamic_metadata{"envoy.lb": {"x-gateway-destination-endpoint": list}}: a Struct in a Struct.
func Destination(list string) []byte {
	value := bytesLen(len(list))                                   // Value{3: string_value}
	entry := bytesLen(len(names.HeaderEndpoint)) + bytesLen(value) // map entry {1: key, 2: value}
	inner := bytesLen(entry)                                       // Struct{1: fields}
	outerValue := bytesLen(inner)                                  // Value{5: struct_value}
	outer := bytesLen(len(namespaceLB)) + bytesLen(outerValue)     // map entry
	b := appendLen(make([]byte, 0, bytesLen(outer)), 1, outer)
	b = appendText(b, 1, namespaceLB)
	b = appendLen(b, 2, outerValue)
	b = appendLen(b, 5, inner)
	b = appendLen(b, 1, entry)
	b = appendText(b, 1, names.HeaderEndpoint)
	b = appendLen(b, 2, value)
	return appendText(b, 3, list)
}

// Metadata encodes dynamic metadata of one namespace, {namespace: {name: value, ...}}. Empty fields are left out.
func Metadata(namespace string, fields []names.Metadata) []byte {
	var inner []byte
	for _, f := range fields {
		switch {
		case f.Text != "":
			inner = appendField(inner, f.Name, appendText(nil, 3, f.Text)) // Value{3: string_value}
		case f.Number != 0:
			number := binary.LittleEndian.AppendUint64(appendTag(nil, 2, wireI64), math.Float64bits(f.Number))
			inner = appendField(inner, f.Name, number) // Value{2: number_value}
		}
	}
	return appendField(nil, namespace, appendText(nil, 5, inner)) // Value{5: struct_value}
}

// appendField appends Struct{1: fields{1: name, 2: value}}.
func appendField(b []byte, name string, value []byte) []byte {
	return appendText(b, 1, appendText(appendText(nil, 1, name), 2, value))
}
