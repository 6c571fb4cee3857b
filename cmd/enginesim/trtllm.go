package main

import (
	"context"
	"encoding/base64"
	"net"
	"net/http"
	"strconv"
	"strings"
)

// TensorRT-LLM's disaggregated_params, context first. Ids are compared as text, so a router that turned one into a float
// is found out: they have more than 53 bits here.

// leastDisaggID is where ids of the router's begin; smaller ones are an engine's own (disaggregated_params.py).
const leastDisaggID = 1 << 42

// parseDisaggregated reads disaggregated_params.
func parseDisaggregated(raw []byte) (kv kvParams) {
	if !isObject(raw) {
		return kv
	}
	kv.present, kv.cachedOnP = true, -1
	disaggID := get(raw, "disagg_request_id")
	if isNull(disaggID) {
		disaggID = nil
	}
	n, ok := integer(disaggID)
	if disaggID != nil && (!ok || n < leastDisaggID) {
		kv.broken = &violation{"bad_disagg_id", "disagg_request_id is " + string(disaggID) + ", not an integer from 2^42 on"}
	}
	contextID := string(get(raw, "ctx_request_id"))
	style, _ := integer(get(raw, "schedule_style"))
	kv.genFirst = style == 1
	if kv.genFirst && disaggID == nil {
		kv.broken = &violation{"bad_disagg_id", "schedule_style 1 without a disagg_request_id, by which the legs meet"}
	}
	switch string(text(get(raw, "request_type"))) {
	case "context_only":
		kv.remoteDecode, kv.context, kv.keepAs = true, true, string(disaggID)
	case "generation_only":
		kv.remotePrefill = true
		if _, ok := integer([]byte(contextID)); !ok {
			kv.broken = &violation{"incomplete_params", "generation_only with ctx_request_id " + contextID}
			return kv
		}
		kv.requestID = contextID + "/" + string(disaggID)
		if kv.genFirst {
			kv.readInfoEndpoint(contextID, string(disaggID), string(text(get(raw, "ctx_info_endpoint"))))
			return kv
		}
		kv.readOpaque(text(get(raw, "encoded_opaque_state")))
	default:
		kv.broken = &violation{"incomplete_params", "an unknown request_type"}
	}
	return kv
}

// readOpaque reads where P is: what an engine puts there is its own affair.
func (kv *kvParams) readOpaque(state []byte) {
	plain, err := base64.StdEncoding.DecodeString(string(state))
	engine, addr, ok := strings.Cut(string(plain), "@")
	host, port, bad := net.SplitHostPort(addr)
	if err != nil || !ok || bad != nil {
		kv.broken = &violation{"incomplete_params", "encoded_opaque_state is not this engine's kind of"}
		return
	}
	kv.engineID, kv.host = engine, host
	kv.port, _ = strconv.Atoi(port)
}

// readInfoEndpoint reads where P's transfers are arranged, which D is told before P has said anything.
func (kv *kvParams) readInfoEndpoint(contextID, disaggID, endpoint string) {
	kv.keepAs = disaggID
	addr, ok := strings.CutPrefix(endpoint, "tcp://")
	host, port, bad := net.SplitHostPort(addr)
	switch {
	case contextID != disaggID:
		kv.broken = &violation{"incomplete_params", "schedule_style 1 with ctx_request_id " + contextID + " and disagg_request_id " + disaggID}
	case !ok || bad != nil:
		kv.broken = &violation{"incomplete_params", "schedule_style 1 without P's ctx_info_endpoint"}
	}
	kv.host = host
	kv.port, _ = strconv.Atoi(port)
}

// sendContext is P's part where both legs run at once: it waits in its scheduler until D is there, computes, and writes.
func (c *call) sendContext(ctx context.Context) error {
	s, key := c.s, "trtllm "+c.req.kv.keepAs
	held := c.hold()
	defer s.rooms.held.Add(-held)
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.transferTimeout, errTransferTimeout)
	defer cancel()
	r, err := s.rooms.enter(key)
	if err != nil {
		return err
	}
	defer s.rooms.close(key)
	select {
	case <-r.join:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := c.prefill(ctx); err != nil {
		return err
	}
	select {
	case <-r.gone:
		<-ctx.Done()
		return context.Cause(ctx)
	default:
	}
	q := c.seqs[0]
	r.answer <- s.send(q.p, &r.want)
	q.handOver = s.appendDisaggregated(nil, c.req.kv.keepAs, c.req.kv.keepAs)
	return nil
}

// receiveContext is D's.
func (c *call) receiveContext(ctx context.Context) error {
	held := c.hold()
	defer c.s.rooms.held.Add(-held)
	c.fetched = true // there is nothing that P would keep
	actual, err := c.s.join(ctx, c.req.kv.addr(), "trtllm "+c.req.kv.keepAs, c.seqs[0].p)
	if err != nil {
		return err
	}
	c.took(c.seqs[0], actual)
	return nil
}

// serveContextInfo is GET /server_info.
func (s *sim) serveContextInfo(w http.ResponseWriter) {
	writeJSONValue(w, map[string]any{"disaggregated_params": map[string]any{
		"ctx_dp_rank": 0, "ctx_info_endpoint": []string{"tcp://" + net.JoinHostPort(s.sideHost, strconv.Itoa(s.sidePort))},
	}})
}

// stopAfterContext cuts an answer after its first token, as a context server does by itself. An answer that ends there
// anyway is complete.
func (q *sequence) stopAfterContext() {
	if q.out.n <= 1 {
		return
	}
	first := q.out.token(0)
	q.out.literal, q.out.text, q.out.tool = true, first, ""
	q.out.n, q.out.finish, q.out.stopReason = 1, "not_finished", "null"
}

// over reports whether a context server has nothing to hand over: the answer is complete.
func (q *sequence) over() bool { return q.out.finish == "stop" || q.out.finish == "tool_calls" }

// appendDisaggregated is disaggregated_params of a context server's answer.
func (s *sim) appendDisaggregated(dst []byte, contextID, disaggID string) []byte {
	opaque := s.engineID + "@" + net.JoinHostPort(s.sideHost, strconv.Itoa(s.sidePort))
	dst = append(dst, `{"request_type":"context_only","first_gen_tokens":[7],"ctx_request_id":`+contextID...)
	dst = appendStr(dst, "encoded_opaque_state", base64.StdEncoding.EncodeToString([]byte(opaque)))
	dst = append(dst, `,"draft_tokens":null`...)
	if disaggID != "" {
		dst = append(dst, `,"disagg_request_id":`+disaggID...)
	}
	return append(dst, `,"ctx_dp_rank":0,"ctx_info_endpoint":null,"schedule_style":0}`...)
}
