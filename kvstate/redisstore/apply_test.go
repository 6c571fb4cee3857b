package redisstore

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"tandem/internal/budget"
	statev1 "tandem/protos/state/v1"
)

// An entry is applied without an allocation, but for the new total of each endpoint, once for a read of many entries,
// and for the growth of the index by new prompts.
func TestApplyAllocs(t *testing.T) {
	const endpoints, read, runs, blocks = 2, 32, 20, 100
	r := apart(t, Options{URL: "redis://127.0.0.1:1"}, endpoints)
	made := 0
	entries := func(prompts int) (out []redis.XMessage) {
		for range read {
			made++
			text, err := proto.Marshal(&statev1.Batch{
				Replica: 1, Seq: uint64(made), LeaseMs: 60_000, Addresses: []string{addr(0), addr(1)},
				Loads: []*statev1.Load{{Address: 0, Requests: 3, Jobs: 2, WorkUs: 3e6}, {Address: 1, Requests: int64(made)}},
				Blocks: []*statev1.Blocks{
					{Also: []uint32{1}, Kind: statev1.Blocks_KIND_ROUTED, Hashes: prompt(made%prompts, blocks)},
				},
			})
			require.NoError(t, err)
			id := streamID{ms: uint64(time.Now().UnixMilli()), n: uint64(made)}
			out = append(out, message(id.String(), string(text)))
		}
		return out
	}
	known := entries(read)
	budget.Allocs(t, runs, endpoints, func() { r.p.takeIn(known...) }, "known prompts")
	require.Equal(t, int64(3), r.e(0).RemoteLoad().Requests)
	require.Equal(t, int64(read), r.e(1).RemoteLoad().Requests)

	var fresh [][]redis.XMessage
	for range 3 * (runs + 1) {
		fresh = append(fresh, entries(1<<30))
	}
	next := 0
	budget.Allocs(t, runs, endpoints+read*blocks/100+3*read, func() {
		r.p.takeIn(fresh[next%len(fresh)]...)
		next++
	}, "new prompts: one for a hundred blocks, and three for a conversation and its place")
}
