package redisstore

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
	statev1 "tandem/protos/state/v1"
)

// events follows the one publisher of a replica's first endpoint.
type events struct {
	feed      *prefixindex.Feed
	e         *kvstate.Endpoint
	needs     atomic.Bool // its feed
	positions int
	forwarded []string
	failing   error
}

func newEvents(t testing.TB, r *replica) *events {
	t.Helper()
	x := &events{feed: r.pool.Feed(r.e(0)), e: r.e(0)}
	r.store.Follow(x)
	return x
}

func (x *events) NeedsFeeds(*kvstate.Pool) bool { return x.needs.Load() }

func (x *events) LoadFeed(_ *kvstate.Pool, p *kvstate.FeedPart) {
	x.feed.Apply(p.Events)
	if !p.More {
		x.needs.Store(false)
	}
}

// EachFeed gives the feed in parts of two events.
func (x *events) EachFeed(_ *kvstate.Pool, f func(*kvstate.FeedPart) error) error {
	if x.failing != nil {
		return x.failing
	}
	var all []prefixindex.BlockEvent
	x.feed.Snapshot().Each(func(e *prefixindex.BlockEvent) {
		own := *e
		own.Keys, own.Blocks = slices.Clone(e.Keys), slices.Clone(e.Blocks)
		all = append(all, own)
	})
	for part := range slices.Chunk(all, 2) {
		p := kvstate.FeedPart{Endpoint: x.e, Next: 7, Time: 1.5, Events: part, First: &part[0] == &all[0], More: &part[len(part)-1] != &all[len(all)-1]}
		if err := f(&p); err != nil {
			return err
		}
	}
	return nil
}

func (x *events) Forwarded(_ *kvstate.Pool, b kvstate.EventBatch) {
	x.forwarded = append(x.forwarded, fmt.Sprint(b.Endpoint.Addr, " ", b.Rank, " ", b.Seq, " ", string(b.Payload)))
}

func (x *events) ForwardPositions(*kvstate.Pool) { x.positions++ }

// runsOfBlocks are events of so many prompts of so many blocks, some of them in another tier, of an adapter, or in two tiers.
func runsOfBlocks(prompts, blocks int) (out []prefixindex.BlockEvent) {
	for i := range prompts {
		lora := []byte("sql")[:i%2*3]
		e := prefixindex.BlockEvent{
			Kind: prefixindex.BlocksStored, Keys: prompt(2*i, blocks), Blocks: prompt(2*i+1, blocks), BlockSize: 16, Tier: prefixindex.Tier(i % 3 * (i % 2)), LoRA: lora, Root: prefixindex.TokenRoot(string(lora), 16),
		}
		out = append(out, e)
		if i%3 == 2 {
			out = append(out, prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Keys: e.Keys[:1], Tier: prefixindex.TierRemote})
		}
		out = append(out, prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Keys: prompt(100+i, 1), Blocks: prompt(200+i, 1), Parent: e.Keys[blocks-1], HasParent: true, BlockSize: 16})
	}
	return out
}

// A feed is read from a snapshot as it was written, whatever is in it, and only from the one that answers a hello that wants it.
func TestFeedsAreInASnapshot(t *testing.T) {
	r := startRedis(t)
	a, b := apart(t, redisURL(r), 1), apart(t, redisURL(r), 1)
	x, y := newEvents(t, a), newEvents(t, b)
	x.feed.Apply(runsOfBlocks(6, 5))
	a.p.joined = true
	read := func(wish snapshotWish, joined bool) int {
		y.feed.Clear()
		b.p.joined = joined
		require.NoError(t, a.p.snapshots.write(t.Context(), wish))
		n, err := b.p.lastSnapshot(t.Context())
		require.NoError(t, err)
		require.NoError(t, b.p.load(t.Context(), n))
		return y.feed.Stats().Held
	}
	require.Equal(t, 36, read(snapshotWish{feeds: true}, true))
	all := func(f *prefixindex.Feed) (out []string) {
		f.Snapshot().Each(func(e *prefixindex.BlockEvent) { out = append(out, fmt.Sprint(*e)) })
		return out
	}
	require.ElementsMatch(t, all(x.feed), all(y.feed))
	require.Zero(t, read(snapshotWish{}, true))
	require.Zero(t, read(snapshotWish{feeds: true}, false), "an old one")
	x.failing = fmt.Errorf("it has none")
	require.ErrorIs(t, a.p.snapshots.write(t.Context(), snapshotWish{feeds: true}), x.failing)
}

// A replica that starts asks for feeds or does not, and the oldest writes them.
func TestFeedsAreWanted(t *testing.T) {
	r := lonely(t, 1)
	x := newEvents(t, r)
	for _, wants := range []bool{true, false} {
		r.hears(&statev1.Batch{Replica: r.store.replica + 1, Joining: true, WantsFeeds: wants})
		<-r.p.snapshots.due
		require.Equal(t, snapshotWish{feeds: wants}, r.p.snapshots.take())
	}
	took := record(r)
	for _, needs := range []bool{true, false} {
		x.needs.Store(needs)
		r.p.requestSnapshot()
		require.NoError(t, r.flush(false))
		require.Equal(t, needs, took.last().GetWantsFeeds())
	}
}

// Batches are forwarded in order, and taken by others as they were; what was sent before a replica said hello is in a feed.
func TestBatchesAreForwarded(t *testing.T) {
	a, b := lonely(t, 2), lonely(t, 2)
	x := record(a)
	forward := func(seq uint64, payload string) {
		a.store.Forward(a.pool, kvstate.EventBatch{Endpoint: a.e(1), Rank: 3, Seq: seq, Payload: []byte(payload)})
	}
	forward(4, "nobody")
	a.p.ids.Store(&[]uint64{a.store.replica, a.store.replica + 1})
	forward(5, "five")
	forward(6, "six")
	forward(7, "")
	require.NoError(t, a.flush(true))
	y := newEvents(t, b)
	b.hears(x.last())
	want := []string{addr(1) + " 3 5 five", addr(1) + " 3 6 six", addr(1) + " 3 7 "}
	require.Equal(t, want, y.forwarded)
	b.p.began = streamID{ms: 1 << 62}
	b.hears(x.last())
	require.Equal(t, want, y.forwarded)
}

// BenchmarkFeed is what it costs to write the feed of an engine for a replica that starts, and to load it, without Redis itself.
func BenchmarkFeed(b *testing.B) {
	const prompts, blocks = 1000, 64
	r := apart(b, Options{URL: "redis://127.0.0.1:1"}, 1)
	x := newEvents(b, r)
	r.p.joined = true
	for i := range prompts {
		x.feed.Apply([]prefixindex.BlockEvent{{Kind: prefixindex.BlocksStored, Keys: prompt(2*i, blocks), Blocks: prompt(2*i+1, blocks), BlockSize: 16, Root: prefixindex.TokenRoot("", 16)}})
	}
	var text []byte
	b.Run("write", func(b *testing.B) {
		for b.Loop() {
			w := chunkWriter{p: r.p}
			w.begin()
			w.held = -1 << 30 // all in one
			require.NoError(b, x.EachFeed(r.pool, w.feed))
			var err error
			text, err = proto.Marshal(w.chunk)
			require.NoError(b, err)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/prompts/blocks, "ns/block")
		b.ReportMetric(float64(len(text))/prompts/blocks, "B/block")
	})
	b.Run("load", func(b *testing.B) {
		for b.Loop() {
			x.feed.Clear()
			require.NoError(b, r.p.loadChunk(r.pool, text))
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/prompts/blocks, "ns/block")
	})
}
