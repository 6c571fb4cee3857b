package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"
)

// call is one generating request on its way through the engine.
type call struct {
	s       *sim
	w       http.ResponseWriter
	r       *http.Request
	req     *request
	rec     *record
	rule    *failRule // an injected failure that strikes later
	xid     string    // the client's x-request-id, "" for none
	id      string    // of the answer
	created int64     // Unix seconds
	seqs    []*sequence

	fetched bool // the hand-over that the parameters name was read, or released
	events  int  // of a stream, so far
}

// serveCall answers one of the generating paths.
func (s *sim) serveCall(w http.ResponseWriter, r *http.Request, a api) {
	rec := s.records.start(r)
	defer rec.finish()
	c := &call{s: s, w: w, r: r, rec: rec, xid: r.Header.Get("X-Request-Id"), created: time.Now().Unix()}
	body, put, err := s.body(w, r)
	defer put()
	if err != nil {
		c.req = &request{api: a}
		c.refuseBody(err)
		return
	}
	s.records.setBody(rec, body)
	var room [24]member
	req, bad := parseRequest(a, body, room[:0], s.cfg.connector, s.cfg.faithful)
	c.req = req
	if s.cfg.connector == connectorNeuron && s.cfg.role == rolePrefill && req.maxTokens == 1 {
		req.kv.remoteDecode = true // nobody says so there: this is what a prefill engine is for
	}
	if spec := req.kv.spec; spec != nil && req.kv.fatal == "" && (len(spec.init) != s.cfg.tp || len(spec.alloc) != s.cfg.tp) {
		req.kv.fatal = "IndexError: the receiver has not one port for each rank"
	}
	if media, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); !strings.EqualFold(strings.TrimSpace(media), "application/json") {
		bad = badRequest("Unsupported Media Type: Only 'application/json' is allowed")
	}
	if s.cfg.pushes() {
		req.kv = s.cfg.parsePush(req.raw("kv_transfer_params"))
	}
	if s.cfg.connector == connectorNCCL && s.cfg.role != roleBoth && a != apiResponses {
		req.roomLeg = string(s.cfg.role)
	}
	if s.roomed() {
		req.roomLeg = string(s.cfg.role)
	}
	leg := req.leg()
	s.metrics.requests.add(r.URL.Path+"\x00"+leg, 1)
	rec.set(func() { rec.Leg, rec.Model, rec.Stream = leg, req.model, req.stream })
	if s.dying.Load() {
		c.reset()
		return
	}
	if c.inject(s.fail.take(leg, r.URL.Path, req.stream)) {
		return
	}
	if bad == nil && s.cfg.role == roleEncode {
		c.encode()
		return
	}
	if bad == nil {
		bad = c.check(leg)
	}
	if bad != nil {
		c.releaseRemote()
		c.refuse(bad)
		return
	}
	c.serve()
}

// refuseBody answers a body that could not be read: too large, or cut off.
func (c *call) refuseBody(err error) {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		c.refuse(&apiError{status: http.StatusRequestEntityTooLarge, typ: "BadRequestError", message: "Request body too large"})
		return
	}
	c.s.metrics.aborted.Add(1)
	c.rec.setAborted()
	c.reset()
}

// check is everything between the parsed body and the engine's queue.
func (c *call) check(leg string) *apiError {
	if bad := c.req.checkModel(c.s.cfg); bad != nil {
		return bad
	}
	if bad := c.req.continued(c.s.responses); bad != nil {
		return bad
	}
	c.req.keepIDs = c.s.events != nil || c.fetchesTurn() || c.s.cfg.connector == connectorLMCache || isTrue(c.req.raw("return_logprob"))
	prompts, bad := c.req.render(c.s.cfg.blockSize)
	if bad != nil {
		return bad
	}
	tokens := 0
	for _, p := range prompts {
		tokens += p.n
	}
	c.rec.set(func() { c.rec.PromptTokens = tokens })
	if bad := c.req.checkLength(prompts, c.s.cfg); bad != nil {
		return bad
	}
	if bad := c.takeEncodings(); bad != nil {
		return bad
	}
	if c.s.roomed() {
		if c.s.cfg.role == rolePrefill {
			c.req.maxTokens, c.req.minTokens = 1, 0
		}
		c.prepare(prompts)
		return c.checkRooms(len(prompts))
	}
	c.checkRole(leg)
	c.prepare(prompts)
	if c.req.roomLeg != "" {
		return c.checkAddresses()
	}
	return c.checkProtocol()
}

// checkRole counts requests that are served although they belong elsewhere.
func (c *call) checkRole(leg string) {
	kind := ""
	switch role := c.s.cfg.role; {
	case role == roleDecode && leg == "prefill":
		kind = "prefill_on_decode"
	case role == rolePrefill && leg == "decode":
		kind = "decode_on_prefill"
	case role == rolePrefill && leg == "plain" && c.req.maxTokens != 1:
		kind = "plain_on_prefill"
	case leg == "prefill" && c.req.maxTokens != 1 && !c.req.kv.context:
		kind = "prefill_of_many_tokens"
	case leg == "prefill" && c.req.stream:
		kind = "prefill_streamed"
	}
	if kind != "" {
		c.s.metrics.roleMismatch.add(kind, 1)
	}
}

// checkProtocol is stricter than vLLM: rules whose breach costs nothing today and another request's KV tomorrow.
func (c *call) checkProtocol() *apiError {
	if c.s.cfg.faithful {
		return nil
	}
	var v *violation
	switch kv := &c.req.kv; {
	case kv.broken != nil:
		v = kv.broken
	case c.s.cfg.connector == connectorLMCache && c.s.cfg.role == roleDecode && kv.present && kv.spec == nil:
		v = &violation{"params_on_decode", "kv_transfer_params of no use to the engine that receives"}
	case kv.spec != nil && c.s.cfg.role == roleDecode:
		v = &violation{"spec_on_decode", "disagg_spec is for the engine that pushes"}
	case c.turnBreach() != nil:
		v = c.turnBreach()
	case (kv.remoteDecode || kv.remotePrefill || kv.spec != nil) && c.xid == "":
		v = &violation{"missing_request_id", "a leg with kv_transfer_params needs an x-request-id"}
	default:
		return nil
	}
	return c.breached(v)
}

// serve runs the call and answers it.
func (c *call) serve() {
	kv := &c.req.kv
	switch {
	case kv.fatal != "":
		c.refuse(engineDead())
		_ = http.NewResponseController(c.w).Flush() // the client has its 500 before the engine goes
		c.s.die(kv.fatal)
		return
	case kv.parked != "":
		c.park()
		return
	case kv.incomplete != "": // registered no receive, and yet parked: it waits until the client leaves, and then raises
		c.s.metrics.waitingDeferred.Add(1)
		<-c.r.Context().Done()
		c.s.metrics.waitingDeferred.Add(-1)
		c.rec.setAborted()
		c.s.die("KeyError: " + kv.incomplete + " (decode request without it was aborted)")
		return
	}
	c.id = c.answerID()
	if c.req.stream {
		c.serveStream()
		return
	}
	if err := c.generate(c.r.Context(), nil); err != nil {
		c.answerError(err)
		return
	}
	c.recordUsage()
	body := c.answerer().whole(c)
	c.keepResponse(body)
	c.writeAnswerBody(body)
}

func (c *call) answerID() string {
	id := c.xid
	if id == "" {
		id = c.s.random.hex16()
	}
	switch c.req.api {
	case apiCompletions:
		return "cmpl-" + id
	case apiResponses: // ResponsesRequest.request_id: the client's, else random
		if raw := c.req.raw("request_id"); len(raw) > 2 && raw[0] == '"' {
			return string(unquote(raw))
		}
		return "resp_" + c.s.random.hex16()
	case apiGenerate:
		return id
	}
	return "chatcmpl-" + id
}

// answerError answers what went wrong in the engine. Nobody hears it if the client has gone.
func (c *call) answerError(err error) {
	if errors.Is(err, context.Canceled) || errors.Is(err, errAborted) {
		return
	}
	c.refuse(asAPIError(err))
}

func (c *call) refuse(e *apiError) {
	c.writeBody(e.status, "application/json", e.json(c.req.api))
}

// tellLoad adds vLLM's ORCA header where the request asks for it (entrypoints/openai/orca_metrics.py, 0.13): two figures, for
// two of the APIs.
func (c *call) tellLoad() {
	if c.req.api != apiChat && c.req.api != apiCompletions {
		return
	}
	usage, waiting := c.s.pool.usage(), float64(c.s.metrics.waitingCapacity.Load()+c.s.metrics.waitingDeferred.Load())
	switch c.r.Header.Get("endpoint-load-metrics-format") {
	case "JSON":
		c.w.Header().Set("endpoint-load-metrics", fmt.Sprintf(`JSON {"named_metrics":{"kv_cache_usage_perc":%v,"num_requests_waiting":%.1f}}`, usage, waiting))
	case "TEXT":
		c.w.Header().Set("endpoint-load-metrics", fmt.Sprintf("TEXT named_metrics.kv_cache_usage_perc=%v, named_metrics.num_requests_waiting=%.1f", usage, waiting))
	}
}

func (c *call) writeBody(status int, contentType string, body []byte) {
	c.w.Header().Set("Content-Type", contentType)
	if status == http.StatusOK {
		c.tellLoad()
	}
	c.rec.setStatus(status)
	c.rec.set(func() { c.rec.AnswerBytes += len(body) })
	writeWith(c.w, status, body)
}

// writeAnswerBody answers 200, unless a failure was injected for half way.
func (c *call) writeAnswerBody(body []byte) {
	if c.rule != nil && c.rule.Mode == failMidReset {
		c.rec.setStatus(http.StatusOK)
		c.w.Header().Set("Content-Type", "application/json")
		writeLength(c.w, len(body))
		c.w.WriteHeader(http.StatusOK)
		_, _ = c.w.Write(body[:len(body)/2])
		_ = http.NewResponseController(c.w).Flush()
		c.reset()
		return
	}
	c.writeBody(http.StatusOK, "application/json", body)
}

// reset breaks the connection: RST on HTTP/1.1, RST_STREAM on HTTP/2.
func (c *call) reset() {
	c.rec.set(func() {
		if c.rec.Outcome == "running" {
			c.rec.Outcome = "reset"
		}
	})
	conn, _, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

// recordUsage puts the token counts into the record.
func (c *call) recordUsage() {
	c.rec.set(func() {
		for _, q := range c.seqs {
			c.rec.CachedTokens += q.local(c.s.cfg.blockSize)
			c.rec.ExternalTokens += q.external
			c.rec.CompletionTokens += q.out.n
		}
	})
}

// usage is what an answer says about tokens.
type usage struct {
	prompt, completion int
	cached             int
	created            int // tokens of blocks newly put into the prefix cache
}

// usage adds up the call's tokens. On a decode engine that fetched its KV, cached is what the *prefill* engine had in
// its cache (remote_prefill_cached_tokens); where nobody said, everything was.
func (c *call) usage() usage {
	var u usage
	blockSize := c.s.cfg.blockSize
	for _, q := range c.seqs {
		u.completion += q.out.n
		if q.choice > 0 {
			continue
		}
		u.prompt += q.p.n
		switch {
		case q.external == 0:
			u.cached += q.local(blockSize)
			u.created += (len(q.p.full) - q.grant.hits) * blockSize
		case c.req.kv.present && c.req.kv.cachedOnP >= 0:
			u.cached += int(c.req.kv.cachedOnP)
		default:
			u.cached += q.p.n
		}
	}
	return u
}

// handOver is the call's kv_transfer_params: those of the first prompt, and of its last choice.
func (c *call) handOver() []byte {
	if c.s.cfg.connector == connectorTRTLLM {
		return []byte("null")
	}
	for _, q := range slices.Backward(c.seqs) {
		if q.index == 0 && q.handOver != nil {
			return q.handOver
		}
	}
	return []byte("null")
}
