package redisstore

import (
	"math"
	"slices"
	"time"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
	statev1 "tandem/protos/state/v1"
)

// outbox holds the changes that are published once: blocks and sessions. It is bounded; a snapshot for everyone
// publishes what does not fit.
type outbox struct {
	blocks   []blocks
	since    time.Time // of the first of them
	sessions []affinity
	released []uint64
	learned  []prefixindex.LearnedTokens
	kvLoads  []kvLoad
	notice   *statev1.SnapshotNotice
	join     bool
	bytes    int
	lossy    bool

	forwarded      []forwarded // with their own bound, and not part of that snapshot
	forwardedBytes int
}

type blocks struct {
	addr   string
	also   []string // other endpoints with the same prompt
	hashes []uint64
}

// kvLoad is a KV load that failed, or that succeeded after failures.
type kvLoad struct {
	prefill, decode string
	failed          bool
}

type affinity struct {
	name            uint64
	prefill, decode string
}

// maxOutbox bounds the waiting changes, in bytes: some 20 s of 100 long prompts a second. itemBytes is about the size
// of an item without its hashes.
const maxOutbox, itemBytes = 4 << 20, 64

func (o *outbox) empty() bool {
	return len(o.blocks) == 0 && len(o.sessions) == 0 && len(o.released) == 0 && len(o.learned) == 0 &&
		len(o.forwarded) == 0 && len(o.kvLoads) == 0 &&
		o.notice == nil && !o.join
}

func (o *outbox) reserve(bytes int) bool {
	if o.bytes+bytes > maxOutbox {
		o.lossy = true
		return false
	}
	o.bytes += bytes
	return true
}

// addEndpoint adds an endpoint to the last prompt, if it is the same one.
func (o *outbox) addEndpoint(addr string, hashes []uint64) bool {
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

// requeue puts unsent changes back, in front, and returns the number of routed prompts that did not fit. Batches of KV
// events are not put back: a gap shows that they are missing.
func (o *outbox) requeue(unsent *outbox) (dropped int) {
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
	o.kvLoads = append(unsent.kvLoads, o.kvLoads...)
	o.bytes += unsent.bytes
	o.lossy = o.lossy || unsent.lossy
	o.join = o.join || unsent.join
	if o.notice == nil {
		o.notice = unsent.notice
	}
	return 0
}

// Changed implements [kvstate.Replicas].
func (s *Store) Changed() {
	if s.dirty.CompareAndSwap(false, true) {
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

// Routed implements [kvstate.Replicas].
func (s *Store) Routed(pool *kvstate.Pool, e *kvstate.Endpoint, hashes []uint64) {
	p := s.poolReplica(pool.Spec.Name)
	if p == nil || len(hashes) == 0 {
		return
	}
	p.outMu.Lock()
	switch {
	case p.out.addEndpoint(e.Addr, hashes): // the other endpoint of a pair
	case p.out.reserve(itemBytes + 8*len(hashes)):
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

// Released implements [kvstate.Replicas].
func (s *Store) Released(pool *kvstate.Pool, id kvstate.ReservationID) {
	p := s.poolReplica(pool.Spec.Name)
	if p == nil {
		return
	}
	p.outMu.Lock()
	if p.out.reserve(8) {
		p.out.released = append(p.out.released, uint64(id))
	}
	p.outMu.Unlock()
	s.Changed()
}

// Learned implements [kvstate.Replicas]. Tokens that do not fit are dropped: they will be learned again.
func (s *Store) Learned(pool *kvstate.Pool, l prefixindex.LearnedTokens) {
	p := s.poolReplica(pool.Spec.Name)
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

// SessionServed implements [kvstate.Replicas].
func (s *Store) SessionServed(pool *kvstate.Pool, name uint64, prefill, decode *kvstate.Endpoint) {
	p := s.poolReplica(pool.Spec.Name)
	if p == nil {
		return
	}
	item := affinity{name: name}
	if prefill != nil {
		item.prefill = prefill.Addr
	}
	if decode != nil {
		item.decode = decode.Addr
	}
	p.outMu.Lock()
	if p.out.reserve(itemBytes) {
		p.out.sessions = append(p.out.sessions, item)
	}
	p.outMu.Unlock()
	s.Changed()
}

// KVLoaded implements [kvstate.Replicas].
func (s *Store) KVLoaded(pool *kvstate.Pool, prefill, decode string, failed bool) {
	p := s.poolReplica(pool.Spec.Name)
	if p == nil {
		return
	}
	p.outMu.Lock()
	if p.out.reserve(itemBytes) {
		p.out.kvLoads = append(p.out.kvLoads, kvLoad{prefill, decode, failed})
	}
	p.outMu.Unlock()
	s.Changed()
}

// Reachable implements [kvstate.Replicas].
func (s *Store) Reachable() bool { return s.link.isUp() }

// take empties the outbox.
func (p *poolReplica) take() outbox {
	p.outMu.Lock()
	defer p.outMu.Unlock()
	taken := p.out
	p.out = outbox{lossy: taken.lossy}
	return taken
}

// published is the other replicas' knowledge of an endpoint, so that it need not be published again.
type published struct {
	load    kvstate.Booked
	failed  bool
	signals time.Time // and of the last scrape
	looked  time.Time
}

// batchOf returns the batch that publishes the outbox and the changes since the last batch; with complete, all
// reservations. It is nil if there is nothing to publish. before is the other replicas' previous knowledge of the
// endpoints in it. poolReplica.mu is held.
func (p *poolReplica) batchOf(out *outbox, complete bool,
	now time.Time) (b *statev1.Batch, before map[string]published) {
	b = &statev1.Batch{
		Replica: p.s.replica, LeaseMs: uint32(p.s.o.Lease.Milliseconds()), Complete: complete,
		Joining: out.join, WantsFeeds: out.join && p.needsFeeds(), Snapshot: out.notice, Released: out.released,
	}
	t := addressTable{batch: &b.Addresses, at: map[string]uint32{}}
	for i := range out.blocks {
		item := &out.blocks[i]
		published := &statev1.Blocks{Address: t.position(item.addr), Kind: statev1.Blocks_KIND_ROUTED,
			Hashes: item.hashes}
		for _, addr := range item.also {
			published.Also = append(published.Also, t.position(addr))
		}
		b.Blocks = append(b.Blocks, published)
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
	for _, l := range out.kvLoads {
		b.KvLoads = append(b.KvLoads,
			&statev1.KVLoad{Prefill: t.position(l.prefill), Decode: t.position(l.decode), Failed: l.failed})
	}
	before = map[string]published{}
	pool := p.s.state.Pool(p.pool)
	addForwarded(b, out, &t)
	p.addFingerprints(b)
	if pool != nil {
		prefill, local := pool.PrefillRates(now)
		b.PrefillRate, b.LocalRate = toMicros(prefill), toMicros(local)
		p.publishWaits(b, &t, pool, complete, now)
		for _, e := range pool.Endpoints() {
			known := p.published[e.Addr]
			if next := p.publishEndpoint(b, &t, e, known, complete, now); next != known {
				p.published[e.Addr], before[e.Addr] = next, known
			}
		}
	}
	if out.empty() && !complete && len(b.Addresses)+len(b.TicketKeys) == 0 &&
		len(b.Waits)+len(b.WaitsOver)+len(b.WaitsSent) == 0 && !b.WaitsAll {
		return nil, nil
	}
	return b, before
}

// publishEndpoint adds an endpoint's changes to the batch, and returns the other replicas' knowledge after it.
func (p *poolReplica) publishEndpoint(b *statev1.Batch, t *addressTable, e *kvstate.Endpoint, known published,
	complete bool, now time.Time) (next published) {
	next = known
	if l := e.Booked(now); l != known.load || complete && l != (kvstate.Booked{}) {
		b.Loads = append(b.Loads, loadOf(t.position(e.Addr), &l, now))
		next.load = l
	}
	if failed := e.Failed(); failed != known.failed {
		b.Health = append(b.Health, &statev1.Health{Address: t.position(e.Addr), Failed: failed})
		next.failed = failed
	}
	if g := e.Signals(); g != nil && (g.At.After(known.signals) || g.ScrapedAt.After(known.looked)) {
		b.Signals = append(b.Signals, signalsOf(t.position(e.Addr), g, known.looked, now))
		next.signals, next.looked = g.At, g.ScrapedAt
	}
	return next
}

// signalsOf encodes signals. A published scrape is left out: its age would make it a later one.
func signalsOf(address uint32, g *kvstate.Signals, looked, now time.Time) *statev1.Signals {
	out := &statev1.Signals{
		Address: address, Running: -1, Waiting: g.Waiting, KvTokens: -1, KvUsagePpm: toPPM(g.KVUsage),
		AgeMs: millis(now.Sub(g.At)), External: g.External,
	}
	if g.ScrapedAt.After(looked) {
		out.Running, out.KvTokens, out.LookOlderMs = g.Running, g.KVTokens, millis(g.At.Sub(g.ScrapedAt))
		out.Transfers, out.TransferBytes = uint64(g.Transfers.Transfers), uint64(g.Transfers.Bytes)
		out.TransferUs, out.TransferTokens = uint64(g.Transfers.Time.Microseconds()), uint64(g.Transfers.Tokens)
		out.Answers, out.AnswerTokens = uint64(g.Answers.Answers), uint64(g.Answers.Tokens)
		out.Generated = uint64(g.Answers.Generated)
		out.FailedTransfers = uint64(g.Transfers.Failed)
		out.Gaps, out.GapUs = uint64(g.Answers.Gaps), uint64(g.Answers.GapTime.Microseconds())
		if h := &g.Host; *h != (kvstate.HostMemory{}) {
			out.Host = &statev1.HostMemory{
				Tokens: uint64(h.Tokens), Bytes: uint64(h.Bytes), LoadedTokens: uint64(h.LoadedTokens),
				LoadedBytes: uint64(h.LoadedBytes), LoadUs: uint64(h.LoadTime.Microseconds()),
			}
		}
	}
	return out
}

// millis returns milliseconds; 0 if the clock went back.
func millis(d time.Duration) uint32 { return uint32(min(max(d.Milliseconds(), 0), math.MaxUint32)) }

func tokensOf(l *prefixindex.LearnedTokens) *statev1.Tokens {
	out := &statev1.Tokens{Prompt: l.Prompt, BlockBytes: uint32(l.BlockBytes), Bytes: uint64(l.Bytes),
		Tokens: uint64(l.Tokens)}
	for _, b := range l.Blocks {
		out.Blocks = append(out.Blocks,
			&statev1.TokenBlocks{Size: uint32(b.Size), From: uint32(b.From), Hashes: b.Hashes})
	}
	return out
}

// loadOf encodes bookings, times relative to now.
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

// toMicros returns a rate in millionths, as in batches.
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

func (t *addressTable) session(item affinity) *statev1.Session {
	out := &statev1.Session{Key: item.name}
	if item.prefill != "" {
		out.Prefill = t.position(item.prefill) + 1
	}
	if item.decode != "" {
		out.Decode = t.position(item.decode) + 1
	}
	return out
}
