package redisstore

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// LMCache's engines notify one replica that KV has arrived, and the request may wait at another (package notices). So
// each notification is published to all replicas, through a stream of its own: the engines of every pool push to the
// same port. A notification is useful for seconds only, so nothing is kept for replicas that start later, and nothing
// is sent again.
const (
	noticesWaiting = 4096 // waiting to be published; more are dropped, which costs what a lost notification costs
	noticesAtOnce  = 256  // in one entry
	noticesLength  = 4096 // of the stream, in entries, about
	noticesTTL     = time.Minute
	noticesField   = "i"
	noticesBlock   = time.Second
	noticeID       = 32 // bytes of a req_id as Tandem makes it; no request waits for others
)

func (o *Options) noticesKey() string { return o.KeyPrefix + ":" + version + ":{notices}" }

// PublishNotice sends a notification that arrived here to the other replicas. It does not wait.
func (s *Store) PublishNotice(id string) {
	if len(id) != noticeID || strings.ContainsRune(id, ' ') {
		return
	}
	select {
	case s.notices <- id:
	default:
		s.counters.noticesDropped.Add(1)
	}
}

// ShareNotices publishes the notifications of PublishNotice, and calls received with those of other replicas, until
// ctx ends.
func (s *Store) ShareNotices(ctx context.Context, received func(id string)) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.receiveNotices(ctx, received)
	}()
	s.publishNotices(ctx)
	<-done
}

func (s *Store) publishNotices(ctx context.Context) {
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
		if !s.link.IsUp(0) {
			s.counters.noticesDropped.Add(int64(len(ids)))
			continue
		}
		if _, err := s.sendNotices(ctx, ids); err != nil {
			s.counters.noticesDropped.Add(int64(len(ids)))
			s.log.Debug("notices are not published to other replicas", "notices", len(ids), "err", err)
		}
	}
}

func (s *Store) sendNotices(ctx context.Context, ids []string) (entry string, err error) {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	pipe := s.client.Pipeline()
	added := pipe.XAdd(ctx, &redis.XAddArgs{
		Stream: s.o.noticesKey(), MaxLen: noticesLength, Approx: true,
		Values: []any{
			"r", strconv.FormatUint(s.replica, 16),
			noticesField, s.sign(s.o.noticesKey(), []byte(strings.Join(ids, " "))),
		},
	})
	pipe.PExpire(ctx, s.o.noticesKey(), noticesTTL)
	if _, err := pipe.Exec(ctx); err != nil {
		return "", err
	}
	return added.Val(), nil
}

// receiveNotices reads the stream from its current end, which it marks with an entry of its own: repeated reads "from
// the end" would lose entries in between.
func (s *Store) receiveNotices(ctx context.Context, received func(id string)) {
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
		reading, cancel := context.WithTimeout(ctx, noticesBlock+commandTime)
		streams, err := s.client.XRead(reading,
			&redis.XReadArgs{Streams: []string{s.o.noticesKey(), from}, Count: readAtOnce,
				Block: noticesBlock}).Result()
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
				// an old entry again is of requests that have had their KV
				if text, ok := s.genuine(s.o.noticesKey(), []byte(ids)); ok {
					for id := range strings.FieldsSeq(string(text)) {
						received(id)
					}
				}
			}
		}
	}
}
