package main

// #include "abi.h"
import "C"

import (
	"runtime"
	"slices"
	"unsafe"

	"tandem/carrier/filter"
)

// stream is a filter of Envoy's: it implements [filter.Envoy].
type stream struct {
	envoy  unsafe.Pointer
	ours   *C.request
	config *configured
}

// view returns Envoy's memory.
func view(b C.bytes) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(b.at)), int(b.length)) }

// views returns Envoy's memory of several pieces, appended to dst.
func views(dst [][]byte, pieces *C.bytes, n C.size_t) [][]byte {
	for _, b := range unsafe.Slice(pieces, int(n)) {
		dst = append(dst, view(b))
	}
	return dst
}

// text is the memory of a string, for a call that reads it.
func text(s string) C.bytes {
	return C.bytes{(*C.char)(unsafe.Pointer(unsafe.StringData(s))), C.size_t(len(s))}
}

// piece is the memory of a slice, for a call that reads it.
func piece(b []byte) C.bytes {
	return C.bytes{(*C.char)(unsafe.Pointer(unsafe.SliceData(b))), C.size_t(len(b))}
}

func each(headers []C.header, do func(name, value []byte)) {
	for _, h := range headers {
		do(view(C.bytes{h.name, h.name_length}), view(C.bytes{h.value, h.value_length}))
	}
}

// headers returns the request's headers.
func (s *stream) headers() []C.header {
	n := C.envoy_dynamic_module_callback_http_get_headers_size(s.envoy, C.REQUEST_HEADERS)
	if n == 0 {
		return nil
	}
	out := make([]C.header, n)
	if !C.envoy_dynamic_module_callback_http_get_headers(s.envoy, C.REQUEST_HEADERS, &out[0]) {
		return nil
	}
	return out
}

// EachHeader implements [filter.Envoy].
func (s *stream) EachHeader(do func(name, value []byte)) { each(s.headers(), do) }

// SetHeader implements [filter.Envoy].
func (s *stream) SetHeader(name, value string) { s.setHeader(C.REQUEST_HEADERS, name, value, false) }

// RemoveHeader implements [filter.Envoy].
func (s *stream) RemoveHeader(name string) { s.setHeader(C.REQUEST_HEADERS, name, "", true) }

// setHeader sets or removes a header of the request or of the answer.
func (s *stream) setHeader(kind C.int, name, value string, remove bool) {
	var pin runtime.Pinner
	defer pin.Unpin()
	var to C.bytes
	if !remove {
		to = pinned(&pin, value)
	}
	C.envoy_dynamic_module_callback_http_set_header(s.envoy, kind, pinned(&pin, name), to)
}

// SetMetadata implements [filter.Envoy].
func (s *stream) SetMetadata(namespace, name, value string) {
	var pin runtime.Pinner
	defer pin.Unpin()
	to := pinned(&pin, value)
	C.envoy_dynamic_module_callback_http_set_dynamic_metadata_string(s.envoy, pinned(&pin, namespace),
		pinned(&pin, name), to)
}

// SetMetadataNumber implements [filter.Envoy].
func (s *stream) SetMetadataNumber(namespace, name string, value float64) {
	var pin runtime.Pinner
	defer pin.Unpin()
	C.envoy_dynamic_module_callback_http_set_dynamic_metadata_number(s.envoy, pinned(&pin, namespace),
		pinned(&pin, name), C.double(value))
}

// pinned is text that stays where it is for a call.
func pinned(pin *runtime.Pinner, s string) C.bytes {
	if s != "" {
		pin.Pin(unsafe.StringData(s))
	}
	return text(s)
}

func pinnedBytes(pin *runtime.Pinner, b []byte) C.bytes {
	if len(b) > 0 {
		pin.Pin(unsafe.SliceData(b))
	}
	return piece(b)
}

// BodySize implements [filter.Envoy].
func (s *stream) BodySize() int {
	return int(C.envoy_dynamic_module_callback_http_get_body_size(s.envoy, C.BUFFERED) +
		C.envoy_dynamic_module_callback_http_get_body_size(s.envoy, C.RECEIVED))
}

// AppendBody implements [filter.Envoy].
func (s *stream) AppendBody(dst []byte) []byte { return s.read(s.read(dst, C.BUFFERED), C.RECEIVED) }

// read appends a body.
func (s *stream) read(dst []byte, kind C.int) []byte {
	for _, p := range s.pieces(kind) {
		dst = append(dst, view(p)...)
	}
	return dst
}

// pieces returns the pieces of a body.
func (s *stream) pieces(kind C.int) []C.bytes {
	n := C.envoy_dynamic_module_callback_http_get_body_chunks_size(s.envoy, kind)
	if n == 0 {
		return nil
	}
	out := make([]C.bytes, n)
	if !C.envoy_dynamic_module_callback_http_get_body_chunks(s.envoy, kind, &out[0]) {
		return nil
	}
	return out
}

// replace replaces a body.
func (s *stream) replace(kind C.int, parts ...[]byte) {
	n := C.envoy_dynamic_module_callback_http_get_body_size(s.envoy, kind)
	C.envoy_dynamic_module_callback_http_drain_body(s.envoy, kind, n)
	var pin runtime.Pinner
	defer pin.Unpin()
	for _, p := range parts {
		if len(p) > 0 {
			C.envoy_dynamic_module_callback_http_append_body(s.envoy, kind, pinnedBytes(&pin, p))
		}
	}
}

// ReplaceBody implements [filter.Envoy].
func (s *stream) ReplaceBody(parts ...[]byte) { s.replace(C.BUFFERED, parts...) }

// leg returns the headers of a call, which stay where they are until pin is unpinned.
func (s *stream) leg(pin *runtime.Pinner, c *filter.Call) []C.header {
	headers := slices.DeleteFunc(s.headers(), func(h C.header) bool {
		return c.Drops(view(C.bytes{h.name, h.name_length}))
	})
	headers = appendHeaders(pin, headers, c.Set)
	pin.Pin(&headers[0])
	return headers
}

// Call implements [filter.Envoy].
func (s *stream) Call(c *filter.Call) bool {
	var pin runtime.Pinner
	defer pin.Unpin()
	headers := s.leg(&pin, c)
	var id C.uint64_t
	return C.envoy_dynamic_module_callback_http_filter_http_callout(s.envoy, &id, pinned(&pin, c.Cluster),
		&headers[0], C.size_t(len(headers)), pinnedBytes(&pin, c.Body), C.uint64_t(c.Timeout.Milliseconds())) == 0
}

// StartStream implements [filter.Envoy].
func (s *stream) StartStream(c *filter.Call) (id uint64, ok bool) {
	s.ours.streams = true
	var pin runtime.Pinner
	defer pin.Unpin()
	headers := s.leg(&pin, c)
	var number C.uint64_t
	ok = C.envoy_dynamic_module_callback_http_filter_start_http_stream(s.envoy, &number, pinned(&pin, c.Cluster),
		&headers[0], C.size_t(len(headers)), pinnedBytes(&pin, c.Body), true,
		C.uint64_t(c.Timeout.Milliseconds())) == 0
	return uint64(number), ok
}

// ResetStream implements [filter.Envoy].
func (s *stream) ResetStream(id uint64) {
	C.envoy_dynamic_module_callback_http_filter_reset_http_stream(s.envoy, C.uint64_t(id))
}

// SendHeaders implements [filter.Envoy].
func (s *stream) SendHeaders(headers []filter.Header) { s.sendHeaders(headers, false) }

func (s *stream) sendHeaders(headers []filter.Header, end bool) {
	var pin runtime.Pinner
	defer pin.Unpin()
	out := appendHeaders(&pin, nil, headers)
	pin.Pin(&out[0])
	C.envoy_dynamic_module_callback_http_send_response_headers(s.envoy, &out[0], C.size_t(len(out)), C.bool(end))
}

// Send implements [filter.Envoy].
func (s *stream) Send(data []byte, end bool) {
	var pin runtime.Pinner
	defer pin.Unpin()
	C.envoy_dynamic_module_callback_http_send_response_data(s.envoy, pinnedBytes(&pin, data), C.bool(end))
}

// Reset implements [filter.Envoy].
func (s *stream) Reset() {
	C.envoy_dynamic_module_callback_http_filter_reset_stream(s.envoy, 0, C.bytes{})
}

// appendHeaders appends headers whose memory stays where it is until pin is unpinned.
func appendHeaders(pin *runtime.Pinner, to []C.header, headers []filter.Header) []C.header {
	for _, h := range headers {
		name, value := pinned(pin, h.Name), pinned(pin, h.Value)
		to = append(to, C.header{name.at, name.length, value.at, value.length})
	}
	return to
}

// Continue implements [filter.Envoy].
func (s *stream) Continue(anew bool) {
	if anew {
		C.envoy_dynamic_module_callback_http_clear_route_cache(s.envoy)
	}
	C.envoy_dynamic_module_callback_http_filter_continue_decoding(s.envoy)
}

// Cluster implements [filter.Envoy].
func (s *stream) Cluster() string {
	var name C.bytes
	if !C.envoy_dynamic_module_callback_http_get_cluster_name(s.envoy, &name) {
		return ""
	}
	return string(view(name))
}

// SendTo implements [filter.Envoy].
func (s *stream) SendTo(endpoint string) bool {
	var pin runtime.Pinner
	defer pin.Unpin()
	return bool(C.envoy_dynamic_module_callback_http_set_upstream_override_host(s.envoy, pinned(&pin, endpoint), true))
}

// KeepUpTo implements [filter.Envoy].
func (s *stream) KeepUpTo(n int) {
	C.envoy_dynamic_module_callback_http_set_buffer_limit(s.envoy, C.uint64_t(n))
}

// Respond implements [filter.Envoy].
func (s *stream) Respond(status int, headers []filter.Header, body []byte, details string) {
	var pin runtime.Pinner
	defer pin.Unpin()
	out := appendHeaders(&pin, nil, headers)
	pin.Pin(&out[0])
	C.envoy_dynamic_module_callback_http_send_response(s.envoy, C.uint32_t(status), &out[0], C.size_t(len(out)),
		pinnedBytes(&pin, body), pinned(&pin, details))
}

// Answer implements [filter.Envoy].
func (s *stream) Answer(headers []filter.Header, body []byte) {
	s.sendHeaders(headers, len(body) == 0)
	if len(body) > 0 {
		s.Send(body, true)
	}
}

// Restart implements [filter.Envoy].
func (s *stream) Restart() bool {
	return bool(C.envoy_dynamic_module_callback_http_filter_recreate_stream(s.envoy, nil, 0))
}

// HoldAnswer implements [filter.Envoy].
func (s *stream) HoldAnswer(hold bool) { s.ours.hold, s.ours.passes = C.bool(hold), false }

// PassEvents implements [filter.Envoy].
func (s *stream) PassEvents(pass bool) { s.ours.passes = C.bool(pass) }

// ResponseHeader implements [filter.Envoy].
func (s *stream) ResponseHeader(name string) []byte {
	var pin runtime.Pinner
	defer pin.Unpin()
	var value C.bytes
	key := pinned(&pin, name)
	if !C.envoy_dynamic_module_callback_http_get_header(s.envoy, C.RESPONSE_HEADERS, key, &value, 0, nil) {
		return nil
	}
	return view(value)
}

// SetResponseHeader implements [filter.Envoy].
func (s *stream) SetResponseHeader(name, value string) {
	s.setHeader(C.RESPONSE_HEADERS, name, value, value == "")
}

// Count implements [filter.Envoy].
func (s *stream) Count(events bool) { s.ours.counts, s.ours.events = true, C.bool(events) }

// EachPiece implements [filter.Envoy].
func (s *stream) EachPiece(do func(piece []byte)) {
	for _, p := range s.pieces(C.ANSWER_RECEIVED) {
		do(view(p))
	}
}

// AppendPiece implements [filter.Envoy].
func (s *stream) AppendPiece(dst []byte) []byte { return s.read(dst, C.ANSWER_RECEIVED) }

// ReplacePiece implements [filter.Envoy].
func (s *stream) ReplacePiece(b []byte) { s.replace(C.ANSWER_RECEIVED, b) }

// AnswerSize implements [filter.Envoy].
func (s *stream) AnswerSize() int {
	n := C.envoy_dynamic_module_callback_http_get_body_size(s.envoy, C.ANSWER_BUFFERED)
	if !C.envoy_dynamic_module_callback_http_received_buffered_response_body(s.envoy) { // they may be the same
		n += C.envoy_dynamic_module_callback_http_get_body_size(s.envoy, C.ANSWER_RECEIVED)
	}
	return int(n)
}

// AppendAnswer implements [filter.Envoy].
func (s *stream) AppendAnswer(dst []byte) []byte {
	dst = s.read(dst, C.ANSWER_BUFFERED)
	if !C.envoy_dynamic_module_callback_http_received_buffered_response_body(s.envoy) {
		dst = s.read(dst, C.ANSWER_RECEIVED)
	}
	return dst
}

// ReplaceAnswer implements [filter.Envoy].
func (s *stream) ReplaceAnswer(b []byte) { s.replace(C.ANSWER_BUFFERED, b) }

// ContinueAnswer implements [filter.Envoy].
func (s *stream) ContinueAnswer() {
	C.envoy_dynamic_module_callback_http_filter_continue_encoding(s.envoy)
}

// Outcome implements [filter.Envoy].
func (s *stream) Outcome() (o filter.Outcome) {
	number := func(id C.int) uint64 {
		var n C.uint64_t
		C.envoy_dynamic_module_callback_http_filter_get_attribute_int(s.envoy, id, &n)
		return uint64(n)
	}
	o.Status, o.Flags, o.Bytes = int(number(C.RESPONSE_CODE)), number(C.RESPONSE_FLAGS), number(C.RESPONSE_SIZE)
	var details C.bytes
	if C.envoy_dynamic_module_callback_http_filter_get_attribute_string(s.envoy, C.RESPONSE_CODE_DETAILS, &details) {
		o.Details = string(view(details))
	}
	if first, last := s.ours.first, s.ours.last; first != 0 {
		o.FirstBody, o.LastBody = timeOf(first), timeOf(last)
	}
	return o
}

// Waker implements [filter.Envoy].
func (s *stream) Waker() filter.Waker {
	return waker{C.envoy_dynamic_module_callback_http_filter_scheduler_new(s.envoy)}
}

// waker is a scheduler of Envoy's.
type waker struct{ scheduler unsafe.Pointer }

// Wake implements [filter.Waker].
func (w waker) Wake() { C.envoy_dynamic_module_callback_http_filter_scheduler_commit(w.scheduler, 0) }

// Close implements [filter.Waker].
func (w waker) Close() { C.envoy_dynamic_module_callback_http_filter_scheduler_delete(w.scheduler) }
