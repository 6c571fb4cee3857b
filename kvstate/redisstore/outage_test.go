package redisstore

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
	"tandem/kvstate"
)

// A Redis that comes back without Tandem's user refuses the login: that is the reason then, in the status and in the log.
func TestUserIsGone(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	r.do(append([]any{"ACL", "SETUSER", "tandem", "on", ">s3cret", "resetkeys", "~tandem:*"}, strings2any(accessList())...)...)
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	defer log.Close()
	a := apart(t, Options{URL: fmt.Sprintf("redis://tandem:s3cret@%s/0", r.Addr)}, 1)
	a.store.log = slog.New(slog.NewTextHandler(log, nil))
	a.run()
	status := func(what string) func() bool {
		return func() bool { text, _ := a.store.Status(); return strings.Contains(text, what) }
	}
	eventually(t, "it is up", status("up for"))
	r.do("ACL", "DELUSER", "tandem")
	eventually(t, "it reports why", status("WRONGPASS"))
	eventually(t, "and logs it", func() bool {
		text, err := os.ReadFile(log.Name())
		return err == nil && strings.Contains(string(text), "WRONGPASS")
	})
}

// A replica that starts receives what the others know.
func TestLateComersAreWarm(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 4), join(t, redisURL(r), 4)
	first, second := prompt(1, 300), prompt(2, 50)
	a.state.Routed(a.pool, a.e(0), first)
	b.state.Routed(b.pool, b.e(3), second)
	eventually(t, "both are known", func() bool { return b.hit(0, first) == 300 && a.hit(3, second) == 50 })
	r.do("DEL", a.p.keys.stream()) // so that it is not from there that it knows
	said := a.store.Stats().BatchesSent
	eventually(t, "the others have said that they are there", func() bool { return a.store.Stats().BatchesSent > said })
	c := apart(t, redisURL(r), 4)
	began := time.Now()
	c.joins()
	t.Logf("joined in %v", time.Since(began))
	require.Equal(t, 300, c.hit(0, first))
	require.Equal(t, 50, c.hit(3, second))
}

// Where the stream was emptied just now, the others are not seen at once; when they are, they are asked.
func TestLateComersWarmUpLater(t *testing.T) {
	r := startRedis(t)
	a := join(t, briefly(r), 4)
	hashes := prompt(1, 300)
	a.state.Routed(a.pool, a.e(0), hashes)
	a.publishedOf(r, 0, 4, hashes)
	r.do("FLUSHALL")
	b := join(t, briefly(r), 4)
	eventually(t, "it is known", func() bool { return b.hit(0, hashes) == 300 })
}

// All replicas may be gone for a while: the last one leaves a snapshot.
func TestWhoStartsAloneInherits(t *testing.T) {
	r := startRedis(t)
	a := join(t, redisURL(r), 2)
	first, second := prompt(1, 300), prompt(2, 50)
	a.state.ApplyRouted(a.pool, a.e(0), first) // known to it, not published
	a.stop()

	b := join(t, briefly(r), 2)
	require.Equal(t, 300, b.hit(0, first), "from the snapshot")
	b.state.Routed(b.pool, b.e(1), second)
	b.publishedOf(r, 1, 2, second)
	b.state.Bookings.Reserve(b.e(0), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10})
	b.kill()
	time.Sleep(brief + 50*time.Millisecond) // nobody lives any more, as far as Redis knows

	c := apart(t, briefly(r), 2)
	defer c.store.Close()
	c.joins()
	require.Equal(t, 300, c.hit(0, first), "from the snapshot")
	require.Equal(t, 50, c.hit(1, second), "from what came after it")
	require.Zero(t, c.booked(0), "whoever booked it is gone")
}

// A new replica takes over a million blocks. How long that takes is logged, and in docs/benchmarks.md; on a busy machine it
// says nothing.
func TestWarmStart(t *testing.T) {
	if testing.Short() {
		t.Skip("a million blocks")
	}
	r := startRedis(t)
	a := join(t, redisURL(r), 8)
	prompts := 1000
	if budget.Race {
		prompts = 100
	}
	for i := range prompts {
		a.state.ApplyRouted(a.pool, a.e(i%8), prompt(i, 1000))
	}
	require.Greater(t, a.pool.Blocks(), 990*prompts)
	r.do("XTRIM", a.p.keys.stream(), "MAXLEN", "1") // so that it waits for the other's snapshot
	b := apart(t, redisURL(r), 8)
	began, before := time.Now(), cpuTime(t)
	b.joins()
	took, busy := time.Since(began), cpuTime(t)-before
	require.Equal(t, 1000, b.hit((prompts-1)%8, prompt(prompts-1, 1000)))
	require.Equal(t, a.pool.Blocks(), b.pool.Blocks())
	s := b.store.Stats()
	t.Logf("%d blocks in %v, %v of CPU for both replicas, %d bytes read, %d commands", b.pool.Blocks(), took, busy, s.BytesRead, s.Commands)
}

// cpuTime is what this process has had of processors until now.
func cpuTime(t *testing.T) time.Duration {
	var u syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// outages are the ways in which Redis is lost for a while.
var outages = map[string]struct{ begin, end func(*server) }{
	"killed, and back empty":   {func(r *server) { r.Kill() }, func(r *server) { r.Start() }},
	"frozen":                   {func(r *server) { r.Signal(syscall.SIGSTOP) }, func(r *server) { r.Signal(syscall.SIGCONT) }},
	"refuses writes, is full":  {func(r *server) { r.do("CONFIG", "SET", "maxmemory", "1") }, func(r *server) { r.do("CONFIG", "SET", "maxmemory", "0") }},
	"emptied":                  {func(r *server) { r.do("FLUSHALL") }, func(*server) {}},
	"forgets who is connected": {func(r *server) { r.do("CLIENT", "KILL", "TYPE", "normal") }, func(*server) {}},
}

// Whatever happens to Redis, replicas go on, each with what it knows, and are of one mind again when it is over: what was
// routed meanwhile is known to all, and so is what is booked.
func TestOutages(t *testing.T) {
	for name, outage := range outages {
		t.Run(name, func(t *testing.T) {
			r := startRedis(t)
			a, b := join(t, briefly(r), 2), join(t, briefly(r), 2)
			before, meanwhile, after := prompt(1, 20), prompt(2, 20), prompt(3, 20)
			a.state.Routed(a.pool, a.e(0), before)
			held := a.state.Bookings.Reserve(a.e(0), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10})
			eventually(t, "it is known", func() bool { return b.hit(0, before) == 20 && b.booked(0) == 1 })

			outage.begin(r)
			a.state.Routed(a.pool, a.e(1), meanwhile)
			a.state.Bookings.Reserve(a.e(1), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10})
			require.True(t, a.state.HandOvers.Consume([16]byte{1}), "service goes on")
			require.Equal(t, 20, a.hit(1, meanwhile), "with what it knows itself")
			time.Sleep(brief / 2)
			outage.end(r)

			a.state.Routed(a.pool, a.e(0), after)
			a.state.Bookings.Release(held)
			eventually(t, "all is known", func() bool {
				return b.hit(0, before) == 20 && b.hit(1, meanwhile) == 20 && b.hit(0, after) == 20 && b.booked(0) == 0 && b.booked(1) == 1
			})
			eventually(t, "and all is well", func() bool {
				_, upA := a.store.Status()
				_, upB := b.store.Status()
				return upA && upB && a.store.Replicas() == 2 && b.store.Replicas() == 2
			})
			ticket := uint64(0)
			eventually(t, "and tickets are spent for all", func() bool {
				ticket++
				return a.state.HandOvers.Consume(ticketOf(ticket)) && !b.state.HandOvers.Consume(ticketOf(ticket))
			})
		})
	}
}

// An outage that outlives the lease: others' bookings are void, since nobody can tell any more, and each collects everything.
func TestLongOutage(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, briefly(r), 2), join(t, briefly(r), 2)
	a.state.Bookings.Reserve(a.e(0), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10})
	eventually(t, "it is known", func() bool { return b.booked(0) == 1 })
	r.Signal(syscall.SIGSTOP)
	eventually(t, "it is void", func() bool { return b.booked(0) == 0 && b.store.Replicas() == 1 })
	require.True(t, b.store.Owns(b.pool, b.e(0)) && b.store.Owns(b.pool, b.e(1)))
	r.Signal(syscall.SIGCONT)
	eventually(t, "it is known again", func() bool { return b.booked(0) == 1 && b.store.Replicas() == 2 })
}

// Who starts waits for what another one knows, which may not answer in time. That is no fault of Redis.
func TestNobodyAnswersInTime(t *testing.T) {
	r := startRedis(t)
	o := redisURL(r)
	o.Lease = 30 * time.Second
	a, b := apart(t, o, 2), apart(t, o, 2)
	eventually(t, "it is there", func() bool { return b.flush(true) == nil })
	eventually(t, "no failure", func() bool {
		err := a.store.Join(context.Background(), 2*time.Second)
		_, up := a.store.Status()
		return err == nil && up
	})
	a.run()
	b.run()
	hashes := prompt(1, 20)
	b.state.Routed(b.pool, b.e(0), hashes)
	eventually(t, "they have found each other", func() bool { return a.hit(0, hashes) == 20 && a.store.Replicas() == 2 })
}

// Who has only said hello so far cannot answer before it has started itself: nobody waits for it who starts at the same time. What it
// knows all the same is asked for when it is there.
func TestStartTogether(t *testing.T) {
	r := startRedis(t)
	o := redisURL(r)
	o.Lease = maxLease
	b := apart(t, o, 2) // the older one
	eventually(t, "the clock goes on, which says who is older", func() bool { return newReplica(time.Now()) > b.store.replica+1<<20 })
	a := apart(t, o, 2)
	hashes := prompt(1, 20)
	b.state.ApplyRouted(b.pool, b.e(0), hashes) // known to it, not published
	eventually(t, "it says hello", func() bool { _, err := b.p.publishJoin(context.Background()); return err == nil })
	took := eventually(t, "the other one joins", func() bool { return a.store.Join(context.Background(), patience) == nil })
	require.Less(t, took, patience/2, "without waiting for an answer")
	require.Equal(t, 2, a.store.Replicas())
	a.p.mu.Lock()
	a.p.sync.at = time.Time{} // its own hello is more than a lease ago
	a.p.mu.Unlock()
	a.run()
	b.run()
	eventually(t, "it has asked", func() bool { return a.hit(0, hashes) == 20 })
}

// The others go on while a replica that starts reads what they have said before: their answer to its hello may be among that.
func TestTheAnswerComesWhileTheStreamIsRead(t *testing.T) {
	r := startRedis(t)
	o := redisURL(r)
	o.Lease = maxLease
	a, b := join(t, o, 2), apart(t, o, 2)
	hashes := prompt(1, 20)
	a.state.ApplyRouted(a.pool, a.e(0), hashes)                                                           // known to it, not published
	eventually(t, "it has said that it is there", func() bool { return a.store.Stats().BatchesSent > 1 }) // more than hello
	c := r.client()
	defer c.Close()
	pipe := c.Pipeline()
	for range 12_000 { // nobody's: some 50 times as many as are read at once
		pipe.XAdd(context.Background(), &redis.XAddArgs{Stream: a.p.keys.stream(), Values: []any{"x", "x"}})
	}
	_, err := pipe.Exec(context.Background())
	require.NoError(t, err)
	held := c.XLen(context.Background(), a.p.keys.stream()).Val()
	require.NoError(t, c.XTrimMaxLen(context.Background(), a.p.keys.stream(), held-1).Err(), "the beginning is gone, so that it waits for the other")
	took := eventually(t, "it joins", func() bool { return b.store.Join(context.Background(), patience) == nil })
	require.Less(t, took, patience/2, "without waiting for another answer")
	require.Equal(t, 20, b.hit(0, hashes))
}

// Without Redis a replica starts all the same, and takes part as soon as there is one.
func TestStartWithoutRedis(t *testing.T) {
	r := startRedis(t)
	a := join(t, redisURL(r), 2)
	r.Kill()
	began := time.Now()
	b := apart(t, redisURL(r), 2)
	require.Error(t, b.store.Join(context.Background(), time.Hour))
	speed(t, time.Since(began), 2*time.Second, "without Redis nobody waits for it to join")
	text, up := b.store.Status()
	require.False(t, up)
	require.Contains(t, text, "connection refused")
	b.run()
	hashes := prompt(1, 20)
	a.state.Routed(a.pool, a.e(0), hashes)
	r.Start()
	eventually(t, "they have found each other", func() bool {
		return b.hit(0, hashes) == 20 && a.store.Replicas() == 2 && b.store.Replicas() == 2
	})
}

// What finds no room while Redis is away is published as a snapshot when it is back.
func TestMoreThanTheOutboxHolds(t *testing.T) {
	if budget.Race {
		t.Skip("600,000 blocks take a minute under the race detector")
	}
	r := startRedis(t)
	a, b := join(t, redisURL(r), 2), join(t, redisURL(r), 2)
	r.Kill()
	n := maxOutbox/8/1000 + 100
	for i := range n {
		a.state.Routed(a.pool, a.e(i%2), prompt(i, 1000))
	}
	r.Start()
	eventually(t, "all is known", func() bool {
		return b.hit(0, prompt(0, 1000)) == 1000 && b.hit((n-1)%2, prompt(n-1, 1000)) == 1000
	})
	require.Positive(t, a.store.Stats().Dropped, "or the test shows nothing")
}

// A replica that misses batches notices by their numbers, and asks for a snapshot.
func TestGapsAreFilled(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 2), join(t, redisURL(r), 2)
	hashes := prompt(1, 20)
	eventually(t, "they know each other", func() bool { return b.store.Replicas() == 2 })
	b.p.mu.Lock()
	b.p.sync.at = time.Time{} // its last hello is more than a lease ago
	b.p.mu.Unlock()
	a.p.mu.Lock()
	a.p.seq += 5 // as if the five before had been cut off the stream
	a.p.mu.Unlock()
	a.state.ApplyRouted(a.pool, a.e(0), hashes) // known to a, not published
	a.state.Routed(a.pool, a.e(1), prompt(2, 1))
	eventually(t, "what was in them is known", func() bool { return b.hit(0, hashes) == 20 })
	require.Positive(t, b.store.Stats().Gaps)
}

// Every endpoint has one collector, and another as soon as that is gone.
func TestEveryEndpointHasOneCollector(t *testing.T) {
	const endpoints = 100
	r := startRedis(t)
	replicas := []*replica{join(t, briefly(r), endpoints), join(t, briefly(r), endpoints), join(t, briefly(r), endpoints), join(t, briefly(r), endpoints)}
	shares := func() (exact bool, least int) {
		least = endpoints
		owners := map[int]int{}
		for _, each := range replicas {
			n := 0
			for i := range endpoints {
				if each.store.Owns(each.pool, each.e(i)) {
					owners[i]++
					n++
				}
			}
			least = min(least, n)
		}
		exact = len(owners) == endpoints
		for _, n := range owners {
			exact = exact && n == 1
		}
		return exact, least
	}
	// Shares are random: 25 of 100, with a standard deviation of 4. In one of 150 runs a share has 12 or fewer.
	eventually(t, "each has one, and the work is shared", func() bool { exact, least := shares(); return exact && least > endpoints/20 })
	replicas[0].kill()
	replicas = replicas[1:]
	took := eventually(t, "each has one again", func() bool { exact, _ := shares(); return exact })
	speed(t, took, 2*brief, "another collector with the lease")
}

// Keys are made by the first and used by all.
func TestSecretsAreEverybodys(t *testing.T) {
	type ring struct {
		seal [32]byte
		open [][32]byte
	}
	keep := func(r *ring) func([32]byte, ...[32]byte) error {
		return func(seal [32]byte, open ...[32]byte) error { *r = ring{seal, open}; return nil }
	}
	ctx := context.Background()
	r := startRedis(t)
	var ofA, ofB, ofC ring
	var ka *Secrets
	eventually(t, "Redis is in time for both", func() bool {
		r.do("FLUSHALL")
		a, b := apart(t, redisURL(r), 1), apart(t, redisURL(r), 1)
		var err error
		ka, err = a.store.Secrets(ctx, keep(&ofA))
		require.NoError(t, err)
		_, err = b.store.Secrets(ctx, keep(&ofB))
		require.NoError(t, err)
		require.NotZero(t, ofA.seal)
		return ofA.seal == ofB.seal && len(ofA.open)+len(ofB.open) == 0
	})
	inStep := func() { t.Helper(); eventually(t, "Redis is in time", func() bool { return ka.sync(ctx) == nil }) }

	r.do("FLUSHALL")
	inStep()
	require.Equal(t, ofB, ofA, "an emptied Redis gets the same one back")

	r.Kill()
	c := apart(t, redisURL(r), 1)
	kc, err := c.store.Secrets(ctx, keep(&ofC))
	require.NoError(t, err)
	own := ofC.seal
	require.NotEqual(t, ofA.seal, own, "made while Redis was away")
	r.Start()
	eventually(t, "redis is back", func() bool { return ka.sync(ctx) == nil && kc.sync(ctx) == nil })
	require.Equal(t, ring{ofA.seal, [][32]byte{own}}, ofC)
	client := r.client()
	defer client.Close()
	require.Greater(t, client.PTTL(ctx, ka.s.o.openKey()).Val(), secretsTTL-patience)
	r.do("PEXPIRE", ka.s.o.sealKey(), patience.Milliseconds())
	inStep()
	require.Greater(t, client.PTTL(ctx, ka.s.o.sealKey()).Val(), secretsTTL-patience, "as long as somebody uses it")
	require.Equal(t, ofC, ofA, "what it has sealed meanwhile opens everywhere")
}
