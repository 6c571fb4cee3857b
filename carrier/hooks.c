//go:build cgo

// Hooks in C: those that have nothing to do, or mostly (an answer's pieces pass here without a call of Go), and when
// the others were called.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#include <time.h>

#include "abi.h"

#include "_cgo_export.h"

// needed are the functions of Envoy that abi.h declares. Envoy 1.39 and 1.40 have them all, as they are declared there.
static const char* const needed[] = {
    "envoy_dynamic_module_callback_cluster_get_name",
    "envoy_dynamic_module_callback_http_append_body",
    "envoy_dynamic_module_callback_http_clear_route_cache",
    "envoy_dynamic_module_callback_http_drain_body",
    "envoy_dynamic_module_callback_http_filter_config_http_callout",
    "envoy_dynamic_module_callback_http_filter_config_scheduler_commit",
    "envoy_dynamic_module_callback_http_filter_config_scheduler_delete",
    "envoy_dynamic_module_callback_http_filter_config_scheduler_new",
    "envoy_dynamic_module_callback_http_filter_continue_decoding",
    "envoy_dynamic_module_callback_http_filter_continue_encoding",
    "envoy_dynamic_module_callback_http_filter_get_attribute_int",
    "envoy_dynamic_module_callback_http_filter_get_attribute_string",
    "envoy_dynamic_module_callback_http_filter_http_callout",
    "envoy_dynamic_module_callback_http_filter_recreate_stream",
    "envoy_dynamic_module_callback_http_filter_reset_http_stream",
    "envoy_dynamic_module_callback_http_filter_reset_stream",
    "envoy_dynamic_module_callback_http_filter_scheduler_commit",
    "envoy_dynamic_module_callback_http_filter_scheduler_delete",
    "envoy_dynamic_module_callback_http_filter_scheduler_new",
    "envoy_dynamic_module_callback_http_filter_start_http_stream",
    "envoy_dynamic_module_callback_http_get_body_chunks",
    "envoy_dynamic_module_callback_http_get_body_chunks_size",
    "envoy_dynamic_module_callback_http_get_body_size",
    "envoy_dynamic_module_callback_http_get_cluster_name",
    "envoy_dynamic_module_callback_http_get_header",
    "envoy_dynamic_module_callback_http_get_headers",
    "envoy_dynamic_module_callback_http_get_headers_size",
    "envoy_dynamic_module_callback_http_received_buffered_response_body",
    "envoy_dynamic_module_callback_http_send_response",
    "envoy_dynamic_module_callback_http_send_response_data",
    "envoy_dynamic_module_callback_http_send_response_headers",
    "envoy_dynamic_module_callback_http_set_buffer_limit",
    "envoy_dynamic_module_callback_http_set_dynamic_metadata_number",
    "envoy_dynamic_module_callback_http_set_dynamic_metadata_string",
    "envoy_dynamic_module_callback_http_set_header",
    "envoy_dynamic_module_callback_http_set_upstream_override_host",
};

// Go's monitor thread naps for 20 µs again and again, since Envoy's workers call Go all the time: a fourth of the CPU of
// an insured stream. Naps may last 4 ms longer here (docs/adr/0087). The thread inherits that from the one that loads the
// library, before Go starts. That one gets its own slack back when Envoy calls program_init.
#ifdef __linux__
static int slack; // ns

__attribute__((constructor(101))) static void beforeGo(void) {
  slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
  prctl(PR_SET_TIMERSLACK, 4000000, 0, 0, 0);
}

static void afterGo(void) {
  if (slack > 0) prctl(PR_SET_TIMERSLACK, slack, 0, 0, 0);
}
#else
static void afterGo(void) {}
#endif

// An Envoy without one of them would end at its first call of it, so the library does not start there.
const char* envoy_dynamic_module_on_program_init(void) {
  afterGo();
  for (size_t i = 0; i < sizeof(needed) / sizeof(needed[0]); i++) {
    if (dlsym(RTLD_DEFAULT, needed[i]) == NULL) {
      fprintf(stderr, "tandem: libtandem.so is for Envoy 1.39 and 1.40; this one has no %s\n", needed[i]);
      return NULL;
    }
  }
  return "v0.2.0";
}

// now is when a hook was called, in nanoseconds: a call of Go may have to wait for a processor of its own, and the worker
// with it.
static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t tandem_now(void) { return now(); }

// A filter behind the router sees every request of its cluster, and only those of pairs have a key for it.
static const bytes key = {"x-tandem-pair", 13};

static int upstreamRequest(request* r) {
  bytes value;
  if (envoy_dynamic_module_callback_http_get_header(r->envoy, REQUEST_HEADERS, key, &value, 0, NULL) &&
      value.length < sizeof(r->pair)) {
    memcpy(r->pair, value.at, value.length);
    envoy_dynamic_module_callback_http_set_header(r->envoy, REQUEST_HEADERS, key, (bytes){NULL, 0});
  }
  return 0;
}

const void* envoy_dynamic_module_on_http_filter_new(const void* config, void* envoy) {
  if (!((const request*)config)->upstream) return newFilter((void*)config, envoy);
  request* r = calloc(1, sizeof(request));
  r->upstream = true;
  r->envoy = envoy;
  return r;
}

void envoy_dynamic_module_on_http_filter_destroy(const void* f) {
  request* r = (request*)f;
  if (!r->upstream) {
    destroyFilter(r);
  } else if (r->pair[0] != 0) {
    upstreamGone(r);
  }
  free(r);
}

int envoy_dynamic_module_on_http_filter_request_headers(void* e, const void* f, bool end) {
  request* r = (request*)f;
  return r->upstream ? upstreamRequest(r) : requestHeaders(r, end, now());
}

int envoy_dynamic_module_on_http_filter_request_body(void* e, const void* f, bool end) {
  request* r = (request*)f;
  return r->upstream ? 0 : requestBody(r, end, now());
}

int envoy_dynamic_module_on_http_filter_request_trailers(void* e, const void* f) {
  request* r = (request*)f;
  return r->upstream ? 0 : requestTrailers(r, now());
}

int envoy_dynamic_module_on_http_filter_response_headers(void* e, const void* f, bool end) {
  request* r = (request*)f;
  if (!r->upstream) return responseHeaders(r, end, now());
  return r->pair[0] != 0 ? upstreamAnswer(r) : 0;
}

// says reports whether a text has a member with a name, which ends in a quote, and an object.
static bool says(bytes text, const char* name) {
  const char *at = text.at, *end = text.at + text.length;
  while ((at = memmem(at, end - at, name, strlen(name))) != NULL) {
    at += strlen(name);
    const char* p = at;
    while (p < end && (*p == ' ' || *p == '\t' || *p == ':')) p++;
    if (p < end && *p == '{') return true;
  }
  return false;
}

// given notes when the client got bytes, and reports whether this piece has any.
static bool given(request* r, void* e) {
  if (envoy_dynamic_module_callback_http_get_body_chunks_size(e, ANSWER_RECEIVED) == 0 ||
      envoy_dynamic_module_callback_http_get_body_size(e, ANSWER_RECEIVED) == 0) {
    return false;
  }
  r->last = now();
  if (r->first == 0) r->first = r->last;
  return true;
}

// single returns the piece of the answer if it is one part in memory.
static bool single(void* e, bytes* piece) {
  return envoy_dynamic_module_callback_http_get_body_chunks_size(e, ANSWER_RECEIVED) == 1 &&
         envoy_dynamic_module_callback_http_get_body_chunks(e, ANSWER_RECEIVED, piece);
}

// count looks at a piece that the client gets. Of a stream most are whole events that say no tokens: they need no Go.
static void count(request* r, void* e) {
  bytes one;
  if (!given(r, e)) return;
  if (r->events && !r->within && single(e, &one) && one.at[one.length - 1] == '\n' && !says(one, "usage\"") &&
      !says(one, "meta_info\"")) {
    return;
  }
  r->within = counted(r);
}

static bool has(bytes text, const char* mark) { return memmem(text.at, text.length, mark, strlen(mark)) != NULL; }

// unmarked reports whether the piece of a stream that begins with an event consists of whole events none of which an
// option would change (package answer, Marked): most of a stream. They need no Go.
static bool unmarked(void* e) {
  bytes one;
  if (envoy_dynamic_module_callback_http_get_body_size(e, ANSWER_RECEIVED) == 0) return true;
  if (!single(e, &one) || one.length < 4) return false;
  const char* end = one.at + one.length;
  return (memcmp(end - 2, "\n\n", 2) == 0 || memcmp(end - 4, "\r\n\r\n", 4) == 0) && !has(one, "_tokens\"") &&
         !has(one, "kv_transfer_params\"");
}

int envoy_dynamic_module_on_http_filter_response_body(void* e, const void* f, bool end) {
  request* r = (request*)f;
  int status = r->hold && !(r->passes && unmarked(e)) ? responseBody(r, end, now()) : 0;
  if (status == 0 && r->counts) count(r, e);
  else if (status == 0 && r->first == 0) given(r, e); // the time to the first token needs no count
  return status;
}

int envoy_dynamic_module_on_http_filter_response_trailers(void* e, const void* f) {
  request* r = (request*)f;
  return r->hold && responseBody(r, true, now()) != 0;
}

void envoy_dynamic_module_on_http_filter_scheduled(void* e, const void* f, uint64_t event) {
  scheduled((request*)f, now());
}

void envoy_dynamic_module_on_http_filter_stream_complete(void* e, const void* f) {
  if (!((const request*)f)->upstream) complete((request*)f, now());
}

void envoy_dynamic_module_on_http_filter_http_callout_done(void* e, const void* f, uint64_t call, int result,
                                                           header* headers, size_t n, bytes* body, size_t pieces) {
  calloutDone((request*)f, result, headers, n, body, pieces, now());
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
