package main

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// ledger is the prefill engine's side of NIXL pull: which finished requests' blocks it keeps for a decode engine, and
// until when (vLLM's kv_lease_duration, 30 s). A hand-over ends in exactly one of three ways: fetched, released (the
// decode engine refused the request and said so), or expired.
//
// What happened to hand-overs that ended is remembered for a while, which is how the second read of one is told from
// the read of something that never was.
type ledger struct {
	pool  *pool
	lease time.Duration

	held    atomic.Int64 // blocks
	fetched atomic.Int64 // hand-overs
	expired atomic.Int64
	given   atomic.Int64
	freed   atomic.Int64 // released
	late    atomic.Int64 // reads after the lease

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

func newLedger(p *pool, lease time.Duration) *ledger {
	return &ledger{
		pool: p, lease: lease,
		live: make(map[string]*handOver), past: make(map[string]string), order: make([]string, rememberedHandOvers),
	}
}

// keep puts a finished request's blocks under a lease. The ledger owns the blocks from now on.
func (l *ledger) keep(id, xid string, blocks []int32, tokens int) {
	l.keepFor(id, xid, blocks, tokens, l.lease, false)
}

// keepFor is keep for another time than a lease.
func (l *ledger) keepFor(id, xid string, blocks []int32, tokens int, d time.Duration, turn bool) {
	h := &handOver{id: id, xid: xid, blocks: blocks, tokens: tokens, turn: turn}
	l.mu.Lock()
	defer l.mu.Unlock()
	h.expires = time.Now().Add(d)
	h.timer = time.AfterFunc(d, func() { l.expire(id) })
	l.live[id] = h
	l.given.Add(1)
	l.held.Add(int64(len(blocks)))
}

func (l *ledger) expire(id string) {
	l.mu.Lock()
	h := l.live[id]
	if h == nil || time.Now().Before(h.expires) { // fetched, or a heartbeat came in between
		l.mu.Unlock()
		return
	}
	l.end(h, "expired")
	l.mu.Unlock()
	l.expired.Add(1)
	l.pool.free(h.blocks)
}

// end moves a hand-over to the past. The caller frees its blocks.
func (l *ledger) end(h *handOver, how string) {
	h.timer.Stop()
	delete(l.live, h.id)
	delete(l.past, l.order[l.next])
	l.order[l.next] = h.id
	l.next = (l.next + 1) % len(l.order)
	l.past[h.id] = how
	l.held.Add(-int64(len(h.blocks)))
}

// extend is a heartbeat of a decode engine that cannot read yet: it buys two thirds of a lease.
func (l *ledger) extend(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.live[id]
	if h == nil || h.turn { // nothing renews what is kept for a next turn
		return
	}
	if until := time.Now().Add(l.lease * 2 / 3); until.After(h.expires) {
		h.expires = until
		h.timer.Reset(time.Until(until))
	}
}

// release frees a hand-over that nobody will read. It reports whether there was one.
func (l *ledger) release(id string) bool {
	l.mu.Lock()
	h := l.live[id]
	if h != nil {
		l.end(h, "released")
	}
	l.mu.Unlock()
	if h == nil {
		return false
	}
	l.freed.Add(1)
	l.pool.free(h.blocks)
	return true
}

// releaseAll empties the ledger.
func (l *ledger) releaseAll() {
	l.mu.Lock()
	ids := make([]string, 0, len(l.live))
	for id := range l.live {
		ids = append(ids, id)
	}
	l.mu.Unlock()
	for _, id := range ids {
		l.release(id)
	}
}

// heldFor are the x-request-ids of the hand-overs that are held.
func (l *ledger) heldFor() (ids []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.live {
		ids = append(ids, h.xid)
	}
	slices.Sort(ids)
	return ids
}

// forget clears the memory of the past and the counts, but not what is held.
func (l *ledger) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.past)
	l.order = make([]string, rememberedHandOvers)
	l.next = 0
	for _, n := range []*atomic.Int64{&l.fetched, &l.expired, &l.given, &l.freed, &l.late} {
		n.Store(0)
	}
}

// pullRequest is what a decode engine asks for, together with what it believes the blocks hold.
type pullRequest struct {
	engineID  string
	requestID string
	xid       string
	blockSize int
	tokens    int      // of its prompt, or of its beginning that was kept of an earlier answer
	turn      bool     // the latter
	ids       []int32  // blocks to read, in order
	want      []uint64 // content of each block of its prompt
}

// pullAnswer is what came of it. Where refused is set, nothing was read: the transfer failed. Otherwise actual is what
// the blocks held, nil when that is what the decode engine wanted; violation is set where vLLM would not have noticed.
type pullAnswer struct {
	refused   string
	violation violation
	actual    []uint64
}

// pull lets a decode engine read blocks and frees the hand-over, whether or not the read made sense: the real engine
// learns from the same notification that the transfer is over.
func (l *ledger) pull(engineID string, req *pullRequest) pullAnswer {
	if req.engineID != engineID && req.engineID != "" {
		return pullAnswer{refused: fmt.Sprintf("remote_engine_id is %s, this is %s", req.engineID, engineID)}
	}
	if req.blockSize != l.pool.blockSize {
		return pullAnswer{refused: fmt.Sprintf("block sizes differ: %d and %d", req.blockSize, l.pool.blockSize)}
	}
	for _, id := range req.ids {
		if id < 1 || int(id) >= len(l.pool.blocks) {
			return pullAnswer{refused: fmt.Sprintf("no block %d", id)}
		}
	}
	l.mu.Lock()
	h := l.live[req.requestID]
	outcome := l.past[req.requestID]
	if h != nil {
		l.end(h, "fetched")
	}
	if h != nil && len(req.ids) == 0 { // asked for by name alone
		req.ids = h.blocks
	}
	actual := l.read(req)
	l.mu.Unlock()
	if outcome == "expired" {
		l.late.Add(1)
	}
	answer := pullAnswer{violation: judge(h, outcome, req, actual)}
	if !slices.Equal(actual, req.want) {
		answer.actual = actual
	}
	if h != nil {
		l.fetched.Add(1)
		l.pool.free(h.blocks)
	}
	return answer
}

// read says what each block of the reader's prompt will hold; blocks that it did not ask for hold nothing.
func (l *ledger) read(req *pullRequest) []uint64 {
	n := min(len(req.ids), len(req.want))
	got := l.pool.read(req.ids[:n], func(i int) uint64 { return req.want[i] })
	return append(got, make([]uint64, len(req.want)-n)...)
}

// judge names what is wrong with a read that the real engines would carry out without a word.
func judge(h *handOver, outcome string, req *pullRequest, actual []uint64) violation {
	switch {
	case h == nil && outcome == "fetched":
		return violation{"read_twice", "the blocks of " + req.requestID + " were fetched before; they may hold another request's KV by now"}
	case h == nil && outcome == "expired":
		return violation{"expired", "the lease on the blocks of " + req.requestID + " ran out; they may hold another request's KV by now"}
	case h == nil && outcome == "released":
		return violation{"released", "the blocks of " + req.requestID + " were released"}
	case h == nil:
		return violation{"unknown_request", "nothing was ever kept for " + req.requestID}
	case len(req.ids) < len(req.want):
		return violation{"fewer_blocks", fmt.Sprintf("%d block ids for a prompt of %d blocks (%d tokens)", len(req.ids), len(req.want), req.tokens)}
	case !slices.Equal(req.ids, h.blocks):
		return violation{"foreign_blocks", "these are not the blocks of " + req.requestID}
	case !slices.Equal(actual, req.want):
		return violation{"other_prompt", fmt.Sprintf("the KV is of another prompt: %d tokens on the prefill engine, %d here", h.tokens, req.tokens)}
	case h.turn != req.turn:
		return violation{"wrong_way", "the blocks of " + req.requestID + " were kept for an engine of the other role"}
	case h.xid != req.xid && !h.turn:
		return violation{"request_id_mismatch", fmt.Sprintf("x-request-id was %q on the prefill leg and is %q here", h.xid, req.xid)}
	}
	return violation{}
}
