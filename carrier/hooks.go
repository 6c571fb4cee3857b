package main

// #cgo CFLAGS: -std=gnu11
// #cgo linux LDFLAGS: -Wl,--unresolved-symbols=ignore-all
// #include "abi.h"
import "C"

import (
	"runtime/cgo"
	"strconv"
	"time"
	"unsafe"

	"tandem/carrier/filter"
)

// What Envoy calls. The pointers that it gets back are [C.request] of filters and handles of configurations.

//export envoy_dynamic_module_on_http_filter_config_new
func envoy_dynamic_module_on_http_filter_config_new(envoy unsafe.Pointer, name, config C.bytes) unsafe.Pointer {
	if string(view(name)) == "hold" { // behind the router
		p := (*C.request)(C.calloc(1, C.sizeof_request))
		p.upstream = true
		return unsafe.Pointer(p)
	}
	opened, err := all().Open(C.GoBytes(unsafe.Pointer(config.at), C.int(config.length)))
	if err != nil {
		complain(err)
		return nil
	}
	c := &configured{opened, newCalls()}
	p := (*C.request)(C.calloc(1, C.sizeof_request))
	c.calls.envoy = envoy
	p.handle = C.uintptr_t(cgo.NewHandle(c))
	return unsafe.Pointer(p)
}

//export envoy_dynamic_module_on_http_filter_config_destroy
func envoy_dynamic_module_on_http_filter_config_destroy(p unsafe.Pointer) {
	defer C.free(p)
	if (*C.request)(p).upstream {
		return
	}
	h := cgo.Handle((*C.request)(p).handle)
	c := h.Value().(*configured)
	c.calls.close()
	c.from.Close()
	h.Delete()
}

//export newFilter
func newFilter(config, envoy unsafe.Pointer) unsafe.Pointer {
	c := cgo.Handle((*C.request)(config).handle).Value().(*configured)
	p := (*C.request)(C.calloc(1, C.sizeof_request))
	p.handle = C.uintptr_t(cgo.NewHandle(c.from.NewFilter(&stream{envoy, p, c})))
	return unsafe.Pointer(p)
}

// of returns the filter of a pointer that Envoy has.
func of(p unsafe.Pointer) *filter.Filter {
	return cgo.Handle((*C.request)(p).handle).Value().(*filter.Filter)
}

//export destroyFilter
func destroyFilter(p *C.request) {
	h := cgo.Handle(p.handle)
	h.Value().(*filter.Filter).Destroy()
	h.Delete()
}

//export upstreamAnswer
func upstreamAnswer(p *C.request) C.int {
	s := &stream{envoy: p.envoy}
	status, _ := strconv.Atoi(string(s.ResponseHeader(":status")))
	return C.int(filter.Answers(C.GoString(&p.pair[0]), status, s))
}

//export upstreamGone
func upstreamGone(p *C.request) { filter.AnswerGone(C.GoString(&p.pair[0])) }

// began and beganAt are the same moment by Go's clock and by C's.
var began, beganAt = time.Now(), uint64(C.tandem_now())

// at returns the filter of a request, for a hook that was called at a time of C's clock.
func at(p *C.request, when C.uint64_t) *filter.Filter {
	f := of(unsafe.Pointer(p))
	f.Called = timeOf(when)
	return f
}

// timeOf returns a time of C's clock.
func timeOf(when C.uint64_t) time.Time { return began.Add(time.Duration(uint64(when) - beganAt)) }

// now is at for a hook that Envoy calls directly, not through hooks.c.
func now(p unsafe.Pointer) *filter.Filter {
	f := of(p)
	f.Called = time.Now()
	return f
}

//export requestHeaders
func requestHeaders(p *C.request, end C.bool, when C.uint64_t) C.int {
	return C.int(at(p, when).RequestHeaders(bool(end)))
}

//export requestBody
func requestBody(p *C.request, end C.bool, when C.uint64_t) C.int {
	return C.int(at(p, when).RequestBody(bool(end)))
}

//export requestTrailers
func requestTrailers(p *C.request, when C.uint64_t) C.int {
	return C.int(at(p, when).RequestTrailers())
}

//export responseHeaders
func responseHeaders(p *C.request, end C.bool, when C.uint64_t) C.int {
	return C.int(at(p, when).ResponseHeaders(bool(end)))
}

//export responseBody
func responseBody(p *C.request, end C.bool, when C.uint64_t) C.int {
	return C.int(at(p, when).ResponseBody(bool(end)))
}

//export counted
func counted(p *C.request) C.bool { return C.bool(filter.Counted(of(unsafe.Pointer(p)))) }

//export scheduled
func scheduled(p *C.request, when C.uint64_t) { at(p, when).Woken() }

//export complete
func complete(p *C.request, when C.uint64_t) { at(p, when).Complete() }

//export calloutDone
func calloutDone(p *C.request, result C.int, headers *C.header, n C.size_t, body *C.bytes, pieces C.size_t,
	when C.uint64_t) {
	at(p, when).CallDone(answerOf(result, headers, n, body, pieces))
}

//export envoy_dynamic_module_on_http_filter_http_stream_headers
func envoy_dynamic_module_on_http_filter_http_stream_headers(envoy, p unsafe.Pointer, id C.uint64_t, headers *C.header,
	n C.size_t, end C.bool) {
	filter.InsuredOf(now(p)).StreamHeaders(uint64(id), func(do func(name, value []byte)) {
		each(unsafe.Slice(headers, int(n)), do)
	}, bool(end))
}

//export envoy_dynamic_module_on_http_filter_http_stream_data
func envoy_dynamic_module_on_http_filter_http_stream_data(envoy, p unsafe.Pointer, id C.uint64_t, pieces *C.bytes,
	n C.size_t, end C.bool) {
	filter.InsuredOf(now(p)).StreamData(uint64(id), views(make([][]byte, 0, 4), pieces, n), bool(end))
}

//export envoy_dynamic_module_on_http_filter_http_stream_trailers
func envoy_dynamic_module_on_http_filter_http_stream_trailers(envoy, p unsafe.Pointer, id C.uint64_t, headers *C.header,
	n C.size_t) {
	filter.InsuredOf(now(p)).StreamTrailers(uint64(id))
}

//export envoy_dynamic_module_on_http_filter_http_stream_reset
func envoy_dynamic_module_on_http_filter_http_stream_reset(envoy, p unsafe.Pointer, id C.uint64_t, reason C.int) {
	filter.InsuredOf(now(p)).StreamReset(uint64(id))
}

//export watermark
func watermark(p *C.request, above C.bool) {
	if in := filter.InsuredOf(now(unsafe.Pointer(p))); above {
		in.AboveWatermark()
	} else {
		in.BelowWatermark()
	}
}

// answerOf returns the answer to a call. Its memory is Envoy's.
func answerOf(result C.int, headers *C.header, n C.size_t, body *C.bytes, pieces C.size_t) *filter.Answer {
	a := &filter.Answer{OK: result == 0}
	if headers != nil {
		a.Headers = func(do func(name, value []byte)) { each(unsafe.Slice(headers, int(n)), do) }
	}
	if body != nil {
		a.Body = views(nil, body, pieces)
	}
	return a
}

//export envoy_dynamic_module_on_http_filter_config_scheduled
func envoy_dynamic_module_on_http_filter_config_scheduled(envoy, p unsafe.Pointer, event C.uint64_t) {
	cgo.Handle((*C.request)(p).handle).Value().(*configured).calls.send()
}

//export envoy_dynamic_module_on_http_filter_config_http_callout_done
func envoy_dynamic_module_on_http_filter_config_http_callout_done(envoy, p unsafe.Pointer, call C.uint64_t,
	result C.int, headers *C.header, n C.size_t, body *C.bytes, pieces C.size_t) {
	c := cgo.Handle((*C.request)(p).handle).Value().(*configured)
	c.calls.done(uint64(call), answerOf(result, headers, n, body, pieces))
}
