package connector

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/handover"
	"tandem/e2e/enginesim/jsontext"
)

// parseKVParams reads valid JSON. The caller refuses a value that is neither object nor null.
func parseKVParams(raw []byte) (kv Params) {
	if jsontext.IsNull(raw) {
		return kv
	}
	kv.Present, kv.CachedOnP = true, -1
	var ids, port, tokens []byte
	jsontext.EachMember(raw, func(key, val []byte) {
		kv.telling = true
		switch string(key) {
		case "do_remote_decode":
			kv.RemoteDecode = jsontext.Truthy(val)
		case "do_remote_prefill":
			kv.RemotePrefill = jsontext.Truthy(val)
		case "remote_block_ids":
			ids = val
		case "remote_engine_id":
			kv.engineID = string(jsontext.Text(val))
		case "remote_request_id":
			kv.requestID = string(jsontext.Text(val))
		case "remote_host":
			kv.host = string(jsontext.Text(val))
		case "remote_port":
			port = val
		case "remote_prefill_cached_tokens":
			if n, ok := jsontext.Integer(val); ok {
				kv.CachedOnP = n
			}
		case "remote_blocks_expiry_time":
			if seconds, err := strconv.ParseFloat(string(val), 64); err == nil {
				kv.expires = time.Duration(seconds * float64(time.Second))
			}
		case "remote_num_tokens":
			tokens = val
		}
	})
	if kv.RemoteDecode && !kv.RemotePrefill && jsontext.Truthy(ids) {
		kv.staleOnP = true
		kv.parseTurn(ids, port, tokens)
	}
	if kv.RemotePrefill {
		kv.parseSource(ids, port)
	}
	return kv
}

// parseSource checks the members that a decode leg needs to find its KV. vLLM's scheduler asserts, parks or raises
// here; it turns nothing into a clean error.
func (kv *Params) parseSource(ids, port []byte) {
	if !jsontext.Truthy(ids) {
		kv.Fatal = "AssertionError: num_external_tokens == 0 (do_remote_prefill without remote_block_ids)"
		return
	}
	var ok bool
	if kv.blockIDs, ok = nestedIDs(ids); !ok {
		kv.Fatal = "TypeError: remote_block_ids must be a list of lists of integers"
		return
	}
	n, isInt := jsontext.Integer(port)
	if jsontext.IsString(port) {
		n, _ = strconv.ParseInt(string(jsontext.Text(port)), 10, 32)
		isInt = true
	}
	kv.port = int(n)
	switch {
	case kv.engineID == "":
		kv.Incomplete = "remote_engine_id"
	case kv.requestID == "":
		kv.Incomplete = "remote_request_id"
	case kv.host == "":
		kv.Incomplete = "remote_host"
	case !isInt:
		kv.Incomplete = "remote_port"
	}
}

// nestedIDs reads [[1,2,3]]: one list for each KV cache group, of which this engine has one.
func nestedIDs(raw []byte) (ids []int32, ok bool) {
	if !jsontext.IsArray(raw) {
		return nil, false
	}
	ok = true
	groups := 0
	jsontext.EachElement(raw, func(group []byte) bool {
		if groups++; groups > 1 || !jsontext.IsArray(group) {
			ok = false
			return false
		}
		ids = make([]int32, 0, len(group)/4)
		jsontext.EachElement(group, func(id []byte) bool {
			n, err := strconv.ParseInt(string(id), 10, 32)
			if err != nil {
				ok = false
			}
			ids = append(ids, int32(n))
			return ok
		})
		return ok
	})
	return ids, ok
}

// appendHandOver appends a prefill engine's kv_transfer_params, in the key order of 0.32. cached < 0 leaves
// remote_prefill_cached_tokens out, as vLLM does when the request outlived its prefill step.
func (s *Node) appendHandOver(dst []byte, requestID string, blocks []int32, tokens, cached int) []byte {
	return s.appendParams(dst, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[`, requestID,
		blocks, tokens, "null", cached)
}

// appendParams appends kv_transfer_params after their head, with remote_blocks_expiry_time; both sides use it.
func (s *Node) appendParams(dst []byte, head, requestID string, blocks []int32, tokens int, expires string,
	cached int) []byte {
	dst = slices.Grow(dst, 512+8*len(blocks))
	dst = append(dst, head...)
	for i, id := range blocks {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(id), 10)
	}
	dst = append(dst, `]],"remote_engine_id":`...)
	dst = jsontext.AppendQuoted(dst, s.EngineID)
	dst = append(dst, `,"remote_request_id":`...)
	dst = jsontext.AppendQuoted(dst, requestID)
	dst = append(dst, `,"remote_host":`...)
	dst = jsontext.AppendQuoted(dst, s.SideHost)
	dst = append(dst, `,"remote_port":`...)
	dst = strconv.AppendInt(dst, int64(s.SidePort), 10)
	dst = append(dst, `,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":`...)
	dst = strconv.AppendInt(dst, int64(tokens), 10)
	dst = append(dst, `,"remote_blocks_expiry_time":`+expires+`,"transfer_mode":"pull"`...)
	if cached >= 0 {
		dst = append(dst, `,"remote_prefill_cached_tokens":`...)
		dst = strconv.AppendInt(dst, int64(cached), 10)
	}
	return append(dst, '}')
}

// fetchKV pulls a decode leg's KV from the prefill engine that its parameters name. It returns the content of the
// prompt's blocks (nil if all is right). The error is errLoadFailed if vLLM's transfer fails, a *violation if vLLM
// would not notice (and the simulator is strict), or the context's.
func (s *Node) fetchKV(ctx context.Context, xid string, kv *Params, p *engine.Prompt, hits int) ([]uint64, error) {
	return s.fetch(ctx, xid, kv, p, hits, false)
}

// fetch is fetchKV, also for KV that a decode engine has kept of an earlier answer (turn).
func (s *Node) fetch(ctx context.Context, xid string, kv *Params, p *engine.Prompt, hits int,
	turn bool) ([]uint64, error) {
	need := engine.BlocksFor(p.N, s.cfg.BlockSize)
	if kv.engineID == s.EngineID && kv.engineID != "" {
		return nil, fmt.Errorf("%w: the parameters name this very engine", engine.ErrLoadFailed)
	}
	req := handover.Question{
		Op: handover.OpPull, EngineID: kv.engineID, RequestID: kv.requestID, Xid: xid, BlockSize: s.cfg.BlockSize,
		KVDtype: s.cfg.KVDtype, Revision: s.cfg.Revision, Tokens: p.N, Turn: turn, Ids: kv.blockIDs,
		Want: make([]uint64, need),
	}
	for i := range req.Want {
		req.Want[i] = p.Content(i)
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.LoadTimeout)
	defer cancel()
	if s.declines(ctx, kv) {
		return nil, fmt.Errorf("%w: declining an expired read of %s", engine.ErrLoadFailed, kv.requestID)
	}
	started := time.Now()
	answer, err := s.peers.Ask(ctx, net.JoinHostPort(kv.host, strconv.Itoa(kv.port)), &req)
	if err != nil {
		<-ctx.Done() // the handshake's receive timeout is always waited out: 5 s in vLLM, however fast the refusal
		if errors.Is(context.Cause(ctx), context.Canceled) {
			return nil, context.Canceled
		}
		s.Metrics.FailedTransfers.Add(1)
		return nil, fmt.Errorf("%w: %w", engine.ErrLoadFailed, err)
	}
	if answer.Refused != "" {
		s.Metrics.FailedTransfers.Add(1)
		return nil, fmt.Errorf("%w: %s", engine.ErrLoadFailed, answer.Refused)
	}
	if err := s.transfer(ctx, need-hits); err != nil {
		return nil, err
	}
	s.Metrics.Transferred(need-hits, s.cfg.BlockSize, time.Since(started))
	if kv.missOK && slices.Contains([]string{"expired", "released", "unknown_request"}, answer.Violation.Kind) {
		return nil, fmt.Errorf("%w: %w", engine.ErrLoadFailed, &answer.Violation)
	}
	if answer.Violation.Kind != "" && !s.cfg.Faithful {
		return nil, &answer.Violation
	}
	if answer.Violation.Kind != "" {
		s.Violate(&answer.Violation, xid)
	}
	return answer.Actual, nil
}

// pulled lets a decode engine read blocks, as far as the two engines fit each other. The handshake's hash has the KV
// cache's dtype, and neither the block size nor the model's revision (0.32.0, nixl/metadata.py,
// compute_nixl_compatibility_hash).
func (s *Node) pulled(q *handover.Question) handover.Answer {
	if q.KVDtype != s.cfg.KVDtype {
		return handover.Answer{Refused: fmt.Sprintf("NIXL compatibility hash mismatch: KV cache dtypes %s and %s",
			q.KVDtype, s.cfg.KVDtype)}
	}
	a := s.Ledger.Pull(s.EngineID, q)
	if a.Refused == "" && a.Violation.Kind == "" && s.otherWeights(q) {
		a = otherWeights(q)
	}
	return a
}

func (s *Node) otherWeights(q *handover.Question) bool {
	return q.Revision != "" && s.cfg.Revision != "" && q.Revision != s.cfg.Revision
}

// otherWeights is what a decode engine gets whose model has other weights: no engine compares them.
func otherWeights(q *handover.Question) handover.Answer {
	return handover.Answer{Actual: slices.Repeat([]uint64{1}, len(q.Want)), Violation: engine.Violation{
		Kind: "other_weights", Message: "the model's revision on the prefill engine is not " + q.Revision}}
}

// expiryMargin is the time for which blocks must still be kept when a read of them begins (_KV_BLOCKS_EXPIRY_SAFETY_
// MARGIN of pull_worker.py, 0.32).
const expiryMargin = 5 * time.Second

// declines reports whether a bidirectional engine gives up a read because the time that the parameters tell is nearly
// over. It counts that among the expired ones, and does not notify the other engine, whose lease goes on.
func (s *Node) declines(ctx context.Context, kv *Params) bool {
	if !s.cfg.Bidirectional || kv.expires == 0 {
		return false
	}
	id, clock := s.peers.Who(ctx, kv.addr())
	if id == "" || clock+expiryMargin < kv.expires {
		return false
	}
	s.Ledger.Declined.Add(1)
	return true
}

// fetchScheduled is fetchKV, but continues when the client leaves, as in vLLM: a scheduled read runs to its end, P is
// notified, and until then the target blocks are not free.
func (l *Leg) fetchScheduled(ctx context.Context, q *engine.Sequence) ([]uint64, error) {
	var actual []uint64
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		actual, err = l.Node.fetchKV(context.WithoutCancel(ctx), l.Xid, l.Kv, q.P, q.Grant.Hits)
		if wrong := (*engine.Violation)(nil); errors.As(err, &wrong) && wrong.Kind == "other_prompt" && l.ThrowsAway {
			err = nil // as in vLLM: it reads, and notifies P that it has read
		}
	}()
	select {
	case <-done:
		return actual, err
	case <-ctx.Done():
	}
	blocks := q.Grant.Blocks
	q.Grant.Blocks = nil
	go func() {
		<-done
		l.Node.Pool.Free(blocks)
		if v, ok := errors.AsType[*engine.Violation](err); ok {
			l.Node.Violate(v, l.Xid)
		}
	}()
	return nil, ctx.Err()
}

// transfer takes the time that the blocks need at the configured rate.
func (s *Node) transfer(ctx context.Context, blocks int) error {
	if s.cfg.TransferRate <= 0 {
		return nil
	}
	seconds := float64(blocks*s.cfg.BlockSize*engine.KVBytesPerToken) / s.cfg.TransferRate
	t := time.NewTimer(time.Duration(seconds * float64(time.Second)))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", engine.ErrLoadFailed, context.Cause(ctx))
	}
}

func (s *Node) collectNIXL(c *engine.Collector) {
	if s.cfg.Connector != NIXL {
		return
	}
	m := s.Metrics
	for _, h := range []prometheus.Histogram{m.TransferTime, m.PostTime, m.TransferBytes, m.Descs} {
		c.Ch <- h
	}
	c.Counter("vllm:nixl_num_failed_transfers_total", "Number of failed NIXL KV Cache transfers.",
		m.FailedTransfers.Load())
	c.Counter("vllm:nixl_num_notifications_after_expiry_total",
		"Number of notifications for requests whose KV had expired.", s.Ledger.Late.Load())
	const byStage = "Number of requests by stage of their KV fetch."
	c.Gauge("vllm:num_requests_kv_fetch_by_stage", byStage, 0, "stage", "waiting_to_start")
	c.Gauge("vllm:num_requests_kv_fetch_by_stage", byStage, float64(m.WaitingDeferred.Load()), "stage", "in_progress")
	c.Gauge("vllm:num_requests_kv_fetch_by_stage", byStage, 0, "stage", "completed_waiting")
	c.Counter("vllm:nixl_num_kv_expired_reqs_total", "Number of requests that had their KV expire.",
		s.Ledger.Expired.Load()+s.Ledger.Declined.Load())
}
