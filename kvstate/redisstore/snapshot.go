package redisstore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

// The interval at which the oldest replica writes a snapshot unasked, for replicas that start when all are gone; the
// minimum interval of those that are needed because the stream would otherwise cut entries that no snapshot has; the
// minimum pause after a snapshot; and the number of blocks and sessions in a chunk, about 512 KiB. Within settled after
// Redis came back its client may still return errors of the outage: a snapshot that was not written is written again.
const (
	snapshotEvery   = time.Minute
	snapshotSoonest = 10 * time.Second
	snapshotAtMost  = 500 * time.Millisecond
	chunkBlocks     = 1 << 16
	chunkSessions   = 1 << 14
	settled         = 5 * time.Second
	chunksAtOnce    = 2 // 1 MiB has to arrive within commandTime
)

// maxChunks bounds the reading that a notice can cause: 64 Mi blocks.
const maxChunks = 1 << 10

// snapshotWish is the purpose of a snapshot to be written.
type snapshotWish struct {
	everyone bool // every replica must load it, not only those that asked
	feeds    bool // for a replica that starts: with the feeds of publishers of KV events
}

// snapshots writes the snapshots of a pool.
type snapshots struct {
	p   *poolReplica
	due chan struct{} // one is wanted

	loading atomic.Bool // one is being loaded, and nothing else is read meanwhile

	mu   sync.Mutex
	wish snapshotWish // its purpose
}

// want makes the oldest replica write a snapshot soon.
func (s *snapshots) want(w snapshotWish) {
	s.mu.Lock()
	s.wish.everyone = s.wish.everyone || w.everyone
	s.wish.feeds = s.wish.feeds || w.feeds
	s.mu.Unlock()
	select {
	case s.due <- struct{}{}:
	default:
	}
}

// take returns the purpose of the next snapshot.
func (s *snapshots) take() snapshotWish {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.wish
	s.wish = snapshotWish{}
	return w
}

// writeSnapshots writes requested snapshots, until ctx ends; then a last one, if this replica is the oldest.
func (s *Store) writeSnapshots(ctx context.Context, p *poolReplica) {
	every := time.NewTicker(snapshotEvery)
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			if p.leads(0) && s.link.IsUp(0) {
				last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
				defer cancel()
				p.snapshots.tryWrite(last, snapshotWish{})
			}
			return
		case <-p.snapshots.due:
		case <-every.C:
			if !p.leads(0) || !s.link.IsUp(0) {
				continue
			}
		}
		w := p.snapshots.take()
		written := p.snapshots.tryWrite(ctx, w)
		wait(ctx, snapshotAtMost)
		// a replica that requested one repeats that; but no replica requests one for changes that did not fit into the
		// outbox
		if !written && w.everyone {
			p.snapshots.want(w)
		}
	}
}

func (s *snapshots) tryWrite(ctx context.Context, wish snapshotWish) (written bool) {
	err := s.write(ctx, wish)
	if err != nil && !errors.Is(err, errNotJoined) && ctx.Err() == nil && s.p.s.link.IsUp(settled) {
		s.p.s.log.Warn("a snapshot was not written", "pool", s.p.pool, "err", err)
	}
	return err == nil
}

// errNotJoined means that this replica has not read the stream yet.
var errNotJoined = errors.New("the stream is not read yet")

// write writes this replica's knowledge, and announces it.
func (s *snapshots) write(ctx context.Context, wish snapshotWish) error {
	p := s.p
	pool := p.s.state.Pool(p.pool)
	if pool == nil {
		return nil
	}
	p.mu.Lock()
	position, joined := p.position, p.joined
	p.mu.Unlock()
	if !joined {
		return errNotJoined
	}
	last, err := p.lastSnapshot(ctx)
	if err != nil {
		return err
	}
	w := chunkWriter{ctx: ctx, p: p, id: uint64(time.Now().UnixNano())}
	w.begin()
	for _, e := range pool.Endpoints() {
		if e.Failed() {
			w.chunk.Health = append(w.chunk.Health,
				&statev1.Health{Address: w.table.position(e.Addr), Failed: true, Hung: kvstate.Hung(e)})
		}
		pool.EachBlock(e, func(parent uint64, hashes []uint64) { w.blocks(e.Addr, parent, hashes) })
	}
	var sessions []affinity
	p.s.state.Sessions.EachSession(pool, func(name uint64, prefill, decode *kvstate.Endpoint) {
		item := affinity{name: name}
		if prefill != nil {
			item.prefill = prefill.Addr
		}
		if decode != nil {
			item.decode = decode.Addr
		}
		sessions = append(sessions, item)
	})
	for _, item := range sessions {
		w.session(item)
	}
	w.chunk.Members = p.s.roster.Gone(*p.ids.Load())
	if f := p.s.follower; wish.feeds && f != nil {
		if err := f.EachFeed(pool, w.feed); err != nil {
			return err
		}
	}
	if w.write(); w.err != nil {
		return w.err
	}
	return s.announce(ctx, last, &statev1.SnapshotNotice{
		Id: w.id, Chunks: uint32(w.chunks), Position: position.String(), Everyone: wish.everyone,
		Previous: last.GetId(), PreviousChunks: last.GetChunks(),
	})
}

// announce makes a snapshot the last one, and drops the one before its predecessor.
func (s *snapshots) announce(ctx context.Context, last, n *statev1.SnapshotNotice) error {
	p := s.p
	text, err := proto.Marshal(n)
	if err != nil {
		return fmt.Errorf("encoding the notice of a snapshot: %w", err)
	}
	pipe := p.s.client.Pipeline()
	pipe.Set(ctx, p.keys.snapshot(), p.s.sign(p.keys.snapshot(), text), snapshotTTL)
	for i := range min(int(last.GetPreviousChunks()), maxChunks) {
		pipe.Unlink(ctx, p.keys.chunk(last.GetPrevious(), i))
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("writing the notice of a snapshot: %w", err)
	}
	p.s.counters.snapshots.Add(1)
	p.mu.Lock()
	p.unsaved = 0
	p.mu.Unlock()
	p.out.mu.Lock()
	p.out.notice = n
	p.out.mu.Unlock()
	p.s.Changed()
	return nil
}

// chunkWriter writes a snapshot in parts. After an error it does nothing more.
type chunkWriter struct {
	ctx            context.Context //nolint:containedctx // lives as long as the call that makes it
	p              *poolReplica
	id             uint64
	chunk          *statev1.SnapshotChunk
	table          addressTable
	held, sessions int // blocks and sessions in the chunk
	chunks         int
	err            error
}

func (w *chunkWriter) begin() {
	w.chunk = &statev1.SnapshotChunk{}
	w.table = addressTable{batch: &w.chunk.Addresses, at: map[string]uint32{}}
	w.held, w.sessions = 0, 0
}

func (w *chunkWriter) blocks(addr string, parent uint64, hashes []uint64) {
	if w.err != nil {
		return
	}
	w.chunk.Blocks = append(w.chunk.Blocks, &statev1.Blocks{
		Address: w.table.position(addr), Kind: statev1.Blocks_KIND_ROUTED, Parent: parent,
		Hashes: append([]uint64(nil), hashes...),
	})
	if w.held += len(hashes); w.held >= chunkBlocks {
		w.write()
	}
}

func (w *chunkWriter) session(item affinity) {
	if w.err != nil {
		return
	}
	w.chunk.Sessions = append(w.chunk.Sessions, w.table.session(item))
	if w.sessions++; w.sessions >= chunkSessions {
		w.write()
	}
}

func (w *chunkWriter) write() {
	if w.err != nil {
		return
	}
	text, err := proto.Marshal(w.chunk)
	if err == nil {
		key := w.p.keys.chunk(w.id, w.chunks)
		err = w.p.s.client.Set(w.ctx, key, w.p.s.sign(key, text), snapshotTTL).Err()
	}
	if err != nil {
		w.err = fmt.Errorf("writing chunk %d of a snapshot: %w", w.chunks, err)
		return
	}
	w.chunks++
	w.begin()
}

// lastSnapshot returns the notice of the last snapshot, nil if there is none.
func (p *poolReplica) lastSnapshot(ctx context.Context) (*statev1.SnapshotNotice, error) {
	text, err := p.s.client.Get(ctx, p.keys.snapshot()).Bytes()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("looking for a snapshot: %w", err)
	}
	n := &statev1.SnapshotNotice{}
	text, ok := p.s.genuine(p.keys.snapshot(), text)
	if !ok {
		return nil, nil
	}
	if err := proto.Unmarshal(text, n); err != nil {
		return nil, nil //nolint:nilerr // from a later release: treated as none
	}
	return n, nil
}

// announced schedules the loading of a snapshot, if it is for this replica. poolReplica.mu is held.
func (p *poolReplica) announced(n *statev1.SnapshotNotice) {
	position, err := parseStreamID(n.GetPosition())
	answers := p.sync.wanted && err == nil && p.sync.position != (streamID{}) && position.compare(p.sync.position) >= 0
	if answers || n.GetEveryone() {
		p.notice = n
		p.sync.wanted = p.sync.wanted && !answers
	}
}

// loadAnnounced loads the announced snapshot.
func (p *poolReplica) loadAnnounced(ctx context.Context) {
	p.mu.Lock()
	n := p.notice
	p.notice = nil
	p.mu.Unlock()
	if n == nil {
		return
	}
	if err := p.load(ctx, n); err != nil && ctx.Err() == nil {
		p.s.log.Warn("a snapshot was not loaded", "pool", p.pool, "err", err)
		p.mu.Lock()
		p.sync = snapshotRequest{wanted: true, at: time.Now(), tries: 1} // askDue requests it
		p.mu.Unlock()
	}
}

// load adds a snapshot to the state.
func (p *poolReplica) load(ctx context.Context, n *statev1.SnapshotNotice) error {
	pool := p.s.state.Pool(p.pool)
	if pool == nil {
		return nil
	}
	began := time.Now()
	chunks := min(int(n.GetChunks()), maxChunks)
	pool.ReserveBlocks(chunks * chunkBlocks)
	for from := 0; from < chunks; from += chunksAtOnce {
		var keys []string
		for i := from; i < min(from+chunksAtOnce, chunks); i++ {
			keys = append(keys, p.keys.chunk(n.GetId(), i))
		}
		values, err := p.s.client.MGet(ctx, keys...).Result()
		if err != nil {
			return fmt.Errorf("reading a snapshot: %w", err)
		}
		for i, v := range values {
			signed, ok := v.(string)
			if !ok {
				return errors.New("reading a snapshot: a part of it is gone")
			}
			text, ok := p.s.genuine(keys[i], []byte(signed))
			if !ok {
				return errors.New("reading a snapshot: a part of it is not a replica's")
			}
			if err := p.loadChunk(pool, text); err != nil {
				return err
			}
		}
	}
	p.s.log.Info("took over what other replicas know", "pool", p.pool, "chunks", chunks, "blocks", pool.Blocks(),
		"time", time.Since(began))
	return nil
}

func (p *poolReplica) loadChunk(pool *kvstate.Pool, text []byte) error {
	var chunk statev1.SnapshotChunk
	if err := proto.Unmarshal(text, &chunk); err != nil {
		return fmt.Errorf("reading a snapshot: %w", err)
	}
	p.mu.Lock()
	at, unknown := p.endpoints.all(nil, pool, chunk.GetAddresses())
	joined := p.joined
	p.mu.Unlock()
	p.s.counters.unknown.Add(unknown)
	p.s.roster.Load(chunk.GetMembers())
	for _, b := range chunk.GetBlocks() {
		if e := at.of(b.GetAddress()); e != nil {
			pool.LoadBlocks(e, b.GetParent(), b.GetHashes())
		}
	}
	for _, session := range chunk.GetSessions() {
		prefill, decode := at.of(session.GetPrefill()-1), at.of(session.GetDecode()-1)
		p.s.state.Sessions.ApplyAffinity(pool, session.GetKey(), prefill, decode)
	}
	if joined { // otherwise the snapshot is old, and the engine may have dropped the batches since
		p.loadFeeds(pool, chunk.GetFeeds(), at)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.applyHealth(chunk.GetHealth(), at)
	return nil
}
