package redisstore

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// LMCache's engines tell one replica that KV has arrived, and the request may wait at another (package notices). So what one
// hears goes to all of them, through a stream of its own: the engines of every pool push at the same port. A notice is
// worth something for seconds only, so nothing is kept for those who start later, and nothing is sent again.
const (
	noticesWaiting = 4096 // to be told; more are dropped, which costs what a lost notice costs
	noticesAtOnce  = 256  // in one entry
	noticesLength  = 4096 // of the stream, in entries, about
	noticesTTL     = time.Minute
	noticesField   = "i"
	noticesBlock   = time.Second
	noticeID       = 32 // bytes of a req_id as Tandem makes it; nobody waits for others
)

func (o *Options) noticesKey() string { return o.KeyPrefix + ":" + version + ":{notices}" }

// TellNotice tells the other replicas of a notice that came here. It does not wait.
func (s *Store) TellNotice(id string) {
	if len(id) != noticeID || strings.ContainsRune(id, ' ') {
		return
	}
	select {
	case s.notices <- id:
	default:
		s.counters.untold.Add(1)
	}
}

// ShareNotices sends what TellNotice was told, and calls heard with what other replicas tell, until ctx ends.
func (s *Store) ShareNotices(ctx context.Context, heard func(id string)) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.hearNotices(ctx, heard)
	}()
	s.tellNotices(ctx)
	<-done
}

func (s *Store) tellNotices(ctx context.Context) {
	for {
		var ids []string
		select {
		case <-ctx.Done():
			return
		case id := <-s.notices:
			ids = append(ids, id)
		}
	collect:
		for len(ids) < noticesAtOnce {
			select {
			case id := <-s.notices:
				ids = append(ids, id)
			default:
				break collect
			}
		}
		if !s.link.isUp() {
			s.counters.untold.Add(int64(len(ids)))
			continue
		}
		if _, err := s.sendNotices(ctx, ids); err != nil {
			s.counters.untold.Add(int64(len(ids)))
			s.log.Debug("notices are not told to other replicas", "notices", len(ids), "err", err)
		}
	}
}

func (s *Store) sendNotices(ctx context.Context, ids []string) (entry string, err error) {
	ctx, cancel := context.WithTimeout(ctx, besidePath)
	defer cancel()
	pipe := s.client.Pipeline()
	added := pipe.XAdd(ctx, &redis.XAddArgs{
		Stream: s.o.noticesKey(), MaxLen: noticesLength, Approx: true,
		Values: []any{"r", strconv.FormatUint(s.replica, 16), noticesField, strings.Join(ids, " ")},
	})
	pipe.PExpire(ctx, s.o.noticesKey(), noticesTTL)
	if _, err := pipe.Exec(ctx); err != nil {
		return "", err
	}
	return added.Val(), nil
}

// hearNotices reads on from where the stream ends now: an entry of its own marks that, since what came between two reads
// "from the end" would be lost.
func (s *Store) hearNotices(ctx context.Context, heard func(id string)) {
	own := strconv.FormatUint(s.replica, 16)
	from := ""
	for ctx.Err() == nil {
		if from == "" {
			id, err := s.sendNotices(ctx, nil)
			if err != nil {
				wait(ctx, retryAfter)
			}
			from = id
			continue
		}
		reading, cancel := context.WithTimeout(ctx, noticesBlock+besidePath)
		streams, err := s.client.XRead(reading, &redis.XReadArgs{Streams: []string{s.o.noticesKey(), from}, Count: readAtOnce, Block: noticesBlock}).Result()
		cancel()
		if err != nil && !errors.Is(err, redis.Nil) {
			if ctx.Err() == nil {
				s.log.Debug("reading notices from redis", "err", err)
				wait(ctx, retryAfter)
			}
			continue
		}
		for _, stream := range streams {
			for _, m := range stream.Messages {
				from = m.ID
				ids, _ := m.Values[noticesField].(string)
				if m.Values["r"] == own {
					continue
				}
				for id := range strings.FieldsSeq(ids) {
					heard(id)
				}
			}
		}
	}
}
