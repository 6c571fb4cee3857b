package kvevents

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"tandem/internal/zmtp"
	"tandem/kvstate"
)

// A publisher whose endpoint in --kv-events-config names a host connects to us, and we bind the socket. Its endpoint
// follows from its topic, by custom kv@<pod address>@<model>, or from its source address.
//
// It reaches one replica. That replica forwards the batches as they arrive and, three times a lease, the number of the
// next one. So the others see that the publisher is connected, and whether they missed something. A replica that missed
// a batch requests it from the publisher, as any other.

// accepted is a connection that a publisher opened, with its first message.
type accepted struct {
	c     *zmtp.Conn
	first [][]byte
	done  chan struct{} // closed when it has been served
}

// firstMessage is the time for which a publisher may be silent before it is identified. An engine without requests
// sends nothing.
const (
	firstMessage = time.Hour
	acceptTime   = 5 * time.Second // for the publisher's subscription to take the connection
)

// listening is the socket on which a pool's publishers are accepted.
type listening struct {
	source Source
	stop   func()
}

// lookListeners starts to listen for new pools, and stops for those that have left or changed.
func (c *Collector) lookListeners(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for pool, l := range c.listening {
		if c.sources[pool] != l.source {
			l.stop()
			delete(c.listening, pool)
		}
	}
	var errs []error
	for _, pool := range slices.Sorted(maps.Keys(c.sources)) {
		if source := c.sources[pool]; source.Listen != "" && c.listening[pool] == nil {
			errs = append(errs, c.listen(ctx, pool, source))
		}
	}
	return errors.Join(errs...)
}

// listen accepts the publishers of a pool.
func (c *Collector) listen(ctx context.Context, pool string, source Source) error {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", source.Listen)
	if err != nil {
		return fmt.Errorf("listening for KV events of pool %s: %w", pool, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	c.listening[pool] = &listening{source, cancel}
	server := zmtp.Server{
		Kind: zmtp.Sub, Limit: maxMessage, Log: c.o.Log,
		Handle: func(ctx context.Context, conn *zmtp.Conn) error { return c.accept(ctx, pool, source.Topic, conn) },
	}
	c.running.Go(func() {
		if err := server.Serve(ctx, l); err != nil {
			c.o.Log.Error("KV events", "pool", pool, "err", err)
		}
	})
	return nil
}

// accept identifies the publisher of a connection and passes the connection to its subscription, until it ends.
func (c *Collector) accept(ctx context.Context, pool, topic string, conn *zmtp.Conn) error {
	if err := conn.Subscribe(topic); err != nil {
		return err
	}
	conn.SetReadDeadline(time.Now().Add(firstMessage))
	frames, err := conn.Read()
	if err != nil {
		return err
	}
	conn.SetReadDeadline(time.Time{})
	s := c.subscriptionOf(pool, frames, conn.Peer())
	if s == nil { // it will try again; its endpoint may be known by then
		c.o.Log.Warn("KV events: a publisher that is no endpoint of the pool", "pool", pool, "from",
			conn.Peer().String(), "topic", string(frames[0]))
		return nil
	}
	a := &accepted{conn, frames, make(chan struct{})}
	select {
	case s.accepted <- a:
	case <-ctx.Done():
		return nil
	case <-time.After(acceptTime): // it has another connection that may be dead
		return nil
	}
	select {
	case <-a.done:
	case <-s.ctx.Done():
	}
	return nil
}

// subscriptionOf returns the subscription that a first message belongs to; nil if there is none.
func (c *Collector) subscriptionOf(pool string, frames [][]byte, from net.Addr) *subscription {
	topic, _, payload, ok := batchOf(frames)
	if !ok {
		return nil
	}
	var d Decoder
	batch, err := d.Batch(payload)
	if err != nil {
		return nil
	}
	names := strings.Split(string(topic), "@")
	remote, _, _ := net.SplitHostPort(from.String())
	c.mu.Lock()
	defer c.mu.Unlock()
	var named, near []*subscription
	ranks := max(c.sources[pool].Ranks, 1)
	for t, s := range c.active {
		if t.pool != pool || (ranks > 1 || t.endpoint.Ranks > 1) && t.rank != batch.Rank {
			continue
		}
		host, _, _ := net.SplitHostPort(t.endpoint.Addr)
		for _, name := range names {
			if name == t.endpoint.HostPort() || name == t.endpoint.Name || name == host {
				named = append(named, s)
				break
			}
		}
		if host == remote {
			near = append(near, s)
		}
	}
	switch {
	case len(named) == 1:
		return named[0]
	case len(named) == 0 && len(near) == 1:
		return near[0]
	}
	return nil
}

// await follows a publisher that connects to us, or to another replica.
func (s *subscription) await() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case a := <-s.accepted:
			_ = s.serve(a.c, a.first)
			close(a.done)
		case b := <-s.forwarded:
			s.takeForwarded(b)
		}
	}
}

// pass forwards a batch to the other replicas.
func (s *subscription) pass(seq uint64, payload []byte) {
	if s.forward == nil {
		return
	}
	s.forwarding.Lock()
	defer s.forwarding.Unlock()
	s.position = seq + 1
	s.forward(kvstate.EventBatch{Endpoint: s.target.endpoint, Rank: s.target.rank, Seq: seq, Payload: payload})
}

// passPosition forwards the number of the publisher's next batch, if it is connected.
func (s *subscription) passPosition() {
	if s.forward == nil || !s.isUp() {
		return
	}
	s.forwarding.Lock()
	defer s.forwarding.Unlock()
	s.forward(kvstate.EventBatch{Endpoint: s.target.endpoint, Rank: s.target.rank, Seq: s.position})
}

// receive takes a batch from another replica. If too many are waiting, it drops the batch, which appears as a gap.
func (s *subscription) receive(b kvstate.EventBatch) {
	select {
	case s.forwarded <- keptBatch{b.Seq, bytes.Clone(b.Payload)}:
	default:
	}
}

func (s *subscription) takeForwarded(b keptBatch) {
	s.remote.Store(true)
	s.mu.Lock()
	s.last = time.Now()
	s.mu.Unlock()
	if len(b.payload) == 0 {
		s.stream.position(b.seq, s.ask)
		return
	}
	s.stream.count.forwarded.Add(1)
	s.stream.live(b.seq, b.payload, s.ask)
}
