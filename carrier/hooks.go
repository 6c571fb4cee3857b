package main

// #cgo CFLAGS: -std=gnu11
// #cgo linux LDFLAGS: -Wl,--unresolved-symbols=ignore-all
// #include "abi.h"
import "C"

import (
	"runtime/cgo"
	"unsafe"

	"tandem/carrier/filter"
)

// What Envoy calls. The pointers that it gets back are [C.request] of filters and handles of configurations.

//export envoy_dynamic_module_on_http_filter_config_new
func envoy_dynamic_module_on_http_filter_config_new(envoy unsafe.Pointer, name, config C.bytes) unsafe.Pointer {
	c, err := open(C.GoBytes(unsafe.Pointer(config.at), C.int(config.length)))
	if err != nil {
		complain(err)
		return nil
	}
	p := (*C.request)(C.calloc(1, C.sizeof_request))
	p.handle = C.uintptr_t(cgo.NewHandle(c))
	return unsafe.Pointer(p)
}

//export envoy_dynamic_module_on_http_filter_config_destroy
func envoy_dynamic_module_on_http_filter_config_destroy(p unsafe.Pointer) {
	h := cgo.Handle((*C.request)(p).handle)
	C.free(p)
	h.Value().(*configured).close()
	h.Delete()
}

//export envoy_dynamic_module_on_http_filter_new
func envoy_dynamic_module_on_http_filter_new(config, envoy unsafe.Pointer) unsafe.Pointer {
	c := cgo.Handle((*C.request)(config).handle).Value().(*configured)
	p := (*C.request)(C.calloc(1, C.sizeof_request))
	p.handle = C.uintptr_t(cgo.NewHandle(c.requests.NewFilter(&stream{envoy, p})))
	return unsafe.Pointer(p)
}

// of returns the filter of a pointer that Envoy has.
func of(p unsafe.Pointer) *filter.Filter {
	return cgo.Handle((*C.request)(p).handle).Value().(*filter.Filter)
}

//export envoy_dynamic_module_on_http_filter_destroy
func envoy_dynamic_module_on_http_filter_destroy(p unsafe.Pointer) {
	h := cgo.Handle((*C.request)(p).handle)
	h.Value().(*filter.Filter).Destroy()
	h.Delete()
	C.free(p)
}

//export envoy_dynamic_module_on_http_filter_request_headers
func envoy_dynamic_module_on_http_filter_request_headers(envoy, p unsafe.Pointer, end C.bool) C.int {
	return C.int(of(p).RequestHeaders(bool(end)))
}

//export envoy_dynamic_module_on_http_filter_request_body
func envoy_dynamic_module_on_http_filter_request_body(envoy, p unsafe.Pointer, end C.bool) C.int {
	return C.int(of(p).RequestBody(bool(end)))
}

//export envoy_dynamic_module_on_http_filter_request_trailers
func envoy_dynamic_module_on_http_filter_request_trailers(envoy, p unsafe.Pointer) C.int {
	return C.int(of(p).RequestTrailers())
}

//export envoy_dynamic_module_on_http_filter_response_headers
func envoy_dynamic_module_on_http_filter_response_headers(envoy, p unsafe.Pointer, end C.bool) C.int {
	return C.int(of(p).ResponseHeaders(bool(end)))
}

//export responseBody
func responseBody(p *C.request, end C.bool) C.int {
	return C.int(of(unsafe.Pointer(p)).ResponseBody(bool(end)))
}

//export envoy_dynamic_module_on_http_filter_scheduled
func envoy_dynamic_module_on_http_filter_scheduled(envoy, p unsafe.Pointer, event C.uint64_t) {
	of(p).Woken()
}

//export envoy_dynamic_module_on_http_filter_stream_complete
func envoy_dynamic_module_on_http_filter_stream_complete(envoy, p unsafe.Pointer) { of(p).Complete() }

//export envoy_dynamic_module_on_http_filter_http_stream_headers
func envoy_dynamic_module_on_http_filter_http_stream_headers(envoy, p unsafe.Pointer, id C.uint64_t, headers *C.header,
	n C.size_t, end C.bool) {
	filter.InsuredOf(of(p)).StreamHeaders(uint64(id), func(do func(name, value []byte)) {
		each(unsafe.Slice(headers, int(n)), do)
	}, bool(end))
}

//export envoy_dynamic_module_on_http_filter_http_stream_data
func envoy_dynamic_module_on_http_filter_http_stream_data(envoy, p unsafe.Pointer, id C.uint64_t, pieces *C.bytes,
	n C.size_t, end C.bool) {
	data := make([][]byte, 0, 4)
	for _, b := range unsafe.Slice(pieces, int(n)) {
		data = append(data, view(b))
	}
	filter.InsuredOf(of(p)).StreamData(uint64(id), data, bool(end))
}

//export envoy_dynamic_module_on_http_filter_http_stream_trailers
func envoy_dynamic_module_on_http_filter_http_stream_trailers(envoy, p unsafe.Pointer, id C.uint64_t, headers *C.header,
	n C.size_t) {
	filter.InsuredOf(of(p)).StreamTrailers(uint64(id))
}

//export envoy_dynamic_module_on_http_filter_http_stream_reset
func envoy_dynamic_module_on_http_filter_http_stream_reset(envoy, p unsafe.Pointer, id C.uint64_t, reason C.int) {
	filter.InsuredOf(of(p)).StreamReset(uint64(id))
}

//export watermark
func watermark(p *C.request, above C.bool) {
	if in := filter.InsuredOf(of(unsafe.Pointer(p))); above {
		in.AboveWatermark()
	} else {
		in.BelowWatermark()
	}
}

//export envoy_dynamic_module_on_http_filter_http_callout_done
func envoy_dynamic_module_on_http_filter_http_callout_done(envoy, p unsafe.Pointer, call C.uint64_t, result C.int,
	headers *C.header, n C.size_t, body *C.bytes, pieces C.size_t) {
	a := filter.Answer{OK: result == 0}
	if headers != nil {
		a.Headers = func(do func(name, value []byte)) { each(unsafe.Slice(headers, int(n)), do) }
	}
	if body != nil {
		for _, b := range unsafe.Slice(body, int(pieces)) {
			a.Body = append(a.Body, view(b))
		}
	}
	of(p).CallDone(&a)
}
