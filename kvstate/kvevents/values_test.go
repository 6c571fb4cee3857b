package kvevents

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// counted is a replica that follows one engine, with neither a network nor other replicas but what a test says of them.
type counted struct {
	t *testing.T
	c *Collector
	p *kvstate.Pool
	e *engine
	s *subscription
}

// others is a relay that says no more than how long what others say holds.
type others struct{ kvstate.EventRelay }

func (others) Lease() time.Duration                                { return 3 * time.Second }
func (others) TellCollected(_ *kvstate.Pool, _ *kvstate.Collected) {}

func newCounted(t *testing.T) *counted {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth}})
	c := NewCollector(Options{State: state, Log: silent(), Pools: map[string]Source{"p": {}}, Relay: others{}})
	c.Look()
	p := state.Pool("p")
	return &counted{t, c, p, newEngine(100, 100, true), c.find(place{"p", "127.0.0.1:8100", 0})}
}

// publish has the engine store a block that is as old as said by now.
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

func (x *counted) listens() {
	x.s.stream.deaf = false
	require.True(x.t, x.s.begin())
	require.NoError(x.t, x.s.stream.connected(x.e.replay))
}

// told is what another replica says: blocks that the engine stored, from one number on to another.
func (x *counted) told(said kvstate.Collected, blocks ...uint64) {
	age := 2 * time.Second
	if said.Part || said.Old { // of all that it knows, or what it has asked for
		age = time.Hour
	}
	said.Endpoint, said.Epoch, said.Time = x.p.Endpoints()[0], 7, float64(time.Now().Add(-age).UnixMicro())/1e6
	for _, b := range blocks {
		said.Events = append(said.Events, prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Keys: []uint64{b}, Blocks: []uint64{b}, Root: prefixindex.TokenRoot("", 16), BlockSize: 16})
	}
	x.c.TakeCollected(x.p, &said)
}

// since are the numbers: gauges as they are, counters as what came to them since before. What the feed counts of itself is left
// out where no metric shows it.
func (x *counted) since(before Stats) (all, change Stats) {
	stats := x.c.Stats()
	require.Len(x.t, stats, 1)
	all = stats[0]
	change = Stats{
		Pool: all.Pool, Endpoint: all.Endpoint, Rank: all.Rank, Connected: all.Connected, Known: all.Known, Lag: all.Lag.Round(time.Millisecond),
		Batches: all.Batches - before.Batches, Events: all.Events - before.Events, Malformed: all.Malformed - before.Malformed, Gaps: all.Gaps - before.Gaps,
		Recovered: all.Recovered - before.Recovered, Lost: all.Lost - before.Lost, Restarts: all.Restarts - before.Restarts,
		Relayed: all.Relayed - before.Relayed, Missed: all.Missed - before.Missed,
		Feed: prefixindex.FeedStats{Held: all.Feed.Held, Orphans: all.Feed.Orphans, Unusable: all.Feed.Unusable - before.Feed.Unusable},
	}
	return all, change
}

// Each thing that happens to a publisher's events counts as what it is, and as nothing else: one step after the other.
func TestWhatIsCountedOfKVEvents(t *testing.T) {
	const lag = 1500 * time.Millisecond
	here := func(s Stats) Stats { s.Connected, s.Known = true, true; return s }
	elsewhere := func(s Stats) Stats { s.Known = true; return s }
	held := func(n int) prefixindex.FeedStats { return prefixindex.FeedStats{Held: n} }
	steps := []struct {
		what string
		do   func(x *counted)
		want Stats
	}{
		{"nothing yet", func(*counted) {}, Stats{}},
		{"what was published an hour ago is asked for", func(x *counted) { x.publish(0, time.Hour); x.listens() }, here(Stats{Batches: 1, Events: 1, Feed: held(1)})},
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
		{"the connection is lost", func(x *counted) { x.s.end(t.Context(), nil) }, Stats{Feed: held(1)}},
		{"and made again: nothing came meanwhile", func(x *counted) { x.listens() }, here(Stats{Feed: held(1)})},
		{"again: one batch came", func(x *counted) { x.publish(8, 0); x.listens() }, here(Stats{Batches: 1, Events: 1, Feed: held(2)})},
		{"again: more than the engine keeps", func(x *counted) {
			x.publish(9, 0)
			x.publish(10, 0)
			x.e.kept = x.e.kept[len(x.e.kept)-1:]
			x.listens()
		},
			here(Stats{Batches: 1, Events: 1, Gaps: 1, Lost: 1, Feed: held(1)})},
		{"again: the engine is another, with a lower number", func(x *counted) { x.e.restart(); x.publish(1, 0); x.listens() },
			here(Stats{Batches: 1, Events: 1, Restarts: 1, Feed: held(1)})},
		{"again: the engine is another, with the same number", func(x *counted) { x.e.restart(); x.publish(2, time.Second); x.publish(3, 0); x.listens() },
			here(Stats{Batches: 2, Events: 2, Restarts: 1, Feed: held(2)})},
		{"it is given up while old batches are asked for", func(x *counted) {
			require.NoError(x.t, x.s.stream.connected(func(from uint64, each func(uint64, []byte)) error {
				x.s.stream.mu.Lock()
				x.s.stream.deaf = true
				x.s.stream.mu.Unlock()
				return x.e.replay(from, each)
			}))
			x.s.end(t.Context(), nil)
		}, Stats{Feed: held(2)}},

		{"another replica begins to tell", func(x *counted) { x.told(kvstate.Collected{Reset: true, From: 0, Next: 1}, 1) }, elsewhere(Stats{Relayed: 1, Lag: 2 * time.Second, Feed: held(1)})},
		{"and goes on", func(x *counted) { x.told(kvstate.Collected{From: 1, Next: 3}, 2, 3) }, elsewhere(Stats{Relayed: 1, Lag: 2 * time.Second, Feed: held(3)})},
		{"says it twice", func(x *counted) { x.told(kvstate.Collected{From: 1, Next: 3}, 2, 3) }, elsewhere(Stats{Lag: 2 * time.Second, Feed: held(3)})},
		{"is still there", func(x *counted) { x.told(kvstate.Collected{From: 3, Next: 3}) }, elsewhere(Stats{Lag: 2 * time.Second, Feed: held(3)})},
		{"something of it is missed", func(x *counted) { x.told(kvstate.Collected{From: 4, Next: 5}, 5) }, Stats{Missed: 1, Lag: 2 * time.Second, Feed: held(3)}},
		{"and what follows that, once", func(x *counted) { x.told(kvstate.Collected{From: 5, Next: 6}, 6) }, Stats{Lag: 2 * time.Second, Feed: held(3)}},
		{"all is said, in two parts", func(x *counted) {
			x.told(kvstate.Collected{Part: true, Reset: true, More: true, Next: 6}, 1, 2, 3, 4)
			x.told(kvstate.Collected{Part: true, Next: 6}, 5, 6)
		}, elsewhere(Stats{Lag: 2 * time.Second, Feed: held(6)})},
		{"it asked for what it had missed", func(x *counted) { x.told(kvstate.Collected{Old: true, From: 6, Next: 7}, 7) }, elsewhere(Stats{Relayed: 1, Lag: 2 * time.Second, Feed: held(7)})},
		{"it says no more", func(*counted) { time.Sleep(4 * time.Second) }, Stats{Lag: 2 * time.Second, Feed: held(7)}},
		{"it says that it forgot all", func(x *counted) { x.told(kvstate.Collected{Reset: true, Next: 1}) }, elsewhere(Stats{Lag: 2 * time.Second})},
		{"it says that it began anew", func(x *counted) { x.told(kvstate.Collected{Reset: true, Next: 1}, 8) }, elsewhere(Stats{Relayed: 1, Lag: 2 * time.Second, Feed: held(1)})},
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

// Others are told which batches did not come as they were published, so that the age of those is not taken for a lag there either.
func TestWhatWasAskedForIsToldAsOld(t *testing.T) {
	x := newCounted(t)
	var old []bool
	x.s.stream.tell = func(said kvstate.Collected) { old = append(old, said.Old) }
	x.publish(0, time.Hour)
	x.listens()
	require.Equal(t, []bool{true}, old, "from before it listened")
	x.live(1, 0)
	require.Equal(t, []bool{true, false}, old)
	x.publish(2, 0)
	x.live(3, 0)
	require.Equal(t, []bool{true, false, true, true}, old, "one had been missed; the engine says both again")
}
