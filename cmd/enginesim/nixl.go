package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"
)

// kvParams is a request's kv_transfer_params as vLLM 0.32's NixlConnector (pull) understands them.
type kvParams struct {
	present       bool // an object, and this engine has a connector
	remoteDecode  bool // do_remote_decode: keep the KV for a decode engine
	remotePrefill bool // do_remote_prefill: fetch the KV from a prefill engine
	blockIDs      []int32
	engineID      string
	requestID     string
	host          string
	port          int
	cachedOnP     int64      // remote_prefill_cached_tokens, -1 when absent
	promptIDs     []uint32   // prompt_token_ids: use these instead of tokenising (0.32 and later)
	turn          turnSource // of do_remote_decode with remote_block_ids (turns.go)
	incomplete    string     // a member without which the engine parks the request for ever
	fatal         string     // what in them kills the engine, "" when nothing
	transfer      string     // transfer_id (Mooncake)
	bootstrap     string     // remote_bootstrap_addr (Mooncake)
	parked        string     // why the engine waits for KV that nobody will send, "" when it does not
	staleOnP      bool       // do_remote_decode with remote_block_ids: P would read from somebody else, or, of an earlier answer, is to

	keepAs     string      // the name under which P keeps the KV; "": one of its own
	missOK     bool        // what D does not find it computes
	context    bool        // of a context server (trtllm.go)
	spec       *disaggSpec // lmcache.go
	genFirst   bool        // both legs at once (trtllm.go)
	firstToken bool        // ret_first_tok: P answers the token that it made
	source     string      // whom to ask for the prompt's beginning (offload.go)
	broken     *violation  // parameters that break their protocol
}

// parseKVParams reads valid JSON. A value that is neither object nor null is the caller's to refuse.
func parseKVParams(raw []byte) (kv kvParams) {
	if isNull(raw) {
		return kv
	}
	kv.present, kv.cachedOnP = true, -1
	var ids, port, promptIDs, tokens []byte
	eachMember(raw, func(key, val []byte) {
		switch string(key) {
		case "do_remote_decode":
			kv.remoteDecode = truthy(val)
		case "do_remote_prefill":
			kv.remotePrefill = truthy(val)
		case "remote_block_ids":
			ids = val
		case "remote_engine_id":
			kv.engineID = string(text(val))
		case "remote_request_id":
			kv.requestID = string(text(val))
		case "remote_host":
			kv.host = string(text(val))
		case "remote_port":
			port = val
		case "remote_prefill_cached_tokens":
			if n, ok := integer(val); ok {
				kv.cachedOnP = n
			}
		case "prompt_token_ids":
			promptIDs = val
		case "remote_num_tokens":
			tokens = val
		}
	})
	if kv.remoteDecode && !kv.remotePrefill && truthy(ids) {
		kv.staleOnP = true
		kv.parseTurn(ids, port, tokens)
	}
	if isArray(promptIDs) {
		kv.promptIDs, _ = tokenIDs(promptIDs)
	}
	if kv.remotePrefill {
		kv.parseSource(ids, port)
	}
	return kv
}

// parseSource checks what a decode leg needs to find its KV. vLLM's scheduler asserts, parks or raises here; nothing
// in it is turned into a clean error.
func (kv *kvParams) parseSource(ids, port []byte) {
	if !truthy(ids) {
		kv.fatal = "AssertionError: num_external_tokens == 0 (do_remote_prefill without remote_block_ids)"
		return
	}
	var ok bool
	if kv.blockIDs, ok = nestedIDs(ids); !ok {
		kv.fatal = "TypeError: remote_block_ids must be a list of lists of integers"
		return
	}
	n, isInt := integer(port)
	if isString(port) {
		n, _ = strconv.ParseInt(string(text(port)), 10, 32)
		isInt = true
	}
	kv.port = int(n)
	switch {
	case kv.engineID == "":
		kv.incomplete = "remote_engine_id"
	case kv.requestID == "":
		kv.incomplete = "remote_request_id"
	case kv.host == "":
		kv.incomplete = "remote_host"
	case !isInt:
		kv.incomplete = "remote_port"
	}
}

// nestedIDs reads [[1,2,3]]: one list for each KV cache group, of which this engine has one.
func nestedIDs(raw []byte) (ids []int32, ok bool) {
	if !isArray(raw) {
		return nil, false
	}
	ok = true
	groups := 0
	eachElement(raw, func(group []byte) bool {
		if groups++; groups > 1 || !isArray(group) {
			ok = false
			return false
		}
		ids = make([]int32, 0, len(group)/4)
		eachElement(group, func(id []byte) bool {
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

// tokenIDs reads a list of token ids.
func tokenIDs(raw []byte) (ids []uint32, ok bool) {
	if !isArray(raw) {
		return nil, false
	}
	ids, ok = make([]uint32, 0, len(raw)/5), true
	eachElement(raw, func(id []byte) bool {
		n, err := strconv.ParseUint(string(id), 10, 32)
		ok = err == nil
		ids = append(ids, uint32(n))
		return ok
	})
	return ids, ok
}

// appendHandOver is the kv_transfer_params that a prefill engine answers with, in the key order of 0.32. cached < 0
// leaves remote_prefill_cached_tokens out, as vLLM does when the request outlived its prefill step.
func (s *sim) appendHandOver(dst []byte, requestID string, blocks []int32, tokens, cached int) []byte {
	return s.appendParams(dst, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[`, requestID, blocks, tokens, "null", cached)
}

// appendParams is kv_transfer_params of either side, as they begin, and with remote_blocks_expiry_time.
func (s *sim) appendParams(dst []byte, head, requestID string, blocks []int32, tokens int, expires string, cached int) []byte {
	dst = slices.Grow(dst, 512+8*len(blocks))
	dst = append(dst, head...)
	for i, id := range blocks {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(id), 10)
	}
	dst = append(dst, `]],"remote_engine_id":`...)
	dst = appendQuoted(dst, s.engineID)
	dst = append(dst, `,"remote_request_id":`...)
	dst = appendQuoted(dst, requestID)
	dst = append(dst, `,"remote_host":`...)
	dst = appendQuoted(dst, s.sideHost)
	dst = append(dst, `,"remote_port":`...)
	dst = strconv.AppendInt(dst, int64(s.sidePort), 10)
	dst = append(dst, `,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":`...)
	dst = strconv.AppendInt(dst, int64(tokens), 10)
	dst = append(dst, `,"remote_blocks_expiry_time":`+expires+`,"transfer_mode":"pull"`...)
	if cached >= 0 {
		dst = append(dst, `,"remote_prefill_cached_tokens":`...)
		dst = strconv.AppendInt(dst, int64(cached), 10)
	}
	return append(dst, '}')
}

var errLoadFailed = errors.New("KV load failed")

// violation is KV that a real engine would silently have answered from although it was not the request's own.
type violation struct{ kind, message string }

func (v *violation) Error() string { return "enginesim violation " + v.kind + ": " + v.message }

// fetchKV pulls a decode leg's KV from the prefill engine that its parameters name. It returns what the blocks of the
// prompt really held (nil when all is right). The error is errLoadFailed where vLLM's transfer fails, a *violation where vLLM would not notice
// (and the simulator is strict), or the context's.
func (s *sim) fetchKV(ctx context.Context, xid string, kv *kvParams, p *prompt, hits int) ([]uint64, error) {
	return s.fetch(ctx, xid, kv, p, hits, false)
}

// fetch is fetchKV, also of what a decode engine has kept of an earlier answer (turn).
func (s *sim) fetch(ctx context.Context, xid string, kv *kvParams, p *prompt, hits int, turn bool) ([]uint64, error) {
	need := blocksFor(p.n, s.cfg.blockSize)
	if kv.engineID == s.engineID && kv.engineID != "" {
		return nil, fmt.Errorf("%w: the parameters name this very engine", errLoadFailed)
	}
	req := pullRequest{
		engineID: kv.engineID, requestID: kv.requestID, xid: xid, blockSize: s.cfg.blockSize,
		tokens: p.n, turn: turn, ids: kv.blockIDs, want: make([]uint64, need),
	}
	for i := range req.want {
		req.want[i] = p.content(i)
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.loadTimeout)
	defer cancel()
	started := time.Now()
	answer, err := s.peers.pull(ctx, net.JoinHostPort(kv.host, strconv.Itoa(kv.port)), &req)
	if err != nil {
		<-ctx.Done() // the handshake's receive timeout is always waited out: 5 s in vLLM, however fast the refusal
		if errors.Is(context.Cause(ctx), context.Canceled) {
			return nil, context.Canceled
		}
		s.metrics.failedTransfers.Add(1)
		return nil, fmt.Errorf("%w: %w", errLoadFailed, err)
	}
	if answer.refused != "" {
		s.metrics.failedTransfers.Add(1)
		return nil, fmt.Errorf("%w: %s", errLoadFailed, answer.refused)
	}
	if err := s.transfer(ctx, need-hits); err != nil {
		return nil, err
	}
	s.metrics.transferred(need-hits, s.cfg.blockSize, time.Since(started))
	if kv.missOK && slices.Contains([]string{"expired", "released", "unknown_request"}, answer.violation.kind) {
		return nil, fmt.Errorf("%w: %w", errLoadFailed, &answer.violation)
	}
	if answer.violation.kind != "" && !s.cfg.faithful {
		return nil, &answer.violation
	}
	return answer.actual, nil
}

// fetchScheduled is fetchKV, which goes on when the client leaves, as in vLLM: what is scheduled is read to its end, P is told, and
// until then the blocks that it is read into are not free.
func (c *call) fetchScheduled(ctx context.Context, q *sequence) ([]uint64, error) {
	var actual []uint64
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		actual, err = c.s.fetchKV(context.WithoutCancel(ctx), c.xid, &c.req.kv, q.p, q.grant.hits)
		if wrong := (*violation)(nil); errors.As(err, &wrong) && wrong.kind == "other_prompt" && c.req.throwsAway() {
			err = nil // as vLLM does: it reads, and tells P that it has read
		}
	}()
	select {
	case <-done:
		return actual, err
	case <-ctx.Done():
	}
	blocks := q.grant.blocks
	q.grant.blocks = nil
	go func() {
		<-done
		c.s.pool.free(blocks)
		if v, ok := errors.AsType[*violation](err); ok {
			c.s.violate(v, c.xid)
		}
	}()
	return nil, ctx.Err()
}

// transfer takes the time that so many blocks need at the configured rate.
func (s *sim) transfer(ctx context.Context, blocks int) error {
	if s.cfg.transferRate <= 0 {
		return nil
	}
	seconds := float64(blocks*s.cfg.blockSize*kvBytesPerToken) / s.cfg.transferRate
	t := time.NewTimer(time.Duration(seconds * float64(time.Second)))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", errLoadFailed, context.Cause(ctx))
	}
}
