package redisstore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate/redisstore/roster"
	statev1 "tandem/protos/state/v1"
)

// secret signs as the keys of tickets do (kvtransfer.Keys).
type secret string

func (s secret) Sign(dst []byte, purpose string, text []byte) []byte {
	sum := sha256.Sum256([]byte(string(s) + strconv.Quote(purpose) + string(text)))
	return append(append(dst, sum[:]...), text...)
}

func (s secret) Genuine(purpose string, signed []byte) ([]byte, bool) {
	if len(signed) < sha256.Size {
		return nil, false
	}
	text := signed[sha256.Size:]
	return text, bytes.Equal(s.Sign(nil, purpose, text), signed)
}

// writer is somebody who can write to the Redis of replicas with a key file, and read it, and does not have the key.
type writer struct {
	*redis.Client
	t *testing.T
}

func (w writer) set(key string, value any) {
	w.t.Helper()
	require.NoError(w.t, w.Set(context.Background(), key, value, time.Minute).Err())
}

func (w writer) get(key string) (value string) {
	w.t.Helper()
	eventually(w.t, key, func() bool { value = w.Get(context.Background(), key).Val(); return value != "" })
	return value
}

func (w writer) add(stream string, values ...any) {
	w.t.Helper()
	require.NoError(w.t, w.XAdd(context.Background(), &redis.XAddArgs{Stream: stream, Values: values}).Err())
}

// Each row is a row of docs/security.md, Redis: what a writer without the key tries, and that nothing comes of it. What
// replicas say to each other goes on.
func TestAWriterTakesServiceAwayAndNoMore(t *testing.T) {
	r := startRedis(t)
	signing := func() *replica {
		s := apart(t, redisURL(r), 4)
		s.store.SignWith(secret("key"))
		s.joins()
		s.run()
		return s
	}
	a, b := signing(), signing()
	eventually(t, "they know each other", func() bool { return a.store.Replicas() == 2 && b.store.Replicas() == 2 })
	client := r.client()
	t.Cleanup(func() { _ = client.Close() })
	w := writer{client, t}
	o, stream := &a.store.o, a.p.keys.stream()
	// applied waits until b has applied everything that is in the stream now.
	n := 0
	applied := func() {
		n++
		mark := prompt(1000+n, 3)
		a.state.Routed(a.pool, a.e(3), mark)
		eventually(t, "what comes after is read", func() bool { return b.hit(3, mark) == 3 })
	}
	forged := func(change func(b *statev1.Batch)) []byte {
		batch := &statev1.Batch{Replica: a.store.replica, Seq: 1 << 40, LeaseMs: 60_000, Addresses: []string{addr(0)}}
		change(batch)
		text, err := proto.Marshal(batch)
		require.NoError(t, err)
		return text
	}

	t.Run("other KV parameters", func(t *testing.T) {
		ref, other := ticketOf(1), ticketOf(2)
		eventually(t, "it is kept", func() bool {
			a.store.PutHandOver(ref, []byte("genuine"))
			got, ok := b.store.TakeHandOver(ref)
			return ok && string(got) == "genuine"
		})
		a.store.PutHandOver(other, []byte("other"))
		for _, bad := range []any{"evil", w.get(o.handOverKey(other)), w.get(o.handOverKey(ref)) + "x", secret("other").Sign(nil, o.handOverKey(ref), []byte("x"))} {
			w.set(o.handOverKey(ref), bad)
			got, ok := b.store.TakeHandOver(ref)
			require.False(t, ok, string(got))
		}
	})
	t.Run("notices of KV that has not arrived", func(t *testing.T) {
		_, heard := a.sharing(t), b.sharing(t)
		key, evil := o.noticesKey(), attempt(666)
		until(t, a, heard, 0)
		for _, bad := range []any{evil, string(secret("other").Sign(nil, key, []byte(evil))), string(secret("key").Sign(nil, key+"x", []byte(evil)))} {
			w.add(key, "r", "1", noticesField, bad)
		}
		until(t, a, heard, 1000) // what comes after is heard
		for len(heard) > 0 {
			require.NotEqual(t, evil, <-heard)
		}
	})
	t.Run("forged batches", func(t *testing.T) {
		bad := prompt(7, 5)
		text := forged(func(b *statev1.Batch) {
			b.Health = []*statev1.Health{{Address: 0, Failed: true}}
			b.Loads = []*statev1.Load{{Address: 0, Requests: 1000}}
			b.Blocks = []*statev1.Blocks{{Address: 0, Kind: statev1.Blocks_KIND_ROUTED, Hashes: bad}}
			b.Signals = []*statev1.Signals{{Address: 0, Running: 0, Waiting: 0, Work: 1 << 40}}
			b.Member = &statev1.Member{Name: "a", Slot: 1, ExtProc: "10.66.66.66:9002", Replan: "10.66.66.66:9003"}
		})
		now := strconv.FormatInt(time.Now().UnixMilli(), 10)
		w.add(stream, batchField, text)
		w.add(stream, batchField, text, sentField, now, codeField, "x")
		w.add(stream, batchField, text, sentField, now, codeField, string(secret("other").Sign(nil, stream+" "+now, text)[:sha256.Size]))
		applied()
		require.False(t, b.e(0).Failed())
		require.Zero(t, b.booked(0))
		require.Zero(t, b.hit(0, bad))
		require.Nil(t, b.e(0).Signals())
		require.Empty(t, b.store.roster.Others()[a.store.replica].ExtProc, "no Envoy is led to another server")
	})
	t.Run("another replica", func(t *testing.T) {
		w.add(stream, batchField, forged(func(b *statev1.Batch) {
			b.Replica = 1
			b.Member = &statev1.Member{Name: "evil", Slot: 1, ExtProc: "10.66.66.66:9002", Replan: "10.66.66.66:9003"}
		}))
		eventually(t, "it is seen, so that people learn of replicas with other keys", func() bool {
			return b.store.roster.Others()[1].Name == "evil"
		})
		require.Equal(t, roster.Member{Replica: 1, Name: "evil", Slot: -1}, func() roster.Member {
			m := b.store.roster.Others()[1]
			m.Heard = time.Time{}
			return m
		}())
	})
	t.Run("an old batch again", func(t *testing.T) {
		hashes := prompt(8, 5)
		batch := forged(func(b *statev1.Batch) {
			b.Blocks = []*statev1.Blocks{{Address: 0, Kind: statev1.Blocks_KIND_ROUTED, Hashes: hashes}}
		})
		for _, ago := range []time.Duration{sentWithin + time.Second, time.Hour} {
			sent := strconv.FormatInt(time.Now().Add(-ago).UnixMilli(), 10)
			code := secret("key").Sign(nil, stream+" "+sent, batch)[:sha256.Size]
			w.add(stream, batchField, batch, sentField, sent, codeField, string(code))
			w.add(stream, batchField, batch, sentField, strconv.FormatInt(time.Now().UnixMilli(), 10), codeField, string(code))
		}
		applied()
		require.Zero(t, b.hit(0, hashes))
	})
	t.Run("another snapshot", func(t *testing.T) {
		hashes := prompt(9, 5)
		chunk, err := proto.Marshal(&statev1.SnapshotChunk{
			Addresses: []string{addr(0)}, Blocks: []*statev1.Blocks{{Address: 0, Kind: statev1.Blocks_KIND_ROUTED, Hashes: hashes}},
		})
		require.NoError(t, err)
		notice, err := proto.Marshal(&statev1.SnapshotNotice{Id: 77, Chunks: 1, Position: "1-1"})
		require.NoError(t, err)
		w.set(a.p.keys.chunk(77, 0), chunk)
		w.set(a.p.keys.snapshot(), notice)
		c := signing()
		require.Zero(t, c.hit(0, hashes))
		require.Error(t, c.p.load(context.Background(), &statev1.SnapshotNotice{Id: 77, Chunks: 1}))
	})
	require.Positive(t, b.store.Stats().Forged)
}

// What others write is bounded: addresses of endpoints that this replica does not have are not kept, nor are more replicas
// than any fleet has.
func TestForeignAddressesTakeNoMemory(t *testing.T) {
	r := lonely(t, 2)
	long := string(bytes.Repeat([]byte("x"), 200_000))
	for i := range 2 * maxMembers {
		text, err := proto.Marshal(&statev1.Batch{
			Replica: uint64(i + 1), Seq: 1, LeaseMs: 60_000, Addresses: []string{long + strconv.Itoa(i), addr(1)},
			Loads: []*statev1.Load{{Address: 0, Requests: 1}, {Address: 1, Requests: 1}},
			Waits: []*statev1.Waits{{Id: uint64(i + 1), HeldAt: []uint32{0}, Held: []int64{1}}},
		})
		require.NoError(t, err)
		r.p.takeIn(message(streamID{ms: uint64(time.Now().UnixMilli()), n: uint64(i)}.String(), string(text)))
	}
	require.Len(t, r.p.members, maxMembers)
	kept := 0
	for _, m := range r.p.members {
		for addr := range m.loads {
			kept += len(addr)
		}
	}
	require.Less(t, kept, 100*maxMembers)
	require.EqualValues(t, maxMembers, r.booked(1))
}
