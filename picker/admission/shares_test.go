package admission

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
	"tandem/kvstate"
	"tandem/picker"
)

// wanting is a queue whose requests have targets.
type wanting struct {
	*room
	wishes map[uint64]picker.Request
}

func newWanting(t *testing.T, prefills int) *wanting {
	return &wanting{room: newRoom(t, prefills), wishes: map[uint64]picker.Request{}}
}

func (w *wanting) Look(id uint64, _ *kvstate.View) *picker.Request {
	r := w.wishes[id]
	r.PromptTokens, r.Split, r.Rand = w.tokens[id], true, id*0x9e3779b97f4a7c15
	w.request = r
	return &w.request
}

func (w *wanting) add(q *Queue, k *picker.Picker, id uint64, tokens int64, now float64, r picker.Request) bool {
	w.tokens[id], w.wishes[id] = tokens, r
	return q.Arrive(k, w, id, now, w.enough)
}

// work processes the sent requests at the speed of the fleet, in steps of 50 ms.
func (w *wanting) work(q *Queue, k *picker.Picker, seconds float64) {
	for now := 0.0; now < seconds; now += .05 {
		for i := range w.queue {
			w.queue[i] = max(w.queue[i]-50*time.Millisecond, 0)
		}
		q.Dispatch(k, w, 0, w.enough)
	}
}

// Higher priorities go first, however long and late; others do not keep an endpoint from a newcomer of a higher one.
func TestQueuePriorities(t *testing.T) {
	k, q, w := late(), &Queue{}, newWanting(t, 1)
	w.queue[0] = time.Minute
	w.add(q, k, 1, 1000, 0, picker.Request{Priority: -1})
	w.add(q, k, 2, 1000, 1, picker.Request{})
	w.add(q, k, 3, 16000, 2, picker.Request{Priority: 5})
	w.add(q, k, 4, 8000, 3, picker.Request{Priority: 5})
	var order []uint64
	for _, x := range q.Waiting() {
		order = append(order, x.ID)
	}
	require.Equal(t, []uint64{4, 3, 2, 1}, order)

	w.queue[0] = 490 * time.Millisecond
	q.Dispatch(k, w, 0, w.enough)
	require.Equal(t, []uint64{4}, w.sent)
	w.queue[0] = 490 * time.Millisecond
	w.add(q, k, 5, 1000, 4, picker.Request{Priority: 9})
	require.Equal(t, []uint64{4, 5}, w.sent)
}

// A full queue: the last of those below 0 makes space for a higher priority.
func TestQueueSheds(t *testing.T) {
	k, q, w := late(), &Queue{Max: 3}, newWanting(t, 1)
	w.queue[0] = time.Minute
	_, ok := q.Sheddable(1)
	require.False(t, ok, "empty")
	w.add(q, k, 1, 1000, 0, picker.Request{Priority: -2})
	w.add(q, k, 2, 1000, 0, picker.Request{Priority: -2})
	w.add(q, k, 3, 1000, 0, picker.Request{})
	require.True(t, q.Full())
	id, ok := q.Sheddable(0)
	require.True(t, ok)
	require.Equal(t, uint64(2), id, "who came last")
	_, ok = q.Sheddable(-2)
	require.False(t, ok, "not for one of its own kind")
}

// A request that waits for its targets blocks no other, and goes when they can be met.
func TestQueueHolds(t *testing.T) {
	k, q, w := late(), &Queue{}, newWanting(t, 1)
	w.queue[0] = 450 * time.Millisecond
	hasty := picker.Request{Targets: picker.Targets{TTFT: .4}, OnMiss: picker.MissWait}
	require.True(t, w.add(q, k, 1, 1000, 0, hasty))
	require.Equal(t, 1, q.Len(), "less than a step is ahead, and yet too much")
	require.True(t, w.add(q, k, 2, 400, 0, picker.Request{}))
	require.Equal(t, []uint64{2}, w.sent)
	w.queue[0] = 100 * time.Millisecond
	q.Dispatch(k, w, 0, w.enough)
	require.Equal(t, []uint64{2, 1}, w.sent)
}

// Two flows get the same work done, however much more the one asks for, and however long its requests are; an unused
// share goes to the other.
func TestQueueShares(t *testing.T) {
	k, q, w := late(), &Queue{}, newWanting(t, 2)
	w.queue[0], w.queue[1] = time.Second, time.Second
	random := rand.New(rand.NewPCG(1, 2))
	for id := range uint64(600) {
		flow, tokens := uint64(1), int64(2000+random.IntN(4000))
		if id%6 == 0 {
			flow, tokens = 2, 12_000
		}
		w.add(q, k, id, tokens, float64(id)/100, picker.Request{Flow: flow})
	}
	w.work(q, k, 60)
	done := map[uint64]float64{}
	for _, id := range w.sent {
		done[w.wishes[id].Flow] += k.Work(&picker.Request{PromptTokens: w.tokens[id], Split: true}, w.Fleet())
	}
	require.Greater(t, q.Len(), 100)
	require.InEpsilon(t, 1, done[1]/done[2], .05)

	w.work(q, k, 300)
	require.Zero(t, q.Len())
	require.Len(t, w.sent, 600)
	require.Empty(t, q.shares.flows, "nothing is held against anybody once nobody waits")
}

// A rare flow goes before one that floods; if all requests are of one flow the shortest goes first, as without flows.
func TestQueueSharesWithFewRequests(t *testing.T) {
	k, q, w := late(), &Queue{}, newWanting(t, 1)
	w.queue[0] = time.Second
	for id := range uint64(50) {
		w.add(q, k, id, 4000, 0, picker.Request{Flow: 1})
	}
	w.work(q, k, 5)
	sent := len(w.sent)
	w.add(q, k, 100, 8000, 5, picker.Request{Flow: 2})
	w.work(q, k, 2)
	require.Contains(t, w.sent[sent:min(sent+5, len(w.sent))], uint64(100), "once the other is a turn ahead, though it is the longest and came last")

	k, q, w = late(), &Queue{}, newWanting(t, 1)
	w.queue[0] = time.Minute
	for i, tokens := range []int64{9000, 2000, 7000, 1000} {
		w.add(q, k, uint64(i), tokens, 0, picker.Request{Flow: 7})
	}
	require.Nil(t, q.inOrder(0))
	w.add(q, k, 9, 30_000, 0, picker.Request{Flow: 8})
	var order []uint64
	for _, i := range q.inOrder(0) {
		order = append(order, q.waiting[i].ID)
	}
	require.Equal(t, []uint64{3, 1, 2, 9, 0}, order, "flow 7 has had its turn before its last")
}

// Flows are counted correctly, whatever comes and goes.
func TestQueueSharesAtRandom(t *testing.T) {
	for seed := range uint64(30) {
		random := rand.New(rand.NewPCG(seed, 5))
		k, q, w := late(), &Queue{Max: 40}, newWanting(t, 2)
		now, id := 0.0, uint64(0)
		for range 2000 {
			now += random.Float64() / 20
			switch random.IntN(4) {
			case 0, 1:
				id++
				if !w.add(q, k, id, random.Int64N(9000), now, picker.Request{Flow: random.Uint64N(5), Priority: int32(random.IntN(3)) - 1}) {
					q.Remove(q.Waiting()[random.IntN(q.Len())].ID)
				}
			case 2:
				for i := range w.queue {
					w.queue[i] = max(w.queue[i]-kvstate.Seconds(.05), 0)
				}
				q.Dispatch(k, w, 0, w.enough)
			case 3:
				if q.Len() > 0 {
					require.True(t, q.Remove(q.Waiting()[random.IntN(q.Len())].ID))
				}
			}
			waiting := map[uint64]int{}
			for _, x := range q.Waiting() {
				waiting[x.Flow]++
			}
			require.Equal(t, len(waiting), q.shares.active)
			for flow, n := range waiting {
				require.Equal(t, n, q.shares.flows[flow].waiting)
			}
		}
	}
}

func TestQueueSharesAlloc(t *testing.T) {
	k, q, w := late(), &Queue{}, newWanting(t, 8)
	for i := range w.queue {
		w.queue[i] = time.Minute
	}
	for id := range uint64(500) {
		w.add(q, k, id, 1000+int64(id), 0, picker.Request{Flow: id % 7})
	}
	w.quiet = true
	budget.Allocs(t, 50, 0, func() { q.Dispatch(k, w, 0, w.enough) })
}
