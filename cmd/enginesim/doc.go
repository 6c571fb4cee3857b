// Command enginesim stands in for an inference engine: it implements vLLM 0.32's HTTP APIs and NIXL's hand-over of KV
// between a prefill and a decode engine, without a model or a GPU. It is stricter than vLLM: if a real engine would
// silently answer from wrong KV, enginesim returns an error and counts it in a metric that every test expects to be
// zero. It needs only Go, imports nothing of this module, and starts in a few milliseconds.
//
//	enginesim --listen 127.0.0.1:8101 --role prefill &
//	enginesim --listen 127.0.0.1:8201 --role decode &
//	curl -s 127.0.0.1:8201/v1/chat/completions -H 'content-type: application/json' \
//	     -d '{"model":"tiny","messages":[{"role":"user","content":"hello"}]}'
//
// # APIs
//
// POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /inference/v1/generate, each whole or as
// server-sent events; /v1/embeddings, /tokenize, /detokenize, /v1/audio/transcriptions (answers the number of received
// bytes and their SHA-256), /v1/models, /v1/load_lora_adapter and /v1/unload_lora_adapter (an adapter is one more name
// of the model), /health, /version, /metrics, /reset_prefix_cache. Answers, errors and metrics have the fields of
// vLLM 0.32.0, recorded from a running one (testdata/vllm-0.32.0, replay_test.go). HTTP/1.1 and h2c.
//
// A token is four bytes of text. The answer is a function of *every* token of the prompt, by way of the KV blocks that
// hold them: one wrong block changes the text. A prompt of token ids that ends with the beginning of an answer goes on
// with that answer, if the request has return_token_ids (or comes with LMCache's first token). Streams hold text back
// for stop strings as vLLM's do. Its length is max_tokens, or 16 to 48 tokens if that is absent. Forced
// tool calls (tool_choice required or named) are answered with arguments that fit the schema.
//
// # How the parts work together
//
// This package reads the flags. The rest is in e2e/enginesim, and imports go one way: api, request, connector,
// handover, engine, jsontext; fault, which injects failures, is used by api and connector.
//
//  1. request reads a body with jsontext: the members that all five APIs share, the errors that vLLM finds at once,
//     and the prompt: the content of each KV block it fills, as a hash of everything up to there (engine/tokens.go).
//  2. engine/cache.go gives it blocks: numbered ones, least recently used first, with a prefix cache over them.
//  3. engine/job.go takes it through admission, KV load, prefill and decode, at the speeds of the flags.
//  4. connector moves KV between engines, one file for each dialect. With NIXL P keeps a finished prefill leg's blocks
//     under a lease (handover/ledger.go) and answers kv_transfer_params; D asks P's side channel for them and sends
//     the content that it expects; P checks, hands over, and frees. neuron is NIXL's parameters under another key.
//     connector/turns.go is NIXL in both directions (-bidirectional): a decode engine keeps an answer for the
//     conversation's next turn.
//  5. engine/output.go plans the answer; api/openai_*.go, anthropic.go and generate.go write it, sse.go sends streams.
//
// # Dialects whose legs run at once
//
// -connector sglang makes it an SGLang server (role both: without --disaggregation-mode): both legs carry a room, D
// looks P up at P's bootstrap server (-bootstrap), P waits for D before it computes, and POST /generate exists.
// mooncake has a bootstrap server with /query, transfer ids, and cancels unless P finished because of its length;
// nixl-push writes from P into D. Legs wait for each other for at most -transfer-timeout (300 s), and keep their
// blocks meanwhile: SGLang's P until it learns that D is gone, vLLM's D if its client has left and P has not sent. A
// room or transfer id that is used twice is a violation (key_reused). moriio is the same with its own members.
// connector/rendezvous.go is where legs meet; pdbuffer is where LMCache's P pushes.
//
// # Strict and faithful
//
// It refuses everything that vLLM refuses: bad bodies, limits, unknown models, stream_options without stream,
// min_tokens above max_tokens, kv_transfer_params that are not an object. A failed KV load (dead side channel, after
// --load-timeout; wrong engine; blocks that do not exist) is 500, or computed locally with
// --kv-load-failure=recompute. A stream has sent its 200 before the load starts, so there a failure is an event, as in
// vLLM.
//
// Requests that kill a real engine kill this one (ports closed, exit status 70): do_remote_prefill without block ids,
// or with ids that are not lists of integers; and, once the client has given up waiting, without remote_host,
// remote_port, remote_engine_id or remote_request_id.
//
// Violations are requests that vLLM would answer with 200 and the wrong text, now or in a later release. Each is a 500
// of type EngineSimViolation (in a stream: an error event) and counted in enginesim_violations_total{kind}:
//
//	read_twice               the same parameters a second time
//	expired                  after the lease
//	released                 after the hand-over was released
//	unknown_request          a remote_request_id that P never gave out
//	fewer_blocks             fewer block ids than the prompt has blocks
//	foreign_blocks           another request's block ids
//	other_prompt             the blocks hold the KV of another prompt
//	request_id_mismatch      the two legs' x-request-id differ
//	missing_request_id       a leg with kv_transfer_params and no x-request-id
//	stale_blocks_on_prefill  do_remote_decode together with remote_block_ids, where -bidirectional is not set
//	turn_not_longer          a prompt that ends where the blocks kept of an earlier answer do
//	wrong_way                blocks kept for a prefill engine, read by a decode engine, or the other way round
//	incomplete_params        parameters that lack something the other side needs (offload, trtllm)
//	forbidden_keys           remote_prefiller with another key of the P2P tier
//	bad_disagg_id            a disagg_request_id that is no integer from 2^42 on
//	first_token_asked        ret_first_tok, although nothing delivers the token to the client
//	spec_on_decode           disagg_spec at an engine that does not push
//	nothing_to_encode        a request without media at an encode engine
//	not_for_encode           text, a stream or KV parameters there
//	foreign_encoding         ec_transfer_params with media that the prompt does not have
//	unknown_encoding         ... that the encode engine never had, or has dropped
//	altered_params           ... that differ from what the encode engine wrote
//	buffer_exhausted         prompts waited for each other's part of LMCache's buffer
//
// With --faithful they are vLLM's own 200, counted as well, and the text is wrong exactly where the KV was: after a
// lease, once another prompt has got the blocks (few --blocks). A duplicate key at the top level of a body is a 400;
// with --faithful the last one wins.
//
// # Time and memory
//
// P keeps a finished prefill leg's blocks for --lease by its own clock; they are memory that nothing else gets. A
// decode leg that waits for blocks renews it, every sixth of D's own --lease, to two thirds of P's from then on. So two
// engines of both roles can wait for each other's memory for ever, as real ones do, until clients leave.
//
// The engine's core can stand still (mode stall): no admission, no token, no fetch, no heartbeat, no free block, no
// count changes; /health, /metrics, a stream's 200 and the side channel answer. A D that goes on after P's lease reads
// blocks that are another's: expired. With --bidirectional an engine answers where it keeps an answer's blocks, and
// until when, to any kv_transfer_params but those of a prefill leg ({"clock":1}): remote_blocks_expiry_time, by a clock
// of its own that no other engine shares. A hand-over that carries it is not read if P's clock says that less than 5 s
// are left: a failed load, computed with --kv-load-failure=recompute, and counted on D in
// vllm:nixl_num_kv_expired_reqs_total, as P counts the leases that ended (vLLM 0.32.0, nixl/pull_worker.py:125-162).
//
// # Other connectors
//
//	-connector neuron    P keeps the KV of every request of one token; D reads disagg_prefill_resp.kv_transfer_params
//	-connector offload   remote_decoder and remote_prefiller: by name, on the side channel; a miss is computed
//	-connector trtllm    disaggregated_params; ids of more than 53 bits, compared as text
//	-connector shared    a store in the engine that -store names; requests have no parameters
//	-connector lmcache   disagg_spec: P pushes to D's ports (-lmcache-init-port, -lmcache-alloc-port, one for each
//	                     -tp) and notifies -proxy, as -notices and -kv-delay say; -pd-buffer bounds what waits at D
//
// -role encode is an engine that only makes embeddings of media and answers ec_transfer_params (api/encode.go). Any
// other engine fetches the embeddings that these name, once, and encodes the rest of a chat's media by itself: encoded
// and encoded_here in /sim/requests.
//
// A spec that lacks a member, or a port for a rank, ends a prefill engine, as in LMCache. These connectors follow the
// source of LMCache 0.5.6, vLLM 0.33.0 and TensorRT-LLM of 2026; they were not recorded from running engines.
//
// Requests on an engine of the wrong role are served, as vLLM does, and counted in enginesim_role_mismatch_total.
//
// # KV events
//
// With --kv-events the prefix cache's blocks are published as vLLM publishes them: stored, removed, all cleared, in
// three frames over ZeroMQ, numbered for each process; --kv-events-replay serves the latest of them again. Events are
// maps, as in vLLM 0.24 and later, or arrays with --kv-events-arrays. A block's name is its cache key. POST
// /sim/kv-events {"lose":n} drops the next n batches. enginesim_kv_events_subscribers is the number of connected
// subscribers.
//
// With --host-blocks there is CPU memory behind the GPU's, as with vLLM's offloading: what is stored in GPU memory is
// copied there and loaded back from there, at --load-rate. Its events have the medium CPU and no token ids.
//
// # What tests and benchmarks use
//
//	GET    /sim/requests?n=&id=  the last n requests (of one x-request-id), oldest first: bytes, headers, leg, timings
//	GET    /sim/state            running, waiting, blocks in use and held, hand-overs by outcome, violations
//	POST   /sim/reset            clears all of that, the prefix cache and the failure rules
//	POST   /sim/fail             inject a failure; GET lists the rules, DELETE clears them
//
// If the client of a decode leg leaves, P is notified as by vLLM: at once if the leg waited to be scheduled, with the
// end of the transfer if that had begun, and not at all if the leg was given up before the engine knew of it.
//
// A failure rule, also taken by --fail (one, or a list):
//
//	{"mode":"status","status":503,"leg":"prefill","count":2,"retry_after":1}
//
// mode: status, reset-before-headers, reset-mid-body, hang, slow (delay "1s"), garbage-body, abort, empty-params,
// null-params, malformed-params (params: the value to answer with), die-in-stream and stream-reset-after (events:
// complete events to send; half of another follows), comment (streams begin with one), keep-alive-race (close a
// kept HTTP/1.1 connection as a request arrives on it), refuse (delay: how long the port stays closed), die,
// restart (die, and after delay start with the same ports and flags, but no KV and a new id; warmup: answer 503 for
// so long, as --warmup), stall (the core stands still for delay, or until cleared), unreachable (the side channel:
// no other engine can load this one's KV).
//
// leg: prefill, decode, plain, any. path: one path only. contains: bodies with that text only. busy: only while at
// least so many requests run or wait, as an engine whose queue is full. count: how often; 0: until cleared. skip: how
// many requests to let through first. for: how long the rule holds ("8s"). A failure strikes before the engine sees the
// request, so P keeps the blocks for a failed decode leg until the lease ends; a spoilt hand-over frees its blocks.
//
// enginesim_blocks_held is the number of blocks that P handed over and no D has fetched yet; tests expect it and the
// violations to be zero at the end. For benchmarks use --record=false: no request is kept and none is hashed.
package main
