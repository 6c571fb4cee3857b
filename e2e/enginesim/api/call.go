package api

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"tandem/e2e/enginesim/connector"
	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/fault"
	"tandem/e2e/enginesim/jsontext"
	"tandem/e2e/enginesim/request"
)

// call is one generating request on its way through the engine.
type call struct {
	*answer

	s    *Server
	n    *connector.Node // the rank that serves it
	w    http.ResponseWriter
	r    *http.Request
	rec  *Record
	rule *fault.Rule // an injected failure that strikes later

	sent int // bytes of the stream, so far
}

// answer is what an API needs to write its answer: the request, and the results of the engine and the connector.
type answer struct {
	*engine.Job

	cfg     *Config
	req     *request.Request
	leg     *connector.Leg
	id      string // of the answer
	tool    string // of its tool call: another one for each answer, as vLLM's
	created int64  // Unix seconds
}

// newCall returns a call for a request that is not read yet.
func (s *Server) newCall(w http.ResponseWriter, r *http.Request, rec *Record, req *request.Request) *call {
	n := s.Node
	if len(s.ranks) > 1 {
		n = s.ranks[s.rankOf(r, req)]
	}
	rec.set(func() { rec.Rank = n.Rank() })
	j := &engine.Job{E: n.Engine, Sampling: &req.Sampling, Xid: r.Header.Get("X-Request-Id")}
	a := &answer{Job: j, cfg: s.cfg, req: req, tool: engine.Hex16(), created: time.Now().Unix()}
	a.leg = &connector.Leg{Node: n, Job: j, Kv: &req.Kv, Xid: j.Xid, Name: a.internalID}
	j.Transfer = a.leg
	return &call{answer: a, s: s, n: n, w: w, r: r, rec: rec}
}

// serveCall answers one of the generating paths.
func (s *Server) serveCall(w http.ResponseWriter, r *http.Request, a request.API) {
	rec := s.Records.start(r)
	defer rec.finish()
	body, put, err := s.body(w, r)
	defer put()
	if err != nil {
		s.newCall(w, r, rec, &request.Request{API: a}).refuseBody(err)
		return
	}
	s.Records.setBody(rec, body)
	var room [24]jsontext.Member
	req, bad := request.Parse(a, body, room[:0], s.cfg.Connector, s.cfg.Faithful)
	if s.cfg.BeginsAnew {
		req.Kv.PromptIDs = nil
	}
	c := s.newCall(w, r, rec, req)
	s.cfg.Complete(&req.Kv, req.Raw("kv_transfer_params"), req.MaxTokens == 1)
	c.leg.ThrowsAway = req.ThrowsAway()
	media, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";")
	if !strings.EqualFold(strings.TrimSpace(media), "application/json") {
		bad = engine.BadRequest("Unsupported Media Type: Only 'application/json' is allowed")
	}
	leg := req.Leg()
	c.n.Metrics.Requests.Add(r.URL.Path+"\x00"+leg, 1)
	rec.set(func() { rec.Leg, rec.Model, rec.Stream = leg, req.Model, req.Stream })
	if s.dying.Load() {
		c.reset()
		return
	}
	if c.inject(c.takeRule(leg, body)) {
		return
	}
	if bad == nil && s.cfg.Role == engine.RoleEncode {
		c.encode()
		return
	}
	if bad == nil {
		bad = c.check(leg)
	}
	if bad != nil {
		c.leg.Release()
		c.refuse(bad)
		return
	}
	if s.cfg.FirstLogprobs > 0 && c.req.Logprobs >= 0 {
		s.compile.Do(func() { s.ranks.stall(s.cfg.FirstLogprobs) })
	}
	c.serve()
}

// refuseBody answers a body that could not be read: too large, or cut off.
func (c *call) refuseBody(err error) {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		c.refuse(&engine.Error{Status: http.StatusRequestEntityTooLarge, Typ: "BadRequestError",
			Message: "Request body too large"})
		return
	}
	c.n.Metrics.Aborted.Add(1)
	c.rec.setAborted()
	c.reset()
}

// rankOf returns the data-parallel rank of a request: vLLM reads x-data-parallel-rank and ignores anything but a
// number, SGLang the room of a prefill leg, or a member of the body. Requests that name none go to the ranks in
// rotation.
func (s *Server) rankOf(r *http.Request, req *request.Request) uint64 {
	n := uint64(len(s.ranks))
	named := []string{r.Header.Get("X-Data-Parallel-Rank")}
	if s.cfg.Connector == connector.SGLang {
		if s.cfg.Roomed() && s.cfg.Role == engine.RolePrefill {
			first, _, _ := strings.Cut(strings.Trim(string(req.Raw("bootstrap_room")), "[ ]"), ",")
			if room, err := strconv.ParseUint(first, 10, 64); err == nil {
				return room % n
			}
		}
		named = append(named, string(req.Raw("routed_dp_rank")), string(req.Raw("data_parallel_rank")))
	}
	for _, text := range named {
		if rank, err := strconv.ParseUint(text, 10, 64); err == nil && rank < n {
			return rank
		}
	}
	return s.next.Add(1) % n
}

// check makes all checks between parsing the body and the engine's queue.
func (c *call) check(leg string) *engine.Error {
	if bad := c.req.CheckModel(c.s.limits()); bad != nil {
		return bad
	}
	if bad := c.s.responses.load(c.req); bad != nil {
		return bad
	}
	c.req.KeepIDs = c.n.Events != nil || c.leg.FetchesTurn() || c.s.cfg.Connector == connector.LMCache ||
		jsontext.IsTrue(c.req.Raw("return_logprob"))
	prompts, bad := c.req.Render(c.s.cfg.BlockSize)
	if bad != nil {
		return bad
	}
	tokens := 0
	for _, p := range prompts {
		tokens += p.N
	}
	c.rec.set(func() { c.rec.PromptTokens = tokens })
	if bad := c.req.CheckLength(prompts, c.s.limits()); bad != nil {
		return bad
	}
	if bad := c.takeEncodings(); bad != nil {
		return bad
	}
	if c.s.cfg.Roomed() {
		if c.s.cfg.Role == engine.RolePrefill {
			c.req.MaxTokens, c.req.MinTokens = 1, 0
		}
		c.prepare(prompts)
		return c.leg.TakeRooms(connector.RoomMembers{Hosts: c.req.Raw("bootstrap_host"),
			Ports: c.req.Raw("bootstrap_port"), Rooms: c.req.Raw("bootstrap_room")}, len(prompts))
	}
	c.checkRole(leg)
	c.prepare(prompts)
	return c.checkProtocol()
}

// checkRole counts requests that are served by an engine of the wrong role.
func (c *call) checkRole(leg string) {
	kind := ""
	switch role := c.s.cfg.Role; {
	case role == engine.RoleDecode && leg == "prefill":
		kind = "prefill_on_decode"
	case role == engine.RolePrefill && leg == "decode":
		kind = "decode_on_prefill"
	case role == engine.RolePrefill && leg == "plain" && c.req.MaxTokens != 1:
		kind = "plain_on_prefill"
	case leg == "prefill" && c.req.MaxTokens != 1 && !c.req.Kv.Context:
		kind = "prefill_of_many_tokens"
	case leg == "prefill" && c.req.Stream:
		kind = "prefill_streamed"
	}
	if kind != "" {
		c.n.Metrics.RoleMismatch.Add(kind, 1)
	}
}

// checkProtocol is stricter than vLLM: it refuses requests that are harmless today, but may get another request's KV
// in a later release.
func (c *call) checkProtocol() *engine.Error {
	if c.s.cfg.Faithful {
		return nil
	}
	var v *engine.Violation
	switch kv := &c.req.Kv; {
	case kv.Broken != nil:
		v = kv.Broken
	case c.s.cfg.Connector == connector.LMCache && c.s.cfg.Role == engine.RoleDecode && kv.Present && kv.Spec == nil:
		v = &engine.Violation{Kind: "params_on_decode",
			Message: "kv_transfer_params of no use to the engine that receives"}
	case kv.Spec != nil && c.s.cfg.Role == engine.RoleDecode:
		v = &engine.Violation{Kind: "spec_on_decode", Message: "disagg_spec is for the engine that pushes"}
	case c.leg.TurnBreach() != nil:
		v = c.leg.TurnBreach()
	case (kv.RemoteDecode || kv.RemotePrefill || kv.Spec != nil) && c.Xid == "":
		v = &engine.Violation{Kind: "missing_request_id",
			Message: "a leg with kv_transfer_params needs an x-request-id"}
	default:
		return nil
	}
	return c.breached(v)
}

// serve runs the call and answers it.
func (c *call) serve() {
	kv := &c.req.Kv
	switch {
	case kv.Fatal != "":
		c.refuse(engine.Dead())
		_ = http.NewResponseController(c.w).Flush() // the client has its 500 before the engine goes
		c.s.die(kv.Fatal)
		return
	case kv.Parked != "":
		c.n.Wait(c.r.Context())
		c.rec.setAborted()
		return
	case kv.Incomplete != "":
		// the engine registered no receive, and yet parked the request: it waits until the client leaves, and then
		// raises
		c.n.Wait(c.r.Context())
		c.rec.setAborted()
		c.s.die("KeyError: " + kv.Incomplete + " (decode request without it was aborted)")
		return
	}
	c.id = c.answerID()
	if c.req.Stream {
		c.serveStream()
		return
	}
	if err := c.generate(nil); err != nil {
		c.answerError(err)
		return
	}
	c.recordUsage()
	body := c.answerer().whole(c.answer)
	c.keepResponse(body)
	c.writeAnswerBody(body)
}

// generate runs the job, and records how it ended.
func (c *call) generate(emit func(step int) error) error {
	err := c.Run(c.r.Context(), emit)
	if v, ok := errors.AsType[*engine.Violation](err); ok {
		c.rec.set(func() { c.rec.Violation = v.Kind })
	}
	if engine.Aborted(err) {
		c.rec.setAborted()
	}
	return err
}

func (c *call) answerID() string {
	id := c.Xid
	if id == "" {
		id = engine.Hex16()
	}
	switch c.req.API {
	case request.Completions:
		return "cmpl-" + id
	case request.Responses: // ResponsesRequest.request_id: the client's, else random
		if raw := c.req.Raw("request_id"); len(raw) > 2 && raw[0] == '"' {
			return string(jsontext.Unquote(raw))
		}
		return "resp_" + engine.Hex16()
	case request.Generate:
		return id
	}
	return "chatcmpl-" + id
}

// answerError answers with an error of the engine, unless the client has gone.
func (c *call) answerError(err error) {
	if engine.Aborted(err) {
		return
	}
	c.refuse(asAPIError(err))
}

func (c *call) refuse(e *engine.Error) {
	c.writeBody(e.Status, errorBody(e, c.req.API))
}

// reportLoad adds vLLM's ORCA header if the request asks for it (entrypoints/openai/orca_metrics.py, 0.13): two
// figures, for two of the APIs.
func (c *call) reportLoad() {
	if c.req.API != request.Chat && c.req.API != request.Completions {
		return
	}
	usage, waiting := c.n.Pool.Usage(), float64(c.n.Metrics.Waiting())
	switch c.r.Header.Get("endpoint-load-metrics-format") {
	case "JSON":
		c.w.Header().Set("endpoint-load-metrics",
			fmt.Sprintf(`JSON {"named_metrics":{"kv_cache_usage_perc":%v,"num_requests_waiting":%.1f}}`, usage,
				waiting))
	case "TEXT":
		c.w.Header().Set("endpoint-load-metrics",
			fmt.Sprintf("TEXT named_metrics.kv_cache_usage_perc=%v, named_metrics.num_requests_waiting=%.1f", usage,
				waiting))
	}
}

// writeBody writes JSON, or what should be.
func (c *call) writeBody(status int, body []byte) {
	c.w.Header().Set("Content-Type", "application/json")
	if status == http.StatusOK {
		c.reportLoad()
	}
	c.rec.setStatus(status)
	c.rec.set(func() { c.rec.AnswerBytes += len(body) })
	writeWith(c.w, status, body)
}

// writeAnswerBody answers 200, unless an injected failure breaks the answer off.
func (c *call) writeAnswerBody(body []byte) {
	if c.rule != nil && c.rule.Mode == fault.MidReset {
		c.rec.setStatus(http.StatusOK)
		c.w.Header().Set("Content-Type", "application/json")
		writeLength(c.w, len(body))
		c.w.WriteHeader(http.StatusOK)
		_, _ = c.w.Write(body[:len(body)/2])
		_ = http.NewResponseController(c.w).Flush()
		c.reset()
		return
	}
	c.writeBody(http.StatusOK, body)
}

// reset breaks the connection: RST on HTTP/1.1, RST_STREAM on HTTP/2.
func (c *call) reset() { c.hangUp(true) }

// hangUp ends the connection: with a reset, or as one that was idle for too long.
func (c *call) hangUp(reset bool) {
	c.rec.set(func() {
		if c.rec.Outcome == "running" {
			c.rec.Outcome = "reset"
		}
	})
	conn, _, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, ok := conn.(*net.TCPConn); ok && reset {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

// recordUsage puts the token counts into the record.
func (c *call) recordUsage() {
	c.rec.set(func() {
		for _, q := range c.Seqs {
			c.rec.CachedTokens += q.Local(c.s.cfg.BlockSize)
			c.rec.ExternalTokens += q.External
			c.rec.CompletionTokens += q.Out.N
		}
	})
}
