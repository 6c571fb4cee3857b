package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/assert" //nolint:depguard // the type that EventuallyWithT gives
	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
	"tandem/kvstate"
)

// publisher is an engine's sockets, made with go-zeromq's own: PUB and, for old batches, ROUTER.
type publisher struct {
	t      *testing.T
	mu     sync.Mutex
	e      *engine
	pub    zmq4.Socket
	router zmq4.Socket
	topics bool // in replayed messages, as vLLM has it from 0.26 on
}

func silent() *slog.Logger { return slog.New(slog.DiscardHandler) }

func port(t *testing.T, s zmq4.Socket) int {
	t.Helper()
	_, p, err := net.SplitHostPort(s.Addr().String())
	require.NoError(t, err)
	n, err := strconv.Atoi(p)
	require.NoError(t, err)
	return n
}

func newPublisher(t *testing.T, topics bool) *publisher {
	p := &publisher{t: t, e: newEngine(1000, 1000, topics), topics: topics}
	ctx, cancel := context.WithCancel(context.Background())
	p.pub, p.router = zmq4.NewPub(ctx), zmq4.NewRouter(ctx)
	require.NoError(t, p.router.Listen("tcp://127.0.0.1:0"))
	go p.answer()
	t.Cleanup(func() { cancel(); _ = p.pub.Close(); _ = p.router.Close() })
	return p
}

func (p *publisher) answer() {
	for {
		m, err := p.router.Recv()
		if err != nil {
			return
		}
		if len(m.Frames) != 3 {
			continue
		}
		from := binary.BigEndian.Uint64(m.Frames[2])
		send := func(seq uint64, payload []byte, topic string) {
			frames := [][]byte{m.Frames[0], {}}
			if p.topics {
				frames = append(frames, []byte(topic))
			}
			_ = p.router.Send(zmq4.NewMsgFrom(append(frames, be(seq, 8), payload)...))
		}
		p.mu.Lock()
		_ = p.e.replay(from, func(seq uint64, payload []byte) { send(seq, payload, "kv@x") })
		p.mu.Unlock()
		send(replayEnd, nil, "")
	}
}

// store makes the engine store a block, and publishes it unless publish is false.
func (p *publisher) store(n int, publish bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.e.clock++
	k := kept{uint64(p.e.seq), pack([]any{p.e.clock, []any{p.e.stored([]int{n, 1, 1, 1}, 0, 1)}, 0})}
	p.e.kept, p.e.seq = append(p.e.kept, k), p.e.seq+1
	if publish {
		require.NoError(p.t, p.pub.Send(zmq4.NewMsgFrom([]byte("kv@127.0.0.1:8100@m"), be(k.seq, 8), k.payload)))
	}
}

func known(s *kvstate.State) (blocks []int) {
	for n := range 10 {
		if hitIn(s, s.Pool("p"), tokenPrompt([]int{n, 1, 1, 1}), engineBlock) > 0 {
			blocks = append(blocks, n)
		}
	}
	return blocks
}

func eventually(t *testing.T, s *kvstate.State, want ...int) {
	t.Helper()
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, want, known(s)) }, 30*time.Second, 10*time.Millisecond)
}

func run(t *testing.T, s *kvstate.State, source Source) *Collector {
	c := NewCollector(Options{State: s, Log: silent(), Pools: map[string]Source{"p": source}})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			require.NoError(t, err)
		case <-time.After(30 * time.Second):
			t.Error("the collector does not end")
		}
	})
	return c
}

func connected(t *testing.T, c *Collector) {
	t.Helper()
	require.Eventually(t, func() bool { s := c.Stats(); return len(s) == 1 && s[0].Connected }, 30*time.Second, 5*time.Millisecond)
}

func TestCollectorConnects(t *testing.T) {
	for _, topics := range []bool{true, false} { // both generations of replayed messages, and of events
		p := newPublisher(t, topics)
		require.NoError(t, p.pub.Listen("tcp://127.0.0.1:0"))
		p.store(0, false) // before we connected
		s := kvstate.New(kvstate.Options{})
		endpoint := kvstate.EndpointSpec{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth, Events: kvstate.EventPorts{Port: port(t, p.pub), Replay: port(t, p.router)}}
		s.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{endpoint})
		c := run(t, s, Source{Topic: "kv@"})
		eventually(t, s, 0)
		connected(t, c)
		soon(t, "it has subscribed: what is published before is a gap", func() bool { return len(p.pub.(zmq4.Topics).Topics()) > 0 })
		require.Eventually(t, func() bool { p.store(1, true); return len(known(s)) == 2 }, 30*time.Second, 50*time.Millisecond)
		p.store(2, false) // lost
		require.NoError(t, p.pub.Send(zmq4.NewMsgFrom([]byte("kv@127.0.0.1:8100@m"), []byte("no number, no payload"))))
		p.store(3, true)
		eventually(t, s, 0, 1, 2, 3)
		stats := c.Stats()[0]
		require.Equal(t, []uint64{1, 1, 0, 0, 1}, []uint64{stats.Gaps, stats.Recovered, stats.Lost, stats.Restarts, stats.Malformed})
		require.Equal(t, 4, stats.Feed.Held)

		s.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{{Name: "other", Addr: "127.0.0.1:8101", Role: kvstate.RoleBoth, Events: kvstate.EventPorts{Port: 1}}})
		eventually(t, s)
		require.Eventually(t, func() bool { s := c.Stats(); return len(s) == 1 && s[0].Endpoint == "127.0.0.1:8101" }, 30*time.Second, 10*time.Millisecond)
	}
}

// An engine whose publisher connects, because its endpoint names a host.
func TestCollectorListens(t *testing.T) {
	addr := loopback.Addresses(t, 1)[0]
	p := newPublisher(t, true)
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{
		{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth, Events: kvstate.EventPorts{Port: 1, Replay: port(t, p.router)}},
		{Name: "another", Addr: "127.0.0.1:8101", Role: kvstate.RoleBoth},
	})
	c := run(t, s, Source{Listen: addr, Port: 1})
	p.store(0, false)
	require.NoError(t, p.pub.Dial("tcp://"+addr))
	require.Eventually(t, func() bool { p.store(1, true); return len(known(s)) == 2 }, 30*time.Second, 50*time.Millisecond)
	for _, one := range c.Stats() {
		require.Equal(t, one.Endpoint == "127.0.0.1:8100", one.Connected, "by its topic it is the first of the two")
	}
}

// A stranger's connection costs nothing more.
func TestCollectorAndStrangers(t *testing.T) {
	addr := loopback.Addresses(t, 1)[0]
	s := kvstate.New(kvstate.Options{})
	s.SetPool(kvstate.PoolSpec{Name: "p"}, []kvstate.EndpointSpec{{Name: "e", Addr: "127.0.0.1:8100", Role: kvstate.RoleBoth}})
	run(t, s, Source{Listen: addr})
	greeting := append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0}, make([]byte, 52)...)
	copy(greeting[12:], "NULL")
	for name, text := range map[string][]byte{
		"HTTP":                  []byte("GET / HTTP/1.1\r\n\r\n" + string(make([]byte, 64))),
		"a frame of an exabyte": append(append([]byte(nil), greeting...), 6, 0x10, 0, 0, 0, 0, 0, 0, 0),
		"negative":              append(append([]byte(nil), greeting...), 6, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff),
	} {
		var nc net.Conn
		var err error
		require.Eventually(t, func() bool { nc, err = net.Dial("tcp", addr); return err == nil }, 30*time.Second, 10*time.Millisecond)
		_, err = nc.Write(text)
		require.NoError(t, err)
		require.NoError(t, nc.SetReadDeadline(time.Now().Add(30*time.Second)))
		_, err = io.Copy(io.Discard, nc)
		var timeout net.Error
		require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "%s: not hung up on", name)
		require.NoError(t, nc.Close())
	}
}
