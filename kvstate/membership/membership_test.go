package membership

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/redisserver"
	"tandem/kvstate"
	"tandem/kvstate/redisstore"
	"tandem/kvstate/redisstore/roster"
	statev1 "tandem/protos/state/v1"
)

// soon is how long tests wait for an event, on a machine that may stand still for seconds.
const soon = 50 * time.Second

func TestMain(m *testing.M) {
	redisstore.LogTo(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

func replicaAt(n int) Replica {
	return Replica{n - 1, fmt.Sprintf("10.0.0.%d:9002", n), fmt.Sprintf("10.0.0.%d:9003", n)}
}

// following are Members without a Redis, and the lists that they published.
func following() (m *Members, published *[][]Replica) {
	published = &[][]Replica{}
	m = &Members{
		o: Options{Every: time.Second, Hold: 30 * time.Second,
			Changed: func(l []Replica, _ error) { *published = append(*published, slices.Clone(l)) }},
		up: func() bool { return true }, seen: map[Replica]time.Time{},
	}
	return m, published
}

// A list is published when it changes: at once if somebody comes, after a while if somebody is missing.
func TestMissingReplicasStayForAWhile(t *testing.T) {
	m, published := following()
	a, b, at := replicaAt(1), replicaAt(2), time.Now()
	m.started = at
	m.take(at, []Replica{b, a}, nil)
	m.take(at.Add(time.Second), []Replica{a, b}, nil)
	require.Equal(t, [][]Replica{{a, b}}, *published, "sorted, and once")
	m.take(at.Add(20*time.Second), []Replica{a}, nil)
	require.Len(t, *published, 1, "it may come back")
	m.take(at.Add(25*time.Second), []Replica{a, b}, nil)
	m.take(at.Add(50*time.Second), []Replica{a}, nil)
	require.Len(t, *published, 1)
	m.take(at.Add(55*time.Second), []Replica{a}, nil)
	require.Equal(t, [][]Replica{{a, b}, {a}}, *published)
}

// While Redis does not answer, nobody is missing; and afterwards everybody has time to come back.
func TestNobodyIsMissingInAnOutage(t *testing.T) {
	m, published := following()
	a, b, at := replicaAt(1), replicaAt(2), time.Now()
	m.started = at
	m.take(at, []Replica{a, b}, nil)
	for s := 1; s < 100; s++ {
		m.take(at.Add(time.Duration(s)*time.Second), nil, errors.New("no Redis"))
	}
	up := false
	m.up = func() bool { return up } // it reads, but does not take writes: leases end
	m.take(at.Add(100*time.Second), []Replica{a}, nil)
	up = true
	m.take(at.Add(110*time.Second), []Replica{a}, nil)
	require.Len(t, *published, 1)
	m.take(at.Add(131*time.Second), []Replica{a}, nil)
	require.Equal(t, [][]Replica{{a, b}, {a}}, *published)
}

// Where Redis does not answer at the start, Envoys get the configured replicas after a while, and then the living ones
// when all had time to show.
func TestStartWithoutRedis(t *testing.T) {
	m, published := following()
	a, b, at := replicaAt(1), replicaAt(2), time.Now()
	m.started = at
	for s := range 12 {
		m.take(at.Add(time.Duration(s)*time.Second), nil, errors.New("no Redis"))
	}
	require.Equal(t, [][]Replica{nil}, *published)
	m.take(at.Add(12*time.Second), []Replica{a}, nil)
	require.Len(t, *published, 1)
	m.take(at.Add(16*time.Second), []Replica{a, b}, nil)
	require.Equal(t, [][]Replica{nil, {a, b}}, *published)
}

// A replica keeps its slot, unless an older one has the same; one that nobody has seen for a while takes none of another.
func TestSlots(t *testing.T) {
	at := func(slots ...int) (out []Replica) {
		for _, s := range slots {
			out = append(out, Replica{Slot: s})
		}
		return out
	}
	for name, c := range map[string]struct {
		has            int
		older, younger []Replica
		known          bool
		want           int
	}{
		"the first":                    {-1, nil, nil, false, 0},
		"the lowest that is free":      {-1, at(0, 2), at(3), false, 1},
		"it keeps its own":             {1, at(0), at(2), true, 1},
		"a younger one has it too":     {1, at(0), at(1), true, 1},
		"an older one has it too":      {1, at(1), at(0), true, 2},
		"it was away, and lost it":     {1, at(0), at(1), false, 2},
		"it was away, and has it":      {1, at(0), at(2), false, 1},
		"there is none left":           {-1, at(0, 1), at(2, 3), false, -1},
		"there is none left but older": {1, at(0, 1), at(2, 3), true, -1},
	} {
		m := &Members{o: Options{Slots: 4}, self: Replica{Slot: c.has}}
		m.choose(c.older, c.younger, c.known)
		require.Equal(t, c.want, m.self.Slot, name)
	}
}

// A replica that Redis took nothing from for a lease leaves its slot to one that has taken it meanwhile. Otherwise it keeps
// it: the younger one chooses again.
func TestASlotIsLostWithTheLease(t *testing.T) {
	for name, c := range map[string]struct {
		away time.Duration
		want int
	}{"for less than a lease": {2 * time.Second, 0}, "for longer": {4 * time.Second, 1}} {
		synctest.Test(t, func(t *testing.T) {
			store, err := redisstore.New(redisstore.Options{URL: "redis://127.0.0.1:1", Lease: 3 * time.Second}, kvstate.New(kvstate.Options{}))
			require.NoError(t, err)
			defer store.Close()
			m := New(store, Options{Slots: 2, Full: func(bool) {}, Self: func(context.Context) (Replica, error) { return replicaAt(1), nil }})
			all, younger := m.redis.Roster, m.redis.Replica+1
			living := []uint64{m.redis.Replica}
			m.redis.Living = func() []uint64 { return slices.Clone(living) }
			look := func() int {
				_, err := m.look(t.Context())
				require.NoError(t, err)
				self, _ := all.Self()
				return self.Slot
			}
			published := func() { all.Took(all.AddTo(&statev1.Batch{}, 0), time.Now()) }
			require.Equal(t, 0, look())
			published()
			for range int(c.away / time.Second) {
				time.Sleep(time.Second)
				require.Equal(t, 0, look())
			}
			published() // and the younger one's batch is read a moment later
			require.Equal(t, 0, look())
			living = append(living, younger)
			all.Add(roster.Member{Replica: younger, Version: "1", Slot: 0, ExtProc: "10.0.0.2:9002", Replan: "10.0.0.2:9003", Heard: time.Now()})
			require.Equal(t, c.want, look(), name)
		})
	}
}

// Who has the place of a missing replica, or its address, takes its place in the list at once.
func TestSuccessors(t *testing.T) {
	m, published := following()
	a, b, at := replicaAt(1), replicaAt(2), time.Now()
	c := Replica{0, "10.0.0.3:9002", "10.0.0.3:9003"}
	m.take(at, []Replica{a, b}, nil)
	m.take(at.Add(time.Second), []Replica{b, c}, nil)
	require.Equal(t, [][]Replica{{a, b}, {c, b}}, *published)
	again := b
	again.Slot = 3
	m.take(at.Add(2*time.Second), []Replica{c, again}, nil)
	require.Equal(t, []Replica{c, again}, (*published)[2])
	m.take(at.Add(3*time.Second), []Replica{c, again, {0, "10.0.0.4:9002", "10.0.0.4:9003"}}, nil)
	require.Len(t, *published, 3, "two of one slot: one of them chooses again")
}

// Envoys reach a replica at --advertise, where it listens, or where it connects to Redis from.
func TestSelf(t *testing.T) {
	for _, c := range []struct{ listen, host, redis, want string }{
		{"10.0.0.1:9002", "", "redis://192.0.2.1", "10.0.0.1:9002"},
		{"0.0.0.0:9002", "10.0.0.7", "redis://192.0.2.1", "10.0.0.7:9002"},
		{":9002", "", "redis://127.0.0.1:1", "127.0.0.1:9002"},
		{"[::]:9002", "fd00::1", "redis://192.0.2.1", "[fd00::1]:9002"},
		{"localhost:9002", "", "redis://192.0.2.1", "127.0.0.1:9002"},
		{"0.0.0.0:9002", "localhost", "redis://192.0.2.1", "127.0.0.1:9002"},
		{"replica.invalid:9002", "", "redis://127.0.0.1", ""},
		{"10.0.0.1", "", "redis://127.0.0.1", ""},
	} {
		self, err := Self(t.Context(), c.listen, "0.0.0.0:9003", c.host, c.redis)
		require.Equal(t, c.want == "", err != nil, "%v: %v", c, err)
		require.Equal(t, c.want, self.ExtProc)
	}
}

// running is a replica as far as this package knows it.
type running struct {
	mu   sync.Mutex
	list []Replica
	full bool
	stop func()

	store *redisstore.Store
}

func start(t *testing.T, redis string, self Replica) *running {
	t.Helper()
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, nil)
	store, err := redisstore.New(redisstore.Options{
		URL: "redis://" + redis, Lease: 10 * time.Second, Name: "new:9090",
	}, state)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return store.Join(t.Context(), 2*time.Second) == nil }, soon, time.Millisecond)
	r := &running{store: store}
	m := New(store, Options{Self: func(context.Context) (Replica, error) { return self, nil },
		Slots: 2, Every: 20 * time.Millisecond, Hold: 100 * time.Millisecond, Changed: func(l []Replica, _ error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.list = l
		}, Full: func(full bool) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.full = full
		}})
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { store.Run(ctx) })
	group.Go(func() { m.Run(ctx) })
	r.stop = sync.OnceFunc(func() { cancel(); group.Wait(); _ = store.Close() })
	t.Cleanup(r.stop)
	return r
}

func (r *running) has(t *testing.T, want ...Replica) {
	t.Helper()
	require.Eventually(t, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return slices.Equal(r.list, want)
	}, soon, 5*time.Millisecond)
}

// Replicas that come and go are in the lists of all.
func TestReplicasKnowEachOther(t *testing.T) {
	t.Parallel()
	redis := redisserver.New(t).Addr
	a := start(t, redis, replicaAt(1)) // it takes the first slot, the next one the second
	a.has(t, replicaAt(1))
	b := start(t, redis, replicaAt(2))
	a.has(t, replicaAt(1), replicaAt(2))
	b.has(t, replicaAt(1), replicaAt(2))
	a.stop()
	b.has(t, replicaAt(2))
}

// A replica for which no slot is left is in nobody's list, knows it, and gets the slot of one that goes.
func TestMoreReplicasThanSlots(t *testing.T) {
	t.Parallel()
	redis := redisserver.New(t).Addr
	a := start(t, redis, replicaAt(1))
	a.has(t, replicaAt(1))
	b := start(t, redis, replicaAt(2))
	a.has(t, replicaAt(1), replicaAt(2))
	c := start(t, redis, Replica{0, "10.0.0.3:9002", "10.0.0.3:9003"})
	c.has(t, replicaAt(1), replicaAt(2))
	isFull := func(want bool) {
		require.Eventually(t, func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.full == want
		}, soon, 5*time.Millisecond)
	}
	isFull(true)
	a.stop()
	b.has(t, Replica{0, "10.0.0.3:9002", "10.0.0.3:9003"}, replicaAt(2))
	isFull(false)
}
