package redisstore

import (
	"fmt"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
	statev1 "tandem/protos/state/v1"
)

// What is packed is read as it was, in the fewest bytes that there can be but for a head or two.
func TestPackedEvents(t *testing.T) {
	words := func(n ...uint64) []uint64 { return n }
	root := prefixindex.TokenRoot("", 16)
	for name, c := range map[string]struct {
		events []prefixindex.BlockEvent
		bytes  int
	}{
		"nothing":         {nil, 0},
		"a prompt begins": {[]prefixindex.BlockEvent{{Kind: prefixindex.BlocksStored, Keys: words(1, 2), Blocks: words(3, 4), BlockSize: 16, Root: root}}, 3 + 32},
		"and goes on": {[]prefixindex.BlockEvent{
			{Kind: prefixindex.BlocksStored, Keys: words(1, 2), Blocks: words(3, 4), BlockSize: 16, Root: root},
			{Kind: prefixindex.BlocksStored, Keys: words(5), Blocks: words(6), BlockSize: 16, Root: root, Parent: 2, HasParent: true},
		}, 3 + 32 + 2 + 16},
		"behind another": {[]prefixindex.BlockEvent{{Kind: prefixindex.BlocksStored, Keys: words(1), Blocks: words(3), BlockSize: 16, Root: root, Parent: 9, HasParent: true, Host: true}}, 3 + 8 + 16},
		"an adapter": {[]prefixindex.BlockEvent{
			{Kind: prefixindex.BlocksStored, Keys: words(1), Blocks: words(3), BlockSize: 16, Root: prefixindex.TokenRoot("sql", 16), LoRA: []byte("sql")},
		}, 3 + 4 + 16},
		"copied to another tier": {[]prefixindex.BlockEvent{{Kind: prefixindex.BlocksStored, Keys: words(1, 2, 3), Host: true}}, 2 + 24},
		"removed":                {[]prefixindex.BlockEvent{{Kind: prefixindex.BlocksRemoved, Keys: words(1)}, {Kind: prefixindex.BlocksRemoved, Keys: words(2), Host: true}}, 2 * (2 + 8)},
		"cleared":                {[]prefixindex.BlockEvent{{Kind: prefixindex.AllBlocksCleared}}, 2},
	} {
		packed := appendEvents(nil, c.events)
		require.Len(t, packed, c.bytes, name)
		var r eventReader
		got, err := r.read(packed)
		require.NoError(t, err, name)
		require.Equal(t, fmt.Sprint(c.events), fmt.Sprint(got), name)
		for n := range packed {
			if part, err := r.read(packed[:n]); err == nil {
				require.Less(t, len(part), len(c.events), "%s: cut", name)
			}
		}
	}
}

// Whatever was packed by whom: it is read without panic, and what is read is packed as the same again.
func FuzzPackedEvents(f *testing.F) {
	f.Add(appendEvents(nil, []prefixindex.BlockEvent{
		{Kind: prefixindex.BlocksStored, Keys: []uint64{1, 2}, Blocks: []uint64{3, 4}, BlockSize: 16, Parent: 7, HasParent: true, LoRA: []byte("x")},
		{Kind: prefixindex.BlocksRemoved, Keys: []uint64{1}}, {Kind: prefixindex.AllBlocksCleared},
	}))
	f.Fuzz(func(t *testing.T, packed []byte) {
		var r, again eventReader
		events, err := r.read(packed)
		if err != nil {
			return
		}
		for i := range events {
			require.True(t, len(events[i].Blocks) == 0 || len(events[i].Blocks) == len(events[i].Keys))
		}
		same, err := again.read(appendEvents(nil, events))
		require.NoError(t, err)
		require.Equal(t, fmt.Sprint(events), fmt.Sprint(same))
	})
}

// busy is what a full engine says in a batch: a prompt's new blocks stored, as many old ones removed, one by one.
func busy(n, blocks int) []prefixindex.BlockEvent {
	e := prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, BlockSize: 16, Root: prefixindex.TokenRoot("", 16), Keys: prompt(2*n, blocks), Blocks: prompt(2*n+1, blocks)}
	events := []prefixindex.BlockEvent{e}
	for _, key := range slices.Backward(prompt(2*((n+512)%1024), blocks)) { // the end of a prompt goes first
		events = append(events, prefixindex.BlockEvent{Kind: prefixindex.BlocksRemoved, Keys: []uint64{key}})
	}
	return events
}

func cpu() float64 {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return float64(r.Utime.Nano()+r.Stime.Nano()) / 1e9
}

// taker is a feed that takes what it is told.
type taker struct {
	kvstate.EventFollower
	feed *prefixindex.Feed
}

func (t taker) TakeCollected(_ *kvstate.Pool, c *kvstate.Collected) { t.feed.Apply(c.Events) }
func (taker) Follows(*kvstate.Pool) bool                            { return true }
func (taker) Lacks(*kvstate.Pool) []string                          { return nil }
func (taker) SayWhatIsCollected(*kvstate.Pool)                      {}

// BenchmarkRelay is what it costs to tell of a batch of 64 blocks stored and 64 removed ("tell", what the listener pays on
// top), and to take it in ("take", from the entry of the stream to the index). kvevents' BenchmarkApply is what it costs to
// listen oneself.
func BenchmarkRelay(b *testing.B) {
	const blocks = 64
	var batches [][]prefixindex.BlockEvent
	for n := range 1024 {
		batches = append(batches, busy(n, blocks))
	}
	at := apart(b, Options{URL: "redis://127.0.0.1:1"}, 16)
	two := []uint64{at.store.replica, 1}
	at.p.collectors.Store(&two)
	perBlock := func(b *testing.B, n int, cpu float64) {
		b.ReportMetric(cpu*1e9/float64(n)/(2*blocks), "cpu-ns/block")
		b.ReportMetric(float64(n)*2*blocks/cpu/1e6, "Mblocks/cpu-s")
	}
	entryOf := func(n int) []byte {
		at.store.TellCollected(at.pool, &kvstate.Collected{Endpoint: at.e(0), From: uint64(n), Next: uint64(n) + 1, Events: batches[n%len(batches)]})
		e, err := at.p.entry(false, false)
		require.NoError(b, err)
		return e.bytes
	}
	b.Run("tell", func(b *testing.B) {
		n, bytes, began := 0, 0, cpu()
		for b.Loop() {
			bytes += len(entryOf(n))
			n++
		}
		perBlock(b, n, cpu()-began)
		b.ReportMetric(float64(bytes)/float64(n)/(2*blocks), "B/block")
	})
	b.Run("take", func(b *testing.B) {
		var entries []string
		for n := range batches {
			entries = append(entries, string(entryOf(n)))
		}
		to := apart(b, Options{URL: "redis://127.0.0.1:1"}, 16)
		to.store.Follow(taker{feed: to.pool.Feed(to.e(0))})
		n, began := 0, cpu()
		for b.Loop() {
			to.p.takeIn(message("1-1", entries[n%len(entries)]))
			n++
		}
		perBlock(b, n, cpu()-began)
	})
}

// A batch of an engine's events is some bytes around what it says, and several are told as one.
func TestCollectedIsToldTogether(t *testing.T) {
	a := apart(t, Options{URL: "redis://127.0.0.1:1"}, 4)
	two := []uint64{a.store.replica, 1}
	a.p.collectors.Store(&two)
	tell := func(from, next uint64, o kvstate.Collected) {
		o.Endpoint, o.From, o.Next = a.e(1), from, next
		a.store.TellCollected(a.pool, &o)
	}
	one := []prefixindex.BlockEvent{{Kind: prefixindex.BlocksRemoved, Keys: []uint64{1}}}
	tell(5, 6, kvstate.Collected{Events: one, Time: 1})
	tell(6, 7, kvstate.Collected{Events: one, Time: 2})
	tell(7, 7, kvstate.Collected{Time: 2}) // it listens: known by what it has told
	tell(7, 8, kvstate.Collected{Events: one, Time: 3, Reset: true})
	tell(8, 9, kvstate.Collected{Events: one, Time: 4})
	e, err := a.p.entry(false, false)
	require.NoError(t, err)
	var b statev1.Batch
	require.NoError(t, proto.Unmarshal(e.bytes, &b))
	require.Len(t, b.GetCollected(), 2)
	first, second := b.GetCollected()[0], b.GetCollected()[1]
	require.Equal(t, []any{uint64(5), uint64(7), 2.0, false, 20}, []any{first.GetFrom(), first.GetNext(), first.GetTime(), first.GetAnew(), len(first.GetEvents())})
	require.Equal(t, []any{uint64(7), uint64(9), 4.0, true, 20}, []any{second.GetFrom(), second.GetNext(), second.GetTime(), second.GetAnew(), len(second.GetEvents())})

	// What could not be sent is told before what came since, and what does not fit not at all.
	unsent := e.out
	tell(9, 10, kvstate.Collected{Events: one, Time: 5})
	a.p.outMu.Lock()
	require.Zero(t, a.p.out.giveBackCollected(&unsent))
	a.p.outMu.Unlock()
	tell(10, 11, kvstate.Collected{Events: one, Time: 6})
	require.Len(t, a.p.out.collected, 3)
	require.Equal(t, uint64(11), a.p.out.collected[2].GetNext())
	big := []prefixindex.BlockEvent{{Kind: prefixindex.BlocksRemoved, Keys: prompt(1, maxCollected/8)}}
	tell(11, 12, kvstate.Collected{Events: big, Time: 7})
	require.Empty(t, a.p.out.collected)
	require.Equal(t, int64(3), a.store.Stats().Uncollected)
	tell(12, 13, kvstate.Collected{Events: one, Time: 8})
	require.Len(t, a.p.out.collected, 1)

	unsent = outbox{}
	unsent.collect(&kvstate.Collected{Endpoint: a.e(1), Events: big[:1:1], From: 13, Next: 14})
	unsent.collect(&kvstate.Collected{Endpoint: a.e(1), Events: one, From: 13, Next: 14})
	require.Equal(t, 3, a.p.out.giveBackCollected(&unsent))
	require.Empty(t, a.p.out.collected)
}

// Where the stream is gone (FLUSHALL) there is nothing to take in again, and nothing to warn of.
func TestCatchingUpWithoutAStream(t *testing.T) {
	a := apart(t, Options{URL: "redis://" + startRedis(t).addr}, 1)
	a.p.position = streamID{ms: 2}
	require.NoError(t, a.p.catchUp(t.Context(), streamID{ms: 1}))
}

// How old the last batch is that is told says something of how late it came, unless it was asked for; or unless it is read once more,
// or was said before this replica was there.
func TestWhatIsOldIsTold(t *testing.T) {
	a := apart(t, Options{URL: "redis://127.0.0.1:1"}, 1)
	two := []uint64{a.store.replica, 1}
	a.p.collectors.Store(&two)
	gone := []prefixindex.BlockEvent{{Kind: prefixindex.BlocksRemoved, Keys: []uint64{1}}}
	asked, published := kvstate.Collected{Old: true, Events: gone, Next: 1}, kvstate.Collected{Events: gone, Next: 1}
	var listens kvstate.Collected // and says nothing else
	for name, c := range map[string]struct {
		said []kvstate.Collected
		old  bool
	}{
		"published":                              {said: []kvstate.Collected{published}},
		"asked for":                              {said: []kvstate.Collected{asked}, old: true},
		"asked for, then published":              {said: []kvstate.Collected{asked, published}},
		"published, then asked for":              {said: []kvstate.Collected{published, asked}, old: true},
		"asked for, and it says that it listens": {said: []kvstate.Collected{asked, listens}, old: true},
		"it says that it listens, asked for":     {said: []kvstate.Collected{listens, asked}, old: true},
	} {
		from := uint64(5)
		for _, said := range c.said {
			said.Endpoint, said.From, said.Next = a.e(0), from, from+said.Next
			from = said.Next
			a.store.TellCollected(a.pool, &said)
		}
		e, err := a.p.entry(false, false)
		require.NoError(t, err)
		b, old := apart(t, Options{URL: "redis://127.0.0.1:1"}, 1), []bool{}
		b.store.Follow(olds{old: &old})
		b.p.began = streamID{ms: 5}
		b.p.takeIn(message("6-1", string(e.bytes)))
		b.p.retake(message("6-1", string(e.bytes)))
		b.p.takeIn(message("4-1", string(e.bytes)))
		require.Equal(t, []bool{c.old, true, true}, old, name)
	}
}

// olds is a follower that notes what is old of what it takes.
type olds struct {
	taker
	old *[]bool
}

func (o olds) TakeCollected(_ *kvstate.Pool, c *kvstate.Collected) { *o.old = append(*o.old, c.Old) }
