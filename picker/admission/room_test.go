package admission

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/picker"
)

// In a full queue a request of lower priority is shed, else the first is dispatched early; a newcomer below 0 is refused.
func TestAFullQueueMakesSpace(t *testing.T) {
	k, q, w := late(), &Queue{Max: 2}, newWanting(t, 1)
	w.queue[0] = time.Minute
	w.add(q, k, 1, 1000, 0, picker.Request{Priority: -1})
	w.add(q, k, 2, 2000, 0, picker.Request{})
	require.True(t, w.add(q, k, 3, 3000, 0, picker.Request{}))
	require.Equal(t, []uint64{1}, w.shed)
	require.True(t, w.add(q, k, 4, 4000, 0, picker.Request{}))
	require.Equal(t, []uint64{2}, w.early)
	require.False(t, w.add(q, k, 5, 1000, 0, picker.Request{Priority: -1}))
	require.Equal(t, 2, q.Len())
}

// A request whose time is over is dispatched before its turn, even if its targets are missed; below 0 it is shed.
func TestRequestsExpire(t *testing.T) {
	k, q, w := late(), &Queue{}, newWanting(t, 1)
	w.queue[0] = time.Minute
	w.add(q, k, 1, 1000, 0, picker.Request{Priority: -1})
	w.add(q, k, 2, 1000, 0, picker.Request{Targets: picker.Targets{TTFT: .1}, OnMiss: picker.MissWait})
	require.True(t, q.Expire(k, w, 1))
	require.True(t, q.Expire(k, w, 2))
	require.False(t, q.Expire(k, w, 2))
	require.Equal(t, [][]uint64{{1}, {2}}, [][]uint64{w.shed, w.early})
	require.Zero(t, q.Len())
}

// While memory is short nothing waits.
func TestNothingWaitsWithoutMemory(t *testing.T) {
	k, q, r := late(), &Queue{}, newRoom(t, 1)
	r.queue[0] = time.Minute
	r.arrive(q, k, 1, 1000, 0)
	require.Empty(t, r.early)
	r.short = true
	r.arrive(q, k, 2, 1000, 0)
	q.Dispatch(k, r, 0, r.enough)
	require.Equal(t, []uint64{2, 1}, r.early)
	require.Zero(t, q.Len())
}
