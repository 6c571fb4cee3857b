package replica

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/redisserver"
	"tandem/kvstate"
)

// startSharing starts two replicas that share a Redis and have key files of their own with the same key.
func startSharing(t *testing.T) (a, b *reloading, text string, redis *redisserver.Server) {
	redis = redisserver.New(t)
	text = twoPools + "state: {redis: {url: \"redis://" + redis.Addr + "\"}}\n"
	a, b = startReloadingWith(t, text), startReloadingWith(t, text)
	return a, b, text, redis
}

// share has the replicas share their state, until the test ends.
func share(t *testing.T, all ...*reloading) {
	for _, r := range all {
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.fleet.share(ctx, slog.New(slog.DiscardHandler)) }()
		t.Cleanup(func() { stop(); <-done })
	}
	for _, r := range all {
		require.Eventually(t, func() bool { return r.fleet.store.Replicas() == len(all) }, time.Minute, 10*time.Millisecond)
	}
}

// In each step of docs/howto/rotate-keys.md, and between two replicas of which one has taken it already, both read what
// the other has signed: bookings in batches, hand-overs, orders. Nothing counts as forged, until one has a key that the
// other does not know. At the end a replica that starts with the new key alone knows the orders of before.
func TestKeysRotateWithSignedBatches(t *testing.T) {
	a, b, text, _ := startSharing(t)
	share(t, a, b)
	const former, next = "ab", "cd"
	keys := func(r *reloading, of ...string) {
		lines := ""
		for _, k := range of {
			lines += strings.Repeat(k, 31) + "01\n"
		}
		require.NoError(t, os.WriteFile(r.key, []byte(lines), 0o600))
		_, err := r.reload(t.Context())
		require.NoError(t, err)
	}
	forged := func() int64 { return a.fleet.store.Stats().Forged + b.fleet.store.Stats().Forged }
	reads := func(from, by *reloading, what string) {
		t.Helper()
		pool, other := from.fleet.state.Pool("a"), by.fleet.state.Pool("a")
		before := other.Endpoints()[0].RemoteLoad().Requests
		id := from.fleet.state.Bookings.Reserve(pool.Endpoints()[0], kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 10})
		require.Eventually(t, func() bool { return other.Endpoints()[0].RemoteLoad().Requests > before }, time.Minute, time.Millisecond, what)
		from.fleet.state.Bookings.Release(id)
		require.Eventually(t, func() bool { return other.Endpoints()[0].RemoteLoad().Requests == before }, time.Minute, time.Millisecond, what)
		require.Eventually(t, func() bool { // Redis has some milliseconds for each
			ref, err := from.fleet.state.HandOvers.PutHandOver([]byte("params"))
			require.NoError(t, err)
			_, ok := by.fleet.state.HandOvers.TakeHandOver(ref)
			return ok
		}, time.Minute, time.Millisecond, what)
	}
	keys(a, former)
	keys(b, former)
	require.NoError(t, a.fleet.state.PausePool("a", true))
	require.NoError(t, a.fleet.operator.Publish(t.Context()))
	start := forged() // of the keys that both have begun with
	for _, step := range [][]string{{former, next}, {next, former}, {next}} {
		for _, r := range []*reloading{a, b} {
			keys(r, step...)
			reads(a, b, strings.Join(step, " "))
			reads(b, a, strings.Join(step, " "))
		}
	}
	require.Equal(t, start, forged())
	require.NoError(t, b.fleet.operator.Sync(t.Context()), "it signs the orders anew")

	c := startReloadingWith(t, text)
	keys(c, next)
	require.NoError(t, c.fleet.operator.Sync(t.Context()))
	require.True(t, c.fleet.state.Pool("a").Paused())

	keys(a, "ef")
	require.Eventually(t, func() bool { a.fleet.store.Changed(); return b.fleet.store.Stats().Forged > start }, time.Minute, 10*time.Millisecond,
		"a key that it does not know")
}
