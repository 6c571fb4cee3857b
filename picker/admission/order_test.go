package admission

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
)

// With more work than the endpoint can do in time, those go first that can still keep the promise, whatever came before
// them; the others follow in their order, and none is lost.
func TestPromiseOrder(t *testing.T) {
	play := func(promise float64) []uint64 {
		k, q, r := late(), &Queue{Promise: promise}, newRoom(t, 1)
		r.queue[0] = time.Minute
		for i := range uint64(4) {
			r.arrive(q, k, i, 8000, 0)
		}
		r.arrive(q, k, 10, 8000, 4)
		r.arrive(q, k, 11, 9000, 4)
		for range 6 {
			r.queue[0] = 0
			q.Dispatch(k, r, 6, r.enough) // those of the first second have waited for six
		}
		require.Zero(t, q.Len())
		return r.sent
	}
	require.Equal(t, []uint64{0, 1, 2, 3, 10, 11}, play(0))
	require.Equal(t, []uint64{10, 11, 0, 1, 2, 3}, play(5))
	require.Equal(t, []uint64{0, 1, 2, 3, 10, 11}, play(60), "all can keep it")
	require.Equal(t, []uint64{0, 1, 2, 3, 10, 11}, play(1), "none can")
}

// A request that arrives does not count those that miss the promise as work before it.
func TestArrivalsGoBeforeThoseThatMiss(t *testing.T) {
	k, q, r := late(), &Queue{Promise: 5}, newRoom(t, 1)
	r.queue[0] = time.Minute
	for i := range uint64(4) {
		r.arrive(q, k, i, 8000, 0)
	}
	q.Dispatch(k, r, 6, r.enough)
	require.Equal(t, 4, q.Len())
	r.queue[0] = 0
	r.arrive(q, k, 9, 8000, 6)
	require.Equal(t, []uint64{9}, r.sent)
}

// The order costs no memory.
func TestPromiseOrderAllocates(t *testing.T) {
	k, q, r := late(), &Queue{Promise: 5}, newRoom(t, 1)
	r.queue[0] = time.Minute
	for i := range uint64(64) {
		r.arrive(q, k, i, 8000, float64(i)/10)
	}
	budget.Allocs(t, 20, 0, func() { q.Dispatch(k, r, 8, r.enough) })
}
