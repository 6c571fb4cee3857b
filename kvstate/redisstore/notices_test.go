package redisstore

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// sharing has a replica hear the others' notices.
func (r *replica) sharing(t *testing.T) (received chan string) {
	received = make(chan string, 4*noticesWaiting)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.store.ShareNotices(ctx, func(id string) { received <- id })
	}()
	t.Cleanup(func() { cancel(); <-done })
	return received
}

// attempt is a req_id as Tandem makes it.
func attempt(i int) string { return fmt.Sprintf("%032x", i) }

// until tells notices, numbered from n on, until one is heard. Others of them may come later.
func until(t *testing.T, from *replica, received chan string, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		n++
		from.store.PublishNotice(attempt(n))
		select {
		case <-received:
		case <-time.After(50 * time.Millisecond):
			return false
		}
		return true
	}, patience, time.Millisecond, "notices are not heard")
}

// What one replica receives all others hear, once and in order, and itself not at all.
func TestNotices(t *testing.T) {
	s := startRedis(t)
	a, b, c := join(t, redisURL(s), 1), join(t, redisURL(s), 1), join(t, redisURL(s), 1)
	heardA, heardB, heardC := a.sharing(t), b.sharing(t), c.sharing(t)
	until(t, a, heardB, 0) // until then the stream may not be read yet
	until(t, a, heardC, 10_000)

	// If Redis has no time for them, they are not published again. So: one round of them comes whole; and in every
	// round in order.
	const n = 2000
	all := false
	for round := 1; !all; round++ {
		require.Less(t, round, 20, "notices are missing")
		first := round * 100_000
		for i := range n {
			a.store.PublishNotice(attempt(first + i))
		}
		all = true
		for _, received := range []chan string{heardB, heardC} {
			all = hearRound(t, received, attempt(first), attempt(first+n-1)) == n && all
		}
	}
	require.Empty(t, heardA, "its own came back")

	// No other ids are received.
	a.store.PublishNotice("short")
	a.store.PublishNotice("0123456789abcde 0123456789abcdef")
	require.Empty(t, a.store.notices)
}

// hearRound reads what is heard until the last id of a round, or until nothing comes any more, and counts those of the round. They
// come in order, each once.
func hearRound(t *testing.T, received chan string, first, last string) (n int) {
	t.Helper()
	for before := ""; before < last; {
		select {
		case id := <-received:
			require.Greater(t, id, before)
			before = id
			if id >= first {
				n++
			}
		case <-time.After(5 * time.Second):
			return n
		}
	}
	return n
}

// While Redis is away notices stay with the replica that received them, and nobody waits; afterwards they go round again.
func TestNoticesWithoutRedis(t *testing.T) {
	s := startRedis(t)
	a, b := join(t, redisURL(s), 1), join(t, redisURL(s), 1)
	a.sharing(t)
	received := b.sharing(t)
	s.Kill()
	for i := range 3 * noticesWaiting {
		a.store.PublishNotice(attempt(i))
	}
	s.Start()
	until(t, a, received, 1_000_000)
}
