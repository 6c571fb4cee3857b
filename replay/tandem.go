package replay

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"tandem/kvstate"
	"tandem/picker"
	"tandem/picker/admission"
)

// tandem is Tandem's own policy: the admission queue and the picker over the state, as the server uses them, in
// virtual time. Several replicas serve in rotation, each with its own state, which learns of the others' decisions
// after a delay.
type tandem struct {
	*fleet
	config   Config
	replicas []*replica
	bookings map[uint64]*bookings
}

// replica is one Tandem.
type replica struct {
	*tandem
	number   int
	state    *kvstate.State
	pool     *kvstate.Pool
	picker   picker.Picker
	queue    admission.Queue
	waiting  map[uint64]*job
	remote   map[uint64]*remoteRequest // requests that wait at other replicas
	view     kvstate.View
	request  picker.Request
	ticking  bool
	tick     func()
	position map[*kvstate.Endpoint]int // index of an endpoint in the fleet
}

// bookings are one request's reservations, on every replica.
type bookings struct {
	replica         *replica
	prefill, decode kvstate.ReservationID
	answer          int64 // tokens of the answer, as expected in pass 1
}

const tickSeconds = 0.020

func newTandem(f *fleet, c Config) *tandem {
	t := &tandem{fleet: f, config: c, bookings: map[uint64]*bookings{}}
	for i := range max(c.Replicas, 1) {
		t.replicas = append(t.replicas, t.newReplica(i))
	}
	if c.Roles {
		t.replicas[0].startWords() // it decides for all
	}
	return t
}

func (t *tandem) newReplica(number int) *replica {
	r := &replica{tandem: t, number: number, waiting: map[uint64]*job{}, remote: map[uint64]*remoteRequest{},
		position: map[*kvstate.Endpoint]int{}}
	blocks := capacity(t.config.Engine)
	if blocks == 0 {
		blocks = 1 << 28
	}
	r.state = kvstate.New(kvstate.Options{
		Now:            func() time.Time { return time.Unix(0, int64(t.Now*float64(time.Second))) },
		EndpointBlocks: 2 * blocks, MaxIndexBytes: 1 << 36, ReservationTTL: 1000 * time.Hour, MaxReservations: 1 << 30,
	})
	var eps []kvstate.EndpointSpec
	add := func(name string, n int, role kvstate.Role) {
		for i := range n {
			eps = append(eps, kvstate.EndpointSpec{Name: fmt.Sprint(name, i), Addr: fmt.Sprint(name, i), Role: role})
		}
	}
	if t.both {
		add("b", len(t.decodes), kvstate.RoleBoth)
	} else {
		add("p", len(t.prefills), kvstate.RolePrefill)
		add("d", len(t.decodes), kvstate.RoleDecode)
	}
	r.state.SetPool(kvstate.PoolSpec{Name: "replay", Models: []string{"*"}}, eps)
	r.pool = r.state.Pool("replay")
	for i, e := range r.pool.Endpoints() {
		if r.position[e] = i; e.Role == kvstate.RoleDecode {
			r.position[e] = i - len(t.prefills)
		}
	}
	r.picker.Policy = picker.DefaultPolicy()
	r.picker.Late, r.picker.Split = t.config.Late, t.config.Split
	r.queue.Promise = t.config.Promise.TTFT
	r.picker.AnswerWeight, r.picker.Promise = t.config.AnswerWeight, t.config.Promise
	// engines report their capacity; the other constants Tandem does not know, and learns how far off they are
	r.picker.Model.KVTokens = t.config.Engine.KVTokens
	r.tick = func() { r.ticking = false; r.dispatch() }
	r.After(0, r.scrape)
	r.After(0, r.sweep)
	return r
}

func (t *tandem) arrive(j *job) {
	r := t.replicas[j.ID%uint64(len(t.replicas))]
	r.state.CountPrompt(r.pool, j.Blocks)
	v := r.Fleet()
	r.look(j, v)
	j.conversation = r.state.Arrived(r.pool, j.whole(), int64(j.Input), 0, v)
	if !t.config.Late {
		c, err := r.picker.Pick(r.look(j, v), v)
		r.send(j, c, err)
		return
	}
	r.waiting[j.ID] = j
	r.queue.Arrive(&r.picker, r, j.ID, t.Now, r.picker.Model.FullStep())
	if r.waiting[j.ID] != nil {
		j.arrived, j.work = t.Now, r.picker.Work(&r.request, &r.view)
		r.publishQueued(j, &r.view)
		if !math.IsInf(t.config.MaxWait, 1) {
			r.After(t.config.MaxWait, func() { r.expire(j, t.config.MaxWait) })
		}
	}
	r.wake()
}

// expire ends the wait of a request that has waited for so long.
func (r *replica) expire(j *job, waited float64) {
	if longest := admission.MemoryWaits * r.config.MaxWait; r.queue.WaitsForMemory(j.ID) && waited < longest {
		r.After(1, func() { r.expire(j, waited+1) })
		return
	}
	j.lookedAt = -1
	r.queue.Expire(&r.picker, r, j.ID)
}

// Fleet implements [admission.Host].
func (r *replica) Fleet() *kvstate.View {
	r.state.View(r.pool, nil, &r.view)
	return &r.view
}

// Look implements [admission.Host].
func (r *replica) Look(id uint64, v *kvstate.View) *picker.Request {
	q := &r.request
	if j := r.waiting[id]; j != nil {
		if q = r.look(j, v); j.published != nil {
			r.publishQueued(j, v)
		}
	} else {
		r.remote[id].look(q, v)
	}
	q.Rand = admission.Chance(id) // the same at all replicas
	return q
}

// look returns the picker's request for a job, with its hits in the view.
func (r *replica) look(j *job, v *kvstate.View) *picker.Request {
	r.request = picker.Request{PromptTokens: int64(j.Input), Blocks: len(j.Blocks), Split: true,
		Rand: r.random.Uint64()}
	r.request.TPOT = r.config.AskTPOT
	r.request.Waited = r.Now - j.Arrival
	if r.config.Routed {
		r.state.Hits(r.pool, j.whole(), v)
		return &r.request
	}
	if j.hits == nil || r.Now-j.lookedAt > keepHits {
		j.hits, j.lookedAt = r.reportedHits(j, j.hits[:0]), r.Now
	}
	engines := r.engines()
	for i := range v.Endpoints {
		v.Endpoints[i].Hit = int(j.hits[i])
		v.Endpoints[i].Loads = kvstate.Loads{int32(engines[i].Loads(j.Blocks))}
	}
	r.state.FindUses(r.pool, j.Blocks, v)
	return &r.request
}

// scrapeSeconds is the interval at which engines' metrics are read.
const scrapeSeconds = 2.0

// scrape reads the counters of the engines, as long as there are requests.
func (r *replica) scrape() {
	at := time.Unix(0, int64(r.Now*float64(time.Second)))
	for _, e := range r.pool.Endpoints() {
		of := r.decodes
		if e.Role&kvstate.RoleDecode == 0 {
			of = r.prefills
		}
		d, g := of[r.position[e]], kvstate.UnknownSignals()
		g.At, g.ScrapedAt, g.Answers, g.Transfers, g.KVUsage = at, at, d.Written, d.Moved, d.Usage()
		g.Waiting = int64(d.Waiting())
		if !math.IsInf(r.config.Engine.KVTokens, 1) {
			g.KVTokens = int64(r.config.Engine.KVTokens)
			g.Host.Tokens = int64(d.HostTokens())
		}
		r.state.Observe(e, g)
	}
	r.After(scrapeSeconds, r.scrape)
}

// sweep teaches the state conversations' idle times.
func (r *replica) sweep() {
	r.pool.SweepMemory(time.Unix(0, int64(r.Now*float64(time.Second))))
	r.After(1, r.sweep)
}

// keepHits is how long a waiting request caches the result of its prefix lookup, in seconds.
const keepHits = 0.1

// reportedHits returns the hits of a prompt according to the engines' events, by position in the pool.
func (r *replica) reportedHits(j *job, hits []int32) []int32 {
	for _, e := range r.engines() {
		hits = append(hits, int32(e.Held(j.Blocks)))
	}
	return hits
}

// Send implements [admission.Host].
func (r *replica) Send(id uint64, _ *picker.Request, _ *kvstate.View, c picker.Choice, err error,
	how admission.Outcome) {
	j := r.waiting[id]
	delete(r.waiting, id)
	r.send(j, c, err)
	r.publish(func(other *replica) { other.removeRemote(id, how == admission.Dispatched) })
}

// Shed implements [admission.Host]: requests of a trace have no priority, so none is shed.
func (*replica) Shed(uint64) { panic("replay: a request without priority was shed") }

// ShortOfMemory implements [admission.Host].
func (*replica) ShortOfMemory() bool { return false }

func (r *replica) dispatch() {
	r.queue.Dispatch(&r.picker, r, r.Now, r.picker.Model.FullStep())
	r.wake()
}

// wake schedules another look at the waiting requests.
func (r *replica) wake() {
	if r.queue.Len() > 0 && !r.ticking {
		r.ticking = true
		r.After(tickSeconds, r.tick)
	}
}

// send reserves a choice and binds the request.
func (r *replica) send(j *job, c picker.Choice, err error) {
	if err != nil {
		// cannot happen: Config.Check
		panic(fmt.Sprintf("replay: a fleet in which nothing fails has no endpoint: %v", err))
	}
	b := &bookings{replica: r}
	r.bookings[j.ID] = b
	prefill, d, booking := -1, r.view.Endpoints[c.Decode].Endpoint, c.DecodeBooking(&r.view)
	booking.Of = j.conversation
	computes := d
	if c.Prefill >= 0 {
		computes = r.view.Endpoints[c.Prefill].Endpoint
	}
	r.state.Computes(r.pool, j.conversation, computes, &r.view)
	if c.Prefill < 0 {
		b.decode = r.book(d, booking, j.whole())
	} else { // D is chosen again, and counts the request then
		p := r.view.Endpoints[c.Prefill].Endpoint
		prefill, b.answer = r.position[p], c.AnswerTokens
		b.prefill = r.book(p, c.PrefillBooking(), j.whole())
		booking.Tentative = true
		b.decode = reserve(r, d, booking)
	}
	r.bind(j, prefill, r.position[d])
}

// book reserves a request on this replica now, and on the others after the delay.
func (r *replica) book(e *kvstate.Endpoint, b kvstate.Booking, blocks []uint64) kvstate.ReservationID {
	r.state.Routed(r.pool, e, blocks)
	r.publish(func(other *replica) { other.state.ApplyRouted(other.pool, other.pool.Endpoint(e.Addr), blocks) })
	return reserve(r, e, b)
}

// reserve reserves an endpoint on this replica now, and on the others after the delay.
func reserve(r *replica, e *kvstate.Endpoint, b kvstate.Booking) kvstate.ReservationID {
	id := r.state.Bookings.Reserve(e, b)
	r.publish(func(other *replica) {
		b := b
		b.Of = nil
		if b.From != nil {
			b.From = other.pool.Endpoint(b.From.Addr)
		}
		other.state.Bookings.ReserveAs(id, other.pool.Endpoint(e.Addr), b, nil)
	})
	return id
}

// publish applies do to the other replicas after the delay of sharing.
func (r *replica) publish(do func(other *replica)) {
	if r.config.Sharing < 0 {
		return
	}
	for _, other := range r.replicas {
		if other != r {
			r.After(r.config.Sharing, func() { do(other) })
		}
	}
}

// release ends a reservation here and, after the delay, at the other replicas.
func (r *replica) release(id kvstate.ReservationID, done bool) {
	end := func(s *kvstate.State) {
		if done {
			s.Bookings.Complete(id)
		} else {
			s.Bookings.Release(id)
		}
	}
	end(r.state)
	r.publish(func(other *replica) { end(other.state) })
}

func (t *tandem) prefilled(j *job) int {
	b := t.bookings[j.ID]
	r := b.replica
	r.release(b.prefill, true)
	v := r.Fleet()
	j.lookedAt = -1
	request := r.look(j, v)
	at := slices.IndexFunc(r.view.Endpoints, func(c kvstate.Candidate) bool {
		return c.Endpoint.Role&kvstate.RolePrefill != 0 && r.position[c.Endpoint] == j.prefill
	})
	request.MinAnswer, request.MaxAnswer = b.answer, b.answer
	p := r.view.Endpoints[at].Endpoint
	booking := kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: int64(j.Input),
		Need: int64(j.Input) + b.answer, From: p, Of: j.conversation}
	d, err := r.picker.PickDecode(request, v, at)
	if errors.Is(err, picker.ErrNoRoom) { // P answers, from its prefix cache
		d, booking.From, err = at, nil, nil
	}
	if err != nil {
		// cannot happen: Config.Check
		panic(fmt.Sprintf("replay: a fleet in which nothing fails has no decode endpoint: %v", err))
	}
	e := r.view.Endpoints[d].Endpoint
	first := b.decode
	b.decode = r.book(e, booking, j.whole())
	r.release(first, false) // until then P's memory counted as held
	return r.position[e]
}

func (t *tandem) done(j *job) {
	b := t.bookings[j.ID]
	b.replica.release(b.decode, false)
	delete(t.bookings, j.ID)
}
