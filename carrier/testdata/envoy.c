// An Envoy that is none: it loads libtandem.so and calls its hooks as Envoy 1.40 does, in an order, with pieces and at
// times that chance chooses, from several workers. It plays client, endpoints and network. What it lends to the library
// ends at a page that nobody may read, and is gone when the hook returns: who reads beyond, or later, crashes. What the
// library may not do (a request that is gone, a call from another thread) ends it, too.
//
//   envoy LIBRARY tandem.yaml SEED REQUESTS   (of each worker; e2e.TestInsideFakeEnvoy)
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../abi.h"

#define WORKERS 4
#define AT_ONCE 6
#define die(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), abort())

// The library's hooks.
static struct {
  const char* (*init)(void);
  const void* (*config_new)(const void*, bytes, bytes);
  void (*config_destroy)(const void*);
  void (*config_scheduled)(void*, const void*, uint64_t);
  void (*config_done)(void*, const void*, uint64_t, int, header*, size_t, bytes*, size_t);
  const void* (*filter_new)(const void*, void*);
  void (*destroy)(const void*);
  int (*request_headers)(void*, const void*, bool);
  int (*request_body)(void*, const void*, bool);
  int (*request_trailers)(void*, const void*);
  int (*response_headers)(void*, const void*, bool);
  int (*response_body)(void*, const void*, bool);
  int (*response_trailers)(void*, const void*);
  void (*scheduled)(void*, const void*, uint64_t);
  void (*complete)(void*, const void*);
  void (*callout_done)(void*, const void*, uint64_t, int, header*, size_t, bytes*, size_t);
  void (*stream_headers)(void*, const void*, uint64_t, header*, size_t, bool);
  void (*stream_data)(void*, const void*, uint64_t, bytes*, size_t, bool);
  void (*stream_trailers)(void*, const void*, uint64_t, header*, size_t);
  void (*stream_reset)(void*, const void*, uint64_t, int);
  void (*stream_complete)(void*, const void*, uint64_t);
  void (*above)(void*, const void*);
  void (*below)(void*, const void*);
} hook;

// Chance.
static __thread uint64_t state;
static uint64_t chance(void) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}
static bool one_in(unsigned n) { return chance() % n == 0; }

// Memory that is lent for a hook.
typedef struct lent {
  struct lent* next;
  void* at;
  size_t size;
} lent;
static __thread lent* lents;
static __thread int depth;  // of hooks that run on this thread

static bytes lend(const void* data, size_t n) {
  size_t page = 4096, size = (n + page - 1) / page * page + page;
  char* at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) die("no memory");
  char* begin = at + size - page - n;
  memcpy(begin, data, n);
  mprotect(at + size - page, page, PROT_NONE);
  lent* l = malloc(sizeof(lent));
  *l = (lent){lents, at, size};
  lents = l;
  return (bytes){begin, n};
}

static void enter(void) { depth++; }
static void leave(void) {
  if (--depth > 0) return;
  while (lents != NULL) {
    lent* l = lents;
    lents = l->next;
    munmap(l->at, l->size);
    free(l);
  }
}

// Text that grows.
typedef struct {
  char* at;
  size_t n;
} text;
static void set(text* t, const void* data, size_t n) {
  char* at = malloc(n + 1);
  memcpy(at, data, n);
  at[n] = 0;
  free(t->at);
  t->at = at, t->n = n;
}
static void add(text* t, const void* data, size_t n) {
  t->at = realloc(t->at, t->n + n + 1);
  memcpy(t->at + t->n, data, n);
  t->at[t->n += n] = 0;
}
static void cut(text* t, size_t n) {
  memmove(t->at, t->at + n, t->n - n);
  t->n -= n;
}

// Headers.
#define MOST 48
typedef struct {
  text name[MOST], value[MOST];
  int n;
} headers;
static void put(headers* h, const char* name, const char* value, size_t n) {
  int i = 0;
  while (i < h->n && strcmp(h->name[i].at, name) != 0) i++;
  if (i == MOST) die("too many headers");
  if (i == h->n) set(&h->name[h->n++], name, strlen(name));
  set(&h->value[i], value, n);
}
static void say(headers* h, const char* name, const char* value) { put(h, name, value, strlen(value)); }
static void drop(headers* h, const char* name) {
  for (int i = 0; i < h->n; i++) {
    if (strcmp(h->name[i].at, name) != 0) continue;
    free(h->name[i].at), free(h->value[i].at);
    h->n--;
    h->name[i] = h->name[h->n], h->value[i] = h->value[h->n];
    h->name[h->n] = h->value[h->n] = (text){0};
    return;
  }
}
static void empty(headers* h) {
  while (h->n > 0) drop(h, h->name[0].at);
}
static header* lend_all(headers* h, size_t* n) {
  header out[MOST];
  for (int i = 0; i < h->n; i++) {
    bytes name = lend(h->name[i].at, h->name[i].n), value = lend(h->value[i].at, h->value[i].n);
    out[i] = (header){name.at, name.length, value.at, value.length};
  }
  *n = h->n;
  return (header*)lend(out, h->n * sizeof(header)).at;
}

// A request, or Envoy's half of one behind the router.
#define LEGS 16
typedef struct request_ {
  uint32_t alive;  // 0x600d
  pthread_t worker;
  const void* filter;
  headers asked, answered;
  text body, received, kept, piece;  // of the request: all of it, and as far as it came; of the answer
  bool begun, asks_on, paused, goes_on, all_in, held, go_answer, answering, over, again, sent, started, stream, buffered;
  size_t at;  // of the answer
  text answer;
  uint64_t calls[LEGS], legs[LEGS];
  int said[LEGS];  // of legs: 0 nothing, 1 headers
  struct request_ *behind, *front;
  _Atomic int scheduled;
} req;

static const void *filter_config, *hold_config;
static _Atomic uint64_t ids = 1, hooks, whole, gone;

static req* check(void* p) {
  req* r = p;
  if (r->alive != 0x600d) die("the library calls for a request that is gone");
  if (depth == 0 || !pthread_equal(r->worker, pthread_self())) die("the library calls outside of a hook");
  return r;
}

static text* part(req* r, int kind) {
  text* all[] = {&r->received, &r->body, &r->piece, &r->kept};
  return all[kind];
}

// What the library calls.
size_t envoy_dynamic_module_callback_http_get_headers_size(void* p, int kind) {
  req* r = check(p);
  return kind == REQUEST_HEADERS ? r->asked.n : r->answered.n;
}
bool envoy_dynamic_module_callback_http_get_headers(void* p, int kind, header* out) {
  req* r = check(p);
  size_t n;
  header* all = lend_all(kind == REQUEST_HEADERS ? &r->asked : &r->answered, &n);
  memcpy(out, all, n * sizeof(header));
  return true;
}
bool envoy_dynamic_module_callback_http_get_header(void* p, int kind, bytes key, bytes* out, size_t index, size_t* n) {
  req* r = check(p);
  headers* h = kind == REQUEST_HEADERS ? &r->asked : &r->answered;
  for (int i = 0; i < h->n; i++) {
    if (h->name[i].n == key.length && memcmp(h->name[i].at, key.at, key.length) == 0) {
      *out = lend(h->value[i].at, h->value[i].n);
      return true;
    }
  }
  *out = (bytes){0};
  return false;
}
bool envoy_dynamic_module_callback_http_set_header(void* p, int kind, bytes key, bytes value) {
  req* r = check(p);
  headers* h = kind == REQUEST_HEADERS ? &r->asked : &r->answered;
  text name = {0};
  set(&name, key.at, key.length);
  drop(h, name.at);
  if (value.at != NULL) put(h, name.at, value.at, value.length);
  free(name.at);
  return true;
}
void envoy_dynamic_module_callback_http_set_dynamic_metadata_string(void* p, bytes a, bytes b, bytes c) { check(p); }
void envoy_dynamic_module_callback_http_set_dynamic_metadata_number(void* p, bytes a, bytes b, double v) { check(p); }
size_t envoy_dynamic_module_callback_http_get_body_size(void* p, int kind) { return part(check(p), kind)->n; }
size_t envoy_dynamic_module_callback_http_get_body_chunks_size(void* p, int kind) {
  size_t n = part(check(p), kind)->n;
  return n == 0 ? 0 : n < 3 ? 1 : 2 - n % 2;
}
bool envoy_dynamic_module_callback_http_get_body_chunks(void* p, int kind, bytes* out) {
  text* t = part(check(p), kind);
  if (t->n == 0) return true;
  if (t->n < 3 || t->n % 2 == 1) {
    out[0] = lend(t->at, t->n);
  } else {
    out[0] = lend(t->at, t->n / 2), out[1] = lend(t->at + t->n / 2, t->n - t->n / 2);
  }
  return true;
}
bool envoy_dynamic_module_callback_http_append_body(void* p, int kind, bytes b) {
  add(part(check(p), kind), b.at, b.length);
  return true;
}
bool envoy_dynamic_module_callback_http_drain_body(void* p, int kind, size_t n) {
  text* t = part(check(p), kind);
  if (n > t->n) die("more is drained than there is");
  if (n > 0) cut(t, n);
  return true;
}
bool envoy_dynamic_module_callback_http_received_buffered_response_body(void* p) { return check(p)->buffered; }

static void end(req* r) {
  if (r->over) return;
  r->over = true;
  if (r->behind != NULL) {
    req* b = r->behind;
    enter();
    hook.destroy(b->filter);
    leave();
    b->alive = 0, b->over = true;
  }
  enter();
  if (r->front == NULL) hook.complete(r, r->filter);
  leave();
  enter();
  hook.destroy(r->filter);
  leave();
  r->alive = 0;
}

void envoy_dynamic_module_callback_http_send_response(void* p, uint32_t status, header* h, size_t n, bytes body,
                                                      bytes details) {
  req* r = check(p);
  if (r->sent) die("two answers");
  r->sent = true;
  for (size_t i = 0; i < n; i++) lend(h[i].name, h[i].name_length), lend(h[i].value, h[i].value_length);
  lend(body.at, body.length);
}
void envoy_dynamic_module_callback_http_send_response_headers(void* p, header* h, size_t n, bool last) {
  req* r = check(p);
  for (size_t i = 0; i < n; i++) lend(h[i].name, h[i].name_length), lend(h[i].value, h[i].value_length);
  r->started = true;
  if (last) end(r);  // before this returns
}
void envoy_dynamic_module_callback_http_send_response_data(void* p, bytes b, bool last) {
  req* r = check(p);
  if (!r->started) die("data before headers");
  lend(b.at, b.length);
  if (last) end(r);
}
static int slot(uint64_t* in) {
  for (int i = 0; i < LEGS; i++) {
    if (in[i] == 0) return i;
  }
  return -1;
}
int envoy_dynamic_module_callback_http_filter_http_callout(void* p, uint64_t* id, bytes cluster, header* h, size_t n,
                                                           bytes body, uint64_t timeout) {
  req* r = check(p);
  int i = slot(r->calls);
  if (i < 0 || one_in(12)) return 1;
  for (size_t k = 0; k < n; k++) lend(h[k].name, h[k].name_length), lend(h[k].value, h[k].value_length);
  lend(body.at, body.length);
  *id = r->calls[i] = ids++;
  return 0;
}
int envoy_dynamic_module_callback_http_filter_start_http_stream(void* p, uint64_t* id, bytes cluster, header* h, size_t n,
                                                                bytes body, bool last, uint64_t timeout) {
  req* r = check(p);
  int i = slot(r->legs);
  if (i < 0 || one_in(12)) return 1;
  lend(body.at, body.length);
  *id = r->legs[i] = ids++, r->said[i] = 0;
  if (one_in(10)) {
    r->legs[i] = 0;
    hook.stream_reset(r, r->filter, *id, 0);
  }
  return 0;
}
void envoy_dynamic_module_callback_http_filter_reset_http_stream(void* p, uint64_t id) {
  req* r = check(p);
  for (int i = 0; i < LEGS; i++) {
    if (id != 0 && r->legs[i] == id) {
      r->legs[i] = 0;
      if (!r->over) hook.stream_reset(r, r->filter, id, 1);
    }
  }
}
void envoy_dynamic_module_callback_http_filter_reset_stream(void* p, int why, bytes details) { check(p)->sent = true; }
void envoy_dynamic_module_callback_http_clear_route_cache(void* p) { check(p); }
void envoy_dynamic_module_callback_http_filter_continue_decoding(void* p) { check(p)->goes_on = true; }
void envoy_dynamic_module_callback_http_filter_continue_encoding(void* p) { check(p)->go_answer = true; }
bool envoy_dynamic_module_callback_http_filter_recreate_stream(void* p, header* h, size_t n) {
  req* r = check(p);
  if (r->started || one_in(10)) return false;
  r->again = true;
  end(r);
  return true;
}
bool envoy_dynamic_module_callback_http_filter_get_attribute_int(void* p, int id, uint64_t* out) {
  check(p);
  *out = id == RESPONSE_CODE ? 200 : one_in(2) ? 0 : chance();
  return !one_in(4);
}
bool envoy_dynamic_module_callback_http_filter_get_attribute_string(void* p, int id, bytes* out) {
  check(p);
  *out = lend("via_upstream", 12);
  return !one_in(4);
}
typedef struct {
  _Atomic int deleted;
  req* of;
} scheduler;
void* envoy_dynamic_module_callback_http_filter_scheduler_new(void* p) {
  scheduler* s = calloc(1, sizeof(scheduler));
  s->of = check(p);
  return s;
}
void envoy_dynamic_module_callback_http_filter_scheduler_commit(void* p, uint64_t event) {
  scheduler* s = p;  // kept, and so are requests: a commit after the end is found
  if (s->deleted) die("a commit by a scheduler that is deleted");
  s->of->scheduled++;
}
void envoy_dynamic_module_callback_http_filter_scheduler_delete(void* p) { ((scheduler*)p)->deleted = 1; }
void envoy_dynamic_module_callback_cluster_get_name(void) {}
bool envoy_dynamic_module_callback_http_get_cluster_name(void* p, bytes* name) { return check(p)->alive == 0; }
void envoy_dynamic_module_callback_http_set_buffer_limit(void* p, uint64_t limit) { check(p); }
bool envoy_dynamic_module_callback_http_set_upstream_override_host(void* p, bytes host, bool strict) { return check(p)->alive != 0; }

// Calls of the configuration: the main thread's.
static _Atomic int config_scheduled;
static uint64_t config_calls[256];
int envoy_dynamic_module_callback_http_filter_config_http_callout(void* p, uint64_t* id, bytes cluster, header* h, size_t n,
                                                                  bytes body, uint64_t timeout) {
  for (int i = 0; i < 256; i++) {
    if (config_calls[i] != 0) continue;
    if (one_in(12)) break;
    lend(body.at, body.length);
    *id = config_calls[i] = ids++;
    return 0;
  }
  return 1;
}
void* envoy_dynamic_module_callback_http_filter_config_scheduler_new(void* p) { return &config_scheduled; }
void envoy_dynamic_module_callback_http_filter_config_scheduler_commit(void* p, uint64_t e) { config_scheduled++; }
void envoy_dynamic_module_callback_http_filter_config_scheduler_delete(void* p) {}

// What clients and endpoints say.
static void spoil(text* t) {
  if (!one_in(5)) return;
  for (int k = chance() % 4; k >= 0 && t->n > 0; k--) t->at[chance() % t->n] = (char)chance();
  if (one_in(3)) t->n = chance() % (t->n + 1);
}

static const char* const models[] = {"nixl", "nixl-push", "sglang", "mooncake", "nixl", "nobody"};

static void ask(req* r) {
  static const char* const paths[] = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/v1/chat/completions"};
  char b[300000];
  const char *path = paths[chance() % 5], *model = models[chance() % 6];
  bool stream = r->stream = chance() % 2;
  int words = one_in(30) ? 40000 : one_in(3) ? 3000 : 20, n;
  if (strcmp(path, "/v1/completions") == 0) {
    n = sprintf(b, "{\"model\":\"%s\",\"stream\":%s,\"max_tokens\":20,\"temperature\":0,\"prompt\":\"%d", model, stream ? "true" : "false", (int)(chance() % 50));
  } else {
    n = sprintf(b, "{\"model\":\"%s\",\"stream\":%s,\"max_tokens\":20,\"temperature\":0,\"messages\":[{\"role\":\"user\",\"content\":\"%d", model, stream ? "true" : "false", (int)(chance() % 50));
  }
  for (int i = 0; i < words; i++) n += sprintf(b + n, " word");
  n += sprintf(b + n, strcmp(path, "/v1/completions") == 0 ? "\"}" : "\"}]}");
  bool get = path[1] != 'v' || path[4] == 'm';
  say(&r->asked, ":method", get ? "GET" : "POST");
  say(&r->asked, ":path", path);
  say(&r->asked, ":authority", "fake");
  say(&r->asked, ":scheme", "http");
  say(&r->asked, "content-type", "application/json");
  char id[40];
  sprintf(id, "fake-%lu", (unsigned long)ids++);
  if (!one_in(8)) say(&r->asked, "x-request-id", id);
  if (one_in(2)) say(&r->asked, "x-insured", "yes");
  if (one_in(20)) say(&r->asked, "x-tandem-attempt", "forged");
  if (!get) set(&r->answer, b, n);  // for now: what is to be received
  spoil(&r->answer);
}

static void prefilled(text* t) {
  static const char one[] =
      "{\"id\":\"cmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"tiny\",\"choices\":[{\"index\":0,\"message\":"
      "{\"role\":\"assistant\",\"content\":\"a\"},\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":20,"
      "\"completion_tokens\":1,\"total_tokens\":21},\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":"
      "false,\"remote_block_ids\":[[1,2]],\"remote_engine_id\":\"e\",\"remote_request_id\":\"chatcmpl-1\",\"remote_host\":"
      "\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1}}";
  set(t, one, sizeof(one) - 1);
  spoil(t);
}

static void decoded(req* r) {
  r->at = 0;
  empty(&r->answered);
  char b[8000];
  int n = 0, tokens = chance() % 20;
  if (one_in(6)) {
    n = sprintf(b, "{\"error\":{\"message\":\"no\",\"type\":\"x\",\"code\":503}}");
    say(&r->answered, ":status", one_in(2) ? "503" : one_in(2) ? "429" : "400");
  } else if (r->stream) {
    say(&r->answered, ":status", "200");
    say(&r->answered, "content-type", "text/event-stream");
    for (int i = 0; i < tokens; i++) {
      n += sprintf(b + n, "data: {\"id\":\"c\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"w \"},\"token_ids\":[%d]%s}]}\n\n", i,
                   i == 0 ? ",\"prompt_token_ids\":[1,2,3]" : "");
    }
    if (!one_in(4)) n += sprintf(b + n, "data: {\"id\":\"c\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":%d}}\n\ndata: [DONE]\n\n", tokens);
  } else {
    say(&r->answered, ":status", "200");
    say(&r->answered, "content-type", "application/json");
    n = sprintf(b, "{\"id\":\"c\",\"choices\":[{\"index\":0,\"message\":{\"content\":\"w\"}}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}");
  }
  if (!one_in(10)) say(&r->answered, "x-envoy-upstream-service-time", "3");
  set(&r->answer, b, n);
  spoil(&r->answer);
}

#define RUN(r, call)    \
  do {                  \
    hooks++;            \
    enter();            \
    call;               \
    leave();            \
  } while (0)

// pair makes the filter behind the router, for a request of both legs.
static void pair(req* r) {
  req* b = calloc(1, sizeof(req));
  b->alive = 0x600d, b->worker = r->worker, b->front = r;
  for (int i = 0; i < r->asked.n; i++) put(&b->asked, r->asked.name[i].at, r->asked.value[i].at, r->asked.value[i].n);
  RUN(r, b->filter = hook.filter_new(hold_config, b));
  r->behind = b;
  RUN(r, hook.request_headers(b, b->filter, false));
}

// step does one thing that may happen to a request now.
static void step(req* r) {
  if (r->sent || one_in(400)) {  // answered, reset, or the client leaves
    gone += !r->sent;
    end(r);
    return;
  }
  if (r->scheduled > 0) {
    r->scheduled--;
    RUN(r, hook.scheduled(r, r->filter, 0));
    return;
  }
  if (!r->begun) {
    r->begun = true;
    r->all_in = r->answer.n == 0;
    int status;
    RUN(r, status = hook.request_headers(r, r->filter, r->all_in));
    r->paused = status == 4;
    if (status == 0 && !r->over) r->goes_on = true;
    return;
  }
  if (!r->all_in && (!r->paused || r->goes_on)) {
    size_t n = one_in(3) ? 1 + chance() % 200 : r->answer.n - r->at;
    if (n > r->answer.n - r->at) n = r->answer.n - r->at;
    set(&r->received, r->answer.at + r->at, n);
    r->at += n;
    r->all_in = r->at == r->answer.n && !one_in(20);
    RUN(r, hook.request_body(r, r->filter, r->all_in));
    if (r->over) return;
    add(&r->body, r->received.at, r->received.n);
    set(&r->received, "", 0);
    if (!r->all_in && r->at == r->answer.n) {
      r->all_in = true;
      if (one_in(2)) {
        RUN(r, hook.request_trailers(r, r->filter));
      } else {
        RUN(r, hook.request_body(r, r->filter, true));
      }
    }
    return;
  }
  int i = chance() % LEGS;
  if (r->calls[i] != 0) {
    uint64_t id = r->calls[i];
    r->calls[i] = 0;
    text t = {0};
    headers h = {0};
    prefilled(&t);
    say(&h, ":status", one_in(8) ? "503" : one_in(20) ? "400" : "200");
    say(&h, "content-type", "application/json");
    if (!one_in(10)) say(&h, "x-envoy-upstream-service-time", "3");
    enter();
    size_t n;
    header* lentHeaders = lend_all(&h, &n);
    bytes two[2] = {lend(t.at, t.n / 2), lend(t.at + t.n / 2, t.n - t.n / 2)};
    hooks++;
    if (one_in(10)) {
      hook.callout_done(r, r->filter, id, 1, NULL, 0, NULL, 0);
    } else {
      hook.callout_done(r, r->filter, id, 0, lentHeaders, n, (bytes*)lend(two, sizeof two).at, 2);
    }
    leave();
    empty(&h), free(t.at);
    return;
  }
  if (r->legs[i] != 0) {
    uint64_t id = r->legs[i];
    if (r->said[i] == 0) {
      decoded(r);
      r->said[i] = 1;
      enter();
      size_t n;
      header* h = lend_all(&r->answered, &n);
      hooks++;
      hook.stream_headers(r, r->filter, id, h, n, false);
      leave();
    } else if (one_in(20)) {
      r->legs[i] = 0;
      RUN(r, hook.stream_reset(r, r->filter, id, 0));
    } else {
      size_t n = one_in(2) ? 1 + chance() % 300 : r->answer.n;
      if (n > r->answer.n - r->at) n = r->answer.n - r->at;
      bool last = r->at + n == r->answer.n;
      enter();
      bytes b = lend(r->answer.at + r->at, n);
      r->at += n;
      if (last) r->legs[i] = 0;
      hooks++;
      hook.stream_data(r, r->filter, id, (bytes*)lend(&b, sizeof b).at, 1, last);
      if (last && !r->over) hook.stream_complete(r, r->filter, id);
      leave();
    }
    if (!r->over && r->started && one_in(8)) RUN(r, hook.above(r, r->filter));
    if (!r->over && r->started && one_in(4)) RUN(r, hook.below(r, r->filter));
    return;
  }
  if (!r->goes_on || r->started) return;
  if (!r->answering) {  // D answers
    if (r->behind == NULL) {
      for (int k = 0; k < r->asked.n; k++) {
        if (strcmp(r->asked.name[k].at, "x-tandem-pair") == 0) {
          pair(r);
          break;
        }
      }
    }
    if (one_in(3)) return;
    decoded(r);
    r->answering = true;
    req* b = r->behind;
    if (b != NULL) {
      for (int k = 0; k < r->answered.n; k++) put(&b->answered, r->answered.name[k].at, r->answered.value[k].at, r->answered.value[k].n);
      int status;
      RUN(r, status = hook.response_headers(b, b->filter, false));
      b->held = status != 0 && !b->go_answer;
    }
    return;
  }
  if (r->behind != NULL && r->behind->held) {
    r->behind->held = !r->behind->go_answer;
    return;
  }
  if (!r->asks_on) {
    r->asks_on = true;
    int status;
    RUN(r, status = hook.response_headers(r, r->filter, false));
    r->held = status != 0;
    return;
  }
  if (r->held) {
    if (!r->go_answer) return;
    r->held = false;
  }
  if (r->at < r->answer.n) {
    size_t n = one_in(2) ? 1 + chance() % 300 : r->answer.n;
    if (n > r->answer.n - r->at) n = r->answer.n - r->at;
    set(&r->piece, r->answer.at + r->at, n);
    r->at += n;
    int status;
    RUN(r, status = hook.response_body(r, r->filter, r->at == r->answer.n));
    if (r->over) return;
    if (status == 0) {
      set(&r->kept, "", 0);
    } else {
      add(&r->kept, r->piece.at, r->piece.n);
    }
    set(&r->piece, "", 0);
    return;
  }
  if (one_in(3)) {
    int status;
    RUN(r, status = hook.response_trailers(r, r->filter));
    if (r->over || status != 0) return;
  }
  whole++;
  end(r);
}

static req* new_request(req* before) {
  req* r = calloc(1, sizeof(req));  // never freed: what comes late is found
  r->alive = 0x600d, r->worker = pthread_self();
  if (before != NULL) {  // it begins again
    for (int i = 0; i < before->asked.n; i++) put(&r->asked, before->asked.name[i].at, before->asked.value[i].at, before->asked.value[i].n);
    set(&r->answer, before->body.at != NULL ? before->body.at : "", before->body.n);
    r->stream = before->stream;
  } else {
    ask(r);
  }
  enter();
  r->filter = hook.filter_new(filter_config, r);
  leave();
  return r;
}

static unsigned long seed, requests;

static void* work(void* number) {
  state = seed * 7919 + (uint64_t)(uintptr_t)number * 104729 + 1;
  req* all[AT_ONCE] = {0};
  unsigned long left = requests;
  for (uint64_t turn = 0;; turn++) {
    int open = 0;
    for (int i = 0; i < AT_ONCE; i++) {
      if (all[i] != NULL && all[i]->over) {
        req* before = all[i];
        all[i] = before->again ? new_request(before) : NULL;
        text* big[] = {&before->body, &before->answer, &before->kept, &before->piece, &before->received};
        for (int k = 0; k < 5; k++) free(big[k]->at), *big[k] = (text){0};
      }
      if (all[i] == NULL && left > 0) all[i] = new_request(NULL), left--;
      if (all[i] != NULL) step(all[i]), open++;
    }
    if (open == 0) return NULL;
    if (turn % 16 == 0) usleep(50);
  }
}

static void main_thread(void) {
  if (config_scheduled > 0) {
    config_scheduled--;
    RUN(0, hook.config_scheduled((void*)1, filter_config, 0));
  }
  int i = chance() % 256;
  if (config_calls[i] == 0) return;
  uint64_t id = config_calls[i];
  config_calls[i] = 0;
  text t = {0};
  headers h = {0};
  prefilled(&t);
  say(&h, ":status", one_in(8) ? "503" : "200");
  say(&h, "x-envoy-upstream-service-time", "3");
  enter();
  size_t n;
  header* lentHeaders = lend_all(&h, &n);
  bytes b = lend(t.at, t.n);
  hook.config_done((void*)1, filter_config, id, one_in(10), lentHeaders, n, (bytes*)lend(&b, sizeof b).at, 1);
  leave();
  empty(&h), free(t.at);
}

int main(int argc, char** argv) {
  if (argc != 5) die("usage: envoy LIBRARY tandem.yaml SEED REQUESTS");
  seed = strtoul(argv[3], NULL, 10), requests = strtoul(argv[4], NULL, 10);
  state = seed + 1;
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) die("%s", dlerror());
#define FIND(field, name) \
  if ((*(void**)&hook.field = dlsym(library, "envoy_dynamic_module_on_" name)) == NULL) die("no %s", name)
  FIND(init, "program_init");
  FIND(config_new, "http_filter_config_new");
  FIND(config_destroy, "http_filter_config_destroy");
  FIND(config_scheduled, "http_filter_config_scheduled");
  FIND(config_done, "http_filter_config_http_callout_done");
  FIND(filter_new, "http_filter_new");
  FIND(destroy, "http_filter_destroy");
  FIND(request_headers, "http_filter_request_headers");
  FIND(request_body, "http_filter_request_body");
  FIND(request_trailers, "http_filter_request_trailers");
  FIND(response_headers, "http_filter_response_headers");
  FIND(response_body, "http_filter_response_body");
  FIND(response_trailers, "http_filter_response_trailers");
  FIND(scheduled, "http_filter_scheduled");
  FIND(complete, "http_filter_stream_complete");
  FIND(callout_done, "http_filter_http_callout_done");
  FIND(stream_headers, "http_filter_http_stream_headers");
  FIND(stream_data, "http_filter_http_stream_data");
  FIND(stream_trailers, "http_filter_http_stream_trailers");
  FIND(stream_reset, "http_filter_http_stream_reset");
  FIND(stream_complete, "http_filter_http_stream_complete");
  FIND(above, "http_filter_downstream_above_write_buffer_high_watermark");
  FIND(below, "http_filter_downstream_below_write_buffer_low_watermark");
  if (hook.init() == NULL) die("the library does not start");
  char config[1000];
  int n = snprintf(config, sizeof config, "{\"file\":\"%s\"}", argv[2]);
  enter();
  filter_config = hook.config_new((void*)1, lend("tandem", 6), lend(config, n));
  hold_config = hook.config_new((void*)2, lend("hold", 4), lend("{}", 2));
  const void* half = hook.config_new((void*)3, lend("tandem", 6), lend("{", 1));
  if (half == NULL) die("half a configuration would take all routes away (docs/adr/0106)");
  hook.config_destroy(half);
  leave();
  if (filter_config == NULL) die("the configuration is refused");
  pthread_t workers[WORKERS];
  for (uintptr_t i = 0; i < WORKERS; i++) pthread_create(&workers[i], NULL, work, (void*)i);
  for (int done = 0; done < WORKERS;) {
    if (pthread_tryjoin_np(workers[done], NULL) == 0) {
      done++;
    } else {
      main_thread();
      usleep(200);
    }
  }
  printf("%lu hooks, %lu whole answers, %lu clients left\n", (unsigned long)hooks, (unsigned long)whole, (unsigned long)gone);
  fflush(stdout);
  struct pollfd in = {0, POLLIN};
  while (poll(&in, 1, 0) == 0) main_thread(), usleep(200);  // until its caller has looked at the replica
  enter();
  hook.config_destroy(hold_config);
  hook.config_destroy(filter_config);
  leave();
  return 0;
}
