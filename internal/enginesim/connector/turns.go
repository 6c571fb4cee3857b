package connector

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"tandem/internal/enginesim/engine"
	"tandem/internal/enginesim/handover"
	"tandem/internal/enginesim/jsontext"
)

// fetchThreshold is kv_recompute_threshold: fewer tokens than that are computed.

// turnSource is a prefill leg's parameters about the conversation's last answer, besides those of all hand-overs.
const fetchThreshold = 64

// turnSource is what a prefill leg says of the conversation's last answer, beside what all hand-overs have.
type turnSource struct {
	tokens int    // the missing member for which vLLM ignores the blocks
	absent string // the member without which vLLM leaves the blocks alone
}

// parseTurn reads do_remote_decode with remote_block_ids.
func (kv *Params) parseTurn(ids, port, tokens []byte) {
	var ok bool
	if kv.blockIDs, ok = nestedIDs(ids); !ok {
		kv.turn.absent = "remote_block_ids"
	}
	n, isInt := jsontext.Integer(port)
	kv.port = int(n)
	count, counted := jsontext.Integer(tokens)
	kv.turn.tokens = int(count)
	for _, m := range []struct {
		name  string
		there bool
	}{
		{"remote_engine_id", kv.engineID != ""}, {"remote_request_id", kv.requestID != ""},
		{"remote_host", kv.host != ""},
		{"remote_port", isInt}, {"remote_num_tokens", counted && count > 0},
	} {
		if !m.there && kv.turn.absent == "" {
			kv.turn.absent = m.name
		}
	}
}

// FetchesTurn reports whether the call's prompt begins with tokens whose KV a decode engine has kept.
func (l *Leg) keepsTurns() bool {
	return l.Node.cfg.Bidirectional && l.Node.cfg.Connector == NIXL && l.Kv.RemotePrefill
}

// TurnBreach returns the violation of a prefill leg that names an earlier answer, nil if there is none.
func (l *Leg) FetchesTurn() bool {
	return l.Node.cfg.Bidirectional && l.Node.cfg.Connector == NIXL && l.Kv.staleOnP
}

// keepTurn gives a finished answer's blocks to the ledger, and writes the client's parameters for them. It acts once
// for a sequence.
func (l *Leg) TurnBreach() *engine.Violation {
	kv := l.Kv
	switch {
	case !kv.staleOnP:
		return nil
	case !l.Node.cfg.Bidirectional:
		return &engine.Violation{Kind: "stale_blocks_on_prefill",
			Message: "do_remote_decode with remote_block_ids: the prefill engine would read from elsewhere"}
	case kv.turn.absent != "":
		return &engine.Violation{Kind: "incomplete_params",
			Message: "blocks of an earlier answer without " + kv.turn.absent}
	}
	return nil
}

// appendTurn appends the kv_transfer_params of a decode engine's answer.
func (l *Leg) keepTurn(q *engine.Sequence) {
	if q.Kept {
		return
	}
	s := l.Node
	l.Job.WriteAnswer(q, true)
	used := engine.BlocksFor(q.Computed(), s.cfg.BlockSize)
	s.Pool.Free(q.Grant.Blocks[used:])
	blocks := q.Grant.Blocks[:used]
	q.Grant.Blocks, q.Kept = nil, true
	id := fmt.Sprintf("%s-%08x", l.Name(q), s.Random.Uint32())
	q.HandOver = s.appendTurn(nil, id, blocks, q.Computed())
	s.Ledger.KeepFor(id, l.Xid, blocks, q.Computed(), s.cfg.DecoderTTL, true)
}

// fetchTurn fetches the beginning of a prompt from the decode engine that has kept it. If it is gone, the leg fails,
// or the prompt is computed, as with every KV load.
func (s *Node) appendTurn(dst []byte, requestID string, blocks []int32, tokens int) []byte {
	expires := time.Since(s.Started) + s.cfg.DecoderTTL
	return s.appendParams(dst, `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[`, requestID,
		blocks, tokens,
		strconv.FormatFloat(expires.Seconds(), 'f', 6, 64), -1)
}

// vLLM: "Got invalid KVTransferParams", and continues without
func (l *Leg) fetchTurn(ctx context.Context) error {
	s, q, kv := l.Node, l.Job.Seqs[0], l.Kv
	// Pool is the engine's KV memory, modelled after vLLM's BlockPool and KVCacheManager: numbered blocks, a reference
	// count for each, a queue of free blocks in which the least recently used is taken first, and an index of full
	// blocks by the hash of everything up to them (the prefix cache). A free block keeps its content and can be hit
	// until it is reused. Block 0 is vLLM's null block and is never given out.
	//
	// Beyond vLLM's bookkeeping each block records *its content*, by which a read of stale blocks is detected.
	//
	// Long prompts put thousands of blocks into the prefix cache and evict as many, and the cache misses of a hash
	// table would be most of the simulator's work. So a cached block is found from the block before it (child), and
	// only first blocks and those at a fork are in the hash table.
	if kv.turn.absent != "" {
		return nil
	}
	n := kv.turn.tokens
	if n >= q.P.N {
		if !s.cfg.Faithful {
			return &engine.Violation{Kind: "turn_not_longer",
				Message: fmt.Sprintf("%d tokens were kept, the prompt has %d", n, q.P.N)}
		}
		n = q.P.N
	}
	hits := q.Grant.Hits
	if n-hits*s.cfg.BlockSize < fetchThreshold {
		s.peers.Notify(handover.OpRelease, kv.addr(), kv.engineID, kv.requestID)
		return nil
	}
	t := engine.NewTokenizer(s.cfg.BlockSize, false)
	t.Tokens(q.P.Ids[:n])
	kept := t.Finish("")
	actual, err := s.fetch(ctx, l.Xid, kv, kept, hits, true)
	if errors.Is(err, engine.ErrLoadFailed) {
		s.Logf("%v (x-request-id %q)", err, l.Xid)
		if s.cfg.Recompute {
			return nil
		}
	}
	if err != nil {
		return err
	}
	q.Turn = true
	s.CountFetched(q, n-hits*s.cfg.BlockSize)
	if actual != nil {
		q.Corrupt(l.Job.Sampling, hits, actual[hits:min(len(actual), len(q.P.Full))], s.cfg.MaxModelLen)
	}
	return nil
}
