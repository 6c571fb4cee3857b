// The part of Envoy's ABI for dynamic modules that is used here, declared anew from
// source/extensions/dynamic_modules/abi/abi.h of Envoy 1.40. Envoy exports the functions; it calls the hooks, which
// hooks.go and hooks.c define.
#ifndef TANDEM_ABI_H
#define TANDEM_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// bytes are Envoy's envoy_buffer and module_buffer, which are the same in memory.
typedef struct {
  const char* at;
  size_t length;
} bytes;

// header is Envoy's envoy_http_header and module_http_header.
typedef struct {
  const char* name;
  size_t name_length;
  const char* value;
  size_t value_length;
} header;

enum { REQUEST_HEADERS = 0, RESPONSE_HEADERS = 2 };  // http_header_type
enum {                                               // http_body_type
  RECEIVED = 0,
  BUFFERED = 1,
  ANSWER_RECEIVED = 2,
  ANSWER_BUFFERED = 3,
};
enum {                                               // attribute_id
  RESPONSE_CODE = 15,
  RESPONSE_CODE_DETAILS = 16,
  RESPONSE_FLAGS = 17,
  RESPONSE_SIZE = 21,
};

// Not called: 1.38 has not got it, and its attributes lack the response's flags, details and size.
void envoy_dynamic_module_callback_cluster_get_name(void);

bool envoy_dynamic_module_callback_http_get_cluster_name(void*, bytes*);
void envoy_dynamic_module_callback_http_set_buffer_limit(void*, uint64_t);
bool envoy_dynamic_module_callback_http_set_upstream_override_host(void*, bytes, bool);
size_t envoy_dynamic_module_callback_http_get_headers_size(void*, int);
bool envoy_dynamic_module_callback_http_get_headers(void*, int, header*);
bool envoy_dynamic_module_callback_http_get_header(void*, int, bytes, bytes*, size_t, size_t*);
bool envoy_dynamic_module_callback_http_set_header(void*, int, bytes, bytes);
void envoy_dynamic_module_callback_http_set_dynamic_metadata_string(void*, bytes, bytes, bytes);
void envoy_dynamic_module_callback_http_set_dynamic_metadata_number(void*, bytes, bytes, double);
size_t envoy_dynamic_module_callback_http_get_body_size(void*, int);
size_t envoy_dynamic_module_callback_http_get_body_chunks_size(void*, int);
bool envoy_dynamic_module_callback_http_get_body_chunks(void*, int, bytes*);
bool envoy_dynamic_module_callback_http_append_body(void*, int, bytes);
bool envoy_dynamic_module_callback_http_drain_body(void*, int, size_t);
void envoy_dynamic_module_callback_http_send_response(void*, uint32_t, header*, size_t, bytes, bytes);
void envoy_dynamic_module_callback_http_send_response_headers(void*, header*, size_t, bool);
void envoy_dynamic_module_callback_http_send_response_data(void*, bytes, bool);
int envoy_dynamic_module_callback_http_filter_start_http_stream(void*, uint64_t*, bytes, header*, size_t, bytes, bool,
                                                                uint64_t);
void envoy_dynamic_module_callback_http_filter_reset_http_stream(void*, uint64_t);
void envoy_dynamic_module_callback_http_filter_reset_stream(void*, int, bytes);
void envoy_dynamic_module_callback_http_clear_route_cache(void*);
void envoy_dynamic_module_callback_http_filter_continue_decoding(void*);
void envoy_dynamic_module_callback_http_filter_continue_encoding(void*);
bool envoy_dynamic_module_callback_http_received_buffered_response_body(void*);
bool envoy_dynamic_module_callback_http_filter_recreate_stream(void*, header*, size_t);
int envoy_dynamic_module_callback_http_filter_http_callout(void*, uint64_t*, bytes, header*, size_t, bytes, uint64_t);
bool envoy_dynamic_module_callback_http_filter_get_attribute_int(void*, int, uint64_t*);
bool envoy_dynamic_module_callback_http_filter_get_attribute_string(void*, int, bytes*);
void* envoy_dynamic_module_callback_http_filter_scheduler_new(void*);
void envoy_dynamic_module_callback_http_filter_scheduler_commit(void*, uint64_t);
void envoy_dynamic_module_callback_http_filter_scheduler_delete(void*);
int envoy_dynamic_module_callback_http_filter_config_http_callout(void*, uint64_t*, bytes, header*, size_t, bytes,
                                                                  uint64_t);
void* envoy_dynamic_module_callback_http_filter_config_scheduler_new(void*);
void envoy_dynamic_module_callback_http_filter_config_scheduler_commit(void*, uint64_t);
void envoy_dynamic_module_callback_http_filter_config_scheduler_delete(void*);

// request is a filter of Envoy's as this library has it, or a configuration of one.
typedef struct {
  uintptr_t handle;  // of the Go value; 0: it has none
  bool hold;         // pieces of the answer are shown to it ...
  bool passes;       // ... but for whole events without a mark
  bool counts;       // the tokens of what the client gets are counted ...
  bool events;       // ... which is a stream of events ...
  bool within;       // ... whose next byte is not the first of a line
  uint64_t first;    // when the client got the first byte of the answer's body ...
  uint64_t last;     // ... and, if it is counted, the last; 0: none
  bool streams;      // it makes D's leg by itself, and sends the answer
  bool upstream;     // it stands behind the router, and holds the answers of pairs
  void* envoy;       // likewise: Envoy's filter
  char pair[32];     // likewise: the pair's key; "": none
} request;

uint64_t tandem_now(void);  // hooks.c

#endif
