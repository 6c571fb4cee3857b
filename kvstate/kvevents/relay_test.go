package kvevents

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
	"tandem/kvstate"
	"tandem/kvstate/redisstore"
)

// redisServer is a redis-server of the test's own.
type redisServer struct {
	t    *testing.T
	addr string
	cmd  *exec.Cmd
}

func startRedis(t *testing.T) *redisServer {
	path := os.Getenv("REDIS_SERVER")
	if path == "" {
		path = "redis-server"
	}
	path, err := exec.LookPath(path)
	if err != nil {
		require.Empty(t, os.Getenv("TANDEM_REQUIRE_TOOLS"), "redis-server is missing: run scripts/tools.sh, or set REDIS_SERVER")
		t.Skip("redis-server is missing: run scripts/tools.sh, or set REDIS_SERVER")
	}
	r := &redisServer{t: t, addr: loopback.Addresses(t, 1)[0]}
	r.start(path)
	t.Cleanup(r.kill)
	return r
}

func (r *redisServer) start(path string) {
	_, port, err := net.SplitHostPort(r.addr)
	require.NoError(r.t, err)
	r.cmd = exec.Command(path, "--bind", "127.0.0.1", "--port", port, "--dir", r.t.TempDir(), "--save", "", "--appendonly", "no")
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(r.t, r.cmd.Start())
	soon(r.t, "redis is there", func() bool {
		c, err := net.Dial("tcp", r.addr)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
}

func (r *redisServer) kill() {
	_ = r.cmd.Process.Kill()
	_ = r.cmd.Wait()
}

func soon(t *testing.T, what string, is func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	require.Eventually(t, is, 60*time.Second, 5*time.Millisecond, what)
	return time.Since(began)
}

// sharing is one replica, as far as this package and redisstore are one.
type sharing struct {
	state *kvstate.State
	store *redisstore.Store
	c     *Collector
	kill  func() // as SIGKILL does
}

// brief is a lease that a test can wait for: where the machine stands still, replicas may be taken for dead, and come back. steady is
// one that no such pause outlives.
const (
	brief  = 600 * time.Millisecond
	steady = 8 * time.Second
)

func (r *redisServer) join(lease time.Duration, source Source, endpoints ...kvstate.EndpointSpec) *sharing {
	t := r.t
	s := &sharing{state: kvstate.New(kvstate.Options{})}
	s.state.SetPool(kvstate.PoolSpec{Name: "p"}, endpoints)
	store, err := redisstore.New(redisstore.Options{URL: "redis://" + r.addr, Lease: lease}, s.state)
	require.NoError(t, err)
	s.store = store
	s.state.Share(store)
	s.c = NewCollector(Options{State: s.state, Log: silent(), Pools: map[string]Source{"p": source}, Relay: store})
	s.c.Look()
	store.Follow(s.c)
	_ = store.Join(t.Context(), 30*time.Second)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { store.Run(ctx) })
	running.Go(func() { _ = s.c.Run(ctx) })
	var once sync.Once
	s.kill = func() { once.Do(func() { _ = store.Close(); cancel(); running.Wait() }) }
	t.Cleanup(s.kill)
	return s
}

func (s *sharing) listens() bool { return s.c.Stats()[0].Connected }

// settled reports whether all replicas know each other, and who is to listen does so, alone.
func settled(replicas []*sharing) bool {
	for _, s := range replicas {
		pool := s.state.Pool("p")
		if s.store.Replicas() != len(replicas) || s.store.Owns(pool, pool.Endpoints()[0]) != s.listens() {
			return false
		}
	}
	return len(listeners(replicas)) == 1
}

func (s *sharing) hit(ids []int) int {
	return hitIn(s.state, s.state.Pool("p"), tokenPrompt(ids), engineBlock)
}

func TestMain(m *testing.M) {
	redisstore.LogTo(silent())
	os.Exit(m.Run())
}

// listeners are those who are connected to the publisher.
func listeners(replicas []*sharing) (out []*sharing) {
	for _, s := range replicas {
		if s.listens() {
			out = append(out, s)
		}
	}
	return out
}

// step has the engine serve a prompt, and publishes what comes of it.
func (p *publisher) step(next func(int) int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.e.step(next)
	require.NoError(p.t, p.pub.Send(zmq4.NewMsgFrom([]byte("kv@127.0.0.1:8100@m"), be(k.seq, 8), k.payload)))
}

// prompts are all that [engine.step] can make.
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

// differs says how what a replica knows differs from what the engine holds; "" where it does not.
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

// One replica listens, and all know what it hears: as replicas come, are killed, and lose Redis, with an engine that gives
// out old batches. Nobody ever knows anything else than the engine does.
func TestReplicasShareOneListener(t *testing.T) {
	r := startRedis(t)
	p := newPublisher(t, true)
	p.e.blocks = 60
	require.NoError(t, p.pub.Listen("tcp://127.0.0.1:0"))
	source := Source{Port: port(t, p.pub), ReplayPort: port(t, p.router)}
	endpoint := kvstate.EndpointSpec{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth}
	next := rand.New(rand.NewPCG(1, 2)).IntN
	var replicas []*sharing
	join := func() { replicas = append(replicas, r.join(brief, source, endpoint)) }
	traffic := func(steps int) {
		for range steps {
			p.step(next)
			time.Sleep(time.Millisecond)
		}
	}
	one := func(what string) {
		t.Helper()
		soon(t, what+": one listens", func() bool { return len(listeners(replicas)) == 1 })
		traffic(50)
		for i, s := range replicas {
			soon(t, fmt.Sprintf("%s: replica %d knows what the engine holds", what, i), func() bool { return p.differs(s) == "" })
		}
		soon(t, what+": and still does, but for a lease that a busy machine missed", func() bool { return len(listeners(replicas)) == 1 })
	}
	join()
	join()
	join()
	one("three start at once")
	join()
	one("a fourth comes")
	for range 2 {
		for i, s := range replicas {
			if s.listens() {
				replicas = append(replicas[:i:i], replicas[i+1:]...)
				s.kill()
				break
			}
		}
		traffic(50)
		t.Logf("the next one listens %v later", soon(t, "the next one listens", func() bool { return len(listeners(replicas)) == 1 }))
		one("the listener was killed")
	}
	join()
	join()
	one("two more")
	path := r.cmd.Path
	r.kill()
	soon(t, "without redis each listens", func() bool { return len(listeners(replicas)) == len(replicas) })
	traffic(50)
	for _, s := range replicas {
		soon(t, "without redis each knows", func() bool { return p.differs(s) == "" })
	}
	r.start(path)
	one("redis is back")
	p.mu.Lock()
	p.e.restart()
	p.mu.Unlock()
	one("the engine has restarted")
	for _, s := range replicas {
		require.Zero(t, s.c.Stats()[0].Lost)
	}
}

// With an engine that keeps no batches nothing is lost either when replicas come and the listener changes with them: those
// who lack something are told all, and what one hears while another begins to listen is taken by both. Where a listener is
// killed while the engine is at work, what it would have told is lost; all the others know is kept, for a while.
func TestReplicasShareAnEngineThatKeepsNothing(t *testing.T) {
	p := newPublisher(t, true)
	p.e.blocks = 60
	require.NoError(t, p.pub.Listen("tcp://127.0.0.1:0"))
	endpoint := kvstate.EndpointSpec{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth}
	next := rand.New(rand.NewPCG(3, 4)).IntN
	var replicas []*sharing
	alike := func(what string) {
		t.Helper()
		for i, s := range replicas {
			soon(t, fmt.Sprintf("%s: replica %d knows what the engine holds", what, i), func() bool { return p.differs(s) == "" })
		}
	}
	stop := make(chan struct{})
	var working sync.WaitGroup
	work := func() {
		stop = make(chan struct{})
		working.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(2 * time.Millisecond):
					p.step(next)
				}
			}
		})
	}
	rest := func() { close(stop); working.Wait() }
	// Chance says who is to listen: of three that come one after the other, the first stays that in a third of all tries.
	var listener *sharing
	for try := 0; try < 30 && (try == 0 || listener == replicas[0]); try++ {
		for _, s := range replicas {
			s.kill()
		}
		soon(t, "nobody listens", func() bool { return len(p.pub.(zmq4.Topics).Topics()) == 0 })
		p.mu.Lock()
		p.e.restart()
		p.mu.Unlock()
		r := startRedis(t)
		replicas = nil
		for i := range 3 {
			replicas = append(replicas, r.join(steady, Source{Port: port(t, p.pub)}, endpoint))
			if i == 0 {
				soon(t, "it has subscribed", func() bool { return len(p.pub.(zmq4.Topics).Topics()) > 0 })
				work()
			}
			soon(t, "who is to listen does, alone", func() bool { return settled(replicas) })
		}
		rest()
		listener = listeners(replicas)[0]
		alike("replicas came")
		for _, s := range replicas {
			require.Zero(t, s.c.Stats()[0].Lost)
		}
	}
	require.NotEqual(t, replicas[0], listener, "the listener has changed")

	work()
	for i, s := range replicas {
		if s == listener {
			replicas = append(replicas[:i:i], replicas[i+1:]...)
			s.kill()
			break
		}
	}
	soon(t, "the next one listens", func() bool { return len(listeners(replicas)) == 1 })
	time.Sleep(brief)
	rest()
	for _, s := range replicas {
		require.Zero(t, s.c.Stats()[0].Lost, "nothing is forgotten")
		soon(t, "all know the same", func() bool { return s.c.Stats()[0].Feed.Held == replicas[0].c.Stats()[0].Feed.Held })
	}
	p.mu.Lock()
	p.e.cache, p.e.order = map[uint64][]int{}, nil
	p.e.clock++
	p.e.seq++
	payload := pack([]any{p.e.clock, []any{[]any{"AllBlocksCleared"}}, 0})
	require.NoError(t, p.pub.Send(zmq4.NewMsgFrom([]byte("kv@127.0.0.1:8100@m"), be(uint64(p.e.seq-1), 8), payload)))
	p.mu.Unlock()
	alike("it was cleared")
	for range 50 {
		p.step(next)
	}
	alike("and works on")
}

// An engine that connects reaches one replica, and every other knows what it says; also when it comes back to another one.
func TestAnEngineThatConnectsIsKnownToAll(t *testing.T) {
	r := startRedis(t)
	p := newPublisher(t, true)
	endpoint := kvstate.EndpointSpec{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth, EventsPort: 1, ReplayPort: port(t, p.router)}
	next := rand.New(rand.NewPCG(5, 6)).IntN
	var replicas []*sharing
	addrs := loopback.Addresses(t, 3)
	for _, addr := range addrs {
		replicas = append(replicas, r.join(steady, Source{Listen: addr}, endpoint))
	}
	dial := func(i int) {
		soon(t, "it listens", func() bool { return p.pub.Dial("tcp://"+addrs[i]) == nil })
		soon(t, "it knows who that is", func() bool { p.step(next); return replicas[i].listens() })
		for range 50 {
			p.step(next)
		}
		require.Len(t, listeners(replicas), 1)
		for n, s := range replicas {
			soon(t, fmt.Sprintf("replica %d knows what the engine holds", n), func() bool { return p.differs(s) == "" })
			soon(t, "and says so", func() bool { return s.c.Stats()[0].Known })
		}
	}
	dial(1)
	gone := replicas[1]
	replicas, addrs = []*sharing{replicas[0], replicas[2]}, []string{addrs[0], addrs[2]}
	gone.kill()
	dial(1)
}
