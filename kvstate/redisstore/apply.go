package redisstore

import (
	"time"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
	statev1 "tandem/protos/state/v1"
)

// apply applies another replica's batch to the state. poolReplica.mu is held.
func (p *poolReplica) apply(b *statev1.Batch, id streamID) {
	pool := p.s.state.Pool(p.pool)
	if pool == nil {
		return
	}
	now := time.Now()
	age := p.s.clock.age(id, now)
	c := &p.s.counters
	c.batchesRead.Add(1)
	before := id.compare(p.began) <= 0 // it was published before this replica joined
	if len(b.GetBlocks()) > 0 && !before {
		c.lag.Note(age + time.Duration(min(b.GetWaitedUs(), uint64(maxWork)))*time.Microsecond)
	}
	at, unknown := p.endpoints.all(p.endpoints.found[:0], pool, b.GetAddresses())
	p.endpoints.found = at
	c.unknown.Add(unknown)
	m := p.observe(b, age)
	if m != nil {
		m.genuine = true
		if m.seq != 0 && b.GetSeq() > m.seq+1 {
			c.gaps.Add(1)
			p.ask()
			if p.sync.position != (streamID{}) && id.compare(p.sync.position) > 0 {
				p.sync.position = id // an older snapshot does not fill the gap
			}
		}
		m.seq = b.GetSeq()
		p.noteFingerprints(m, b)
		p.applyLoads(m, b, at, now.Add(-age))
		p.applyWaits(pool, b, at, now.Add(-age))
	}
	applyBlocks(p.s.state, pool, b.GetBlocks(), at)
	p.applyHealth(b.GetHealth(), at)
	applyKVLoads(p.s.state, pool, b.GetKvLoads(), at)
	for _, g := range b.GetSignals() {
		if e := at.of(g.GetAddress()); e != nil {
			p.applySignals(e, g, now.Add(-age-time.Duration(g.GetAgeMs())*time.Millisecond))
		}
	}
	for _, session := range b.GetSessions() {
		prefill, decode := at.of(session.GetPrefill()-1), at.of(session.GetDecode()-1)
		p.s.state.Sessions.ApplyAffinity(pool, session.GetKey(), prefill, decode)
	}
	for _, t := range b.GetTokens() {
		p.s.state.ApplyLearned(pool, learnedOf(t))
	}
	for _, id := range b.GetReleased() {
		p.s.state.Bookings.Release(kvstate.ReservationID(id))
	}
	if !before { // otherwise the loaded feed contains them
		p.applyForwarded(pool, b.GetEvents(), at)
	}
	if m != nil && b.GetJoining() && p.leads(b.GetReplica()) {
		p.snapshots.want(snapshotWish{feeds: b.GetWantsFeeds()})
	}
	if n := b.GetSnapshot(); n != nil {
		p.unsaved = 0
		if !before { // otherwise it is loaded already, or was replaced since
			p.announced(n)
		}
	}
}

// applyBlocks applies prompts that another replica routed.
func applyBlocks(s *kvstate.State, pool *kvstate.Pool, all []*statev1.Blocks, at positions) {
	for _, blocks := range all {
		if blocks.GetKind() != statev1.Blocks_KIND_ROUTED { // from a later release
			continue
		}
		if e := at.of(blocks.GetAddress()); e != nil {
			s.ApplyRouted(pool, e, blocks.GetHashes())
		}
		for _, also := range blocks.GetAlso() {
			if e := at.of(also); e != nil {
				s.ApplyRouted(pool, e, blocks.GetHashes())
			}
		}
	}
}

// applyKVLoads applies what another replica saw of KV loads.
func applyKVLoads(s *kvstate.State, pool *kvstate.Pool, loads []*statev1.KVLoad, at positions) {
	for _, l := range loads {
		prefill, decode := at.of(l.GetPrefill()), at.of(l.GetDecode())
		switch {
		case prefill == nil || decode == nil:
		case l.GetFailed():
			s.KVLoads.ApplyLoadFailed(pool, prefill.Addr, decode.Addr)
		default:
			s.KVLoads.ApplyLoadSucceeded(pool, prefill.Addr, decode.Addr)
		}
	}
}

// positions are the endpoints at the addresses of a message; nil if one is unknown here.
type positions []*kvstate.Endpoint

// of returns the endpoint at a position; nil if it is unknown.
func (p positions) of(i uint32) *kvstate.Endpoint {
	if int(i) < len(p) {
		return p[i]
	}
	return nil
}

// endpoints finds a pool's endpoints by address.
type endpoints struct {
	pool   *kvstate.Pool
	byAddr map[string]*kvstate.Endpoint
	found  positions // of the last batch, to be used again
}

// all appends the endpoints at the addresses of a batch, and nil for each unknown address. unknown is how many these
// are: replicas may have different configurations, or resolve a name to other addresses.
func (x *endpoints) all(to positions, pool *kvstate.Pool, addresses []string) (out positions, unknown int64) {
	for _, a := range addresses {
		e := x.find(pool, a)
		if e == nil {
			unknown++
		}
		to = append(to, e)
	}
	return to, unknown
}

// find finds one of the pool's endpoints. poolReplica.mu is held.
func (x *endpoints) find(pool *kvstate.Pool, addr string) *kvstate.Endpoint {
	if x.pool != pool { // other endpoints make another pool
		x.pool, x.byAddr = pool, make(map[string]*kvstate.Endpoint, len(pool.Endpoints()))
		for _, e := range pool.Endpoints() {
			x.byAddr[e.Addr] = e
		}
	}
	return x.byAddr[addr]
}

// Bounds of the reservations in a batch: more than any replica makes.
const (
	maxLoad = 1 << 40
	maxWork = int64(24 * time.Hour / time.Microsecond)
)

// applyLoads records the reservations of a replica as of the time sent.
func (p *poolReplica) applyLoads(m *remoteReplica, b *statev1.Batch, at positions, sent time.Time) {
	if m.prefillRate != b.GetPrefillRate() || m.localRate != b.GetLocalRate() {
		m.prefillRate, m.localRate = b.GetPrefillRate(), b.GetLocalRate()
		p.setRates()
	}
	var named map[string]bool
	if b.GetComplete() {
		named = make(map[string]bool, len(b.GetLoads()))
	}
	for _, l := range b.GetLoads() {
		if e := at.of(l.GetAddress()); e != nil { // of others nothing is kept: a complete batch comes every second
			addr := e.Addr
			if named != nil {
				named[addr] = true
			}
			p.set(m, addr, bookedOf(l, sent))
		}
	}
	if b.GetComplete() {
		for addr := range m.loads {
			if !named[addr] {
				p.set(m, addr, kvstate.Booked{})
			}
		}
	}
}

// bookedOf decodes bookings of a batch made at the time at.
func bookedOf(l *statev1.Load, at time.Time) kvstate.Booked {
	count := func(n int64) int64 { return min(max(n, 0), maxLoad) }
	micros := func(n int64) time.Duration { return time.Duration(min(max(n, 0), maxWork)) * time.Microsecond }
	b := kvstate.Booked{
		Requests: count(l.GetRequests()), PromptTokens: count(l.GetPromptTokens()),
		Jobs: min(count(l.GetJobs()), count(l.GetRequests())), Work: micros(l.GetWorkUs()),
		Lead: micros(min(l.GetLeadUs(), l.GetWorkUs())),
		Room: kvstate.Room{Held: count(l.GetHeld()), Need: count(l.GetNeed())},
	}
	if b.Jobs > 0 {
		b.Since = at.Add(-micros(l.GetLeadAgeUs()))
	}
	if l.GetLocalUs() > 0 {
		b.LocalUntil = at.Add(micros(l.GetLocalUs()))
	}
	return b
}

// maxPrompt is more than the bytes or tokens of any prompt.
const maxPrompt = 1 << 30

func learnedOf(t *statev1.Tokens) *prefixindex.LearnedTokens {
	out := &prefixindex.LearnedTokens{
		Prompt: t.GetPrompt(), BlockBytes: int(t.GetBlockBytes()), Bytes: int(min(t.GetBytes(), maxPrompt)),
		Tokens: int(min(t.GetTokens(), maxPrompt)),
	}
	for _, b := range t.GetBlocks() {
		out.Blocks = append(out.Blocks,
			prefixindex.LearnedBlocks{Size: int(b.GetSize()), From: int(b.GetFrom()), Hashes: b.GetHashes()})
	}
	return out
}

func (p *poolReplica) applyHealth(all []*statev1.Health, at positions) {
	for _, h := range all {
		if e := at.of(h.GetAddress()); e != nil {
			p.s.state.Health.ApplyFailed(e, h.GetFailed(), h.GetHung())
			t := p.published[e.Addr]
			t.failed, t.hung = h.GetFailed(), h.GetHung()
			p.published[e.Addr] = t
		}
	}
}

func (p *poolReplica) applySignals(e *kvstate.Endpoint, g *statev1.Signals, at time.Time) {
	var scraped time.Time
	if g.GetRunning() >= 0 {
		scraped = at.Add(-time.Duration(g.GetLookOlderMs()) * time.Millisecond)
	}
	if p.s.state.ApplyObserved(e, kvstate.Signals{
		Running: g.GetRunning(), Waiting: g.GetWaiting(), KVUsage: fromPPM(g.GetKvUsagePpm()),
		KVTokens: g.GetKvTokens(), At: at, ScrapedAt: scraped, External: max(g.GetExternal(), 0),
		Work: int64(g.GetWork()), Expired: int64(g.GetExpired()),
		Transfers: kvstate.TransferCounters{
			Transfers: int64(g.GetTransfers()), Bytes: int64(g.GetTransferBytes()),
			Tokens: int64(g.GetTransferTokens()),
			Time:   time.Duration(g.GetTransferUs()) * time.Microsecond, Failed: int64(g.GetFailedTransfers()),
		},
		Answers: kvstate.AnswerCounters{
			Answers: int64(g.GetAnswers()), Tokens: int64(g.GetAnswerTokens()),
			Gaps: int64(g.GetGaps()), GapTime: time.Duration(g.GetGapUs()) * time.Microsecond,
			Generated: int64(g.GetGenerated()),
		},
		Host: hostMemoryOf(g.GetHost()),
	}) {
		t := p.published[e.Addr]
		t.signals, t.scraped = later(t.signals, at), later(t.scraped, scraped)
		p.published[e.Addr] = t
	}
}

func hostMemoryOf(h *statev1.HostMemory) kvstate.HostMemory {
	return kvstate.HostMemory{
		Tokens: int64(h.GetTokens()), Bytes: int64(h.GetBytes()), LoadedTokens: int64(h.GetLoadedTokens()),
		LoadedBytes: int64(h.GetLoadedBytes()), LoadTime: time.Duration(h.GetLoadUs()) * time.Microsecond,
	}
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
