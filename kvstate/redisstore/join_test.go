package redisstore

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	statev1 "tandem/protos/state/v1"
)

// Where Redis comes back to a replica that has not joined yet, what it has to tell and its hello go out at the same time. Each has a
// number of its own and none is left out, or others would take that for a gap.
func TestNumbersAreGivenOnce(t *testing.T) {
	r := startRedis(t)
	c := r.client()
	defer c.Close()
	ctx := context.Background()
	var numbers, want []uint64
	eventually(t, "Redis is in time for all", func() bool {
		r.do("FLUSHALL")
		a := apart(t, redisURL(r), 2)
		defer a.store.Close()
		var late atomic.Int32
		for range 50 {
			var both sync.WaitGroup
			for _, tell := range []func() error{
				func() error { _, err := a.p.greet(ctx); return err },
				func() error { return a.store.flush(ctx, true, false) },
			} {
				both.Go(func() {
					if tell() != nil {
						late.Add(1)
					}
				})
			}
			both.Wait()
		}
		numbers, want = nil, nil
		for i, m := range c.XRange(ctx, a.p.keys.stream(), "-", "+").Val() {
			var b statev1.Batch
			require.NoError(t, proto.Unmarshal([]byte(m.Values[batchField].(string)), &b))
			numbers, want = append(numbers, b.GetSeq()), append(want, uint64(i)+1)
		}
		return late.Load() == 0
	})
	require.Len(t, numbers, 100)
	require.Equal(t, want, numbers)
}
