package kvevents

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/go-zeromq/zmq4"
)

// subscription follows one publisher over any number of connections.
type subscription struct {
	target     target
	topic      string
	eventsAddr string
	replayAddr string // "": none
	publisher  Publisher
	stream     stream
	log        *slog.Logger
	stop       context.CancelFunc
	up         atomic.Bool
	accepted   chan *accepted // connections that the publisher opened; see listen.go
}

// Between two tries to connect, and how long a publisher may be away before what it said is void: by then its engine is
// more likely gone than its network slow.
const (
	firstRetry = 250 * time.Millisecond
	lastRetry  = 5 * time.Second
	staleAfter = 30 * time.Second
)

func newSubscription(t target, source Source, p Publisher, log *slog.Logger) *subscription {
	s := &subscription{
		target: t, topic: source.Topic, publisher: p, accepted: make(chan *accepted),
		log: log.With("pool", t.pool, "endpoint", t.endpoint.Addr, "rank", t.rank),
	}
	s.stream.sink = p
	events, replayed := source.Port, source.ReplayPort
	if t.endpoint.EventsPort != 0 {
		events, replayed = t.endpoint.EventsPort, t.endpoint.ReplayPort
	}
	host, _, _ := net.SplitHostPort(t.endpoint.Addr)
	s.eventsAddr = net.JoinHostPort(host, strconv.Itoa(events+t.rank))
	if replayed != 0 {
		s.replayAddr = net.JoinHostPort(host, strconv.Itoa(replayed+t.rank))
	}
	return s
}

func (s *subscription) ask(ctx context.Context) replay {
	return func(from uint64, each func(seq uint64, payload []byte)) error {
		if s.replayAddr == "" {
			return errNoReplay
		}
		return ask(ctx, s.replayAddr, from, each)
	}
}

// connect follows a publisher that binds its socket, until ctx ends.
func (s *subscription) connect(ctx context.Context) {
	retry, since := firstRetry, time.Now()
	for ctx.Err() == nil {
		c, err := dial(ctx, s.eventsAddr, zmq4.Sub)
		if err == nil {
			err = s.serve(ctx, c, nil)
			retry, since = firstRetry, time.Now()
		}
		s.down(err, since)
		select {
		case <-ctx.Done():
		case <-time.After(retry/2 + rand.N(retry)):
		}
		retry = min(2*retry, lastRetry)
	}
}

// down notes that the publisher is away.
func (s *subscription) down(err error, since time.Time) {
	if s.up.Swap(false) {
		s.log.Warn("KV events: the connection is lost", "err", err)
	} else {
		s.log.Debug("KV events: no connection", "err", err)
	}
	if s.stream.known && time.Since(since) > staleAfter {
		s.log.Warn("KV events: the publisher stays away; what it said is forgotten")
		s.stream.forget()
	}
}

// serve takes what comes over a connection until that ends. first is a message that came already.
func (s *subscription) serve(ctx context.Context, c *conn, first [][]byte) error {
	defer c.close()
	defer context.AfterFunc(ctx, c.close)()
	if first == nil {
		if err := c.subscribe(s.topic); err != nil {
			return err
		}
	}
	ask := s.ask(ctx)
	if err := s.stream.connected(ask); err != nil {
		s.log.Debug("KV events: what was said before now cannot be had", "err", err)
	}
	if !s.up.Swap(true) {
		s.log.Info("KV events: connected", "from", c.net.RemoteAddr().String())
	}
	for frames := first; ; {
		if frames != nil {
			if _, seq, payload, ok := batchOf(frames); ok {
				s.stream.live(seq, payload, ask)
			} else {
				s.stream.count.malformed.Add(1)
			}
		}
		var err error
		if frames, err = c.read(); err != nil {
			return err
		}
	}
}
