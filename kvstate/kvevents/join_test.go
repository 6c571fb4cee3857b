package kvevents

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// follower is a replica that follows one engine, without a network in between.
type follower struct {
	*subscription
	x engineIndex
}

func newFollower(t *testing.T, joining bool) *follower {
	x := newEngineIndex()
	s := newSubscription(t.Context(), target{pool: "p", endpoint: x.pool.Endpoints()[0]}, x.feed, silent())
	s.stream.joining = joining
	return &follower{s, x}
}

// parts returns a replica's feed as another one reads it later.
func (f *follower) parts(t *testing.T) (out []kvstate.FeedPart) {
	require.NoError(t, f.eachPart(func(p *kvstate.FeedPart) error { out = append(out, *p); return nil }))
	return out
}

// A replica that starts while others follow an engine gets their knowledge, whenever it connected and whenever they
// wrote their feed, as long as no batch in between was missed; and it never promises more than the engine holds.
func joinProgram(t *testing.T, next func(int) int) {
	canReplay := next(2) == 0
	e := newEngine(24+next(40), 1_000_000, next(2) == 0)
	ask := replay(noReplay)
	if canReplay {
		ask = e.replay
	}
	old, starting := newFollower(t, false), newFollower(t, true)
	connected, evicted := false, false
	publish := func(n int) {
		for range n {
			k := e.step(next)
			old.stream.live(k.seq, k.payload, ask)
			if connected {
				starting.stream.live(k.seq, k.payload, ask)
			}
		}
	}
	require.NoError(t, ignoreNoReplay(old.stream.connected(ask)))
	publish(next(60))
	missed := false // a batch between the feed and the connection
	var parts []kvstate.FeedPart
	switch next(3) {
	case 0: // the usual order: it connects, then the others write
		connected = true
		publish(next(20))
		parts = old.parts(t)
	case 1: // it connects later
		parts = old.parts(t)
		n := next(5)
		publish(n)
		missed = n > 0
		connected = true
	case 2: // no replica writes
		connected, missed = true, e.seq > 0
	}
	evicted = old.x.feed.Stats().Orphans > 0 // blocks behind an evicted one are not in a feed
	require.NoError(t, ignoreNoReplay(starting.stream.connected(ask)))
	publish(next(10))
	if next(8) == 0 {
		e.restart()
		publish(1 + next(5))
	}
	for i := range parts {
		starting.stream.load(&parts[i])
	}
	publish(next(10))
	require.Equal(t, len(parts) > 0, starting.stream.isLoaded())
	require.NoError(t, ignoreNoReplay(starting.stream.join(ask)))
	publish(1 + next(20))
	for _, ids := range prompts() {
		want, got := e.hit(ids), starting.x.hit(tokenPrompt(ids), engineBlock)
		require.LessOrEqual(t, got, want, "it promises what is gone")
		if canReplay && !evicted || !missed && !evicted {
			require.Equal(t, want, got)
		}
	}
	require.Equal(t, old.stream.next, starting.stream.next)
}

func ignoreNoReplay(err error) error {
	if err == errNoReplay { //nolint:errorlint // as it is
		return nil
	}
	return err
}

func TestAReplicaThatStartsAgainstEngine(t *testing.T) {
	seeds := uint64(400)
	if testing.Short() || budget.Race {
		seeds = 40
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { joinProgram(t, rand.New(rand.NewPCG(seed, 17)).IntN) })
	}
}

// A feed that came only in part is forgotten; a repeated one replaces the previous one; and after joining none is
// accepted.
func TestFeedsThatAreLoaded(t *testing.T) {
	next := rand.New(rand.NewPCG(1, 17)).IntN
	e := newEngine(40, 0, false)
	old := newFollower(t, false)
	for range 100 {
		k := e.step(next)
		old.stream.live(k.seq, k.payload, noReplay)
	}
	parts := old.parts(t)
	require.Len(t, parts, 1)
	all := parts[0]
	held := old.x.feed.Stats().Held - old.x.feed.Stats().Orphans
	half := all
	half.More, half.Events = true, slices.Clone(all.Events[:len(all.Events)/2])
	rest := all
	rest.First, rest.Events = false, slices.Clone(all.Events[len(all.Events)/2:])
	other := kvstate.FeedPart{First: true, Next: 3, Events: []prefixindex.BlockEvent{
		{Kind: prefixindex.BlocksStored, Keys: []uint64{1}, Blocks: []uint64{2}, BlockSize: 4, Root: prefixindex.TokenRoot("", 4)},
	}}
	for name, c := range map[string]struct {
		parts []kvstate.FeedPart
		held  int
	}{
		"whole":                {[]kvstate.FeedPart{all}, held},
		"in parts":             {[]kvstate.FeedPart{half, rest}, held},
		"twice":                {[]kvstate.FeedPart{all, all}, held},
		"another one before":   {[]kvstate.FeedPart{other, all}, held},
		"the rest is missing":  {[]kvstate.FeedPart{half}, 0},
		"the first is missing": {[]kvstate.FeedPart{rest}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFollower(t, true)
			for _, p := range c.parts {
				f.stream.load(&p)
			}
			require.NoError(t, f.stream.join(noReplay))
			require.Equal(t, c.held, f.x.feed.Stats().Held)
			f.stream.load(&other)
			require.Equal(t, c.held, f.x.feed.Stats().Held, "it has joined")
		})
	}
}

// The kept batches of a joining replica are bounded: excess ones are missed, and appear as a gap.
func TestKeptBatchesAreBounded(t *testing.T) {
	e := newEngine(1000, 1000, false)
	f := newFollower(t, true)
	next := rand.New(rand.NewPCG(1, 17)).IntN
	big := pack([]any{1, []any{}, 0, string(make([]byte, 1<<16-1))})
	for range 2 * maxKept / len(big) {
		e.clock++
		e.kept = append(e.kept, kept{uint64(e.seq), big})
		f.stream.live(uint64(e.seq), big, noReplay)
		e.seq++
		require.LessOrEqual(t, f.stream.keptBytes, maxKept)
	}
	k := e.step(next)
	f.stream.live(k.seq, k.payload, noReplay)
	f.stream.load(&kvstate.FeedPart{First: true, Next: 1})
	require.NoError(t, f.stream.join(noReplay))
	require.Equal(t, uint64(1), f.stream.count.lost.Load())
	require.Equal(t, k.seq+1, f.stream.next)
}

// A feed that comes late is waited for, but not for ever.
func TestLateFeeds(t *testing.T) {
	for name, c := range map[string]struct {
		comes time.Duration
		held  int
	}{"in time": {2 * time.Second, 1}, "too late": {4 * time.Second, 0}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				state := kvstate.New(kvstate.Options{})
				state.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth}})
				events := NewCollector(Options{State: state, Log: silent(), Pools: map[string]Source{"p": {Listen: "none"}}, Forward: noReplicas{}})
				defer events.end()
				events.Look(t.Context())
				pool := state.Pool("p")
				require.True(t, events.NeedsFeeds(pool))
				events.Joined(3 * time.Second)
				time.Sleep(c.comes)
				events.LoadFeed(pool, &kvstate.FeedPart{Endpoint: pool.Endpoints()[0], First: true, Next: 3, Events: []prefixindex.BlockEvent{
					{Kind: prefixindex.BlocksStored, Keys: []uint64{1}, Blocks: []uint64{2}, BlockSize: 4, Root: prefixindex.TokenRoot("", 4)},
				}})
				require.False(t, events.NeedsFeeds(pool))
				time.Sleep(5 * time.Second)
				require.Equal(t, c.held, events.Stats()[0].Feed.Held)
			})
		})
	}
}
