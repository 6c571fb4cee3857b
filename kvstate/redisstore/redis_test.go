package redisstore

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"tandem/e2e/redisserver"
	"tandem/kvstate"
)

func TestMain(m *testing.M) {
	LogTo(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

// server is a redis-server of the test's own.
type server struct {
	*redisserver.Server
	t testing.TB
}

func startRedis(t testing.TB, args ...string) *server {
	t.Helper()
	return &server{redisserver.New(t, args...), t}
}

func (s *server) client() *redis.Client {
	return redis.NewClient(&redis.Options{Addr: s.Addr, MaxRetries: -1, DialTimeout: patience, ReadTimeout: patience, WriteTimeout: patience})
}

func (s *server) do(args ...any) {
	s.t.Helper()
	c := s.client()
	defer c.Close()
	require.NoError(s.t, c.Do(context.Background(), args...).Err())
}

// replica is one Tandem as far as this package knows.
type replica struct {
	t     testing.TB
	state *kvstate.State
	store *Store
	pool  *kvstate.Pool
	p     *poolReplica
	stop  func() // as SIGTERM does
	kill  func() // as SIGKILL does
}

// testLease is one that no pause of a busy machine outlives; where a test is about the end of a lease, it is brief: there whatever
// is seen may be seen late, and a replica may be taken for dead and come back in between.
const (
	testLease = 10 * time.Second
	brief     = 600 * time.Millisecond
)

// patience is how long a test waits for what has to come; less than [maxLease].
const patience = 50 * time.Second

// speed holds a claim about how fast something is, which is true of an idle machine: TANDEM_SPEED=1 (make speed) asks for it.
func speed(t testing.TB, took, limit time.Duration, what string) {
	t.Helper()
	t.Logf("%s: %v", what, took)
	if os.Getenv("TANDEM_SPEED") != "" {
		require.Less(t, took, limit, what)
	}
}

// addresses of the test's endpoints.
func addr(i int) string { return fmt.Sprintf("10.0.%d.%d:8000", i/250, i%250+1) }

// join makes a replica with n endpoints, has it join the others, and runs it.
func join(t testing.TB, o Options, n int) *replica {
	t.Helper()
	r := apart(t, o, n)
	r.joins()
	r.run()
	return r
}

// joins has a replica join the others, however often it takes until Redis is in time for that.
func (r *replica) joins() {
	r.t.Helper()
	eventually(r.t, "it joins", func() bool { return r.store.Join(context.Background(), patience) == nil })
}

// apart makes a replica that knows nobody yet.
func apart(t testing.TB, o Options, n int) *replica {
	t.Helper()
	r := &replica{t: t, state: kvstate.New(kvstate.Options{MaxIndexBytes: 1 << 30, EndpointBlocks: 1 << 22})}
	var eps []kvstate.EndpointSpec
	for i := range n {
		eps = append(eps, kvstate.EndpointSpec{Name: addr(i), Addr: addr(i), Role: kvstate.RoleBoth})
	}
	r.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, eps)
	r.pool = r.state.Pool("chat")
	if o.Lease == 0 {
		o.Lease = testLease
	}
	if testing.Verbose() {
		o.Log = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	var err error
	r.store, err = New(o, r.state)
	require.NoError(t, err)
	r.state.Connect(r.store)
	r.p = r.store.poolReplica("chat")
	return r
}

func (r *replica) run() {
	end := during(context.Background(), r.store.Run)
	var once sync.Once
	r.stop = func() { once.Do(func() { end(); _ = r.store.Close() }) }
	r.kill = func() { once.Do(func() { _ = r.store.Close(); end() }) }
	r.t.Cleanup(r.stop)
}

// during does something until stop, which waits for its end.
func during(ctx context.Context, do func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() { defer close(ended); do(ctx) }()
	return func() { cancel(); <-ended }
}

// message is an entry of the stream with a batch in it, as it is read.
func message(id, batch string) redis.XMessage {
	return redis.XMessage{ID: id, Values: map[string]any{batchField: batch}}
}

func (r *replica) e(i int) *kvstate.Endpoint { return r.pool.Endpoint(addr(i)) }

// hit is how many leading blocks of a prompt endpoint i holds.
func (r *replica) hit(i int, hashes []uint64) int {
	var v kvstate.View
	r.state.View(r.pool, hashes, &v)
	return v.Endpoints[i].Hit
}

func (r *replica) booked(i int) int64 {
	var v kvstate.View
	r.state.View(r.pool, nil, &v)
	return v.Endpoints[i].Requests
}

// toldOf waits until what a replica has routed to endpoint i of n lies in the stream, for whoever reads it.
func (r *replica) publishedOf(s *server, i, n int, hashes []uint64) {
	r.t.Helper()
	c := s.client()
	defer c.Close()
	eventually(r.t, "it is told", func() bool {
		reader := apart(r.t, Options{URL: "redis://127.0.0.1:1"}, n)
		defer reader.store.Close()
		for _, m := range c.XRange(context.Background(), r.p.keys.stream(), "-", "+").Val() {
			reader.p.takeIn(m)
		}
		return reader.hit(i, hashes) == len(hashes)
	})
}

// ticketOf is a ticket of its own for every n.
func ticketOf(n uint64) (ticket [16]byte) {
	binary.BigEndian.PutUint64(ticket[8:], n)
	return ticket
}

// prompt is the blocks of a prompt of its own.
func prompt(n int, blocks int) []uint64 {
	out := make([]uint64, blocks)
	h := uint64(n)*0x9E3779B185EBCA87 + 1
	for i := range out {
		h = (h ^ h>>31) * 0xBF58476D1CE4E5B9
		out[i] = h
	}
	return out
}

func eventually(t testing.TB, what string, f func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !f() {
		if time.Since(began) > patience {
			require.Fail(t, "did not come true: "+what)
		}
		time.Sleep(200 * time.Microsecond)
	}
	return time.Since(began)
}

func redisURL(s *server) Options { return Options{URL: "redis://" + s.Addr + "/0"} }

// briefly is redisURL with a lease that a test can wait for.
func briefly(s *server) Options { return Options{URL: "redis://" + s.Addr + "/0", Lease: brief} }
