package kvevents

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// crew are replicas that follow one engine without a network in between: what each tells lies in the others' boxes until
// they take it, or it gets lost.
type crew struct {
	e        *engine
	ask      replay
	replicas []*mate
	given    bool // somebody had to be given all: without what is set aside behind blocks that the engine has evicted
}

type mate struct {
	*subscription
	x   engineIndex
	box []kvstate.Collected
}

func newCrew(e *engine, n int, ask replay) *crew {
	c := &crew{e: e, ask: ask}
	for range n {
		x := newEngineIndex()
		m := &mate{x: x}
		m.subscription = newSubscription(target{pool: "p", endpoint: x.pool.Endpoints()[0]}, Source{}, x.feed, silent())
		m.stream.tell = func(said kvstate.Collected) {
			said.Events = copied(said.Events)
			for _, other := range c.replicas {
				if other != m {
					other.box = append(other.box, said)
				}
			}
		}
		c.replicas = append(c.replicas, m)
	}
	return c
}

// copied are events that do not change when their decoder goes on.
func copied(events []prefixindex.BlockEvent) (out []prefixindex.BlockEvent) {
	for _, e := range events {
		e.Keys, e.Blocks, e.LoRA = slices.Clone(e.Keys), slices.Clone(e.Blocks), slices.Clone(e.LoRA)
		out = append(out, e)
	}
	return out
}

func (m *mate) takeAll() {
	for _, said := range m.box {
		m.take(&said, time.Now())
	}
	m.box = nil
}

// listen has a replica connect to the engine; rest has it hear that another one did.
func (c *crew) listen(m *mate) {
	m.stream.deaf = false
	m.begin()
	_ = m.stream.connected(c.ask)
}

func (m *mate) rest() { m.stream.deaf = true; m.up.Store(false) }

// heartbeat has the listener say where it is, and tell those all who say that they lack something.
func (c *crew) heartbeat(t *testing.T, listener *mate) {
	listener.since = time.Now().Add(-time.Minute)
	listener.say()
	for _, m := range c.replicas {
		m.takeAll()
		if m.isLacking() {
			c.given = true
			require.NoError(t, listener.contents(func(part *kvstate.Collected) error {
				one := *part
				one.Events = copied(part.Events)
				m.take(&one, time.Now())
				return nil
			}))
			require.False(t, m.isLacking())
		}
	}
}

// Whatever gets lost or is said twice on its way between replicas, whoever of them listens, and whenever the engine restarts:
// a heartbeat later all of them know what the engine holds, and no more.
func crewProgram(t *testing.T, next func(int) int, steps int) {
	e := newEngine(24+next(40), 1_000_000, next(2) == 0)
	c, loses := newCrew(e, 2+next(3), e.replay), next(2) == 0
	at := c.replicas[0]
	c.listen(at)
	publish := func(n int) {
		for range n {
			k := e.step(next)
			for _, m := range c.replicas {
				if m.up.Load() {
					m.stream.live(k.seq, k.payload, c.ask)
				}
			}
		}
	}
	for range steps {
		m := c.replicas[next(len(c.replicas))]
		switch next(12) {
		case 0: // another one begins to listen, after the one before it or at the same time
			if next(2) == 0 {
				at.rest()
				publish(next(5))
			}
			c.listen(m)
			publish(next(5))
			if m != at && at.up.Load() {
				at.rest()
			}
			at = m
		case 1:
			if loses && len(m.box) > 0 { // something is lost, and nobody knows
				i := next(len(m.box))
				m.box = slices.Delete(m.box, i, i+1)
			}
		case 2:
			if len(m.box) > 0 {
				m.box = append(m.box[:1:1], m.box...)
			}
		case 3:
			if next(6) == 0 {
				e.restart()
				publish(1) // until it says something nobody can know
			}
		case 4, 5, 6:
			m.takeAll()
		case 7:
			c.heartbeat(t, at)
			for i, m := range c.replicas {
				for _, ids := range prompts() {
					want, got := e.hit(ids), m.x.hit(tokenPrompt(ids), engineBlock)
					require.LessOrEqual(t, got, want, "replica %d promises what is gone", i)
					if !c.given {
						require.Equal(t, want, got, "replica %d", i)
					}
				}
				require.Equal(t, at.stream.next, m.stream.next)
			}
		default:
			publish(1 + next(3))
		}
	}
}

func TestCrewAgainstEngine(t *testing.T) {
	seeds := uint64(60)
	if testing.Short() || budget.Race {
		seeds = 8
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { crewProgram(t, rand.New(rand.NewPCG(seed, 17)).IntN, 300) })
	}
}

// What was to be loaded and came in part only is forgotten when the replica connects to the publisher itself, and when the
// rest stays away: nobody tells of what becomes of it.
func TestAPartIsForgotten(t *testing.T) {
	for name, end := range map[string]func(c *crew, m *mate){
		"it listens itself":   func(c *crew, m *mate) { c.listen(m) },
		"the rest stays away": func(_ *crew, m *mate) { m.settle(time.Now().Add(staleAfter + time.Second)) },
	} {
		t.Run(name, func(t *testing.T) {
			next := rand.New(rand.NewPCG(1, 17)).IntN
			e := newEngine(40, 0, false)
			c := newCrew(e, 2, noReplay)
			listener, other := c.replicas[0], c.replicas[1]
			c.listen(listener)
			for range 100 {
				k := e.step(next)
				listener.stream.live(k.seq, k.payload, c.ask)
			}
			listener.since = time.Now().Add(-time.Minute)
			listener.say()
			other.box = other.box[len(other.box)-1:]
			other.takeAll()
			require.True(t, other.isLacking())
			require.NoError(t, listener.contents(func(part *kvstate.Collected) error {
				one := *part
				one.Events, one.More = copied(part.Events), true
				other.take(&one, time.Now())
				return nil
			}))
			require.Positive(t, other.x.feed.Stats().Held)
			other.settle(time.Now().Add(time.Second))
			require.Positive(t, other.x.feed.Stats().Held, "the rest is on its way")
			end(c, other)
			require.Zero(t, other.x.feed.Stats().Held)
			if !other.up.Load() {
				c.heartbeat(t, listener)
				all, loaded := listener.x.feed.Stats(), other.x.feed.Stats()
				require.Equal(t, all.Held-all.Orphans, loaded.Held-loaded.Orphans, "and is loaded another time")
			}
		})
	}
}

// Where the engine keeps no batches and a listener dies, what all know in doubt ends: then nobody promises anything that the
// engine does not hold, however often that happens, what engine and replicas do meanwhile, and in whatever order it evicts.
func TestCrewWithoutReplayPromisesNothingForEver(t *testing.T) {
	seeds := uint64(20)
	if testing.Short() || budget.Race {
		seeds = 4
	}
	kept := 0
	for seed := range seeds {
		next := rand.New(rand.NewPCG(seed, 23)).IntN
		e := newEngine(24+next(40), 0, next(2) == 0)
		c := newCrew(e, 2+next(3), noReplay)
		at := c.replicas[0]
		c.listen(at)
		publish := func(n int) {
			for range n {
				k := e.step(next)
				if at.up.Load() {
					at.stream.live(k.seq, k.payload, c.ask)
				}
			}
		}
		publish(1 + next(100))
		c.heartbeat(t, at)
		for range 20 {
			for range 1 + next(3) { // listeners die, one after the other
				at.rest()
				publish(next(60))
				for _, m := range c.replicas {
					m.takeAll()
				}
				at = c.replicas[next(len(c.replicas))]
				c.listen(at)
				publish(1 + next(30))
			}
			c.heartbeat(t, at)
			for i, m := range c.replicas {
				require.Equal(t, at.stream.next, m.stream.next)
				m.x.feed.ExpireSuspects(time.Now().Add(time.Hour))
				require.False(t, m.x.feed.HasSuspects())
				for _, ids := range prompts() {
					got := m.x.hit(tokenPrompt(ids), engineBlock)
					require.LessOrEqual(t, got, e.hit(ids), "seed %d: replica %d promises what is gone", seed, i)
					kept += got
				}
			}
		}
	}
	require.Positive(t, kept)
}

// Who listens ends when the one that is to listen does and has got as far. That another one did, which may be about to end itself,
// is not enough: else nobody would listen where two have to make room for a third that is not there yet.
func TestWhoListensWaitsForItsHeir(t *testing.T) {
	const lease = time.Second
	c := newCrew(newEngine(24, 0, false), 1, noReplay)
	m, now := c.replicas[0], time.Now()
	says := func(next uint64, heir bool) {
		m.take(&kvstate.Collected{From: next, Next: next, Heir: heir}, now)
	}
	require.Equal(t, listen, m.next(true, true, lease, now))
	c.listen(m)
	m.stream.next, m.stream.known = 10, true
	says(10, false)
	require.Equal(t, stay, m.next(false, false, lease, now), "another one listens, that is not to either")
	says(11, true)
	require.Equal(t, stay, m.next(false, false, lease, now), "its heir knows more")
	says(10, true)
	require.Equal(t, stay, m.next(true, false, lease, now), "it is to listen again")
	require.Equal(t, stay, m.next(false, false, lease, now), "and then not: what its heir said before does not count")
	says(10, true)
	require.Equal(t, stay, m.next(false, false, lease, now.Add(lease)), "its heir has not spoken for a lease")
	require.Equal(t, rest, m.next(false, false, lease, now.Add(lease/2)))
	require.False(t, m.up.Load())
}

// Where the heir is killed before it has told anything, the replica before it takes over from it as any other would: what was said
// meanwhile is lost, and all else is kept, in doubt.
func TestTheHeirIsKilledAtOnce(t *testing.T) {
	next := rand.New(rand.NewPCG(1, 29)).IntN
	e := newEngine(40, 0, false)
	c := newCrew(e, 1, noReplay)
	m := c.replicas[0]
	publish := func() {
		k := e.step(next)
		m.stream.live(k.seq, k.payload, c.ask)
	}
	require.Equal(t, listen, m.next(true, true, time.Second, time.Now()))
	c.listen(m)
	for e.seq < 100 || len(e.cache) < 10 {
		publish()
	}
	m.take(&kvstate.Collected{From: m.stream.next, Next: m.stream.next, Heir: true}, time.Now())
	require.Equal(t, rest, m.next(false, false, time.Second, time.Now()))
	e.step(func(int) int { return 1 }) // nobody hears it
	require.Equal(t, listen, m.next(true, false, time.Second, time.Now().Add(time.Minute)))
	c.listen(m)
	publish()
	require.True(t, m.x.feed.HasSuspects())
	require.Greater(t, m.x.feed.Stats().Held, 5)
	require.Zero(t, m.stream.count.lost.Load())
}
