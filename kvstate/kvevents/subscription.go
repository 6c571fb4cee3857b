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

	"tandem/internal/zmtp"
	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
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
	ctx        context.Context //nolint:containedctx // lives as long as the subscription
	stop       context.CancelFunc

	mu   sync.Mutex
	up   bool
	last time.Time // when the publisher was last connected, here or to the replica that forwards its batches

	// Of publishers that connect to us (listen.go).
	accepted   chan *accepted
	forwarded  chan keptBatch           // from another replica
	forward    func(kvstate.EventBatch) // to the other replicas; nil: there are none
	position   uint64                   // the number after the last forwarded batch; guarded by forwarding
	forwarding sync.Mutex
	remote     atomic.Bool // a batch came from another replica since the publisher was last connected
}

// The pause between two tries to connect, and the time after which the reports of a disconnected publisher are void:
// its engine is probably gone by then.
const (
	firstRetry = 250 * time.Millisecond
	lastRetry  = 5 * time.Second
	staleAfter = 30 * time.Second
)

// maxForwarded bounds the waiting batches from another replica.
const maxForwarded = 256

func newSubscription(ctx context.Context, t target, p Publisher, log *slog.Logger) *subscription {
	s := &subscription{
		target: t, topic: t.source.Topic, publisher: p, accepted: make(chan *accepted),
		forwarded: make(chan keptBatch, maxForwarded),
		log:       log.With("pool", t.pool, "endpoint", t.endpoint.Addr, "rank", t.rank), last: time.Now(),
	}
	s.ctx, s.stop = context.WithCancel(ctx)
	s.stream.sink = p
	events, replayed := t.source.Port, t.source.ReplayPort
	if own := t.endpoint.Events; own.Port != 0 {
		events, replayed = own.Port, own.Replay
	}
	host, _, _ := net.SplitHostPort(t.endpoint.Addr)
	s.eventsAddr = net.JoinHostPort(host, strconv.Itoa(events+t.rank))
	if replayed != 0 {
		s.replayAddr = net.JoinHostPort(host, strconv.Itoa(replayed+t.rank))
	}
	return s
}

// ask returns the publisher's [replay].
func (s *subscription) ask(from uint64, each func(seq uint64, payload []byte)) error {
	if s.replayAddr == "" {
		return errNoReplay
	}
	return ask(s.ctx, s.replayAddr, from, each)
}

// follow follows the publisher until the subscription is stopped.
func (s *subscription) follow() {
	if s.target.source.Listen != "" {
		s.await()
	} else {
		s.connect()
	}
}

// close stops following the publisher.
func (s *subscription) close() {
	s.stream.mu.Lock()
	defer s.stream.mu.Unlock()
	s.publisher.Close()
}

// connect follows a publisher that binds its socket.
func (s *subscription) connect() {
	for retry := firstRetry; s.ctx.Err() == nil; retry = min(2*retry, lastRetry) {
		c, err := zmtp.Dial(s.ctx, s.eventsAddr, zmtp.Sub, maxMessage)
		if err == nil {
			err = s.serve(c, nil)
			retry = firstRetry
		}
		if s.ctx.Err() != nil {
			return
		}
		s.log.Debug("KV events: no connection", "err", err)
		select {
		case <-s.ctx.Done():
		case <-time.After(retry/2 + rand.N(retry)):
		}
	}
}

// serve receives the batches of a connection until it ends. first is a message that was already received.
func (s *subscription) serve(c *zmtp.Conn, first [][]byte) (err error) {
	defer c.Close()
	defer context.AfterFunc(s.ctx, c.Close)()
	if first == nil {
		if err := c.Subscribe(s.topic); err != nil {
			return err
		}
	}
	s.begin()
	defer func() { s.end(err) }()
	s.log.Info("KV events: connected", "from", c.Peer().String())
	if err := s.stream.connected(s.ask); err != nil {
		s.log.Debug("KV events: batches published before now cannot be had", "err", err)
	}
	for frames := first; ; {
		if frames != nil {
			if _, seq, payload, ok := batchOf(frames); ok {
				s.pass(seq, payload)
				s.stream.live(seq, payload, s.ask)
			} else {
				s.stream.count.malformed.Add(1)
			}
		}
		if frames, err = c.Read(); err != nil {
			return err
		}
	}
}

// join waits until the publisher's feed is loaded, or until late is over, and then ends the time of joining.
func (s *subscription) join(late time.Duration) {
	for until := time.Now().Add(late); !s.stream.isLoaded() && time.Now().Before(until); {
		select {
		case <-s.ctx.Done():
			return
		case <-time.After(lookEvery):
		}
	}
	if err := s.stream.join(s.ask); err != nil {
		s.log.Debug("KV events: batches published before now cannot be had", "err", err)
	}
}

// begin records that the publisher is connected to this replica.
func (s *subscription) begin() {
	s.forwarding.Lock()
	s.position = 0
	s.forwarding.Unlock()
	s.remote.Store(false)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.up = true
}

// end records that the publisher is disconnected.
func (s *subscription) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.up, s.last = false, time.Now()
	if s.ctx.Err() == nil {
		s.log.Warn("KV events: the connection is lost", "err", err)
	}
}

func (s *subscription) isUp() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.up
}

// settle forgets the reports of a publisher that has been disconnected for too long.
func (s *subscription) settle(now time.Time) {
	if s.isAway(now) && s.stream.isKnown() {
		s.log.Warn("KV events: the publisher stays away; its reports are forgotten")
		s.stream.reset()
	}
}

func (s *subscription) isAway(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.up && now.Sub(s.last) > staleAfter
}

// reaches reports whether the publisher's batches reach this replica: directly, or through the replica that it is
// connected to.
func (s *subscription) reaches(now time.Time) bool {
	return s.isUp() || s.remote.Load() && !s.isAway(now)
}

// partBlocks is about the number of blocks in a part of a feed: some 512 KiB.
const partBlocks = 1 << 15

// eachPart calls f with the publisher's feed, in parts, until f fails.
func (s *subscription) eachPart(f func(*kvstate.FeedPart) error) (err error) {
	held, p := s.snapshot()
	if held == nil {
		return nil
	}
	var words []uint64
	blocks := 0
	held.Each(func(e *prefixindex.BlockEvent) {
		own := *e
		words = append(words, e.Keys...)
		own.Keys = words[len(words)-len(e.Keys):]
		words = append(words, e.Blocks...)
		own.Blocks = words[len(words)-len(e.Blocks):]
		p.Events = append(p.Events, own)
		if blocks += len(e.Keys); blocks >= partBlocks && err == nil {
			err = f(&p)
			p.First, p.Events, words, blocks = false, nil, nil, 0
		}
	})
	if p.More = false; err == nil {
		err = f(&p)
	}
	return err
}

// snapshot copies the publisher's feed; nil if nothing is known of it.
func (s *subscription) snapshot() (*prefixindex.FeedSnapshot, kvstate.FeedPart) {
	t := &s.stream
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.known || t.joining {
		return nil, kvstate.FeedPart{}
	}
	return s.publisher.Snapshot(),
		kvstate.FeedPart{Endpoint: s.target.endpoint, Rank: s.target.rank, Next: t.next, Time: t.last, First: true,
			More: true}
}
