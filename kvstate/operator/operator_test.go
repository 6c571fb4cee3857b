package operator

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"tandem/e2e/redisserver"
	"tandem/kvstate"
	"tandem/kvstate/redisstore"
	"tandem/kvstate/redisstore/roster"
)

// Tests wait this long for an event, on a machine that may stand still for seconds.
const soon = 50 * time.Second

func TestMain(m *testing.M) {
	redisstore.LogTo(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

// replica is one Tandem, as far as this package knows it.
type replica struct {
	t     *testing.T
	state *kvstate.State
	store *redisstore.Store
	*Operator
	stop func()
}

const endpoint = "10.0.0.1:80"

// start starts a replica; if answer is nil, it answers nothing.
func start(t *testing.T, addr string, answer func([]byte) []byte) *replica {
	t.Helper()
	return startNamed(t, addr, "replica", answer)
}

func startNamed(t *testing.T, addr, name string, answer func([]byte) []byte, prepare ...func(*redisstore.Store)) *replica {
	t.Helper()
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}},
		[]kvstate.EndpointSpec{{Name: "d1:80", Addr: endpoint, Role: kvstate.RoleBoth}})
	store, err := redisstore.New(redisstore.Options{
		URL: "redis://" + addr, Lease: 10 * time.Second, Name: name,
	}, state)
	require.NoError(t, err)
	for _, p := range prepare {
		p(store)
	}
	r := &replica{t: t, state: state, store: store, Operator: New(store, state, slog.New(slog.DiscardHandler))}
	if answer != nil {
		r.Answer("test", answer)
	}
	state.Connect(store)
	require.Eventually(t, func() bool { return store.Join(t.Context(), 2*time.Second) == nil && r.Sync(t.Context()) == nil }, soon, time.Millisecond)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { store.Run(ctx) })
	running.Go(func() { r.Run(ctx) })
	r.stop = sync.OnceFunc(func() { cancel(); running.Wait(); _ = store.Close() })
	t.Cleanup(r.stop)
	return r
}

func (r *replica) paused() bool { return r.state.Pool("chat").Endpoint(endpoint).Paused() }

func (r *replica) order(paused bool) {
	r.t.Helper()
	_, err := r.state.SetOverride("chat", endpoint, func(o *kvstate.Override) { o.Paused = paused })
	require.NoError(r.t, err)
}

// publish publishes until Redis answers in time.
func (r *replica) publish() {
	r.t.Helper()
	require.Eventually(r.t, func() bool { return r.Publish(r.t.Context()) == nil }, soon, time.Millisecond)
}

// A replica that did not end in order is named for an hour, apart from the others if another one has its name since. One
// that ended in order is forgotten.
func TestGone(t *testing.T) {
	t.Parallel()
	addr := redisserver.New(t).Addr
	a := startNamed(t, addr, "a:9090", nil)
	heard := time.Now().Add(-time.Minute)
	number := func(age time.Duration) uint64 { return uint64(time.Now().Add(-age).UnixMilli()) << 20 }
	add := func(replica uint64, at time.Time, ended bool, name string) {
		a.redis.Roster.Add(roster.Member{Replica: replica, Name: name, Version: "1", Heard: at, Ended: ended})
	}
	add(number(2*time.Hour), heard, false, "killed:9090")
	add(number(3*time.Hour), heard, false, "a:9090")                          // a runs again
	add(number(5*time.Hour), heard.Add(-40*time.Minute), false, "ended:9090") // killed, started again, then ended
	add(number(4*time.Hour), heard, true, "ended:9090")
	add(number(6*time.Hour), heard.Add(-time.Hour), false, "removed:90") // for good

	gone := func(o *replica) (Answers, error) { return o.Ask(t.Context(), "test", nil) }
	got, err := gone(a)
	require.NoError(t, err)
	require.Equal(t, []Gone{{"killed:9090", heard}}, got.Gone)
	require.Equal(t, []Gone{{"a:9090", heard}, {"ended:9090", heard.Add(-40 * time.Minute)}}, got.Restarted)

	// A replica that starts learns of them with the snapshot that it asks for, and one that ends in order is not one.
	b := startNamed(t, addr, "b:9090", nil)
	require.Eventually(t, func() bool {
		got, err := gone(b)
		return err == nil && len(got.Gone) == 1 && got.Gone[0].Name == "killed:9090" && len(got.Restarted) == 2
	}, soon, 5*time.Millisecond)
	knowEachOther(t, a, b)
	b.stop()
	require.Eventually(t, func() bool { return len(a.redis.Living()) == 1 }, soon, time.Millisecond)
	got, err = gone(a)
	require.NoError(t, err)
	require.Equal(t, []Gone{{"killed:9090", heard}}, got.Gone)
	require.True(t, a.redis.Roster.Others()[b.redis.Replica].Ended)
}

// A replica that dies while it is asked is gone, and not silent as well.
func TestDiesWhileAsked(t *testing.T) {
	t.Parallel()
	addr := redisserver.New(t).Addr
	a := startNamed(t, addr, "a:9090", nil)
	dies, heard := uint64(time.Now().Add(-time.Hour).UnixMilli())<<20, time.Now()
	o := New(a.store, a.state, slog.New(slog.DiscardHandler))
	o.redis.Roster.Add(roster.Member{Replica: dies, Name: "b:9090", Version: "1", Heard: heard})
	asked := false
	o.redis.Living = func() []uint64 {
		if asked {
			return []uint64{o.redis.Replica}
		}
		asked = true
		return []uint64{o.redis.Replica, dies}
	}
	got, err := o.Ask(t.Context(), "test", nil)
	require.NoError(t, err)
	require.Empty(t, got.Silent)
	require.Equal(t, []Gone{{"b:9090", heard}}, got.Gone)
}

// accessTo returns the access of replica 1, which knows others by these records.
func accessTo(others ...roster.Member) redisstore.Access {
	store, err := redisstore.New(redisstore.Options{URL: "redis://127.0.0.1:1"}, kvstate.New(kvstate.Options{}))
	if err != nil {
		panic(err)
	}
	_ = store.Close()
	a := store.Access()
	a.Replica = 1
	for _, m := range others {
		a.Roster.Add(m)
	}
	return a
}

func knowEachOther(t *testing.T, replicas ...*replica) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, r := range replicas {
			if len(r.store.Access().Living()) != len(replicas) {
				return false
			}
		}
		return true
	}, soon, 5*time.Millisecond)
}

// An order applies at every replica, also at one that starts later, and can be revoked at any of them.
func TestOrdersHoldForAllReplicas(t *testing.T) {
	t.Parallel()
	addr := redisserver.New(t).Addr
	a, b := start(t, addr, nil), start(t, addr, nil)
	a.order(true)
	a.publish()
	require.Eventually(t, b.paused, soon, time.Millisecond)
	late := start(t, addr, nil)
	require.True(t, late.paused(), "before it decides anything")
	late.order(false)
	late.publish()
	require.Eventually(t, func() bool { return !a.paused() && !b.paused() }, soon, time.Millisecond)

	b.order(true)
	b.publish()
	require.Eventually(t, func() bool { return a.paused() && late.paused() }, soon, time.Millisecond)
	for _, r := range []*replica{a, b, late} {
		r.stop()
	}
	require.True(t, start(t, addr, nil).paused(), "all replicas were restarted")
}

// An order given while Redis did not answer is published when it does, and orders that Redis has lost are written
// again.
func TestOrdersWithoutRedis(t *testing.T) {
	t.Parallel()
	server := redisserver.New(t)
	addr := server.Addr
	a, b := start(t, addr, nil), start(t, addr, nil)
	server.Signal(syscall.SIGSTOP)
	a.order(true)
	require.Error(t, a.Publish(t.Context()))
	require.True(t, a.paused())
	server.Signal(syscall.SIGCONT)
	require.Eventually(t, b.paused, soon, 5*time.Millisecond)

	client := redis.NewClient(&redis.Options{Addr: addr})
	defer client.Close()
	require.NoError(t, client.FlushAll(t.Context()).Err())
	require.Eventually(t, func() bool { return client.HLen(t.Context(), a.ordersKey()).Val() == 1 }, soon, 5*time.Millisecond)
	require.True(t, a.paused() && b.paused())
}

// Invalid orders are ignored, and do no harm.
func TestOrdersThatAreNone(t *testing.T) {
	t.Parallel()
	addr := redisserver.New(t).Addr
	a := start(t, addr, nil)
	client := redis.NewClient(&redis.Options{Addr: addr})
	defer client.Close()
	for i, text := range []string{"", "{", `{"version":9}`, `{"pool":"chat","endpoint":"10.0.0.1:80","weight":-5,"version":7}`, `[1]`} {
		require.NoError(t, client.HSet(t.Context(), a.ordersKey(), i, text).Err())
	}
	require.Eventually(t, func() bool { return a.Sync(t.Context()) == nil }, soon, time.Millisecond)
	require.False(t, a.paused())
	require.Equal(t, 100, a.state.Pool("chat").Endpoint(endpoint).Weight())
}

// With a key file only orders that a replica signed count, and only questions and answers.
func TestOrdersOfStrangersDoNotCount(t *testing.T) {
	t.Parallel()
	addr := redisserver.New(t).Addr
	a := startNamed(t, addr, "replica", nil, func(s *redisstore.Store) { s.SignWith(prefix{}) })
	client := redis.NewClient(&redis.Options{Addr: addr})
	defer client.Close()
	const order = `{"pool":"chat","endpoint":"10.0.0.1:80","paused":true,"version":7}`
	set := func(value string) {
		require.NoError(t, client.HSet(t.Context(), a.ordersKey(), "x", value).Err())
		require.Eventually(t, func() bool { return a.Sync(t.Context()) == nil }, soon, time.Millisecond)
	}
	set(order)
	set("signed for another purpose " + order)
	require.False(t, a.paused())
	set("signed for " + a.ordersKey() + " " + order)
	require.True(t, a.paused())
}

// prefix is a signature that shows what it is for.
type prefix struct{}

func (prefix) Sign(dst []byte, purpose string, text []byte) []byte {
	return append(append(dst, "signed for "+purpose+" "...), text...)
}

func (prefix) Genuine(purpose string, signed []byte) ([]byte, bool) {
	return bytes.CutPrefix(signed, []byte("signed for "+purpose+" "))
}

// Every living replica answers a question; those that do not are named. A replica that answers has applied the earlier
// orders.
func TestAsk(t *testing.T) {
	t.Parallel()
	addr := redisserver.New(t).Addr
	a := start(t, addr, nil)
	alone, err := a.Ask(t.Context(), "test", []byte("anybody?"))
	require.NoError(t, err)
	require.Empty(t, alone.Of)
	require.Empty(t, alone.Silent)

	var b *replica
	b = start(t, addr, func(q []byte) []byte {
		if b.paused() {
			return append([]byte("paused: "), q...)
		}
		return q
	})
	silent := startNamed(t, addr, "silent", nil)
	knowEachOther(t, a, b, silent)
	a.order(true)
	a.publish()
	require.Eventually(t, func() bool { // a stalled machine does not answer within a second
		got, err := a.Ask(t.Context(), "test", []byte("how many?"))
		if err != nil || len(got.Of) == 0 {
			return false
		}
		require.Equal(t, []Answer{{b.store.Access().Replica, "replica", []byte("paused: how many?")}}, got.Of)
		require.Equal(t, []string{"silent"}, got.Silent, "named though it has never answered")
		return true
	}, soon, time.Millisecond)
	client := redis.NewClient(&redis.Options{Addr: addr})
	defer client.Close()
	require.Eventually(t, func() bool { // nothing is left of it
		keys, err := client.Keys(t.Context(), "*answers*").Result()
		return err == nil && len(keys) == 0
	}, soon, 5*time.Millisecond)
}

// Replicas that come and go are logged by name, once, and not while nobody is known for a moment.
func TestChangesAreLoggedByName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		o := &Operator{
			redis: accessTo(roster.Member{Replica: 2, Name: "t2:9090", Heard: time.Now()}),
			log:   slog.New(slog.NewTextHandler(&text, nil)), logged: map[uint64]*seen{},
		}
		count := func(what string) int { return strings.Count(text.String(), what) }
		for _, living := range [][]uint64{{1, 2, 3}, {1, 2, 3}, {1}, {1, 2}, {1}} {
			o.logChanges(living)
		}
		require.Equal(t, 1, count(`msg="a replica is there" replica=t2:9090`))
		require.Equal(t, 1, count("replica=t"), "this one, and one without a name yet, are not logged")
		require.Zero(t, count("is gone"))
		time.Sleep(missingFor)
		o.logChanges([]uint64{1})
		require.Equal(t, 1, count(`msg="a replica is gone" replica=t2:9090 shut_down=false`), text.String())
		o.logChanges([]uint64{1, 2})
		require.Equal(t, 2, count("is there"))

		o.redis.Roster.Add(roster.Member{Replica: 4, Name: "t2:9090", Heard: time.Now()}) // 2 was started again
		o.logChanges([]uint64{1, 4})
		time.Sleep(missingFor)
		o.logChanges([]uint64{1, 4})
		require.Equal(t, 3, count("is there"))
		require.Equal(t, 1, count("is gone\" replica=t2:9090 shut_down=false replicas=1"), "the one before")
		require.Equal(t, 1, count("a replica's earlier process is gone\" replica=t2:9090 shut_down=false replicas=2"), text.String())
	})
}

// While Redis is away replicas cannot report themselves: they are not gone until they had the time to, after it came
// back. Those that were gone before still are, also if Redis came back empty.
func TestRedisWasAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		heard := time.Now()
		log := slog.New(slog.NewTextHandler(&text, nil))
		o := &Operator{
			redis: accessTo(roster.Member{Replica: 2, Name: "t2:9090", Heard: heard},
				roster.Member{Replica: 3, Name: "t3:9090", Heard: heard.Add(-time.Minute)}),
			log: log, logged: map[uint64]*seen{},
		}
		time.Sleep(time.Minute)
		names := func(living ...uint64) (names string) {
			var a Answers
			o.addGone(&a, living, o.redis.Roster.Others())
			for _, g := range a.Gone {
				names += g.Name + " "
			}
			return names
		}
		o.logChanges([]uint64{1, 2})
		require.Equal(t, "t3:9090 ", names(1, 2))
		o.redis.Living = func() []uint64 { return []uint64{1} }
		silent := func() []string {
			got, err := o.Ask(t.Context(), "test", nil)
			require.NoError(t, err)
			return got.Silent
		}
		o.lost()
		require.Equal(t, "t3:9090 ", names(1), "Redis is away")
		require.Equal(t, []string{"t2:9090"}, silent(), "it was there")
		for range 3 {
			o.heard()
		}
		require.Equal(t, "t3:9090 ", names(1), "Redis is back")
		require.Equal(t, []string{"t2:9090"}, silent(), "it could not report itself yet")
		require.NotContains(t, text.String(), "is gone")
		time.Sleep(settling)
		o.logChanges([]uint64{1, 2})
		require.Equal(t, "t3:9090 ", names(1, 2))
		require.NotContains(t, text.String(), "is gone")
		o.logChanges([]uint64{1})
		time.Sleep(missingFor)
		o.logChanges([]uint64{1})
		require.Equal(t, "t2:9090 t3:9090 ", names(1))
		require.Equal(t, 1, strings.Count(text.String(), "a replica is gone"))
		time.Sleep(roster.Remembered)
		require.Empty(t, names(1), "they are kept for an hour")
	})
}
