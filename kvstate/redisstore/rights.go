package redisstore

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"tandem/kvstate/redisstore/redisclient"
)

// CheckRights asks Redis for every command that replicas use, on keys of its own, which it removes. The error names
// each command that Redis refuses, in Redis's words, or says why Redis cannot be asked.
func CheckRights(ctx context.Context, o Options) error {
	o.setDefaults()
	var counts redisclient.Counts
	client, err := o.client(&counts)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, 5*commandTime)
	defer cancel()
	if err := client.Ping(ctx).Err(); err != nil {
		return fmt.Errorf("cannot use Redis: %w", err)
	}
	var id [8]byte
	_, _ = rand.Read(id[:])           // never fails (crypto/rand)
	key := func(kind string) string { // one hash tag: a Cluster stores them on one node
		return o.KeyPrefix + ":" + version + ":{check:" + hex.EncodeToString(id[:]) + "}:" + kind
	}
	text, hash, stream := key("text"), key("hash"), key("stream")
	var errs []error
	for _, one := range []struct {
		command string
		do      func() error
	}{
		{"SET", func() error { return client.Set(ctx, text, "x", time.Minute).Err() }},
		{"SET with NX", func() error {
			return client.SetArgs(ctx, text, "x", redis.SetArgs{Mode: "NX", TTL: time.Minute}).Err()
		}},
		{"SET with GET", func() error {
			return client.SetArgs(ctx, text, "x", redis.SetArgs{Get: true, TTL: time.Minute}).Err()
		}},
		{"GET", func() error { return client.Get(ctx, text).Err() }},
		{"MGET", func() error { return client.MGet(ctx, text).Err() }},
		{"HSET", func() error { return client.HSet(ctx, hash, "a", "b").Err() }},
		{"HVALS", func() error { return client.HVals(ctx, hash).Err() }},
		{"XADD", func() error {
			return client.XAdd(ctx, &redis.XAddArgs{
				Stream: stream, MaxLen: 1, Approx: true, Values: []any{"a", "b"},
			}).Err()
		}},
		{"XREAD", func() error {
			return client.XRead(ctx, &redis.XReadArgs{Streams: []string{stream, "0"}, Count: 1, Block: -1}).Err()
		}},
		{"PEXPIRE", func() error { return client.PExpire(ctx, hash, time.Minute).Err() }},
		{"UNLINK", func() error { return client.Unlink(ctx, text, hash, stream).Err() }},
	} {
		if err := one.do(); err != nil && !errors.Is(err, redis.Nil) {
			errs = append(errs, fmt.Errorf("%s is refused by Redis: %w", one.command, err))
		}
	}
	return errors.Join(errs...)
}

// Refused describes the latest command that Redis refused lately; "" if there is none.
func (s *Store) Refused() string { return s.counters.Refusals.Latest() }
