package kvevents

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// counted is a replica that follows one engine, without a network; the test plays other replicas.
type counted struct {
	t *testing.T
	c *Collector
	p *kvstate.Pool
	e *engine
	s *subscription
}

// noReplicas is a forwarder without other replicas.
type noReplicas struct{}

func (noReplicas) Forward(*kvstate.Pool, kvstate.EventBatch) {}

func newCounted(t *testing.T) *counted {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth}})
	c := NewCollector(Options{State: state, Log: silent(), Pools: map[string]Source{"p": {Listen: "none"}}, Forward: noReplicas{}})
	c.Look(t.Context())
	c.Joined(0)
	t.Cleanup(c.end)
	p := state.Pool("p")
	return &counted{t, c, p, newEngine(100, 100, true), c.find(place{"p", "127.0.0.1:8100", 0})}
}

// publish makes the engine store a block, in a batch of the given age.
func (x *counted) publish(n int, age time.Duration) kept {
	return x.say(x.e.stored([]int{n, 1, 1, 1}, 0, 1), age)
}

func (x *counted) say(event any, age time.Duration) kept {
	k := kept{uint64(x.e.seq), pack([]any{float64(time.Now().Add(-age).UnixMicro()) / 1e6, []any{event}, 0})}
	x.e.kept, x.e.seq = append(x.e.kept, k), x.e.seq+1
	return k
}

func (x *counted) live(n int, age time.Duration) {
	k := x.publish(n, age)
	x.s.stream.live(k.seq, k.payload, x.e.replay)
}

func (x *counted) connects() {
	x.s.begin()
	require.NoError(x.t, x.s.stream.connected(x.e.replay))
}

// forwarded is a batch, or the number of the next one, from another replica.
func (x *counted) forwarded(k kept) {
	x.c.Forwarded(x.p, kvstate.EventBatch{Endpoint: x.p.Endpoints()[0], Seq: k.seq, Payload: k.payload})
	synctest.Wait()
}

// since returns the statistics: gauges unchanged, counters as differences to before. Counts of the feed without a
// metric are left out.
func (x *counted) since(before Stats) (all, change Stats) {
	stats := x.c.Stats()
	require.Len(x.t, stats, 1)
	all = stats[0]
	change = Stats{
		Pool: all.Pool, Endpoint: all.Endpoint, Rank: all.Rank, Connected: all.Connected, Lag: all.Lag.Round(time.Millisecond),
		Batches: all.Batches - before.Batches, Events: all.Events - before.Events, Malformed: all.Malformed - before.Malformed, Gaps: all.Gaps - before.Gaps,
		Recovered: all.Recovered - before.Recovered, Lost: all.Lost - before.Lost, Restarts: all.Restarts - before.Restarts,
		Forwarded: all.Forwarded - before.Forwarded,
		Feed:      prefixindex.FeedStats{Held: all.Feed.Held, Orphans: all.Feed.Orphans, Unusable: all.Feed.Unusable - before.Feed.Unusable},
	}
	return all, change
}

// Each event of a publisher's life is counted as what it is, and as nothing else: one step after the other.
func TestEventCounters(t *testing.T) {
	const lag = 1500 * time.Millisecond
	here := func(s Stats) Stats { s.Connected = true; return s }
	held := func(n int) prefixindex.FeedStats { return prefixindex.FeedStats{Held: n} }
	steps := []struct {
		what string
		do   func(x *counted)
		want Stats
	}{
		{"nothing yet", func(*counted) {}, Stats{}},
		{"what was published an hour ago is asked for", func(x *counted) { x.publish(0, time.Hour); x.connects() }, here(Stats{Batches: 1, Events: 1, Feed: held(1)})},
		{"a batch", func(x *counted) { x.live(1, lag) }, here(Stats{Batches: 1, Events: 1, Lag: lag, Feed: held(2)})},
		{"a batch that a replay brought already", func(x *counted) { k := x.e.kept[0]; x.s.stream.live(k.seq, k.payload, x.e.replay) }, here(Stats{Lag: lag, Feed: held(2)})},
		{"two were missed, and had again", func(x *counted) { x.publish(2, 0); x.publish(3, 0); x.live(4, time.Second) },
			here(Stats{Batches: 3, Events: 3, Gaps: 1, Recovered: 1, Lag: time.Second, Feed: held(5)})},
		{"one was missed, and cannot be had", func(x *counted) {
			x.publish(5, 0)
			k := x.publish(6, lag)
			x.e.kept = nil
			x.s.stream.live(k.seq, k.payload, x.e.replay)
		},
			here(Stats{Batches: 1, Events: 1, Gaps: 1, Lost: 1, Lag: lag, Feed: held(1)})},
		{"what is no batch", func(x *counted) { x.s.stream.live(uint64(x.e.seq), []byte("x"), x.e.replay); x.e.seq++ }, here(Stats{Malformed: 1, Lost: 1, Lag: lag})},
		{"an old number, and no batch", func(x *counted) { x.s.stream.live(0, []byte("x"), x.e.replay) }, here(Stats{Malformed: 1, Lag: lag})},
		{"the engine has restarted", func(x *counted) { x.e.restart(); x.live(7, 0) }, here(Stats{Batches: 1, Events: 1, Restarts: 1, Feed: held(1)})},
		{"a copy of a block never heard of", func(x *counted) {
			k := x.say(fields{"type", "BlockStored", "block_hashes", []any{99}, "medium", "CPU"}, 0)
			x.s.stream.live(k.seq, k.payload, x.e.replay)
		}, here(Stats{Batches: 1, Events: 1, Feed: prefixindex.FeedStats{Held: 1, Unusable: 1}})},
		{"the connection is lost", func(x *counted) { x.s.end(nil) }, Stats{Feed: held(1)}},
		{"and made again: nothing came meanwhile", func(x *counted) { x.connects() }, here(Stats{Feed: held(1)})},
		{"again: one batch came", func(x *counted) { x.publish(8, 0); x.connects() }, here(Stats{Batches: 1, Events: 1, Feed: held(2)})},
		{"again: more than the engine keeps", func(x *counted) {
			x.publish(9, 0)
			x.publish(10, 0)
			x.e.kept = x.e.kept[len(x.e.kept)-1:]
			x.connects()
		},
			here(Stats{Batches: 1, Events: 1, Gaps: 1, Lost: 1, Feed: held(1)})},
		{"again: the engine is another, with a lower number", func(x *counted) { x.e.restart(); x.publish(1, 0); x.connects() },
			here(Stats{Batches: 1, Events: 1, Restarts: 1, Feed: held(1)})},
		{"again: the engine is another, with the same number", func(x *counted) { x.e.restart(); x.publish(2, time.Second); x.publish(3, 0); x.connects() },
			here(Stats{Batches: 2, Events: 2, Restarts: 1, Feed: held(2)})},
		{"the publisher has connected to another replica", func(x *counted) { x.s.end(nil); x.forwarded(x.publish(4, lag)) },
			here(Stats{Batches: 1, Events: 1, Forwarded: 1, Lag: lag, Feed: held(3)})},
		{"a batch is forwarded twice", func(x *counted) { x.forwarded(x.e.kept[2]) }, here(Stats{Forwarded: 1, Lag: lag, Feed: held(3)})},
		{"the number of the next batch is as expected", func(x *counted) { x.forwarded(kept{3, nil}) }, here(Stats{Lag: lag, Feed: held(3)})},
		{"the number of the next batch is older", func(x *counted) { x.forwarded(kept{2, nil}) }, here(Stats{Lag: lag, Feed: held(3)})},
		{"a batch is missed: the number of the next one shows it", func(x *counted) { x.publish(5, 0); x.forwarded(kept{4, nil}) }, here(Stats{Gaps: 1, Lost: 1, Lag: lag})},
		{"no more is forwarded", func(*counted) { time.Sleep(staleAfter + time.Second) }, Stats{Lag: lag}},
		{"the engine has restarted and connects to another replica", func(x *counted) { x.e.restart(); x.forwarded(x.publish(1, 0)) },
			here(Stats{Batches: 1, Events: 1, Forwarded: 1, Restarts: 1, Feed: held(1)})},
		{"it connects here: what others forward does not count", func(x *counted) { x.connects(); x.forwarded(x.publish(2, 0)) }, here(Stats{Feed: held(1)})},
	}
	synctest.Test(t, func(t *testing.T) {
		x := newCounted(t)
		var all, change Stats
		for _, step := range steps {
			step.do(x)
			step.want.Pool, step.want.Endpoint = "p", "127.0.0.1:8100"
			all, change = x.since(all)
			require.Equal(t, step.want, change, step.what)
			time.Sleep(time.Millisecond)
		}
	})
}

// The reports of a publisher that stays away are forgotten, whether it was connected here or to another replica.
func TestAPublisherThatStaysAwayIsForgotten(t *testing.T) {
	for name, come := range map[string]func(x *counted){
		"it was connected here":               func(x *counted) { x.connects(); x.live(1, 0); x.s.end(nil) },
		"it was connected to another replica": func(x *counted) { x.forwarded(x.publish(1, 0)) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				x := newCounted(t)
				come(x)
				time.Sleep(staleAfter - time.Second)
				x.c.Look(t.Context())
				require.Equal(t, 1, x.c.Stats()[0].Feed.Held)
				time.Sleep(2 * time.Second)
				x.c.Look(t.Context())
				require.Zero(t, x.c.Stats()[0].Feed.Held)
				x.connects()
				require.Equal(t, 1, x.c.Stats()[0].Feed.Held, "and asked for again")
			})
		})
	}
}

// Every batch of a publisher that connects to this replica is forwarded, and on demand the number of the next one.
func TestBatchesAreForwarded(t *testing.T) {
	x := newCounted(t)
	var out []kvstate.EventBatch
	x.s.forward = func(b kvstate.EventBatch) { out = append(out, b) }
	e := x.p.Endpoints()[0]
	x.c.ForwardPositions(x.p)
	require.Empty(t, out, "it is not connected")
	x.s.begin()
	k := x.publish(0, 0)
	x.s.pass(k.seq, k.payload)
	x.c.ForwardPositions(x.p)
	require.Equal(t, []kvstate.EventBatch{{Endpoint: e, Payload: k.payload}, {Endpoint: e, Seq: 1}}, out)
}
