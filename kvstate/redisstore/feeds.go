package redisstore

import (
	"bytes"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
	statev1 "tandem/protos/state/v1"
)

// Every replica subscribes to every publisher of KV events by itself. Two things pass through Redis: feeds for a
// replica that starts, in the snapshot that it requests; and the batches of publishers that connect to one replica.

// Follow makes f receive the feeds and batches of other replicas. Call it before [Store.Join].
func (s *Store) Follow(f kvstate.EventFollower) { s.follower = f }

// maxForwarded bounds the batches that wait to be published, in bytes: some 10,000 blocks. A batch that does not fit
// appears as a gap in the publisher's numbers.
const maxForwarded = 1 << 20

// forwarded is a batch that waits to be published.
type forwarded struct {
	addr  string
	batch *statev1.EventBatch
}

// Forward implements [kvstate.EventForwarder].
func (s *Store) Forward(pool *kvstate.Pool, b kvstate.EventBatch) {
	p := s.poolReplica(pool.Spec.Name)
	if p == nil || len(*p.ids.Load()) == 1 {
		return
	}
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	if p.out.forwardedBytes+len(b.Payload) > maxForwarded {
		s.counters.eventsDropped.Add(1)
		return
	}
	p.out.forwardedBytes += itemBytes + len(b.Payload)
	event := &statev1.EventBatch{Rank: uint32(b.Rank), Seq: b.Seq, Payload: bytes.Clone(b.Payload)}
	p.out.forwarded = append(p.out.forwarded, forwarded{b.Endpoint.Addr, event})
	s.Changed()
}

// addForwarded adds the waiting batches of KV events to a batch of the stream.
func addForwarded(b *statev1.Batch, out *changes, t *addressTable) {
	for _, f := range out.forwarded {
		f.batch.Address = t.position(f.addr)
		b.Events = append(b.Events, f.batch)
	}
}

// applyForwarded applies batches that another replica received from publishers.
func (p *poolReplica) applyForwarded(pool *kvstate.Pool, all []*statev1.EventBatch, at positions) {
	if p.s.follower == nil {
		return
	}
	for _, b := range all {
		if e := at.of(b.GetAddress()); e != nil {
			p.s.follower.Forwarded(pool,
				kvstate.EventBatch{Endpoint: e, Rank: int(b.GetRank()), Seq: b.GetSeq(), Payload: b.GetPayload()})
		}
	}
}

// needsFeeds reports whether this replica lacks earlier reports of publishers.
func (p *poolReplica) needsFeeds() bool {
	pool := p.s.state.Pool(p.pool)
	return p.s.follower != nil && pool != nil && p.s.follower.NeedsFeeds(pool)
}

// feed adds a part of a publisher's feed to a snapshot.
func (w *chunkWriter) feed(part *kvstate.FeedPart) error {
	out := &statev1.Feed{
		Address: w.table.position(part.Endpoint.Addr), Rank: uint32(part.Rank), Next: part.Next, Time: part.Time,
		First: part.First, More: part.More,
	}
	for i := range part.Events {
		e := &part.Events[i]
		run := &statev1.Run{Keys: e.Keys, Blocks: e.Blocks, BlockSize: uint32(e.BlockSize), Lora: e.LoRA}
		run.Tier = uint32(e.Tier)
		if e.HasParent {
			run.Parent = &e.Parent
		}
		out.Runs = append(out.Runs, run)
		w.held += 2 * len(e.Keys)
	}
	w.chunk.Feeds = append(w.chunk.Feeds, out)
	if w.held >= chunkBlocks {
		w.write()
	}
	return w.err
}

// loadFeeds loads the feeds in a snapshot.
func (p *poolReplica) loadFeeds(pool *kvstate.Pool, feeds []*statev1.Feed, at positions) {
	if p.s.follower == nil {
		return
	}
	for _, f := range feeds {
		e := at.of(f.GetAddress())
		if e == nil {
			continue
		}
		part := kvstate.FeedPart{Endpoint: e, Rank: int(f.GetRank()), Next: f.GetNext(), Time: f.GetTime(),
			First: f.GetFirst(), More: f.GetMore()}
		for _, run := range f.GetRuns() {
			if len(run.GetBlocks()) == 0 || len(run.GetBlocks()) == len(run.GetKeys()) {
				part.Events = append(part.Events, eventOf(run))
			}
		}
		p.s.follower.LoadFeed(pool, &part)
	}
}

// maxBlockSize is more than the tokens of any block.
const maxBlockSize = 1 << 20

func eventOf(run *statev1.Run) prefixindex.BlockEvent {
	e := prefixindex.BlockEvent{
		Kind: prefixindex.BlocksStored, Keys: run.GetKeys(), Blocks: run.GetBlocks(), LoRA: run.GetLora(),
		Tier:   prefixindex.Tier(min(run.GetTier(), uint32(prefixindex.TierRemote))),
		Parent: run.GetParent(), HasParent: run.Parent != nil, BlockSize: int(min(run.GetBlockSize(), maxBlockSize)),
	}
	e.Root = prefixindex.TokenRoot(string(e.LoRA), e.BlockSize)
	return e
}
