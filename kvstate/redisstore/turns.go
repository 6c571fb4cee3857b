package redisstore

import (
	"context"
	"encoding/hex"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

func (o *Options) turnKey(conversation [16]byte) string {
	return o.KeyPrefix + ":" + version + ":turn:" + hex.EncodeToString(conversation[:])
}

// PutConversation implements [kvstate.Replicas]. If Redis does not accept the state now, it is dropped, and the next
// turn computes its prompt. The previous state then stays if it cannot be deleted; it is still valid for one use.
// Expired state is never stored, because go-redis takes a ttl of 0 or less for no ttl.
func (s *Store) PutConversation(conversation [16]byte, turn []byte, ttl time.Duration) {
	if ttl < time.Millisecond || !s.link.MayAsk() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), handOverTime)
	defer cancel()
	key := s.o.turnKey(conversation)
	if err := s.client.Set(ctx, key, turn, ttl).Err(); err != nil {
		s.link.Asked(err)
		s.log.Warn("a turn of a conversation is not kept", "bytes", len(turn), "err", err)
	}
}

// takenTTL is the time for which an empty text marks a turn as taken.
const takenTTL = time.Second

// TakeConversation implements [kvstate.Replicas]: one SET GET (Redis 6.2) leaves nothing in its place, so only one of
// all replicas gets it. If the answer is late, it counts as taken.
func (s *Store) TakeConversation(conversation [16]byte) (turn []byte, ok bool) {
	if !s.link.MayAsk() {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(context.Background(), handOverTime)
	defer cancel()
	key := s.o.turnKey(conversation)
	text, err := s.client.SetArgs(ctx, key, "", redis.SetArgs{Get: true, TTL: takenTTL}).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		s.link.Asked(err)
	}
	return []byte(text), err == nil && text != ""
}
