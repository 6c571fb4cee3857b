package redisstore

import (
	"math"
	"slices"
	"sync"
	"time"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
	statev1 "tandem/protos/state/v1"
)

// outbox collects changes until they are published. It is safe for concurrent use.
type outbox struct {
	mu sync.Mutex
	changes
}

// changes are published once. They are bounded; a snapshot for everyone publishes what does not fit.
type changes struct {
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

	forwarded      []forwarded // with a bound of their own; not part of the snapshot
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

func (o *changes) empty() bool {
	return len(o.blocks) == 0 && len(o.sessions) == 0 && len(o.released) == 0 && len(o.learned) == 0 &&
		len(o.forwarded) == 0 && len(o.kvLoads) == 0 && o.notice == nil && !o.join
}

func (o *changes) reserve(bytes int) bool {
	if o.bytes+bytes > maxOutbox {
		o.lossy = true
		return false
	}
	o.bytes += bytes
	return true
}

// addEndpoint adds an endpoint to the last prompt, if it is the same one.
func (o *changes) addEndpoint(addr string, hashes []uint64) bool {
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
func (o *outbox) requeue(unsent *changes) (dropped int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.reserve(unsent.bytes) {
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
	o.lossy = o.lossy || unsent.lossy
	o.join = o.join || unsent.join
	if o.notice == nil {
		o.notice = unsent.notice
	}
	return 0
}

// take empties the outbox.
func (o *outbox) take() changes {
	o.mu.Lock()
	defer o.mu.Unlock()
	taken := o.changes
	o.changes = changes{lossy: taken.lossy}
	return taken
}

// lost reports whether something did not fit since the last call.
func (o *outbox) lost() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	defer func() { o.lossy = false }()
	return o.lossy
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

// collect changes the outbox of a pool, which is published soon.
func (s *Store) collect(pool *kvstate.Pool, change func(*changes)) {
	if p := s.poolReplica(pool.Spec.Name); p != nil {
		p.out.mu.Lock()
		change(&p.out.changes)
		p.out.mu.Unlock()
		s.Changed()
	}
}

// Routed implements [kvstate.Replicas].
func (s *Store) Routed(pool *kvstate.Pool, e *kvstate.Endpoint, hashes []uint64) {
	if len(hashes) == 0 {
		return
	}
	s.collect(pool, func(o *changes) {
		switch {
		case o.addEndpoint(e.Addr, hashes): // the other endpoint of a pair
		case o.reserve(itemBytes + 8*len(hashes)):
			if len(o.blocks) == 0 {
				o.since = time.Now()
			}
			o.blocks = append(o.blocks, blocks{addr: e.Addr, hashes: slices.Clone(hashes)})
		default:
			s.counters.dropped.Add(1)
		}
	})
}

// Released implements [kvstate.Replicas].
func (s *Store) Released(pool *kvstate.Pool, id kvstate.ReservationID) {
	s.collect(pool, func(o *changes) {
		if o.reserve(8) {
			o.released = append(o.released, uint64(id))
		}
	})
}

// Learned implements [kvstate.Replicas]. Tokens that do not fit are dropped: they will be learned again.
func (s *Store) Learned(pool *kvstate.Pool, l prefixindex.LearnedTokens) {
	bytes := itemBytes
	for _, b := range l.Blocks {
		bytes += 8 * len(b.Hashes)
	}
	s.collect(pool, func(o *changes) {
		if o.bytes+bytes <= maxOutbox/2 {
			o.bytes += bytes
			o.learned = append(o.learned, l)
		}
	})
}

// SessionServed implements [kvstate.Replicas].
func (s *Store) SessionServed(pool *kvstate.Pool, name uint64, prefill, decode *kvstate.Endpoint) {
	addr := func(e *kvstate.Endpoint) string {
		if e == nil {
			return ""
		}
		return e.Addr
	}
	s.collect(pool, func(o *changes) {
		if o.reserve(itemBytes) {
			o.sessions = append(o.sessions, affinity{name, addr(prefill), addr(decode)})
		}
	})
}

// KVLoaded implements [kvstate.Replicas].
func (s *Store) KVLoaded(pool *kvstate.Pool, prefill, decode string, failed bool) {
	s.collect(pool, func(o *changes) {
		if o.reserve(itemBytes) {
			o.kvLoads = append(o.kvLoads, kvLoad{prefill, decode, failed})
		}
	})
}

// Reachable implements [kvstate.Replicas].
func (s *Store) Reachable() bool { return s.link.IsUp(0) }

// published is the other replicas' knowledge of an endpoint, so that it need not be published again.
type published struct {
	load    kvstate.Booked
	failed  bool
	hung    bool
	signals time.Time // of any report
	scraped time.Time
}

// batchOf returns the batch that publishes the outbox and the changes since the last batch; with complete, all
// reservations. It is nil if there is nothing to publish. before is the other replicas' previous knowledge of the
// endpoints in it. poolReplica.mu is held.
func (p *poolReplica) batchOf(out *changes, complete bool,
	now time.Time) (b *statev1.Batch, before map[string]published) {
	b = &statev1.Batch{
		Replica: p.s.replica, LeaseMs: uint32(p.s.o.Lease.Milliseconds()), Complete: complete,
		Joining: out.join, WantsFeeds: out.join && p.needsFeeds(), Snapshot: out.notice, Released: out.released,
	}
	t := addressTable{batch: &b.Addresses, at: map[string]uint32{}}
	for i := range out.blocks {
		item := &out.blocks[i]
		routed := &statev1.Blocks{
			Address: t.position(item.addr), Kind: statev1.Blocks_KIND_ROUTED, Hashes: item.hashes,
		}
		for _, addr := range item.also {
			routed.Also = append(routed.Also, t.position(addr))
		}
		b.Blocks = append(b.Blocks, routed)
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
	p.edition = p.s.roster.AddTo(b, p.edition)
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
		len(b.Waits)+len(b.WaitsOver)+len(b.WaitsSent) == 0 && !b.WaitsAll && b.Member == nil {
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
	if failed, hung := e.Failed(), kvstate.Hung(e); failed != known.failed || hung != known.hung {
		b.Health = append(b.Health, &statev1.Health{Address: t.position(e.Addr), Failed: failed, Hung: hung})
		next.failed, next.hung = failed, hung
	}
	if g := e.Signals(); g != nil && (g.At.After(known.signals) || g.ScrapedAt.After(known.scraped)) {
		b.Signals = append(b.Signals, signalsOf(t.position(e.Addr), g, known.scraped, now))
		next.signals, next.scraped = g.At, g.ScrapedAt
	}
	return next
}

// signalsOf encodes signals. A published scrape is left out: its age would make it a later one.
func signalsOf(address uint32, g *kvstate.Signals, scraped, now time.Time) *statev1.Signals {
	out := &statev1.Signals{
		Address: address, Running: -1, Waiting: g.Waiting, KvTokens: -1, KvUsagePpm: toPPM(g.KVUsage),
		AgeMs: millis(now.Sub(g.At)), External: g.External,
	}
	if g.ScrapedAt.After(scraped) {
		out.Running, out.KvTokens, out.LookOlderMs = g.Running, g.KVTokens, millis(g.At.Sub(g.ScrapedAt))
		out.Transfers, out.TransferBytes = uint64(g.Transfers.Transfers), uint64(g.Transfers.Bytes)
		out.TransferUs, out.TransferTokens = uint64(g.Transfers.Time.Microseconds()), uint64(g.Transfers.Tokens)
		out.Answers, out.AnswerTokens = uint64(g.Answers.Answers), uint64(g.Answers.Tokens)
		out.Generated, out.Work, out.Expired = uint64(g.Answers.Generated), uint64(g.Work), uint64(g.Expired)
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
		blocks := &statev1.TokenBlocks{Size: uint32(b.Size), From: uint32(b.From), Hashes: b.Hashes}
		out.Blocks = append(out.Blocks, blocks)
	}
	return out
}

// loadOf encodes bookings, times relative to now.
func loadOf(address uint32, l *kvstate.Booked, now time.Time) *statev1.Load {
	out := &statev1.Load{
		Address: address, Requests: l.Requests, PromptTokens: l.PromptTokens,
		Jobs: l.Jobs, WorkUs: l.Work.Microseconds(), LeadUs: l.Lead.Microseconds(),
		Held: l.Room.Held, Need: l.Room.Need,
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
