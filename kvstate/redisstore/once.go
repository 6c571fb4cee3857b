package redisstore

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"
)

// Spend implements [kvstate.Peers]: one SET NX, with a deadline.
func (s *Store) Spend(ticket [16]byte) (first, known bool) {
	if !s.link.mayAsk() {
		s.counters.spendUnknown.Add(1)
		return false, false
	}
	ctx, cancel := context.WithTimeout(context.Background(), onPath)
	defer cancel()
	err := s.path.SetArgs(ctx, s.o.spentKey(ticket), "", redis.SetArgs{Mode: "NX", TTL: spentTTL}).Err()
	if errors.Is(err, redis.Nil) { // it is there
		s.link.asked(nil)
		return false, true
	}
	s.link.asked(err)
	if err != nil {
		s.counters.spendUnknown.Add(1)
	}
	return true, err == nil
}

// PutHandOver implements [kvstate.Peers].
func (s *Store) PutHandOver(ref [16]byte, params []byte) {
	if !s.link.mayAsk() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), handOverTime)
	defer cancel()
	if err := s.beside.Set(ctx, s.o.handOverKey(ref), params, handOverTTL).Err(); err != nil {
		s.link.asked(err)
		s.log.Warn("a hand-over is kept by this replica alone", "bytes", len(params), "err", err)
	}
}

// TakeHandOver implements [kvstate.Peers]. What was taken stays there until its time is up: the ticket is what makes sure
// that nobody asks twice.
func (s *Store) TakeHandOver(ref [16]byte) ([]byte, bool) {
	if !s.link.mayAsk() {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(context.Background(), handOverTime)
	defer cancel()
	params, err := s.beside.Get(ctx, s.o.handOverKey(ref)).Bytes()
	if err != nil && !errors.Is(err, redis.Nil) {
		s.link.asked(err)
	}
	return params, err == nil
}
