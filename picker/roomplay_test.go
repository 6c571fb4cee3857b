package picker

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// play is a fleet of engines of both roles, and replicas that share what they book with a delay. Engines are as vLLM's:
// first come, first served; what does not fit blocks what is behind it; answers grow, and the latest gives way if
// memory is full. A step is 10 ms.
type roomPlay struct {
	t        *testing.T
	random   *rand.Rand
	now      time.Time
	engines  []*playEngine
	replicas []*playReplica
	requests []*playRequest

	late   bool
	blind  bool // without the rule
	silent bool // engines do not say how much memory they have
	words  bool // engines have words, which change at any time
	delay  int  // steps after which replicas know what others booked
}

type playReplica struct {
	state *kvstate.State
	pool  *kvstate.Pool
	k     *Picker
	v     kvstate.View
}

// playEngine holds KV for requests: of those that run, of prompts that it computes, and of those not fetched.
type playEngine struct {
	capacity, used int64
	queue          []*playJob
	running        []*playJob
	held           map[*playRequest]int // until when at the latest, in steps; -1: until it is fetched
}

type playJob struct {
	r      *playRequest
	kind   string // prefill, fetch, alone, or same: the prompt is in the prefix cache
	tokens int64  // that it has memory for
	work   int64  // tokens to compute or to wait for before it answers
}

type playRequest struct {
	prompt, guess, answer, limit, done int64
	arrives, deadline                  int
	stage                              string
	p                                  int
	expected                           int64 // tokens of its answer
	by                                 *playReplica
	booked                             [2]kvstate.ReservationID
	ends                               int // when its reservation ends
}

const (
	playScrape = 200
	playLease  = 3000
	playWords  = 300
)

func newRoomPlay(t *testing.T, seed uint64) *roomPlay {
	m := &roomPlay{t: t, random: rand.New(rand.NewPCG(seed, 52)), now: time.Unix(1e9, 0)}
	capacity := 4000 + m.random.Int64N(12_000)
	var specs []kvstate.EndpointSpec
	for i := range 2 + m.random.IntN(2) {
		m.engines = append(m.engines, &playEngine{capacity: capacity, held: map[*playRequest]int{}})
		specs = append(specs, kvstate.EndpointSpec{Addr: fmt.Sprintf("10.0.0.%d:80", i), Role: kvstate.RoleBoth})
	}
	m.late, m.silent, m.delay = m.random.IntN(2) == 0, m.random.IntN(5) == 0, 1+m.random.IntN(10)
	m.words = seed%2 == 1
	split := Split(m.random.IntN(2))
	for range 1 + m.random.IntN(3) {
		s := kvstate.New(kvstate.Options{Now: func() time.Time { return m.now }})
		s.SetPool(kvstate.PoolSpec{Name: "p"}, specs)
		k := &Picker{Policy: DefaultPolicy()}
		k.Split, k.Late, k.PairsOnly = split, m.late, split == SplitAlways && seed%3 == 0
		m.replicas = append(m.replicas, &playReplica{state: s, pool: s.Pool("p"), k: k})
	}
	rate := 1 + m.random.IntN(40)
	for i := range 40 {
		r := &playRequest{answer: 1 + m.random.Int64N(250), arrives: playScrape + 10 + m.random.IntN(1+i*rate), stage: "new"}
		r.prompt = 64 + m.random.Int64N(capacity/2)
		if m.random.IntN(8) == 0 {
			r.prompt = 64 + m.random.Int64N(capacity-512)
		}
		r.guess = r.prompt * (80 + m.random.Int64N(40)) / 100
		if r.limit = 256; m.random.IntN(2) == 0 {
			r.limit = r.answer
		}
		r.deadline = r.arrives + 6000
		m.requests = append(m.requests, r)
	}
	return m
}

// view returns a replica's view.
func (m *roomPlay) view(q *playReplica) *kvstate.View {
	v := &q.v
	q.state.View(q.pool, nil, v)
	for i := range v.Endpoints {
		if m.blind {
			v.Endpoints[i].Room, v.Endpoints[i].KVTokens = kvstate.Room{}, 0
		}
	}
	return v
}

func (m *roomPlay) arrive(r *playRequest, step int) {
	q := m.replicas[m.random.IntN(len(m.replicas))]
	v := m.view(q)
	c, err := q.k.Pick(&Request{PromptTokens: r.guess, MaxAnswer: r.limit, Split: true, Rand: m.random.Uint64()}, v)
	require.NoError(m.t, err)
	if m.late && c.NoRoom && step < r.deadline {
		return
	}
	r.by, r.p, r.expected = q, c.Prefill, c.AnswerTokens
	b := c.DecodeBooking(v)
	if c.Prefill < 0 {
		m.enqueue(c.Decode, &playJob{r: r, kind: "alone"})
	} else {
		r.booked[0] = q.state.Bookings.Reserve(v.Endpoints[c.Prefill].Endpoint, c.PrefillBooking())
		b.Tentative = true
		m.enqueue(c.Prefill, &playJob{r: r, kind: "prefill"})
	}
	r.booked[1] = q.state.Bookings.Reserve(v.Endpoints[c.Decode].Endpoint, b)
	r.stage = "sent"
}

// resume is pass 2, at any replica.
func (m *roomPlay) resume(r *playRequest, step int) {
	q := m.replicas[m.random.IntN(len(m.replicas))]
	v := m.view(q)
	b := kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: r.prompt, Need: r.prompt + r.expected, From: v.Endpoints[r.p].Endpoint}
	want := Request{PromptTokens: r.prompt, MinAnswer: r.expected, MaxAnswer: r.expected, Rand: m.random.Uint64()}
	d, err := q.k.PickDecode(&want, v, r.p)
	kind := "fetch"
	if errors.Is(err, ErrNoRoom) {
		d, kind, err = r.p, "same", nil
		b.From = nil
		m.engines[d].held[r] = step + playLease
	}
	require.NoError(m.t, err)
	m.enqueue(d, &playJob{r: r, kind: kind})
	before, booked := r.by, r.booked
	r.by, r.booked = q, [2]kvstate.ReservationID{0, q.state.Bookings.Reserve(v.Endpoints[d].Endpoint, b)}
	before.state.Bookings.Complete(booked[0])
	before.state.Bookings.Release(booked[1])
	r.stage = "sent"
}

func (m *roomPlay) enqueue(at int, j *playJob) { m.engines[at].queue = append(m.engines[at].queue, j) }

// work is one step of an engine.
func (m *roomPlay) work(e *playEngine, step int) {
	for r, until := range e.held {
		if until >= 0 && step >= until {
			delete(e.held, r)
			e.used -= r.prompt
		}
	}
	for len(e.queue) > 0 {
		j := e.queue[0]
		need, work := j.r.prompt+j.r.done, j.r.prompt+j.r.done
		switch _, cached := e.held[j.r]; {
		case j.kind == "fetch":
			work = 400 // two steps
		case j.kind == "same" && cached:
			need, work = j.r.done+1, 1
		}
		if e.used+need > e.capacity {
			break
		}
		j.tokens, j.work = need, work
		e.used += need
		e.queue, e.running = e.queue[1:], append(e.running, j)
	}
	budget := int64(200) // of computing; fetches go on beside it
	for _, j := range slices.Clone(e.running) {
		if !slices.Contains(e.running, j) { // it gave way
			continue
		}
		if j.work > 0 {
			n := min(j.work, 200)
			if j.kind != "fetch" {
				n = min(j.work, budget)
				budget -= n
			}
			if j.work -= n; j.work == 0 {
				m.computed(e, j)
			}
			continue
		}
		for e.used+1 > e.capacity && slices.Contains(e.running, j) {
			last := e.running[len(e.running)-1]
			e.running = e.running[:len(e.running)-1]
			e.used -= last.tokens
			again := &playJob{r: last.r, kind: last.kind}
			if last.kind == "fetch" && last.work == 0 {
				again.kind = "alone"
			}
			e.queue = append([]*playJob{again}, e.queue...)
		}
		if !slices.Contains(e.running, j) {
			continue
		}
		e.used, j.tokens, j.r.done = e.used+1, j.tokens+1, j.r.done+1
		if j.r.done >= j.r.answer {
			e.used -= j.tokens
			e.running = slices.DeleteFunc(e.running, func(o *playJob) bool { return o == j })
			j.r.stage, j.r.ends = "ended", step+m.random.IntN(100)
		}
	}
}

// computed ends a job's prompt.
func (m *roomPlay) computed(e *playEngine, j *playJob) {
	switch j.kind {
	case "prefill":
		e.running = slices.DeleteFunc(e.running, func(o *playJob) bool { return o == j })
		e.held[j.r] = -1
		j.r.stage = "computed"
	case "fetch":
		from := m.engines[j.r.p]
		delete(from.held, j.r)
		from.used -= j.r.prompt
	}
}

// run plays until all requests have ended; false: they have not after so many steps.
func (m *roomPlay) run(steps int) bool {
	for step := range steps {
		m.now = m.now.Add(10 * time.Millisecond)
		if step%playScrape == 0 {
			m.scrape()
		}
		if step%m.delay == 0 {
			m.share()
		}
		if m.words && step%playWords == 0 {
			m.change()
		}
		open := false
		for _, r := range m.requests {
			switch {
			case r.stage == "new" && step >= r.arrives:
				m.arrive(r, step)
			case r.stage == "computed":
				m.resume(r, step)
			case r.stage == "ended" && step >= r.ends:
				r.by.state.Bookings.Release(r.booked[1])
				r.stage = "over"
			}
			open = open || r.stage != "over"
		}
		if !open {
			return true
		}
		for _, e := range m.engines {
			if m.work(e, step); e.used > e.capacity { // require itself would take half of the test's time
				require.LessOrEqual(m.t, e.used, e.capacity)
			}
		}
	}
	return false
}

func (m *roomPlay) scrape() {
	for i, e := range m.engines {
		g := kvstate.Signals{Running: int64(len(e.running)), Waiting: int64(len(e.queue)), KVTokens: e.capacity,
			KVUsage: float64(e.used) / float64(e.capacity), At: m.now}
		for _, j := range e.running { // KV that is being fetched waits, as in vLLM
			if j.kind == "fetch" && j.work > 0 {
				g.Running, g.Waiting = g.Running-1, g.Waiting+1
			}
		}
		if m.silent {
			g.KVTokens, g.Waiting = -1, -1
		}
		for _, q := range m.replicas {
			q.state.Observe(q.pool.Endpoints()[i], g)
		}
	}
}

// change gives the engines words: one prefills, the others decode, or the other way round.
func (m *roomPlay) change() {
	one, words := m.random.IntN(len(m.engines)), []kvstate.Role{kvstate.RolePrefill, kvstate.RoleDecode}
	m.random.Shuffle(2, func(i, j int) { words[i], words[j] = words[j], words[i] })
	for _, q := range m.replicas {
		for i, e := range q.pool.Endpoints() {
			q.state.SetWord(e, words[min(max(i-one, one-i), 1)])
		}
	}
}

func (m *roomPlay) share() {
	for _, q := range m.replicas {
		for i, e := range q.pool.Endpoints() {
			all := kvstate.RemoteLoad{At: m.now}
			for _, other := range m.replicas {
				if other != q {
					b := other.pool.Endpoints()[i].Booked(m.now)
					all.Add(&b)
				}
			}
			e.SetRemoteLoad(all)
		}
	}
}

func (m *roomPlay) String() string {
	s := fmt.Sprintf("late %v, words %v, %d replicas, delay %d, silent %v, split %v\n", m.late, m.words, len(m.replicas), m.delay, m.silent, m.replicas[0].k.Split)
	for i, e := range m.engines {
		s += fmt.Sprintf("engine %d: %d of %d, held %d\n", i, e.used, e.capacity, len(e.held))
		for _, j := range e.queue {
			s += fmt.Sprintf("  waits %s %d+%d of %d (p %d)\n", j.kind, j.r.prompt, j.r.done, j.r.answer, j.r.p)
		}
		for _, j := range e.running {
			s += fmt.Sprintf("  runs %s %d+%d of %d\n", j.kind, j.r.prompt, j.r.done, j.r.answer)
		}
	}
	return s
}

// Whatever comes, however late replicas know of each other, and whenever words change: every request ends. Without the rule many do not.
func TestRoomAtRandom(t *testing.T) {
	const fleets, steps = 150, 30_000
	stuck := 0
	for seed := range uint64(fleets) {
		m := newRoomPlay(t, seed)
		limit := steps
		if m.words { // some wait for leases, one after the other
			limit *= 10
		}
		require.True(t, m.run(limit), "seed %d: not all end\n%s", seed, m)
		for _, q := range m.replicas {
			require.Zero(t, q.state.Bookings.Reservations())
			for _, e := range q.pool.Endpoints() {
				require.Equal(t, kvstate.Room{}, e.Booked(m.now).Room, "nothing is held in the end")
			}
		}
		if seed%5 == 0 {
			m = newRoomPlay(t, seed)
			m.blind = true
			if !m.run(steps) {
				stuck++
			}
		}
	}
	require.Positive(t, stuck, "without the rule some fleets stand still")
	t.Logf("%d of %d fleets stand still without the rule", stuck, fleets/5)
}
