package redisstore

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"tandem/kvstate/redisstore/redisclient"
)

// question asks Redis whether a ticket is consumed, for a request.
type question struct {
	ticket [16]byte
	answer chan spent // buffered
}

type spent struct{ first, known bool }

// The number of concurrent questions to Redis, and of requests in one of them. This way requests do not wait for
// connections: the 5 ms are for Redis to answer, not for a TLS handshake, and simultaneous requests share a round
// trip.
const (
	askers    = 4
	askAtOnce = 64
)

// Consume implements [kvstate.Replicas]: one SET NX, with a deadline.
func (s *Store) Consume(ticket [16]byte, patient bool) (first, known bool) {
	if s.link.MayAsk() {
		q := question{ticket, make(chan spent, 1)}
		select {
		case s.questions <- q:
			within := onPath
			if patient {
				within = commandTime
			}
			if a, ok := await(s.link, q, within); ok {
				return a.first, a.known
			}
		default: // too many wait for Redis to answer in time
		}
	}
	s.counters.spendUnknown.Add(1)
	return false, false
}

// await waits for the answer.
func await(l *redisclient.Link, q question, within time.Duration) (spent, bool) {
	t := time.NewTimer(within)
	defer t.Stop()
	select {
	case a := <-q.answer:
		return a, a.known
	case <-t.C:
		l.Asked(context.DeadlineExceeded)
		return spent{}, false
	}
}

// askAll sends the questions of requests to Redis, until ctx ends. A request that no longer waits has decided; its
// ticket is marked as consumed all the same.
func (s *Store) askAll(ctx context.Context) {
	var batch []question
	for {
		batch = batch[:0]
		select {
		case <-ctx.Done():
			return
		case q := <-s.questions:
			batch = append(batch, q)
		}
	collect:
		for len(batch) < askAtOnce {
			select {
			case q := <-s.questions:
				batch = append(batch, q)
			default:
				break collect
			}
		}
		askRedis(ctx, s, batch)
	}
}

func askRedis(ctx context.Context, s *Store, batch []question) {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	pipe := s.client.Pipeline()
	replies := make([]*redis.StatusCmd, len(batch))
	for i := range batch {
		replies[i] = pipe.SetArgs(ctx, s.o.spentKey(batch[i].ticket), "", redis.SetArgs{Mode: "NX", TTL: spentTTL})
	}
	_, _ = pipe.Exec(ctx) // each reply has its own error
	for i, reply := range replies {
		err := reply.Err()
		there := errors.Is(err, redis.Nil)
		if there {
			err = nil
		}
		s.link.Asked(err)
		batch[i].answer <- spent{first: !there, known: err == nil}
	}
}

// PutHandOver implements [kvstate.Replicas].
func (s *Store) PutHandOver(ref [16]byte, params []byte) {
	if !s.link.MayAsk() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), handOverTime)
	defer cancel()
	key := s.o.handOverKey(ref)
	if err := s.client.Set(ctx, key, s.sign(key, params), handOverTTL).Err(); err != nil {
		s.link.Asked(err)
		s.log.Warn("a hand-over is kept by this replica alone", "bytes", len(params), "err", err)
	}
}

// TakeHandOver implements [kvstate.Replicas]. The params stay until they expire: the ticket prevents a second use.
func (s *Store) TakeHandOver(ref [16]byte) ([]byte, bool) {
	if !s.link.MayAsk() {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(context.Background(), handOverTime)
	defer cancel()
	key := s.o.handOverKey(ref)
	signed, err := s.client.Get(ctx, key).Bytes()
	if err != nil {
		if !errors.Is(err, redis.Nil) {
			s.link.Asked(err)
		}
		return nil, false
	}
	return s.genuine(key, signed)
}
