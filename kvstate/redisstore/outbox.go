package redisstore

import (
	"math"
	"slices"
	"time"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

// outbox holds what is to be told and is not said again by itself: blocks and sessions. It is bounded; what finds no room
// is told later, by a snapshot for everyone.
type outbox struct {
	blocks   []blocks
	sessions []stuck
	released []uint64
	notice   *statev1.SnapshotNotice
	hello    bool
	bytes    int
	lossy    bool
}

type blocks struct {
	addr   string
	kind   statev1.Blocks_Kind
	hashes []uint64
}

type stuck struct {
	name            uint64
	prefill, decode string
}

// maxOutbox bounds what waits, in bytes: some 20 s of 100 long prompts a second.
const maxOutbox = 4 << 20

const itemBytes = 64 // about what an item takes beside its hashes

func (o *outbox) empty() bool {
	return len(o.blocks) == 0 && len(o.sessions) == 0 && len(o.released) == 0 && o.notice == nil && !o.hello
}

func (o *outbox) room(bytes int) bool {
	if o.bytes+bytes > maxOutbox {
		o.lossy = true
		return false
	}
	o.bytes += bytes
	return true
}

// giveBack puts what could not be sent before what came since, and returns how many routed prompts found no room.
func (o *outbox) giveBack(unsent *outbox) (dropped int) {
	if o.bytes+unsent.bytes > maxOutbox {
		o.lossy = true
		return len(unsent.blocks)
	}
	o.blocks = append(unsent.blocks, o.blocks...)
	o.sessions = append(unsent.sessions, o.sessions...)
	o.released = append(unsent.released, o.released...)
	o.bytes += unsent.bytes
	o.lossy = o.lossy || unsent.lossy
	o.hello = o.hello || unsent.hello
	if o.notice == nil {
		o.notice = unsent.notice
	}
	return 0
}

// Changed implements [kvstate.Peers].
func (s *Store) Changed() {
	if s.dirty.CompareAndSwap(false, true) {
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

// Routed implements [kvstate.Peers].
func (s *Store) Routed(pool *kvstate.Pool, e *kvstate.Endpoint, hashes []uint64) {
	s.tell(pool, e, statev1.Blocks_KIND_ROUTED, hashes)
}

func (s *Store) tell(pool *kvstate.Pool, e *kvstate.Endpoint, kind statev1.Blocks_Kind, hashes []uint64) {
	p := s.sharer(pool.Spec.Name)
	if p == nil || len(hashes) == 0 && kind != statev1.Blocks_KIND_CLEARED {
		return
	}
	p.outMu.Lock()
	if p.out.room(itemBytes + 8*len(hashes)) {
		p.out.blocks = append(p.out.blocks, blocks{e.Addr, kind, slices.Clone(hashes)})
	} else {
		s.counters.dropped.Add(1)
	}
	p.outMu.Unlock()
	s.Changed()
}

// Released implements [kvstate.Peers].
func (s *Store) Released(pool *kvstate.Pool, id kvstate.ReservationID) {
	p := s.sharer(pool.Spec.Name)
	if p == nil {
		return
	}
	p.outMu.Lock()
	if p.out.room(8) {
		p.out.released = append(p.out.released, uint64(id))
	}
	p.outMu.Unlock()
	s.Changed()
}

// Stuck implements [kvstate.Peers].
func (s *Store) Stuck(pool *kvstate.Pool, name uint64, prefill, decode *kvstate.Endpoint) {
	p := s.sharer(pool.Spec.Name)
	if p == nil {
		return
	}
	item := stuck{name: name}
	if prefill != nil {
		item.prefill = prefill.Addr
	}
	if decode != nil {
		item.decode = decode.Addr
	}
	p.outMu.Lock()
	if p.out.room(itemBytes) {
		p.out.sessions = append(p.out.sessions, item)
	}
	p.outMu.Unlock()
	s.Changed()
}

// take empties the outbox.
func (p *sharer) take() outbox {
	p.outMu.Lock()
	defer p.outMu.Unlock()
	taken := p.out
	p.out = outbox{lossy: taken.lossy}
	return taken
}

// told is what others know of an endpoint, from here or from elsewhere, so that it need not be said again.
type told struct {
	load    load
	failed  bool
	signals time.Time
}

// batchOf makes the batch that tells what is in the outbox and what has changed since the last one; with complete, all that
// is booked. It is nil where there is nothing to tell. before is what others were told until then of what it tells anew.
// sharer.mu is held.
func (p *sharer) batchOf(out *outbox, complete bool, now time.Time) (b *statev1.Batch, before map[string]told) {
	b = &statev1.Batch{
		Replica: p.s.replica, LeaseMs: uint32(p.s.o.Lease.Milliseconds()), Complete: complete,
		Hello: out.hello, Snapshot: out.notice, Released: out.released,
	}
	t := addressTable{batch: &b.Addresses, at: map[string]uint32{}}
	for i := range out.blocks {
		item := &out.blocks[i]
		b.Blocks = append(b.Blocks, &statev1.Blocks{Address: t.position(item.addr), Kind: item.kind, Hashes: item.hashes})
	}
	for _, item := range out.sessions {
		b.Sessions = append(b.Sessions, t.session(item))
	}
	before = map[string]told{}
	if pool := p.s.state.Pool(p.pool); pool != nil {
		for _, e := range pool.Endpoints() {
			known := p.told[e.Addr]
			if next := p.tellEndpoint(b, &t, e, known, complete, now); next != known {
				p.told[e.Addr], before[e.Addr] = next, known
			}
		}
	}
	if out.empty() && !complete && len(b.Addresses) == 0 {
		return nil, nil
	}
	return b, before
}

// tellEndpoint adds what is new about an endpoint to what is known, and returns what is known then.
func (p *sharer) tellEndpoint(b *statev1.Batch, t *addressTable, e *kvstate.Endpoint, known told, complete bool, now time.Time) (next told) {
	next = known
	var l load
	l.requests, l.tokens = e.Load()
	if l != known.load || complete && l != (load{}) {
		b.Loads = append(b.Loads, &statev1.Load{Address: t.position(e.Addr), Requests: l.requests, PromptTokens: l.tokens})
		next.load = l
	}
	if failed := e.Failed(); failed != known.failed {
		b.Health = append(b.Health, &statev1.Health{Address: t.position(e.Addr), Failed: failed})
		next.failed = failed
	}
	if g := e.Signals(); g != nil && g.At.After(known.signals) {
		b.Signals = append(b.Signals, &statev1.Signals{
			Address: t.position(e.Addr), Running: g.Running, Waiting: g.Waiting, KvTokens: g.KVTokens,
			KvUsagePpm: toPPM(g.KVUsage), AgeMs: uint32(min(max(now.Sub(g.At).Milliseconds(), 0), math.MaxUint32)),
		})
		next.signals = g.At
	}
	return next
}

func toPPM(v float64) int64 {
	if v < 0 {
		return -1
	}
	return int64(v * 1e6)
}

func fromPPM(v int64) float64 {
	if v < 0 {
		return -1
	}
	return float64(v) / 1e6
}

// addressTable gives every address of a message a position.
type addressTable struct {
	batch *[]string
	at    map[string]uint32
}

func (t *addressTable) position(addr string) uint32 {
	i, ok := t.at[addr]
	if !ok {
		i = uint32(len(*t.batch))
		t.at[addr] = i
		*t.batch = append(*t.batch, addr)
	}
	return i
}

func (t *addressTable) session(item stuck) *statev1.Session {
	out := &statev1.Session{Key: item.name}
	if item.prefill != "" {
		out.Prefill = t.position(item.prefill) + 1
	}
	if item.decode != "" {
		out.Decode = t.position(item.decode) + 1
	}
	return out
}
