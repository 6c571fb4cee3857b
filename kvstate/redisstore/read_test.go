package redisstore

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
	statev1 "tandem/protos/state/v1"
)

// Without Redis it is tried ten times a second, by one command for all pools; whose lease ends meanwhile is gone, and who has not been answered asks again.
func TestReadingWithoutRedis(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := lonely(t, 1)
		x := record(r)
		x.failing(errGone)
		r.hears(&statev1.Batch{Replica: 7})
		r.hears(&statev1.Batch{Replica: 8})
		r.p.members[7].expires = time.Now().Add(retryAfter / 2)
		r.p.joined, r.p.sync = true, snapshotRequest{wanted: true, at: time.Now()}
		r.state.SetPool(kvstate.PoolSpec{Name: "other"}, nil)
		pools := r.store.pools()
		require.Len(t, pools, 2)
		r.store.poolReplica("other").joined = true
		asked := func() bool {
			synctest.Wait()
			r.p.out.mu.Lock()
			defer r.p.out.mu.Unlock()
			return r.p.out.join
		}
		stop := during(t.Context(), (&reader{s: r.store, pools: pools}).run)
		time.Sleep(10*retryAfter - time.Millisecond)
		synctest.Wait()
		require.Equal(t, 10, x.refused())
		require.Equal(t, 2, r.store.Replicas())
		require.False(t, asked())
		time.Sleep(r.store.o.Lease)
		require.True(t, asked())
		stop()
	})
}

// What is read again does not lead back, and nobody's batch is nobody's, nor one's own another's.
func TestWhoseBatchItIs(t *testing.T) {
	r := lonely(t, 1)
	r.p.position = streamID{ms: 5, n: 5}
	for _, id := range []string{"5-4", "4-9", "nonsense"} {
		r.p.takeIn(redis.XMessage{ID: id})
		require.Equal(t, streamID{ms: 5, n: 5}, r.p.position)
	}
	r.p.takeIn(redis.XMessage{ID: "5-6"})
	require.Equal(t, streamID{ms: 5, n: 6}, r.p.position)
	r.hears(&statev1.Batch{})
	r.hears(&statev1.Batch{Replica: r.store.replica})
	require.Equal(t, 1, r.store.Replicas())
	require.Zero(t, r.store.Stats().BatchesRead)
	r.hears(&statev1.Batch{Replica: 7})
	require.Equal(t, 2, r.store.Replicas())
}

// What is published is what is known: a replica's load, what it has learned of prompts, and what it received last.
func TestWhatIsToldIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := lonely(t, 2), lonely(t, 2)
		x := record(a)
		for _, r := range []*replica{a, b} {
			f := r.pool.Feed(r.e(0)) // an engine with blocks of 16 tokens
			f.Apply([]prefixindex.BlockEvent{{Kind: prefixindex.BlocksStored, Keys: []uint64{1}, Blocks: []uint64{1}, Root: prefixindex.TokenRoot("", 16), BlockSize: 16}})
		}
		text := prompt(1, 4)
		a.state.Routed(a.pool, a.e(0), text)
		ids := make([]uint32, 640)
		a.state.LearnTokens(a.pool, prefixindex.TextPrompt{Blocks: text, BlockBytes: 512, Bytes: 4 * 512}, &prefixindex.TokenPrompt{IDs: ids})
		held := b.state.Bookings.Reserve(b.e(1), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10})
		a.state.Bookings.ReleaseAnywhere(a.pool, held) // its answer came by here
		a.state.Bookings.Reserve(a.e(0), kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 5000, Uncached: 5000, Work: 20 * time.Second})
		a.state.Bookings.Reserve(a.e(1), kvstate.Booking{For: kvstate.RoleBoth, PromptTokens: 5000, Uncached: 5000, Work: 30 * time.Second})
		time.Sleep(4 * time.Second)
		require.NoError(t, a.flush(true))
		b.hears(x.last())

		require.NotZero(t, a.pool.KnownTokens(text).Tokens)
		require.Equal(t, a.pool.KnownTokens(text).Tokens, b.pool.KnownTokens(text).Tokens)
		require.Equal(t, a.pool.KnownTokens(text).Blocks(16), b.pool.KnownTokens(text).Blocks(16))
		see := func(r *replica) (v kvstate.View) { r.state.View(r.pool, nil, &v); return v }
		va, vb := see(a), see(b)
		require.EqualValues(t, 1, vb.Endpoints[1].Requests, "what it had booked itself is released")
		for i := range 2 {
			require.Equal(t, va.Endpoints[i].Jobs, vb.Endpoints[i].Jobs)
			require.InDelta(t, va.Endpoints[i].Queue.Seconds(), vb.Endpoints[i].Queue.Seconds(), .01)
			require.InDelta(t, va.Endpoints[i].Local.Seconds(), vb.Endpoints[i].Local.Seconds(), .01)
		}
		require.InDelta(t, 16, vb.Endpoints[0].Queue.Seconds(), .01)
		require.InDelta(t, 26, vb.Endpoints[1].Local.Seconds(), .01)
		require.Positive(t, vb.Load.Prefill)
		require.InDelta(t, va.Load.Prefill, vb.Load.Prefill, 1e-4)
		require.InDelta(t, va.Load.Local, vb.Load.Local, 1e-4)
	})
}

// All pools are read at once, and a key that Redis refuses to read stops its own pool only.
func TestABadKeyStopsOnePool(t *testing.T) {
	t.Parallel()
	s := startRedis(t)
	both := func() *replica {
		r := apart(t, redisURL(s), 1)
		r.state.SetPool(kvstate.PoolSpec{Name: "other"}, []kvstate.EndpointSpec{{Name: addr(0), Addr: addr(0), Role: kvstate.RoleBoth}})
		r.joins()
		r.run()
		return r
	}
	a, b := both(), both()
	other := b.state.Pool("other")
	held := func() int {
		var v kvstate.View
		b.state.View(other, prompt(1, 3), &v)
		return v.Endpoints[0].Hit
	}
	a.state.Routed(a.state.Pool("other"), a.state.Pool("other").Endpoint(addr(0)), prompt(1, 3))
	eventually(t, "a prompt of the second pool is known", func() bool { return held() == 3 })
	s.do("DEL", b.store.poolReplica("other").keys.stream())
	s.do("SET", b.store.poolReplica("other").keys.stream(), "nonsense")
	a.state.Routed(a.pool, a.e(0), prompt(2, 3))
	eventually(t, "one of the first is, too", func() bool { return b.hit(0, prompt(2, 3)) == 3 })
}
