package admission

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
	"tandem/kvstate"
	"tandem/picker"
)

// room is a host: a fleet of prefill endpoints whose queues are the requests sent to them.
type room struct {
	t       testing.TB
	enough  float64
	tokens  map[uint64]int64
	queue   []time.Duration
	view    kvstate.View
	request picker.Request
	sent    []uint64
	shed    []uint64
	early   []uint64
	short   bool
	quiet   bool // counts nothing: for measuring allocations
}

func newRoom(t testing.TB, prefills int) *room {
	return &room{t: t, enough: 0.5, tokens: map[uint64]int64{}, queue: make([]time.Duration, prefills)}
}

func (r *room) Fleet() *kvstate.View {
	if len(r.view.Endpoints) == 0 {
		v := fleet(2 * len(r.queue))
		r.view.Endpoints = v.Endpoints
	}
	for i, q := range r.queue {
		r.view.Endpoints[i].Queue = q
	}
	return &r.view
}

func (r *room) Look(id uint64, _ *kvstate.View) *picker.Request {
	r.request = picker.Request{PromptTokens: r.tokens[id], Split: true, Rand: id * 0x9e3779b97f4a7c15}
	return &r.request
}

func (r *room) Send(id uint64, _ *picker.Request, _ *kvstate.View, c picker.Choice, err error, how Outcome) {
	require.NoError(r.t, err)
	if how != Dispatched {
		r.early = append(r.early, id)
		return
	}
	require.Less(r.t, r.queue[c.Prefill].Seconds(), r.enough, "nobody is sent where a step of work waits")
	r.queue[c.Prefill] += kvstate.Seconds(c.Work)
	if !r.quiet {
		r.sent = append(r.sent, id)
	}
}

func (r *room) Shed(id uint64)      { r.shed = append(r.shed, id) }
func (r *room) ShortOfMemory() bool { return r.short }

func (r *room) arrive(q *Queue, k *picker.Picker, id uint64, tokens int64, now float64) bool {
	r.tokens[id] = tokens
	return q.Arrive(k, r, id, now, r.enough)
}

// late returns a picker that splits every request and binds late.
func late() *picker.Picker {
	k := &picker.Picker{Policy: picker.DefaultPolicy()}
	k.Split, k.Late = picker.SplitAlways, true
	return k
}

// fleet returns n idle endpoints, the first half of which prefills.
func fleet(n int) *kvstate.View {
	v := &kvstate.View{}
	for i := range n {
		role := kvstate.RolePrefill
		if i >= n/2 {
			role = kvstate.RoleDecode
		}
		spec := kvstate.EndpointSpec{Addr: fmt.Sprintf("10.0.%d.%d:8000", i/256, i%256), Role: role}
		v.Endpoints = append(v.Endpoints, kvstate.Candidate{Usable: true, Endpoint: &kvstate.Endpoint{EndpointSpec: spec}})
	}
	return v
}

// A request is bound at once while there is capacity, and waits when every endpoint has a step of work; then the
// shortest goes first.
func TestQueueShortestFirst(t *testing.T) {
	k, q, r := late(), &Queue{}, newRoom(t, 2)
	require.True(t, r.arrive(q, k, 1, 16000, 0))
	require.True(t, r.arrive(q, k, 2, 16000, 0))
	require.Equal(t, []uint64{1, 2}, r.sent, "two endpoints, two long prompts")
	r.arrive(q, k, 3, 8000, .1)
	r.arrive(q, k, 4, 2000, .2)
	r.arrive(q, k, 5, 4000, .3)
	require.Equal(t, 3, q.Len())
	require.Len(t, r.sent, 2)

	r.queue[0] = 400 * time.Millisecond
	q.Dispatch(k, r, 0, r.enough)
	require.Equal(t, []uint64{1, 2, 4}, r.sent, "the shortest, and with it the endpoint has enough again")
	r.queue[0], r.queue[1] = 0, 0
	q.Dispatch(k, r, 0, r.enough)
	require.Equal(t, []uint64{1, 2, 4, 5, 3}, r.sent)
	require.Zero(t, q.Len())
}

// Five seconds of age outweigh a second of work, so that none waits for ever.
func TestQueueAges(t *testing.T) {
	k, q, r := late(), &Queue{}, newRoom(t, 1)
	r.arrive(q, k, 1, 16000, 0)
	r.arrive(q, k, 2, 16000, 0) // a second of work
	for id := uint64(3); id < 20; id++ {
		r.arrive(q, k, id, 1000, float64(id))
	}
	var order []uint64
	for _, w := range q.Waiting() {
		order = append(order, w.ID)
	}
	require.Equal(t, []uint64{3, 4, 5}, order[:3], "those who came soon after and are short go before")
	require.Equal(t, uint64(2), order[3], "those who came later do not")
}

// Equal keys keep the order of arrival; a removed request is not sent; in a full queue the first makes space.
func TestQueueBounds(t *testing.T) {
	k, q, r := late(), &Queue{Max: 3}, newRoom(t, 1)
	r.queue[0] = time.Minute
	for id := range uint64(3) {
		require.True(t, r.arrive(q, k, id, 1000, 7))
	}
	require.True(t, r.arrive(q, k, 3, 10000, 7), "full: the first makes space")
	require.Equal(t, []uint64{0}, r.early)
	require.True(t, q.Remove(3))
	require.True(t, q.Remove(1))
	require.False(t, q.Remove(1))
	require.True(t, r.arrive(q, k, 4, 1000, 7))
	r.queue[0] = 0
	for q.Len() > 0 {
		q.Dispatch(k, r, 0, r.enough)
		r.queue[0] = 0
	}
	require.Equal(t, []uint64{2, 4}, r.sent)
}

// Without an endpoint that decodes there is nothing to wait for.
func TestQueueSendsErrors(t *testing.T) {
	q, k := &Queue{}, late()
	empty := &noEndpoint{}
	require.True(t, q.Arrive(k, empty, 1, 0, .5))
	require.ErrorIs(t, empty.err, picker.ErrNoEndpoint)
	require.Zero(t, q.Len())
}

type noEndpoint struct {
	view kvstate.View
	err  error
}

func (*noEndpoint) Shed(uint64)         {}
func (*noEndpoint) ShortOfMemory() bool { return false }

func (n *noEndpoint) Fleet() *kvstate.View                       { return &n.view }
func (n *noEndpoint) Look(uint64, *kvstate.View) *picker.Request { return &picker.Request{Split: true} }
func (n *noEndpoint) Send(_ uint64, _ *picker.Request, _ *kvstate.View, _ picker.Choice, err error, _ Outcome) {
	n.err = err
}

// Whatever comes and goes: all are sent once, in a time that their work allows, and none waits while an endpoint
// idles.
func TestQueueAtRandom(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		k, q, r := late(), &Queue{}, newRoom(t, 1+random.IntN(5))
		arrived, now := map[uint64]bool{}, 0.0
		for id := uint64(0); id < 300 || q.Len() > 0; {
			if id < 300 && random.IntN(3) > 0 {
				require.True(t, r.arrive(q, k, id, random.Int64N(20000), now))
				arrived[id] = true
				id++
			}
			step := random.Float64() / 10
			now += step
			for i := range r.queue {
				r.queue[i] = max(r.queue[i]-kvstate.Seconds(step), 0)
			}
			q.Dispatch(k, r, 0, r.enough)
			if q.Len() > 0 {
				for i := range r.queue {
					require.GreaterOrEqual(t, r.queue[i].Seconds(), r.enough, "seed %d: %d wait beside endpoint %d", seed, q.Len(), i)
				}
			}
		}
		require.Len(t, r.sent, 300)
		for _, id := range r.sent {
			require.True(t, arrived[id], "sent once")
			delete(arrived, id)
		}
	}
}

func TestQueueAlloc(t *testing.T) {
	k, q, r := late(), &Queue{}, newRoom(t, 8)
	for i := range r.queue {
		r.queue[i] = time.Minute
	}
	for id := range uint64(500) {
		r.arrive(q, k, id, 1000+int64(id), 0)
	}
	r.quiet = true
	budget.Allocs(t, 50, 0, func() { q.Dispatch(k, r, 0, r.enough) })
}

func BenchmarkDispatch(b *testing.B) {
	k, q, r := late(), &Queue{}, newRoom(b, 32)
	for i := range r.queue {
		r.queue[i] = time.Minute
	}
	for id := range uint64(500) {
		r.arrive(q, k, id, 1000+int64(id), 0)
	}
	r.queue[0], r.enough = 0, 1e-9 // one is idle, and not the wanted one
	b.ReportAllocs()
	for b.Loop() {
		r.queue[0] = 0
		q.Dispatch(k, r, 0, r.enough)
	}
}
