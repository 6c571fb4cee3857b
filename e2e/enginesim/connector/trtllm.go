package connector

import (
	"context"
	"encoding/base64"
	"net"
	"strconv"
	"strings"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// TensorRT-LLM's disaggregated_params, context first. Ids are compared as text and have more than 53 bits, which
// reveals a router that turns one into a float.

// leastDisaggID is the least id that a router may choose; smaller ones are an engine's own (disaggregated_params.py).
const leastDisaggID = 1 << 42

// parseDisaggregated reads disaggregated_params.
func parseDisaggregated(raw []byte) (kv Params) {
	if !jsontext.IsObject(raw) {
		return kv
	}
	kv.Present, kv.CachedOnP = true, -1
	disaggID := jsontext.Get(raw, "disagg_request_id")
	if jsontext.IsNull(disaggID) {
		disaggID = nil
	}
	n, ok := jsontext.Integer(disaggID)
	if disaggID != nil && (!ok || n < leastDisaggID) {
		kv.Broken = &engine.Violation{Kind: "bad_disagg_id",
			Message: "disagg_request_id is " + string(disaggID) + ", not an integer from 2^42 on"}
	}
	contextID := string(jsontext.Get(raw, "ctx_request_id"))
	style, _ := jsontext.Integer(jsontext.Get(raw, "schedule_style"))
	kv.genFirst = style == 1
	if kv.genFirst && disaggID == nil {
		kv.Broken = &engine.Violation{Kind: "bad_disagg_id",
			Message: "schedule_style 1 without a disagg_request_id, by which the legs meet"}
	}
	switch string(jsontext.Text(jsontext.Get(raw, "request_type"))) {
	case "context_only":
		kv.RemoteDecode, kv.Context, kv.keepAs = true, true, string(disaggID)
	case "generation_only":
		kv.RemotePrefill = true
		if _, ok := jsontext.Integer([]byte(contextID)); !ok {
			kv.Broken = &engine.Violation{Kind: "incomplete_params",
				Message: "generation_only with ctx_request_id " + contextID}
			return kv
		}
		kv.requestID = contextID + "/" + string(disaggID)
		if kv.genFirst {
			kv.readInfoEndpoint(contextID, string(disaggID),
				string(jsontext.Text(jsontext.Get(raw, "ctx_info_endpoint"))))
			return kv
		}
		kv.readOpaque(jsontext.Text(jsontext.Get(raw, "encoded_opaque_state")))
	default:
		kv.Broken = &engine.Violation{Kind: "incomplete_params", Message: "an unknown request_type"}
	}
	return kv
}

// readOpaque reads P's location, whose form is the engine's own affair.
func (kv *Params) readOpaque(state []byte) {
	plain, err := base64.StdEncoding.DecodeString(string(state))
	id, addr, ok := strings.Cut(string(plain), "@")
	host, port, bad := net.SplitHostPort(addr)
	if err != nil || !ok || bad != nil {
		kv.Broken = &engine.Violation{Kind: "incomplete_params",
			Message: "encoded_opaque_state is not this engine's kind of"}
		return
	}
	kv.engineID, kv.host = id, host
	kv.port, _ = strconv.Atoi(port)
}

// readInfoEndpoint reads the address at which P's transfers are arranged, which D gets before P has answered.
func (kv *Params) readInfoEndpoint(contextID, disaggID, endpoint string) {
	kv.keepAs = disaggID
	addr, ok := strings.CutPrefix(endpoint, "tcp://")
	host, port, bad := net.SplitHostPort(addr)
	switch {
	case contextID != disaggID:
		kv.Broken = &engine.Violation{Kind: "incomplete_params",
			Message: "schedule_style 1 with ctx_request_id " + contextID + " and disagg_request_id " + disaggID}
	case !ok || bad != nil:
		kv.Broken = &engine.Violation{Kind: "incomplete_params",
			Message: "schedule_style 1 without P's ctx_info_endpoint"}
	}
	kv.host = host
	kv.port, _ = strconv.Atoi(port)
}

// sendContext returns P's part where both legs run at once: it waits in its scheduler until D is there, computes, and
// writes.
func (l *Leg) sendContext(ctx context.Context) error {
	s, key := l.Node, "trtllm "+l.Kv.keepAs
	held := l.hold()
	defer s.Rooms.Held.Add(-held)
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.TransferTimeout, errTransferTimeout)
	defer cancel()
	r, err := s.Rooms.enter(key)
	if err != nil {
		return err
	}
	defer s.Rooms.close(key)
	select {
	case <-r.join:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := l.Job.Prefill(ctx); err != nil {
		return err
	}
	select {
	case <-r.gone:
		<-ctx.Done()
		return context.Cause(ctx)
	default:
	}
	q := l.Job.Seqs[0]
	r.answer <- s.send(q.P, r.want)
	q.HandOver = s.appendDisaggregated(nil, l.Kv.keepAs, l.Kv.keepAs)
	return nil
}

// receiveContext returns D's.
func (l *Leg) receiveContext(ctx context.Context) error {
	held := l.hold()
	defer l.Node.Rooms.Held.Add(-held)
	l.fetched = true // there is nothing that P would keep
	actual, err := l.Node.join(ctx, l.Kv.addr(), "trtllm "+l.Kv.keepAs, l.Job.Seqs[0].P)
	if err != nil {
		return err
	}
	l.took(l.Job.Seqs[0], actual)
	return nil
}

// StopAfterContext cuts an answer after its first token, as a context server does by itself. An answer that ends there
// anyway is complete.
func StopAfterContext(q *engine.Sequence) {
	if q.Out.N <= 1 {
		return
	}
	first := q.Out.Token(0)
	q.Out.Literal, q.Out.Text, q.Out.Tool = true, first, ""
	q.Out.N, q.Out.Finish, q.Out.StopReason = 1, "not_finished", "null"
}

// over reports whether a context server has nothing to hand over: the answer is complete.
func over(q *engine.Sequence) bool { return q.Out.Finish == "stop" || q.Out.Finish == "tool_calls" }

// appendDisaggregated appends disaggregated_params of a context server's answer.
func (s *Node) appendDisaggregated(dst []byte, contextID, disaggID string) []byte {
	opaque := s.EngineID + "@" + net.JoinHostPort(s.SideHost, strconv.Itoa(s.SidePort))
	dst = append(dst, `{"request_type":"context_only","first_gen_tokens":[7],"ctx_request_id":`+contextID...)
	dst = jsontext.AppendStr(dst, "encoded_opaque_state", base64.StdEncoding.EncodeToString([]byte(opaque)))
	dst = append(dst, `,"draft_tokens":null`...)
	if disaggID != "" {
		dst = append(dst, `,"disagg_request_id":`+disaggID...)
	}
	return append(dst, `,"ctx_dp_rank":0,"ctx_info_endpoint":null,"schedule_style":0}`...)
}
