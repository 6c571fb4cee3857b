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

// Remote requests have a place in the order: they are not sent from here, and the requests behind them wait while they
// could go.
func TestQueueStandsBehindOthers(t *testing.T) {
	k, q, r := late(), &Queue{}, newRoom(t, 1)
	r.queue[0] = time.Minute
	r.tokens[100] = 3000
	q.AddRemote(Waiting{ID: 100, Work: .2, Arrived: 0, Replica: 7})
	q.AddRemote(Waiting{ID: 100, Work: .2, Arrived: 0, Replica: 7}) // repeated
	r.arrive(q, k, 1, 8000, 0)
	r.arrive(q, k, 2, 500, 0)
	require.Equal(t, []int{2, 1}, []int{q.Len(), q.Remote()})
	here, atOthers, self := q.Before(1)
	require.Equal(t, []int{1, 1}, []int{here, atOthers})
	require.InDelta(t, .5, self.Work, .1)
	first, _ := q.First()
	require.Equal(t, uint64(2), first)

	r.queue[0] = 350 * time.Millisecond
	q.Dispatch(k, r, 1, r.enough)
	require.Equal(t, []uint64{2}, r.sent, "the shortest of all; with the next one, which is not ours, there is enough")
	require.True(t, q.RemoveRemote(100, true))
	require.False(t, q.RemoveRemote(100, true))
	q.Dispatch(k, r, 1.02, r.enough)
	require.Equal(t, []uint64{2, 1}, r.sent)
	require.Zero(t, q.Len()+q.Remote())
	require.Empty(t, q.replicas)
}

// A request that arrives while others wait remotely stands behind them, even if none waits here.
func TestQueueArrivesBehindOthers(t *testing.T) {
	k, q, r := late(), &Queue{}, newRoom(t, 2)
	for id := uint64(100); id < 104; id++ {
		r.tokens[id] = 8000
		q.AddRemote(Waiting{ID: id, Work: .5, Arrived: 9, Replica: 7})
	}
	r.arrive(q, k, 1, 8000, 10)
	require.Empty(t, r.sent, "four before it will fill both endpoints")
	require.Equal(t, 1, q.Len())
	r.arrive(q, k, 2, 8000, 10.001)
	require.Equal(t, 2, q.Len(), "no look at all of them for each that comes")
}

// A remote request that could go and does not is not waited for: its replica is gone, or has a reason. Nor are others
// of that replica, until it sends one.
func TestQueueIsPatientForAWhile(t *testing.T) {
	k, q, r := late(), &Queue{}, newRoom(t, 1)
	r.queue[0] = time.Minute
	for id := uint64(100); id < 110; id++ {
		r.tokens[id] = 8000
		q.AddRemote(Waiting{ID: id, Work: .5, Arrived: 0, Replica: 7})
	}
	r.tokens[200] = 8000
	q.AddRemote(Waiting{ID: 200, Work: .5, Arrived: 0, Replica: 8})
	r.arrive(q, k, 1, 8000, 1)
	at := func(now float64) []uint64 {
		r.queue[0] = 0
		q.Dispatch(k, r, now, r.enough)
		return r.sent
	}
	require.Empty(t, at(2))
	require.Empty(t, at(2+patience))
	require.Empty(t, at(2.01+patience), "the first of the other replica is next")
	require.Equal(t, []uint64{1}, at(2.02+2*patience), "after two replicas, and not ten requests")

	q.RemoveRemote(200, true)
	q.RemoveRemote(100, true)
	r.arrive(q, k, 2, 8000, 3)
	require.Equal(t, []uint64{1}, at(4), "it has sent one, so it is there")
}

// Replicas with instant knowledge of each other send what a single one would, at the same time, whichever looks first.
// (Each request fills an endpoint here: of two that fill it only together, the second's replica may look first, and
// the first goes next.)
func TestQueuesAgree(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 9))
		k, alone, r := late(), &Queue{}, newRoom(t, 1+random.IntN(4))
		all := newShared(t, 1+random.IntN(4), len(r.queue))
		set := func(change func(i int) time.Duration) {
			for i := range r.queue {
				r.queue[i] = change(i)
				all.queue[i] = r.queue[i]
			}
		}
		set(func(int) time.Duration { return time.Minute })
		for id := uint64(1); id <= 100; id++ {
			tokens, now := 8300+random.Int64N(20000), float64(id)/50
			r.arrive(alone, k, id, tokens, now)
			all.arrive(k, id, tokens, now)
		}
		set(func(int) time.Duration { return kvstate.Seconds(random.Float64()) })
		for now := 2.0; alone.Len() > 0; now += .02 {
			alone.Dispatch(k, r, now, r.enough)
			for before := -1; before != len(all.sent); { // each waits until the others have gone
				before = len(all.sent)
				for _, i := range random.Perm(len(all.queues)) {
					all.turn = i
					all.queues[i].Dispatch(k, all, now, all.enough)
					all.publish()
				}
			}
			require.ElementsMatch(t, r.sent, all.sent, "seed %d, at %v", seed, now)
			set(func(i int) time.Duration { return max(r.queue[i]-20*time.Millisecond, 0) })
		}
		require.Len(t, all.sent, 100)
	}
}

// shared is a room of several replicas.
type shared struct {
	*room
	queues []*Queue
	turn   int // whose Send is being called
	gone   []uint64
}

func newShared(t *testing.T, replicas, prefills int) *shared {
	s := &shared{room: newRoom(t, prefills)}
	for range replicas {
		s.queues = append(s.queues, &Queue{})
	}
	return s
}

func (s *shared) Look(id uint64, v *kvstate.View) *picker.Request { return s.room.Look(id, v) }

func (s *shared) Send(id uint64, r *picker.Request, v *kvstate.View, c picker.Choice, err error, how Outcome) {
	s.room.Send(id, r, v, c, err, how)
	s.gone = append(s.gone, id)
}

func (s *shared) arrive(k *picker.Picker, id uint64, tokens int64, now float64) {
	s.tokens[id], s.turn = tokens, int(id)%len(s.queues)
	q := s.queues[s.turn]
	q.Arrive(k, s, id, now, s.enough)
	if _, _, self := q.Before(id); self.ID == id {
		self.Replica = uint64(s.turn) + 1
		for i, other := range s.queues {
			if i != s.turn {
				other.AddRemote(self)
			}
		}
	}
	s.publish()
}

func (s *shared) publish() {
	for _, id := range s.gone {
		for i, q := range s.queues {
			if i != s.turn {
				q.RemoveRemote(id, true)
			}
		}
	}
	s.gone = s.gone[:0]
}

func TestRemoteQueueAlloc(t *testing.T) {
	k, q, r := late(), &Queue{}, newRoom(t, 8)
	for i := range r.queue {
		r.queue[i] = time.Minute
	}
	for id := range uint64(200) {
		r.tokens[1000+id] = 1000 + int64(id)
		q.AddRemote(Waiting{ID: 1000 + id, Work: 1, Replica: 1 + id%3})
		r.arrive(q, k, id, 1000+int64(id), 0)
	}
	r.quiet = true
	budget.Allocs(t, 50, 0, func() { q.Dispatch(k, r, 1, r.enough) })
}

// A flow is charged for its remote dispatches, but not for requests that only stopped waiting.
func TestQueueChargesRemoteDispatches(t *testing.T) {
	for _, sent := range []bool{true, false} {
		q := &Queue{}
		for id := uint64(100); id < 103; id++ {
			q.AddRemote(Waiting{ID: id, Work: 3, Flow: id % 2, Replica: 7})
		}
		require.True(t, q.RemoveRemote(100, sent))
		owed := q.shares.debt(q.shares.flows[0])
		require.Equal(t, sent, owed > 0, owed)
	}
}
