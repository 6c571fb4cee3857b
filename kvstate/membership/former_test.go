package membership

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"tandem/e2e/redisserver"
	statev1 "tandem/protos/state/v1"
)

// formerReplica does with a real Redis what the release before the roster did (0044ea1): its batches have no record, and
// its name, slot and addresses are in keys of their own.
type formerReplica struct {
	t      *testing.T
	client *redis.Client
	id     uint64
	name   string
	self   formerAddresses
	seq    uint64
}

func formerAt(t *testing.T, addr, name string, self formerAddresses) *formerReplica {
	t.Helper()
	c := redis.NewClient(&redis.Options{Addr: addr})
	t.Cleanup(func() { _ = c.Close() })
	return &formerReplica{t: t, client: c, id: uint64(time.Now().UnixMilli()) << 20, name: name, self: self}
}

func (f *formerReplica) hour() string {
	return "tandem:1:{operator}:replicas:" + strconv.FormatInt(time.Now().Unix()/3600, 10)
}

// beat writes all that a former replica wrote within a second.
func (f *formerReplica) beat(mark string, leaving bool) {
	f.t.Helper()
	f.seq++
	ctx, id := context.WithoutCancel(f.t.Context()), strconv.FormatUint(f.id, 16)
	batch, err := proto.Marshal(&statev1.Batch{Replica: f.id, Seq: f.seq, LeaseMs: 10_000, Complete: true, Leaving: leaving})
	require.NoError(f.t, err)
	text, err := json.Marshal(f.self)
	require.NoError(f.t, err)
	pipe := f.client.Pipeline()
	pipe.XAdd(ctx, &redis.XAddArgs{Stream: "tandem:1:{chat}:deltas", Values: []any{"b", batch}})
	pipe.Set(ctx, "tandem:1:{replicas}:"+id, text, 10*time.Second)
	pipe.HSet(ctx, f.hour(), id, fmt.Sprintf("%s %d %s %s", id, time.Now().UnixMilli(), mark, f.name))
	_, err = pipe.Exec(ctx)
	require.NoError(f.t, err)
}

// reads returns what a former replica reads of another one: its addresses, and its entry but for the time.
func (f *formerReplica) reads(id uint64) (self formerAddresses, entry string) {
	f.t.Helper()
	hex := strconv.FormatUint(id, 16)
	if text, err := f.client.Get(f.t.Context(), "tandem:1:{replicas}:"+hex).Bytes(); err == nil {
		require.NoError(f.t, json.Unmarshal(text, &self))
	}
	if parts := strings.SplitN(f.client.HGet(f.t.Context(), f.hour(), hex).Val(), " ", 4); len(parts) == 4 {
		entry = parts[0] + " " + parts[2] + " " + parts[3]
	}
	return self, entry
}

// A fleet is upgraded: replicas of the release before the roster and of this one serve the same Envoys, have slots of
// their own, and know each other's names. When the last former one has ended, nothing is written for it any more.
func TestUpgradeFromFormerRecords(t *testing.T) {
	t.Parallel()
	addr := redisserver.New(t).Addr
	killed := formerAt(t, addr, "killed:9090", formerAddresses{1, "10.0.0.9:9002", "10.0.0.9:9003"})
	killed.id -= uint64(time.Hour.Milliseconds()) << 20
	require.NoError(t, killed.client.HSet(t.Context(), killed.hour(), "k",
		fmt.Sprintf("%x %d r killed:9090", killed.id, time.Now().UnixMilli())).Err())
	old := formerAt(t, addr, "old:9090", formerAddresses{0, "10.0.0.1:9002", "10.0.0.1:9003"})
	old.beat("r", false)

	a := startWithBridge(t, addr, Replica{0, "10.0.0.2:9002", "10.0.0.2:9003"})
	require.Equal(t, 0, a.store.Access().Roster.Others()[old.id].Slot, "before it chooses one")
	id := a.store.Access().Replica
	require.Eventually(t, func() bool { // new ones know it, and take another slot
		old.beat("r", false)
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.list) == 2 && a.list[0] == Replica{0, "10.0.0.1:9002", "10.0.0.1:9003"} && a.list[1] == replicaAt(2)
	}, soon, 20*time.Millisecond)
	others := a.store.Access().Roster.Others()
	require.Equal(t, "old:9090", others[old.id].Name)
	require.Equal(t, "killed:9090", others[killed.id].Name)
	require.False(t, others[killed.id].Ended)
	require.Eventually(t, func() bool { // and it knows them
		old.beat("r", false)
		self, entry := old.reads(id)
		return self == formerAddresses{1, "10.0.0.2:9002", "10.0.0.2:9003"} && entry == fmt.Sprintf("%x r new:9090", id)
	}, soon, 20*time.Millisecond)

	b := startWithBridge(t, addr, replicaAt(3)) // one with a record more: there are two slots, and both are taken
	require.Eventually(t, func() bool {
		old.beat("r", false)
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.full
	}, soon, 20*time.Millisecond)
	require.Eventually(t, func() bool {
		old.beat("r", false)
		_, entry := old.reads(b.store.Access().Replica)
		return entry != ""
	}, soon, 20*time.Millisecond)
	b.stop()
	_, entry := old.reads(b.store.Access().Replica)
	require.Equal(t, fmt.Sprintf("%x e new:9090", b.store.Access().Replica), entry, "it ended in order")

	old.beat("e", true)
	a.has(t, replicaAt(2))
	require.True(t, a.store.Access().Roster.Others()[old.id].Ended)
	require.Eventually(t, func() bool {
		return old.client.PTTL(t.Context(), "tandem:1:{replicas}:"+strconv.FormatUint(id, 16)).Val() < 8*time.Second
	}, soon,
		20*time.Millisecond, "what it wrote for the former one expires")
}

// What is no record is left out, and does no harm.
func TestFormerRecordsThatAreNone(t *testing.T) {
	for text, good := range map[string]bool{
		"1f 1700000000000 r a:9090": true, "1f 1700000000000 e name with spaces": true,
		"": false, "1f 1 r": false, "x 1 r a": false, "1f x r a": false, "1f 1 r " + strings.Repeat("x", maxText): false,
	} {
		_, err := parseName(text)
		require.Equal(t, good, err == nil, text)
	}
}
