package kvevents

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
	"tandem/e2e/redisserver"
	"tandem/kvstate"
	"tandem/kvstate/redisstore"
)

func soon(t *testing.T, what string, is func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	require.Eventually(t, is, 60*time.Second, 5*time.Millisecond, what)
	return time.Since(began)
}

// sharing is one replica, with the parts of redisstore and this package.
type sharing struct {
	state *kvstate.State
	store *redisstore.Store
	c     *Collector
	kill  func() // as SIGKILL does
}

// steady is a lease that no pause of a busy machine outlives.
const steady = 8 * time.Second

func join(t *testing.T, redis string, source Source, endpoints ...kvstate.EndpointSpec) *sharing {
	t.Helper()
	s := &sharing{state: kvstate.New(kvstate.Options{})}
	s.state.SetPool(kvstate.PoolSpec{Name: "p"}, endpoints)
	store, err := redisstore.New(redisstore.Options{URL: "redis://" + redis, Lease: steady}, s.state)
	require.NoError(t, err)
	s.store = store
	s.state.Connect(store)
	s.c = NewCollector(Options{State: s.state, Log: silent(), Pools: map[string]Source{"p": source}, Forward: store})
	ctx, cancel := context.WithCancel(context.Background())
	s.c.Look(ctx)
	s.c.AwaitConnected(t.Context())
	store.Follow(s.c)
	_ = store.Join(t.Context(), 30*time.Second)
	s.c.Joined(0)
	var running sync.WaitGroup
	running.Go(func() { store.Run(ctx) })
	running.Go(func() { _ = s.c.Run(ctx) })
	var once sync.Once
	s.kill = func() { once.Do(func() { _ = store.Close(); cancel(); running.Wait() }) }
	t.Cleanup(s.kill)
	return s
}

func (s *sharing) connected() bool { return s.c.Stats()[0].Connected }

func (s *sharing) hit(ids []int) int {
	return hitIn(s.state, s.state.Pool("p"), tokenPrompt(ids), engineBlock)
}

func TestMain(m *testing.M) {
	redisstore.LogTo(silent())
	os.Exit(m.Run())
}

// step makes the engine serve a prompt, and publishes the events.
func (p *publisher) step(next func(int) int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.e.step(next)
	require.NoError(p.t, p.pub.Send(zmq4.NewMsgFrom([]byte("kv@127.0.0.1:8100@m"), be(k.seq, 8), k.payload)))
}

// prompts returns all prompts that [engine.step] can make.
func prompts() (out [][]int) {
	for n := range 81 {
		ids := make([]int, 4*engineBlock)
		for i := range ids {
			ids[i] = 1
		}
		for i, rest := 0, n; i < 4; i, rest = i+1, rest/3 {
			ids[i*engineBlock] = rest%3 + 70_000
		}
		out = append(out, ids)
	}
	return out
}

// differs returns the difference between a replica's knowledge and the engine's blocks; "" if there is none.
func (p *publisher) differs(s *sharing) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ids := range prompts() {
		if want, got := p.e.hit(ids), s.hit(ids); want != got {
			return fmt.Sprintf("%v: engine %d, index %d", ids, want, got)
		}
	}
	return ""
}

func (p *publisher) alike(what string, replicas []*sharing) {
	p.t.Helper()
	for i, s := range replicas {
		soon(p.t, fmt.Sprintf("%s: replica %d knows what the engine holds", what, i), func() bool { return p.differs(s) == "" })
	}
}

// serve makes the engine serve prompts until the returned function is called.
func (p *publisher) serve(next func(int) int) (stop func()) {
	done := make(chan struct{})
	var working sync.WaitGroup
	working.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(2 * time.Millisecond):
				p.step(next)
			}
		}
	})
	return func() { close(done); working.Wait() }
}

// Each replica follows an engine by itself. One that starts while the engine is busy, and keeps no batches, gets the
// others' knowledge and continues it: nothing is lost. Losing Redis or another replica changes nothing.
func TestReplicasFollowAnEngineThatKeepsNothing(t *testing.T) {
	redis := redisserver.New(t)
	p := newPublisher(t, true)
	p.e.blocks = 20_000 // it evicts none: a feed lacks the blocks behind an evicted one
	require.NoError(t, p.pub.Listen("tcp://127.0.0.1:0"))
	source := Source{Port: port(t, p.pub)}
	endpoint := kvstate.EndpointSpec{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth}
	next := rand.New(rand.NewPCG(3, 4)).IntN
	replicas := []*sharing{join(t, redis.Addr, source, endpoint)}
	soon(t, "it has subscribed", func() bool { return len(p.pub.(zmq4.Topics).Topics()) > 0 })
	for range 3 {
		stop := p.serve(next)
		replicas = append(replicas, join(t, redis.Addr, source, endpoint))
		stop()
		p.alike("one more came", replicas)
	}
	for _, s := range replicas {
		require.Zero(t, s.c.Stats()[0].Lost)
	}
	stop := p.serve(next)
	replicas[0].kill()
	replicas = replicas[1:]
	redis.Kill()
	stop()
	p.alike("another replica and redis are gone", replicas)
	for _, s := range replicas {
		require.Zero(t, s.c.Stats()[0].Lost)
	}
}

// An engine that connects reaches one replica, and every other has the same knowledge, later ones included; also when
// the engine reconnects to another replica.
func TestAnEngineThatConnectsIsKnownToAll(t *testing.T) {
	redis := redisserver.New(t)
	p := newPublisher(t, true)
	p.e.blocks = 20_000
	endpoint := kvstate.EndpointSpec{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth, Events: kvstate.EventPorts{Port: 1, Replay: port(t, p.router)}}
	next := rand.New(rand.NewPCG(5, 6)).IntN
	var replicas []*sharing
	addrs := loopback.Addresses(t, 4)
	add := func(i int) { replicas = append(replicas, join(t, redis.Addr, Source{Listen: addrs[i]}, endpoint)) }
	add(0)
	add(1)
	add(2)
	dial := func(to *sharing, addr string) {
		soon(t, "it listens", func() bool { return p.pub.Dial("tcp://"+addr) == nil })
		soon(t, "it knows who that is", func() bool { p.step(next); return to.c.find(place{"p", "127.0.0.1:8100", 0}).isUp() })
		for range 50 {
			p.step(next)
		}
		p.alike("it has connected", replicas)
		for _, s := range replicas {
			soon(t, "it says so", s.connected)
		}
	}
	dial(replicas[1], addrs[1])
	require.Zero(t, replicas[1].c.Stats()[0].Forwarded)
	soon(t, "batches are forwarded", func() bool { return replicas[0].c.Stats()[0].Forwarded > 0 })
	add(3)
	p.alike("one more came", replicas)
	gone := replicas[1]
	replicas = append(replicas[:1:1], replicas[2:]...)
	gone.kill()
	dial(replicas[1], addrs[2])
	require.Zero(t, replicas[1].c.Stats()[0].Lost)
}
