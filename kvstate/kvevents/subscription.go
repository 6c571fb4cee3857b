package kvevents

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zeromq/zmq4"

	"tandem/internal/guard"
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
	up         atomic.Bool    // the publisher is connected to this replica
	accepted   chan *accepted // connections that the publisher opened; see listen.go

	// Guarded by the stream's lock.
	follower follower
	opened   time.Time
	since    time.Time // when it was connected last
	heard    time.Time // when somebody listened last

	// Of the collector's goroutine.
	stop  context.CancelFunc // of the listening
	ended chan struct{}      // closed when it has ended
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
		log:    log.With("pool", t.pool, "endpoint", t.endpoint.Addr, "rank", t.rank),
		opened: time.Now(), stop: func() {}, ended: make(chan struct{}),
	}
	close(s.ended)
	s.heard = s.opened
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

// listen follows the publisher in a goroutine, until ctx ends or s.stop is called.
func (s *subscription) listen(ctx context.Context, running *sync.WaitGroup, follow func(context.Context)) {
	before := s.ended
	ctx, s.stop = context.WithCancel(ctx)
	ended := make(chan struct{})
	s.ended = ended
	running.Go(func() {
		defer close(ended)
		<-before
		s.stream.mu.Lock()
		s.stream.deaf = !s.follower.listening
		s.stream.mu.Unlock()
		guard.Keep(ctx, "KV events", func() { follow(ctx) })
	})
}

// connect follows a publisher that binds its socket, until ctx ends.
func (s *subscription) connect(ctx context.Context) {
	for retry := firstRetry; ctx.Err() == nil; retry = min(2*retry, lastRetry) {
		c, err := dial(ctx, s.eventsAddr, zmq4.Sub)
		if err == nil {
			err = s.serve(ctx, c, nil)
			retry = firstRetry
		}
		if ctx.Err() != nil {
			return
		}
		s.log.Debug("KV events: no connection", "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(retry/2 + rand.N(retry)):
		}
	}
}

// begin notes that the publisher is connected, unless it need not be any more.
func (s *subscription) begin() bool {
	s.stream.mu.Lock()
	defer s.stream.mu.Unlock()
	if s.stream.deaf {
		return false
	}
	if s.follower.loading { // a part, of which nobody knows any more what has become
		s.stream.forget()
	}
	s.follower.lacks, s.follower.loading = false, false
	s.since = time.Now()
	s.up.Store(true)
	return true
}

// end notes that the publisher is away.
func (s *subscription) end(ctx context.Context, err error) {
	s.stream.mu.Lock()
	defer s.stream.mu.Unlock()
	if s.up.Swap(false) && ctx.Err() == nil {
		s.heard = time.Now()
		s.log.Warn("KV events: the connection is lost", "err", err)
	}
}

// serve takes what comes over a connection until that ends. first is a message that came already.
func (s *subscription) serve(ctx context.Context, c *conn, first [][]byte) (err error) {
	defer c.close()
	defer context.AfterFunc(ctx, c.close)()
	if first == nil {
		if err := c.subscribe(s.topic); err != nil {
			return err
		}
	}
	if !s.begin() {
		return context.Canceled
	}
	defer func() { s.end(ctx, err) }()
	s.log.Info("KV events: connected", "from", c.net.RemoteAddr().String())
	ask := s.ask(ctx)
	if err := s.stream.connected(ask); err != nil {
		s.log.Debug("KV events: what was said before now cannot be had", "err", err)
	}
	for frames := first; ; {
		if frames != nil {
			if _, seq, payload, ok := batchOf(frames); ok {
				s.stream.live(seq, payload, ask)
			} else {
				s.stream.count.malformed.Add(1)
			}
		}
		if frames, err = c.read(); err != nil {
			return err
		}
	}
}
