package redisstore

import (
	"math"
	"slices"
	"time"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
	statev1 "tandem/protos/state/v1"
)

// outbox holds what is to be told and is not said again by itself: blocks and sessions. It is bounded; what finds no room
// is told later, by a snapshot for everyone.
type outbox struct {
	blocks   []blocks
	since    time.Time // of the first of them
	sessions []stuck
	released []uint64
	learned  []prefixindex.LearnedTokens
	notice   *statev1.SnapshotNotice
	hello    bool
	bytes    int
	lossy    bool

	forwarded      []forwarded // bounded by themselves, and never told by that snapshot
	forwardedBytes int
}

type blocks struct {
	addr   string
	also   []string // other endpoints that were sent the same prompt
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
	return len(o.blocks) == 0 && len(o.sessions) == 0 && len(o.released) == 0 && len(o.learned) == 0 && len(o.forwarded) == 0 &&
		o.notice == nil && !o.hello
}

func (o *outbox) room(bytes int) bool {
	if o.bytes+bytes > maxOutbox {
		o.lossy = true
		return false
	}
	o.bytes += bytes
	return true
}

// again adds an endpoint to the prompt noted last, if it is the same one.
func (o *outbox) again(addr string, hashes []uint64) bool {
	if len(o.blocks) == 0 {
		return false
	}
	last := &o.blocks[len(o.blocks)-1]
	if !slices.Equal(last.hashes, hashes) {
		return false
	}
	last.also = append(last.also, addr)
	return true
}

// giveBack puts what could not be sent before what came since, and returns how many routed prompts found no room. Batches of
// KV events are not given back: a gap shows that they are missing.
func (o *outbox) giveBack(unsent *outbox) (dropped int) {
	if o.bytes+unsent.bytes > maxOutbox {
		o.lossy = true
		return len(unsent.blocks)
	}
	o.blocks = append(unsent.blocks, o.blocks...)
	if len(unsent.blocks) > 0 {
		o.since = unsent.since
	}
	o.sessions = append(unsent.sessions, o.sessions...)
	o.released = append(unsent.released, o.released...)
	o.learned = append(unsent.learned, o.learned...)
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
	p := s.sharer(pool.Spec.Name)
	if p == nil || len(hashes) == 0 {
		return
	}
	p.outMu.Lock()
	switch {
	case p.out.again(e.Addr, hashes): // the other endpoint of a pair
	case p.out.room(itemBytes + 8*len(hashes)):
		if len(p.out.blocks) == 0 {
			p.out.since = time.Now()
		}
		p.out.blocks = append(p.out.blocks, blocks{addr: e.Addr, hashes: slices.Clone(hashes)})
	default:
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

// Learned implements [kvstate.Peers]. What finds no room is not told: prefill will say it again.
func (s *Store) Learned(pool *kvstate.Pool, l prefixindex.LearnedTokens) {
	p := s.sharer(pool.Spec.Name)
	if p == nil {
		return
	}
	bytes := itemBytes
	for _, b := range l.Blocks {
		bytes += 8 * len(b.Hashes)
	}
	p.outMu.Lock()
	if p.out.bytes+bytes <= maxOutbox/2 {
		p.out.bytes += bytes
		p.out.learned = append(p.out.learned, l)
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
	load    kvstate.Booked
	failed  bool
	signals time.Time // and when its metrics were looked at
	looked  time.Time
}

// batchOf makes the batch that tells what is in the outbox and what has changed since the last one; with complete, all that
// is booked. It is nil where there is nothing to tell. before is what others were told until then of what it tells anew.
// sharer.mu is held.
func (p *sharer) batchOf(out *outbox, complete bool, now time.Time) (b *statev1.Batch, before map[string]told) {
	b = &statev1.Batch{
		Replica: p.s.replica, LeaseMs: uint32(p.s.o.Lease.Milliseconds()), Complete: complete,
		Hello: out.hello, WantsFeeds: out.hello && p.needsFeeds(), Snapshot: out.notice, Released: out.released,
	}
	t := addressTable{batch: &b.Addresses, at: map[string]uint32{}}
	for i := range out.blocks {
		item := &out.blocks[i]
		told := &statev1.Blocks{Address: t.position(item.addr), Kind: statev1.Blocks_KIND_ROUTED, Hashes: item.hashes}
		for _, addr := range item.also {
			told.Also = append(told.Also, t.position(addr))
		}
		b.Blocks = append(b.Blocks, told)
	}
	if len(out.blocks) > 0 {
		b.WaitedUs = uint64(max(now.Sub(out.since), 0).Microseconds())
	}
	for _, item := range out.sessions {
		b.Sessions = append(b.Sessions, t.session(item))
	}
	for i := range out.learned {
		b.Tokens = append(b.Tokens, tokensOf(&out.learned[i]))
	}
	before = map[string]told{}
	pool := p.s.state.Pool(p.pool)
	addForwarded(b, out, &t)
	p.addFingerprints(b)
	if pool != nil {
		prefill, local := pool.PrefillRates(now)
		b.PrefillRate, b.LocalRate = toMicros(prefill), toMicros(local)
		p.tellWaits(b, &t, pool, complete, now)
		for _, e := range pool.Endpoints() {
			known := p.told[e.Addr]
			if next := p.tellEndpoint(b, &t, e, known, complete, now); next != known {
				p.told[e.Addr], before[e.Addr] = next, known
			}
		}
	}
	if out.empty() && !complete && len(b.Addresses)+len(b.TicketKeys) == 0 && len(b.Waits)+len(b.WaitsOver)+len(b.WaitsSent) == 0 && !b.WaitsAll {
		return nil, nil
	}
	return b, before
}

// tellEndpoint adds what is new about an endpoint to what is known, and returns what is known then.
func (p *sharer) tellEndpoint(b *statev1.Batch, t *addressTable, e *kvstate.Endpoint, known told, complete bool, now time.Time) (next told) {
	next = known
	if l := e.Booked(now); l != known.load || complete && l != (kvstate.Booked{}) {
		b.Loads = append(b.Loads, loadOf(t.position(e.Addr), &l, now))
		next.load = l
	}
	if failed := e.Failed(); failed != known.failed {
		b.Health = append(b.Health, &statev1.Health{Address: t.position(e.Addr), Failed: failed})
		next.failed = failed
	}
	if g := e.Signals(); g != nil && (g.At.After(known.signals) || g.Looked.After(known.looked)) {
		b.Signals = append(b.Signals, signalsOf(t.position(e.Addr), g, known.looked, now))
		next.signals, next.looked = g.At, g.Looked
	}
	return next
}

// signalsOf tells signals. A look that others know by now is not told again: they would take it for a later one, by what the way took.
func signalsOf(address uint32, g *kvstate.Signals, looked, now time.Time) *statev1.Signals {
	out := &statev1.Signals{
		Address: address, Running: -1, Waiting: g.Waiting, KvTokens: -1, KvUsagePpm: toPPM(g.KVUsage), AgeMs: millis(now.Sub(g.At)), Elsewhere: g.Elsewhere,
	}
	if g.Looked.After(looked) {
		out.Running, out.KvTokens, out.LookOlderMs = g.Running, g.KVTokens, millis(g.At.Sub(g.Looked))
		out.Transfers, out.TransferBytes = uint64(g.Moved.Transfers), uint64(g.Moved.Bytes)
		out.TransferUs, out.TransferTokens = uint64(g.Moved.Time.Microseconds()), uint64(g.Moved.Tokens)
		out.Answers, out.AnswerTokens = uint64(g.Written.Answers), uint64(g.Written.Tokens)
		out.Gaps, out.GapUs = uint64(g.Written.Gaps), uint64(g.Written.GapTime.Microseconds())
	}
	return out
}

// millis are milliseconds; none where the clock went back.
func millis(d time.Duration) uint32 { return uint32(min(max(d.Milliseconds(), 0), math.MaxUint32)) }

func tokensOf(l *prefixindex.LearnedTokens) *statev1.Tokens {
	out := &statev1.Tokens{Prompt: l.Prompt, BlockBytes: uint32(l.BlockBytes), Bytes: uint64(l.Bytes), Tokens: uint64(l.Tokens)}
	for _, b := range l.Blocks {
		out.Blocks = append(out.Blocks, &statev1.TokenBlocks{Size: uint32(b.Size), From: uint32(b.From), Hashes: b.Hashes})
	}
	return out
}

// loadOf tells what is booked: times as what they are from now.
func loadOf(address uint32, l *kvstate.Booked, now time.Time) *statev1.Load {
	out := &statev1.Load{
		Address: address, Requests: l.Requests, PromptTokens: l.PromptTokens,
		Jobs: l.Jobs, WorkUs: l.Work.Microseconds(), LeadUs: l.Lead.Microseconds(),
	}
	if l.Jobs > 0 {
		out.LeadAgeUs = min(max(now.Sub(l.Since), 0), l.Lead).Microseconds()
	}
	if !l.LocalUntil.IsZero() {
		out.LocalUs = max(l.LocalUntil.Sub(now), 0).Microseconds()
	}
	return out
}

// toMicros is a rate in millionths, as batches have it.
func toMicros(v float64) uint32 { return uint32(min(max(v*1e6, 0), math.MaxUint32)) }

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
