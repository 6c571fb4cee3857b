package connector

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/fault"
	"tandem/e2e/enginesim/handover"
)

// Leg is one request's transfer.
type Leg struct {
	Node       *Node
	Job        *engine.Job
	Kv         *Params
	Xid        string                          // the client's x-request-id, "" for none
	Name       func(q *engine.Sequence) string // vLLM's name for a sequence, without its random tail
	Rule       *fault.Rule                     // an injected failure of the hand-over, nil for none
	rooms      []roomParams                    // sglang: of each prompt
	ThrowsAway bool                            // the KV may be another prompt's, because the answer is discarded

	fetched bool // the hand-over that the parameters name was read, or released
}

// Unscheduled leaves P's hand-over alone: vLLM does not notify P of a request that its engine never saw.
func (l *Leg) Unscheduled() { l.fetched = true }

// Abandoned releases P's hand-over.
func (l *Leg) Abandoned() { l.Release() }

// Deferred reports whether the job waits for KV of another engine.
func (l *Leg) Deferred() bool { return l.Kv.RemotePrefill }

// LookUp fetches KV of the prompts that other engines may have.
func (l *Leg) LookUp(ctx context.Context) error {
	if l.FetchesTurn() {
		if err := l.fetchTurn(ctx); err != nil {
			return err
		}
	}
	if l.Kv.source != "" {
		l.pullPrefix(ctx)
	}
	if l.Node.cfg.Connector.looksUp() && l.Kv.Spec == nil {
		for _, q := range l.Job.Seqs {
			if err := l.find(q); err != nil {
				return err
			}
		}
	}
	return nil
}

// Last keeps an answer for the conversation's next turn.
func (l *Leg) Last(q *engine.Sequence) {
	if l.keepsTurns() {
		l.keepTurn(q)
	}
}

// Keep takes a finished prefill leg's blocks.
func (l *Leg) Keep(q *engine.Sequence, blocks []int32) bool {
	switch {
	case !l.Kv.RemoteDecode || l.Kv.genFirst || l.Kv.Context && over(q):
		return false
	case l.Node.cfg.pushes():
		l.offer(q, blocks)
	default:
		l.keepPull(q, blocks)
	}
	return true
}

// Queued extends the prefill engine's lease while a decode leg waits for blocks, as vLLM does: one heartbeat for every
// sixth of a lease.
func (l *Leg) Queued() (stop func()) {
	kv := l.Kv
	if !kv.RemotePrefill || l.Node.cfg.pushes() {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		tick := time.NewTicker(max(l.Node.cfg.Lease/6, time.Millisecond))
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if l.Node.Core.Stands() { // they go out with steps only
					continue
				}
				l.Node.peers.Notify(handover.OpHeartbeat, kv.addr(), kv.engineID, kv.requestID)
			case <-done:
				return
			}
		}
	}()
	return func() { close(done) }
}

// Load fetches each sequence's KV. With the policy "recompute" a failed load costs only its time.
func (l *Leg) Load(ctx context.Context) error {
	s := l.Node
	if s.cfg.pushes() {
		return l.await(ctx)
	}
	if l.Kv.genFirst {
		return l.receiveContext(ctx)
	}
	for _, q := range l.Job.Seqs {
		actual, err := l.fetchScheduled(ctx, q)
		l.fetched = true
		if errors.Is(err, engine.ErrLoadFailed) {
			s.Logf("%v (x-request-id %q)", err, l.Xid)
			if s.cfg.Recompute || l.Kv.missOK {
				continue
			}
		}
		if err != nil {
			return err
		}
		l.took(q, actual)
	}
	return ctx.Err()
}

// Fill gets the prompts' KV: it computes it, for itself or for another engine, or fetches it from one.
func (l *Leg) Fill(ctx context.Context) error {
	switch {
	case l.Kv.genFirst && l.Kv.Context:
		return l.sendContext(ctx)
	case !l.Node.cfg.Roomed():
		return l.Job.Prefill(ctx)
	case l.Job.Sampling.N > 1:
		return l.shareRoom(ctx)
	case l.Node.cfg.Role == engine.RolePrefill:
		return l.sendRooms(ctx)
	}
	if err := l.receiveRooms(ctx); err != nil {
		return err
	}
	return l.Job.Prefill(ctx)
}

// keepPull puts a sequence's blocks under a lease and writes its hand-over.
func (l *Leg) keepPull(q *engine.Sequence, blocks []int32) {
	s := l.Node
	id := fmt.Sprintf("%s-%08x", l.Name(q), rand.Uint32())
	cached := -1
	if q.Out.N == 1 {
		cached = q.Local(s.cfg.BlockSize)
	}
	var params []byte
	switch s.cfg.Connector {
	case Offload:
		id = l.Kv.keepAs
	case TRTLLM:
		contextID := strconv.FormatUint(rand.Uint64()>>2|1<<61, 10) // more bits than a float holds
		id = contextID + "/" + l.Kv.keepAs
		params = s.appendDisaggregated(nil, contextID, l.Kv.keepAs)
	default:
		params = s.appendHandOver(nil, id, blocks, q.Computed(), cached)
	}
	params, spoilt := l.Rule.SpoilParams(params)
	q.HandOver = params
	if spoilt {
		s.Pool.Free(blocks)
		return
	}
	s.Ledger.Keep(id, l.Xid, blocks, q.Computed())
}

// Release notifies the prefill engine that its blocks will not be fetched. vLLM does so when a decode leg is aborted
// while it waits to be scheduled (request_finished of nixl_connector.py, with do_remote_prefill still set), and from
// 0.21 on when it refuses one.
func (l *Leg) Release() {
	kv := l.Kv
	if l.Node.cfg.pushes() || !kv.RemotePrefill || l.fetched || kv.Fatal != "" || kv.Incomplete != "" {
		return
	}
	l.fetched = true
	go l.Node.peers.Notify(handover.OpRelease, kv.addr(), kv.engineID, kv.requestID)
}

// find looks for a sequence's KV that others have stored. Half of a prompt in a store counts as nothing.
func (l *Leg) find(q *engine.Sequence) error {
	s := l.Node
	if s.cfg.Role == engine.RolePrefill {
		return nil
	}
	found := 0
	switch s.cfg.Connector {
	case LMCache:
		var err error
		if found, err = s.buffer.Take(l.Xid, q.P, q.Grant.Hits); err != nil {
			return err
		}
	case Shared:
		if s.store.has(q.P.Full) {
			found = len(q.P.Full)
		}
	}
	if found > q.Grant.Hits {
		s.CountFetched(q, (found-q.Grant.Hits)*s.cfg.BlockSize)
		s.Pool.Write(&q.Grant, q.P, q.Grant.Hits, nil)
	}
	return nil
}

// Computed makes the computed KV available to others.
func (l *Leg) Computed() {
	s := l.Node
	switch {
	case s.cfg.Connector == Shared:
		for _, q := range l.Job.Seqs {
			s.store.put(q.P.Full)
		}
	case l.Kv.Spec != nil:
		l.pushKV()
	}
}
