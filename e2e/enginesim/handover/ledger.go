package handover

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tandem/e2e/enginesim/engine"
)

// Ledger is the prefill engine's side of NIXL pull: finished requests whose blocks it keeps for a decode engine, and
// until when (vLLM's kv_lease_duration, 30 s). A hand-over ends in exactly one of three ways: fetched, released (the
// decode engine refused the request and reported it), or expired.
//
// The outcome of past hand-overs is remembered for a while, to distinguish the second read of one from the read of an
// unknown one.
type Ledger struct {
	pool  *engine.Pool
	core  *engine.Core
	lease time.Duration

	Held    atomic.Int64 // blocks
	Fetched atomic.Int64 // hand-overs
	Expired atomic.Int64
	Given   atomic.Int64
	Freed   atomic.Int64 // released
	Late    atomic.Int64 // reads after the lease
	// Declined counts this engine's own reads that it gave up because too little of the lease was left.
	Declined atomic.Int64

	mu    sync.Mutex
	live  map[string]*handOver
	past  map[string]string // outcome by id
	order []string          // ring of ids in past
	next  int
}

type handOver struct {
	id      string // vLLM's internal request id, remote_request_id on the wire
	xid     string // x-request-id of the leg
	blocks  []int32
	tokens  int
	turn    bool // of an answer, for the conversation's next turn (turns.go)
	expires time.Time
	timer   *time.Timer
}

const rememberedHandOvers = 16384

// NewLedger returns a ledger of blocks of p, each kept for a lease. An engine whose core stands still frees nothing,
// whoever has read meanwhile and however long a lease is over.
func NewLedger(p *engine.Pool, core *engine.Core, lease time.Duration) *Ledger {
	return &Ledger{
		pool: p, core: core, lease: lease,
		live: make(map[string]*handOver), past: make(map[string]string), order: make([]string, rememberedHandOvers),
	}
}

// Keep puts a finished request's blocks under a lease. The ledger owns the blocks from now on.
func (l *Ledger) Keep(id, xid string, blocks []int32, tokens int) {
	l.KeepFor(id, xid, blocks, tokens, l.lease, false)
}

// KeepFor is Keep for another time than a lease.
func (l *Ledger) KeepFor(id, xid string, blocks []int32, tokens int, d time.Duration, turn bool) {
	h := &handOver{id: id, xid: xid, blocks: blocks, tokens: tokens, turn: turn}
	l.mu.Lock()
	defer l.mu.Unlock()
	h.expires = time.Now().Add(d)
	h.timer = time.AfterFunc(d, func() { l.expire(id) })
	l.live[id] = h
	l.Given.Add(1)
	l.Held.Add(int64(len(blocks)))
}

func (l *Ledger) expire(id string) {
	l.core.Step()
	l.mu.Lock()
	h := l.live[id]
	if h == nil || time.Now().Before(h.expires) { // fetched, or a heartbeat came in between
		l.mu.Unlock()
		return
	}
	l.end(h, "expired")
	l.mu.Unlock()
	l.Expired.Add(1)
	l.pool.Free(h.blocks)
}

// end moves a hand-over to the past. The caller frees its blocks.
func (l *Ledger) end(h *handOver, how string) {
	h.timer.Stop()
	delete(l.live, h.id)
	delete(l.past, l.order[l.next])
	l.order[l.next] = h.id
	l.next = (l.next + 1) % len(l.order)
	l.past[h.id] = how
	l.Held.Add(-int64(len(h.blocks)))
}

// free frees blocks that another engine has reported as fetched, in the core's next step.
func (l *Ledger) free(blocks []int32) {
	if !l.core.Stands() {
		l.pool.Free(blocks)
		return
	}
	go func() {
		l.core.Step()
		l.pool.Free(blocks)
	}()
}

// Extend handles a heartbeat of a decode engine that cannot read yet: it adds two thirds of a lease.
func (l *Ledger) Extend(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.live[id]
	if h == nil || h.turn { // nothing renews blocks kept for a next turn
		return
	}
	if until := time.Now().Add(l.lease * 2 / 3); until.After(h.expires) {
		h.expires = until
		h.timer.Reset(time.Until(until))
	}
}

// Release frees a hand-over that will not be read. It reports whether there was one.
func (l *Ledger) Release(id string) bool {
	l.mu.Lock()
	h := l.live[id]
	if h != nil {
		l.end(h, "released")
	}
	l.mu.Unlock()
	if h == nil {
		return false
	}
	l.Freed.Add(1)
	l.free(h.blocks)
	return true
}

// ReleaseAll empties the ledger.
func (l *Ledger) ReleaseAll() {
	l.mu.Lock()
	ids := make([]string, 0, len(l.live))
	for id := range l.live {
		ids = append(ids, id)
	}
	l.mu.Unlock()
	for _, id := range ids {
		l.Release(id)
	}
}

// HeldFor returns the x-request-ids of the current hand-overs.
func (l *Ledger) HeldFor() (ids []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.live {
		ids = append(ids, h.xid)
	}
	slices.Sort(ids)
	return ids
}

// Forget clears the memory of the past and the counts, but not current hand-overs.
func (l *Ledger) Forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.past)
	l.order = make([]string, rememberedHandOvers)
	l.next = 0
	for _, n := range []*atomic.Int64{&l.Fetched, &l.Expired, &l.Given, &l.Freed, &l.Late, &l.Declined} {
		n.Store(0)
	}
}

// Pull lets a decode engine read blocks and frees the hand-over, even if the read was wrong: the real engine learns
// from the same notification that the transfer is over.
func (l *Ledger) Pull(engineID string, req *Question) Answer {
	if req.EngineID != engineID && req.EngineID != "" {
		return Answer{Refused: fmt.Sprintf("remote_engine_id is %s, this is %s", req.EngineID, engineID)}
	}
	for _, id := range req.Ids {
		if id < 1 || int(id) > l.pool.All() {
			return Answer{Refused: fmt.Sprintf("no block %d", id)}
		}
	}
	l.mu.Lock()
	h := l.live[req.RequestID]
	outcome := l.past[req.RequestID]
	if h != nil {
		l.end(h, "fetched")
	}
	if h != nil && len(req.Ids) == 0 { // requested by name only
		req.Ids = h.blocks
	}
	actual := l.read(req)
	l.mu.Unlock()
	if outcome == "expired" {
		l.Late.Add(1)
	}
	answer := Answer{Violation: judge(h, outcome, req, actual)}
	if req.BlockSize != l.pool.BlockSize {
		answer = OtherBlocks(l.pool.BlockSize, req)
	}
	if !slices.Equal(actual, req.Want) {
		answer.Actual = actual
	}
	if h != nil {
		l.Fetched.Add(1)
		l.free(h.blocks)
	}
	return answer
}

// read returns the content that each block of the reader's prompt will have; blocks that it did not request have none.
func (l *Ledger) read(req *Question) []uint64 {
	n := min(len(req.Ids), len(req.Want))
	got := l.pool.Read(req.Ids[:n], func(i int) uint64 { return req.Want[i] })
	return append(got, make([]uint64, len(req.Want)-n)...)
}

// OtherBlocks is what a decode engine gets that takes blocks of another size for its own. vLLM 0.32.0 on a CPU, NIXL
// with P at 32 and D at 64 tokens: the handshake passes, and 100 of 100 answers were wrong. No block of its prompt has
// what it should have.
func OtherBlocks(size int, req *Question) Answer {
	return Answer{Actual: slices.Repeat([]uint64{1}, len(req.Want)), Violation: engine.Violation{
		Kind:    "other_block_size",
		Message: fmt.Sprintf("blocks have %d tokens on the prefill engine, %d here", size, req.BlockSize)}}
}

// judge returns the violation in a read that real engines would carry out silently.
func judge(h *handOver, outcome string, req *Question, actual []uint64) engine.Violation {
	switch {
	case h == nil && outcome == "fetched":
		return engine.Violation{Kind: "read_twice",
			Message: "the blocks of " + req.RequestID +
				" were fetched before; they may hold another request's KV by now"}
	case h == nil && outcome == "expired":
		return engine.Violation{Kind: "expired",
			Message: "the lease on the blocks of " + req.RequestID +
				" ran out; they may hold another request's KV by now"}
	case h == nil && outcome == "released":
		return engine.Violation{Kind: "released", Message: "the blocks of " + req.RequestID + " were released"}
	case h == nil:
		return engine.Violation{Kind: "unknown_request", Message: "nothing was ever kept for " + req.RequestID}
	case len(req.Ids) < len(req.Want):
		return engine.Violation{Kind: "fewer_blocks",
			Message: fmt.Sprintf("%d block ids for a prompt of %d blocks (%d tokens)", len(req.Ids), len(req.Want),
				req.Tokens)}
	case !slices.Equal(req.Ids, h.blocks):
		return engine.Violation{Kind: "foreign_blocks", Message: "these are not the blocks of " + req.RequestID}
	case !slices.Equal(actual, req.Want):
		return engine.Violation{Kind: "other_prompt",
			Message: fmt.Sprintf("the KV is of another prompt: %d tokens on the prefill engine, %d here", h.tokens,
				req.Tokens)}
	case h.turn != req.Turn:
		return engine.Violation{Kind: "wrong_way",
			Message: "the blocks of " + req.RequestID + " were kept for an engine of the other role"}
	case h.xid != req.Xid && !h.turn:
		return engine.Violation{Kind: "request_id_mismatch",
			Message: fmt.Sprintf("x-request-id was %q on the prefill leg and is %q here", h.xid, req.Xid)}
	}
	return engine.Violation{}
}

// Expires returns the time at which the hand-over of the leg with that x-request-id ends; zero if there is none.
func (l *Ledger) Expires(xid string) (at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.live {
		if h.xid == xid {
			at = h.expires
		}
	}
	return at
}
