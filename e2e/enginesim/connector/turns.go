package connector

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/handover"
	"tandem/e2e/enginesim/jsontext"
)

// NIXL pull in both directions (vLLM's bidirectional_kv_xfer, from 0.21; here as in 0.32 and, for streams, 0.33): a
// decode engine that fetched its prompt keeps the blocks of prompt and answer, and answers their location. The prefill
// engine of the conversation's next turn fetches them, and computes the rest. Blocks are read by number, so a prompt
// that does not begin with exactly those tokens gets another's KV: here that is a violation. The blocks are kept for
// one read, until their time (-decoder-ttl, decoder_kv_blocks_ttl) is over; nothing renews it.

// fetchThreshold is kv_recompute_threshold: fewer tokens than that are computed.
const fetchThreshold = 64

// turnSource is a prefill leg's parameters about the conversation's last answer, besides those of all hand-overs.
type turnSource struct {
	tokens int    // remote_num_tokens
	absent string // the missing member for which vLLM ignores the blocks
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

// keepsTurns reports whether the call's answer is kept for the conversation's next turn: with any parameters but those
// of a prefill leg (pull_scheduler.py, request_finished). So {"clock":1} is enough to read the engine's clock.
func (l *Leg) keepsTurns() bool {
	return l.Node.cfg.Bidirectional && l.Node.cfg.Connector == NIXL && l.Kv.telling && !l.Kv.RemoteDecode
}

// FetchesTurn reports whether the call's prompt begins with tokens whose KV a decode engine has kept.
func (l *Leg) FetchesTurn() bool {
	return l.Node.cfg.Bidirectional && l.Node.cfg.Connector == NIXL && l.Kv.staleOnP
}

// TurnBreach returns the violation of a prefill leg that names an earlier answer, nil if there is none.
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

// keepTurn gives a finished answer's blocks to the ledger, and writes the client's parameters for them. It acts once
// for a sequence.
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
	id := fmt.Sprintf("%s-%08x", l.Name(q), rand.Uint32())
	q.HandOver = s.appendTurn(nil, id, blocks, q.Computed())
	s.Ledger.KeepFor(id, l.Xid, blocks, q.Computed(), s.cfg.DecoderTTL, true)
}

// appendTurn appends the kv_transfer_params of a decode engine's answer.
func (s *Node) appendTurn(dst []byte, requestID string, blocks []int32, tokens int) []byte {
	expires := s.Clock() + s.cfg.DecoderTTL
	return s.appendParams(dst, `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[`, requestID,
		blocks, tokens,
		strconv.FormatFloat(expires.Seconds(), 'f', 6, 64), -1)
}

// fetchTurn fetches the beginning of a prompt from the decode engine that has kept it. If it is gone, the leg fails,
// or the prompt is computed, as with every KV load.
func (l *Leg) fetchTurn(ctx context.Context) error {
	s, q, kv := l.Node, l.Job.Seqs[0], l.Kv
	if kv.turn.absent != "" { // vLLM: "Got invalid KVTransferParams", and continues without
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
