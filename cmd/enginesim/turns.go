package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// NIXL pull in both directions (vLLM's bidirectional_kv_xfer, from 0.21; here as 0.32 and, for streams, 0.33 have it): a decode
// engine keeps the blocks of an answer that it fetched the prompt of, prompt and answer, and says where they are; the prefill
// engine of the conversation's next turn fetches them, and computes what lies behind. Blocks are read by number, so a prompt
// that does not begin with just those tokens gets another's KV: here that is a violation. What is kept is kept for one read,
// until its time (-decoder-ttl, decoder_kv_blocks_ttl) is over; nothing renews it.

// fetchThreshold is kv_recompute_threshold: fewer tokens than that are computed.
const fetchThreshold = 64

// turnSource is what a prefill leg says of the conversation's last answer, beside what all hand-overs have.
type turnSource struct {
	tokens int    // remote_num_tokens
	lacks  string // the member without which vLLM leaves the blocks alone
}

// parseTurn reads do_remote_decode with remote_block_ids.
func (kv *kvParams) parseTurn(ids, port, tokens []byte) {
	var ok bool
	if kv.blockIDs, ok = nestedIDs(ids); !ok {
		kv.turn.lacks = "remote_block_ids"
	}
	n, isInt := integer(port)
	kv.port = int(n)
	count, counted := integer(tokens)
	kv.turn.tokens = int(count)
	for _, m := range []struct {
		name  string
		there bool
	}{
		{"remote_engine_id", kv.engineID != ""}, {"remote_request_id", kv.requestID != ""}, {"remote_host", kv.host != ""},
		{"remote_port", isInt}, {"remote_num_tokens", counted && count > 0},
	} {
		if !m.there && kv.turn.lacks == "" {
			kv.turn.lacks = m.name
		}
	}
}

// keepsTurns reports whether the call's answer is kept for the conversation's next turn.
func (c *call) keepsTurns() bool {
	return c.s.cfg.bidirectional && c.s.cfg.connector == connectorNIXL && c.req.kv.remotePrefill
}

// fetchesTurn reports whether the call's prompt begins with what a decode engine has kept.
func (c *call) fetchesTurn() bool {
	return c.s.cfg.bidirectional && c.s.cfg.connector == connectorNIXL && c.req.kv.staleOnP
}

// turnBreach is what is wrong with a prefill leg that tells of an earlier answer, nil for nothing.
func (c *call) turnBreach() *violation {
	kv := &c.req.kv
	switch {
	case !kv.staleOnP:
		return nil
	case !c.s.cfg.bidirectional:
		return &violation{"stale_blocks_on_prefill", "do_remote_decode with remote_block_ids: the prefill engine would read from elsewhere"}
	case kv.turn.lacks != "":
		return &violation{"incomplete_params", "blocks of an earlier answer without " + kv.turn.lacks}
	}
	return nil
}

// keepTurn hands a finished answer's blocks to the ledger, and writes what the client is told of them. Once for a sequence.
func (c *call) keepTurn(q *sequence) {
	if q.kept {
		return
	}
	s := c.s
	c.writeAnswer(q)
	used := blocksFor(q.computed(), s.cfg.blockSize)
	s.pool.free(q.grant.blocks[used:])
	blocks := q.grant.blocks[:used]
	q.grant.blocks, q.kept = nil, true
	id := fmt.Sprintf("%s-%08x", c.internalID(q), s.random.Uint32())
	q.handOver = s.appendTurn(nil, id, blocks, q.computed())
	s.ledger.keepFor(id, c.xid, blocks, q.computed(), s.cfg.decoderTTL, true)
}

// appendTurn is the kv_transfer_params of a decode engine's answer.
func (s *sim) appendTurn(dst []byte, requestID string, blocks []int32, tokens int) []byte {
	expires := time.Since(s.started) + s.cfg.decoderTTL
	return s.appendParams(dst, `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[`, requestID, blocks, tokens,
		strconv.FormatFloat(expires.Seconds(), 'f', 6, 64), -1)
}

// appendTurnEvent puts them into the event that says why an answer ended (from 0.33).
func (c *call) appendTurnEvent(dst []byte, q *sequence) []byte {
	if !q.kept {
		return dst
	}
	return appendRaw(dst, "kv_transfer_params", q.handOver)
}

// fetchTurn gets the beginning of a prompt from the decode engine that has kept it. What that does not have any more fails the
// leg, or is computed, as with every KV load.
func (c *call) fetchTurn(ctx context.Context) error {
	s, q, kv := c.s, c.seqs[0], &c.req.kv
	if kv.turn.lacks != "" { // vLLM: "Got invalid KVTransferParams", and goes on without
		return nil
	}
	n := kv.turn.tokens
	if n >= q.p.n {
		if !s.cfg.faithful {
			return &violation{"turn_not_longer", fmt.Sprintf("%d tokens were kept, the prompt has %d", n, q.p.n)}
		}
		n = q.p.n
	}
	hits := q.grant.hits
	if n-hits*s.cfg.blockSize < fetchThreshold {
		s.peers.notify(opRelease, kv.addr(), kv.engineID, kv.requestID)
		return nil
	}
	t := newTokenizer(s.cfg.blockSize, false)
	t.tokens(q.p.ids[:n])
	kept := t.finish("")
	actual, err := s.fetch(ctx, c.xid, kv, kept, hits, true)
	if errors.Is(err, errLoadFailed) {
		s.logf("%v (x-request-id %q)", err, c.xid)
		if s.cfg.recompute {
			return nil
		}
	}
	if err != nil {
		return err
	}
	q.external, q.turn = n-hits*s.cfg.blockSize, true
	s.metrics.external.Add(int64(q.external))
	s.metrics.externalHits.Add(int64(q.external))
	if actual != nil {
		q.corrupt(c.req, hits, actual[hits:min(len(actual), len(q.p.full))], s.cfg.maxModelLen)
	}
	return nil
}

// serveRender is POST /v1/chat/completions/render (vLLM 0.24, --enable-scale-out): the token ids that a chat would have.
func (s *sim) serveRender(w http.ResponseWriter, _ *http.Request, body []byte) {
	q, ok := s.small(w, body)
	if !ok {
		return
	}
	q.api, q.returnIDs = apiChat, true
	prompts, bad := q.render(s.cfg.blockSize)
	if bad != nil {
		writeRaw(w, bad.status, bad.json(apiNone))
		return
	}
	dst := appendIDs([]byte(`{"request_id":"chatcmpl-render","token_ids":`), prompts[0].ids)
	writeRaw(w, http.StatusOK, append(dst, `,"sampling_params":{}}`...))
}
