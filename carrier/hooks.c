//go:build cgo

// Hooks that have nothing to do, or mostly: an answer's pieces pass here without a call of Go.
#include "abi.h"

#include "_cgo_export.h"

const char* envoy_dynamic_module_on_program_init(void) { return "v0.2.0"; }

int envoy_dynamic_module_on_http_filter_response_body(void* envoy, const void* filter, bool end) {
  return ((const request*)filter)->hold ? responseBody((request*)filter, end) : 0;
}

int envoy_dynamic_module_on_http_filter_response_trailers(void* envoy, const void* filter) {
  return ((const request*)filter)->hold && responseBody((request*)filter, true) != 0;
}

int envoy_dynamic_module_on_http_filter_local_reply(void* e, const void* f, uint32_t code, bytes details, bool reset) {
  return 0;
}

void envoy_dynamic_module_on_http_filter_http_stream_complete(void* e, const void* f, uint64_t id) {}

void envoy_dynamic_module_on_http_filter_downstream_above_write_buffer_high_watermark(void* e, const void* f) {
  if (((const request*)f)->streams) watermark((request*)f, true);
}

void envoy_dynamic_module_on_http_filter_downstream_below_write_buffer_low_watermark(void* e, const void* f) {
  if (((const request*)f)->streams) watermark((request*)f, false);
}
