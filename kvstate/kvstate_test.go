package kvstate

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/media"
	"tandem/kvstate/paramstore"
)

func pd(prefills, decodes int) []EndpointSpec {
	var eps []EndpointSpec
	for i := range prefills {
		eps = append(eps, EndpointSpec{Name: fmt.Sprint("p", i), Addr: fmt.Sprint("10.0.0.", i, ":8000"), Role: RolePrefill})
	}
	for i := range decodes {
		eps = append(eps, EndpointSpec{Name: fmt.Sprint("d", i), Addr: fmt.Sprint("10.0.1.", i, ":8000"), Role: RoleDecode})
	}
	return eps
}

// answer books an answer to that many tokens.
func answer(tokens int64) Booking { return Booking{For: RoleDecode, PromptTokens: tokens} }

func TestRoles(t *testing.T) {
	for _, name := range []string{"prefill", "decode", "both"} {
		r, err := ParseRole(name)
		require.NoError(t, err)
		require.Equal(t, name, r.String())
	}
	_, err := ParseRole("prefil")
	require.EqualError(t, err, `"prefil" is not a role: one of prefill, decode, both, encode`)
	require.Equal(t, "none", Role(0).String())
}

func TestReserveAndRelease(t *testing.T) {
	s := New(Options{MaxReservations: 2})
	s.SetPool(PoolSpec{Name: "p"}, pd(1, 1))
	e := s.Pool("p").Endpoints()[0]
	load := func() [2]int64 { r, n := e.Load(); return [2]int64{r, n} }

	a, b := s.Bookings.Reserve(e, answer(100)), s.Bookings.Reserve(e, answer(-7))
	require.NotEqual(t, a, b)
	require.Equal(t, [2]int64{2, 100}, load(), "a negative number of tokens is none")
	require.Zero(t, s.Bookings.Reserve(e, answer(5)), "no room for a third")
	require.Equal(t, 2, s.Bookings.Reservations())

	require.False(t, s.Bookings.Release(0))
	require.False(t, s.Bookings.Release(a^1<<40), "an id that was never given")
	require.True(t, s.Bookings.Release(a))
	require.False(t, s.Bookings.Release(a), "once")
	require.True(t, s.Bookings.Release(b))
	require.Equal(t, [2]int64{0, 0}, load())
	require.Zero(t, s.Bookings.Reservations())
}

func TestReservationsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{ReservationTTL: time.Minute})
		s.SetPool(PoolSpec{Name: "p"}, pd(1, 0))
		e := s.Pool("p").Endpoints()[0]
		ctx, stop := context.WithCancel(t.Context())
		go s.Run(ctx)
		lost := s.Bookings.Reserve(e, answer(100))
		<-time.After(30 * time.Second)
		held := s.Bookings.Reserve(e, answer(10))
		<-time.After(29 * time.Second)
		require.Equal(t, 2, s.Bookings.Reservations())
		<-time.After(3 * time.Second)
		requests, tokens := e.Load()
		require.Equal(t, []int64{1, 10}, []int64{requests, tokens})
		require.False(t, s.Bookings.Release(lost), "expired already")
		require.True(t, s.Bookings.Release(held))
		stop()
		synctest.Wait() // Run ends, or the bubble deadlocks
	})
}

func TestSetPool(t *testing.T) {
	s := New(Options{})
	spec := PoolSpec{Name: "p", Models: []string{"m"}}
	s.SetPool(spec, pd(2, 1))
	before := s.Pool("p")
	stays, changes, goes := before.Endpoints()[0], before.Endpoints()[1], before.Endpoints()[2]
	prompt := long(8, 0, 1)
	var booked []ReservationID
	for _, e := range before.Endpoints() {
		booked = append(booked, s.Bookings.Reserve(e, answer(10)))
		s.Routed(before, e, prompt)
		s.Health.MarkFailed(e)
		s.SetModels(e, []Model{{ID: e.Name}})
	}

	next := pd(2, 0)
	next[1].Group = "b"
	next = append(next, EndpointSpec{Name: "other name", Addr: next[0].Addr, Role: RoleDecode}, EndpointSpec{Name: "new", Addr: "10.0.2.1:8000", Role: RoleDecode})
	s.SetPool(spec, next)
	p := s.Pool("p")
	require.Len(t, p.Endpoints(), 3, "one address, one endpoint")
	require.Same(t, stays, p.Endpoints()[0])
	changed := p.Endpoint(changes.Addr)
	require.NotSame(t, changes, changed)
	require.Equal(t, "b", changed.Group)
	require.Same(t, changed, p.Endpoints()[2], "groups stand together")
	require.Nil(t, p.Endpoint(goes.Addr))

	var v View
	s.View(p, prompt, &v)
	for i, kept := range []bool{true, false, true} {
		want := Candidate{Endpoint: p.Endpoints()[i], Usable: true, Weight: 100, Learned: Learned{1, 1, 1}}
		if kept {
			want.Requests, want.PromptTokens, want.Hit = 1, 10, 8
		}
		require.Equal(t, want, v.Endpoints[i])
		require.Equal(t, kept, want.Endpoint.Failed())
	}

	s.Routed(p, goes, prompt) // too late: no effect
	for _, id := range booked {
		require.True(t, s.Bookings.Release(id), "also on those that left or changed")
	}
	for _, e := range []*Endpoint{stays, changes, goes, changed} {
		requests, tokens := e.Load()
		require.Zero(t, requests)
		require.Zero(t, tokens)
	}

	s.RetainPools(nil)
	require.Nil(t, s.Pool("p"))
	require.Empty(t, s.Pools())
	s.View(before, prompt, &v) // a request with the old pool may continue
	require.Len(t, v.Endpoints, 3)
}

func TestPoolFor(t *testing.T) {
	s := New(Options{})
	require.Nil(t, s.PoolFor(""))
	require.Nil(t, s.PoolFor("a"))
	s.SetPool(PoolSpec{Name: "named", Models: []string{"a", "b"}}, nil)
	require.Nil(t, s.PoolFor("x"))
	s.SetPool(PoolSpec{Name: "any", Models: []string{"*"}}, pd(1, 1))
	s.SetPool(PoolSpec{Name: "any2", Models: []string{"*", "c"}}, pd(1, 1))
	s.SetModels(s.Pool("any2").Endpoints()[1], []Model{{ID: "lora"}, {ID: "a"}})
	for model, want := range map[string]string{"": "named", "a": "named", "b": "named", "c": "any2", "lora": "any2", "x": "any"} {
		require.Equal(t, want, s.PoolFor(model).Spec.Name, model)
	}
	require.Equal(t, []string{"a", "b"}, s.ModelNames(s.Pool("named")))
	require.Equal(t, []string{"a", "c", "lora"}, s.ModelNames(s.Pool("any2")))
	require.Empty(t, s.Models(s.Pool("any")))
}

// An adapter that an engine reports with its parent is found in the pool of that engine, though the pool lists other
// models; a model that it reports besides is not. A name that a pool lists, or has configured, comes first.
func TestPoolForReportedAdapters(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "chat", Models: []string{"llama"}}, pd(1, 1))
	s.SetPool(PoolSpec{Name: "other", Models: []string{"mistral", "taken"}}, pd(1, 1))
	require.Nil(t, s.PoolFor("sql"))
	s.SetModels(s.Pool("chat").Endpoints()[1], []Model{{ID: "llama", Owner: "vllm"},
		{ID: "sql", Root: "/adapters/sql", Parent: "llama", Owner: "vllm"}, {ID: "taken", Parent: "llama"}, {ID: "besides"}})
	require.Equal(t, "chat", s.PoolFor("sql").Spec.Name)
	require.Equal(t, "other", s.PoolFor("taken").Spec.Name)
	require.Nil(t, s.PoolFor("besides"))
	require.Contains(t, s.Models(s.Pool("chat")), Model{ID: "sql", Root: "/adapters/sql", Parent: "llama", Owner: "vllm"})
	require.NotContains(t, s.ModelNames(s.Pool("chat")), "besides")

	configured := pd(1, 1)
	configured[1].LoRAs = "sql"
	s.SetPool(PoolSpec{Name: "late", Models: []string{"qwen"}}, configured)
	require.Equal(t, "late", s.PoolFor("sql").Spec.Name)
	s.SetModels(s.Pool("chat").Endpoints()[1], nil)
	require.Equal(t, "late", s.PoolFor("sql").Spec.Name)
}

func TestEqualListsOfModelsAreShared(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, pd(1, 2))
	e := s.Pool("p").Endpoints()
	for i, ids := range [][]string{{"a", "b"}, {"a", "b"}, {"a"}} {
		s.SetModels(e[i], []Model{{ID: ids[0]}, {ID: ids[len(ids)-1]}}[:len(ids)])
		require.Equal(t, ids, e[i].Models())
	}
	require.Same(t, &e[0].Models()[0], &e[1].Models()[0])
	s.SetModels(e[1], []Model{{ID: "c"}})
	require.Equal(t, []string{"a", "b"}, e[0].Models(), "the other keeps its own")
}

func TestHealth(t *testing.T) {
	both := EndpointSpec{Name: "b0", Addr: "10.0.2.0:8000", Role: RoleBoth}
	for _, c := range []struct {
		name   string
		fleet  []EndpointSpec
		failed []string
		out    []string // excluded by View
	}{
		{"never asked", pd(2, 2), nil, nil},
		{"one of each", pd(2, 2), []string{"p0", "d1"}, []string{"p0", "d1"}},
		{"a whole role", pd(2, 2), []string{"p0", "p1", "d0"}, []string{"d0"}},
		{"everybody", pd(2, 2), []string{"p0", "p1", "d0", "d1"}, nil},
		{"both stands in for the role", append(pd(1, 1), both), []string{"p0", "d0"}, []string{"p0", "d0"}},
		{"both is the last that decodes", append(pd(1, 1), both), []string{"b0", "d0"}, nil},
		{"both is not the last", append(pd(1, 1), both), []string{"b0"}, []string{"b0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := New(Options{})
			s.SetPool(PoolSpec{Name: "p"}, c.fleet)
			p := s.Pool("p")
			for _, e := range p.Endpoints() {
				for _, name := range c.failed {
					if e.Name == name {
						require.True(t, s.Health.MarkFailed(e))
						require.False(t, s.Health.MarkFailed(e), "no news")
					}
				}
			}
			var v View
			s.View(p, nil, &v)
			var out []string
			for _, c := range v.Endpoints {
				if !c.Usable {
					out = append(out, c.Endpoint.Name)
				}
				s.Health.MarkGood(c.Endpoint)
				require.False(t, s.Health.MarkGood(c.Endpoint), "no news")
			}
			require.Equal(t, c.out, out)
			s.View(p, nil, &v)
			for _, c := range v.Endpoints {
				require.True(t, c.Usable)
			}
		})
	}
}

func ticket(n uint64) (id [16]byte) {
	binary.LittleEndian.PutUint64(id[:], n)
	return id
}

func TestConsume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{ConsumedTTL: time.Minute, MaxConsumed: 8})
		require.True(t, s.HandOvers.Consume(ticket(1)))
		require.False(t, s.HandOvers.Consume(ticket(1)))
		<-time.After(59 * time.Second)
		for i := range uint64(3) {
			require.True(t, s.HandOvers.Consume(ticket(10+i)))
		}
		require.False(t, s.HandOvers.Consume(ticket(20)), "a generation is full: no ticket is forgotten for another")
		<-time.After(2 * time.Second)
		require.True(t, s.HandOvers.Consume(ticket(20)), "and a new one begins")
		for i := range uint64(3) {
			require.False(t, s.HandOvers.Consume(ticket(10+i)), "still remembered")
		}
		<-time.After(58 * time.Second)
		require.False(t, s.HandOvers.Consume(ticket(12)), "for a whole time to live")
		<-time.After(3 * time.Minute)
		s.sweep(time.Now())
		<-time.After(3 * time.Minute)
		s.sweep(time.Now())
		require.Empty(t, s.HandOvers.consumed.seen.now)
		require.Empty(t, s.HandOvers.consumed.seen.old)
	})
}

func TestConsumeOnceAmongMany(t *testing.T) {
	s := New(Options{})
	var first sync.Map
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for n := range uint64(500) {
				if s.HandOvers.Consume(ticket(n)) {
					_, again := first.LoadOrStore(n, true)
					require.False(t, again)
				}
			}
		})
	}
	group.Wait()
	for n := range uint64(500) {
		_, ok := first.Load(n)
		require.True(t, ok)
	}
}

func TestHandOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{HandOverTTL: time.Minute, MaxHandOverBytes: 100})
		params := []byte(`{"remote_block_ids":[1,2,3]}`)
		ref, err := s.HandOvers.PutHandOver(params)
		require.NoError(t, err)
		params[0] = 'x'
		got, ok := s.HandOvers.TakeHandOver(ref)
		require.True(t, ok)
		require.Equal(t, `{"remote_block_ids":[1,2,3]}`, string(got), "a copy was kept")
		_, ok = s.HandOvers.TakeHandOver(ref)
		require.False(t, ok, "once")
		_, ok = s.HandOvers.TakeHandOver([16]byte{})
		require.False(t, ok)

		late, err := s.HandOvers.PutHandOver(make([]byte, 60))
		require.NoError(t, err)
		_, err = s.HandOvers.PutHandOver(make([]byte, 41))
		require.ErrorIs(t, err, paramstore.ErrFull)
		<-time.After(61 * time.Second)
		_, ok = s.HandOvers.TakeHandOver(late)
		require.False(t, ok, "expired")
		_, err = s.HandOvers.PutHandOver(make([]byte, 100))
		require.NoError(t, err, "its room is free again")
		<-time.After(61 * time.Second)
		s.sweep(time.Now())
		entries, bytes := s.HandOvers.handOvers.Held()
		require.Zero(t, entries+bytes)
	})
}

func TestPromptTokens(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, nil)
	p := s.Pool("p")
	require.EqualValues(t, 1, p.PromptTokens(0))
	require.EqualValues(t, 1000, p.PromptTokens(4000), "before anything is learned")
	for range 100 {
		p.ObservePrompt(60_000, 10_000)
		p.ObservePrompt(400, 10) // small ones, mostly JSON
		p.ObservePrompt(0, 10)
		p.ObservePrompt(10, 0)
		p.ObservePrompt(10, 1000) // nonsense
	}
	require.InDelta(t, 1000, p.PromptTokens(6000), 20)
	for range 3000 {
		p.ObservePrompt(30_000, 10_000)
	}
	require.InDelta(t, 2000, p.PromptTokens(6000), 60, "it follows")
	for range 3000 {
		p.ObservePrompt(1<<20, 10)
	}
	require.EqualValues(t, 1000, p.PromptTokens(16000), "within bounds")
	s.SetPool(PoolSpec{Name: "p"}, pd(1, 1))
	require.EqualValues(t, 1000, s.Pool("p").PromptTokens(16000), "what was learned stays with the pool")
}

// TestLearnPrompt: only text teaches how many bytes a token has, and what texts are estimated by is the same after any
// number of prompts with media, with token ids, or of nonsense.
func TestLearnPrompt(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, nil)
	p := s.Pool("p")
	text := PromptSize{Text: 80_000}
	for range 30 {
		p.LearnPrompt("m", &PromptSize{Text: 16_000}, 4000)
	}
	before, densest := p.EstimateTokens("m", &text), p.density.Most()
	require.InDelta(t, 20_000, before, 10)
	image := PromptSize{Text: 48, Media: media.Count{media.Image: 1}}
	require.EqualValues(t, 1024+12, p.EstimateTokens("m", &image))
	for range 30 {
		p.LearnPrompt("m", &image, 1512)
		p.LearnPrompt("m", &PromptSize{Text: 100, Counted: 50_000}, 50_000)
		p.LearnPrompt("m", &PromptSize{Text: 100}, 0)
	}
	require.Equal(t, before, p.EstimateTokens("m", &text))
	require.InDelta(t, densest, p.density.Most(), 0)
	require.InDelta(t, 1512, p.EstimateTokens("m", &image), 50)
	require.EqualValues(t, 50_000+25, p.EstimateTokens("m", &PromptSize{Text: 100, Counted: 50_000}))
	s.SetPool(PoolSpec{Name: "p"}, pd(1, 1))
	require.InDelta(t, 1512, s.Pool("p").EstimateTokens("m", &image), 50, "what was learned stays with the pool")
}

// TestMediaTeachNoSpeed: Work lacks what it takes to encode media, so the time of such a prompt says nothing.
func TestMediaTeachNoSpeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{})
		s.SetPool(PoolSpec{Name: "p"}, pd(1, 1))
		e := s.Pool("p").Endpoints()[0]
		work := func(media bool, took time.Duration) {
			id := s.Bookings.Reserve(e, Booking{For: RolePrefill, PromptTokens: 1500, Uncached: 1500, Work: 100 * time.Millisecond, Media: media})
			time.Sleep(took)
			s.Bookings.Complete(id)
		}
		for range 50 {
			work(true, 3*time.Second)
		}
		require.InDelta(t, 1, e.state.speedAt(time.Now().UnixNano()), 0.001)
		for range 50 {
			work(false, 200*time.Millisecond)
		}
		require.Greater(t, e.state.speedAt(time.Now().UnixNano()), 1.5)
	})
}

// Everything concurrently, under the race detector; at the end everything is at zero.
func TestStress(t *testing.T) {
	s := New(Options{EndpointBlocks: 256})
	spec := PoolSpec{Name: "p", Models: []string{"*"}}
	fleet := pd(8, 8)
	s.SetPool(spec, fleet)
	var everSeen sync.Map
	ctx, stop := context.WithCancel(t.Context())
	var background, requests sync.WaitGroup
	background.Go(func() { s.Run(ctx) })
	background.Go(func() {
		for r := rand.New(rand.NewPCG(1, 2)); ctx.Err() == nil; {
			some := append([]EndpointSpec(nil), fleet...)
			r.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
			some = some[:4+r.IntN(12)]
			some[0].Group = fmt.Sprint(r.IntN(3))
			s.SetPool(spec, some)
		}
	})
	for worker := range uint64(6) {
		requests.Go(func() {
			r, v := rand.New(rand.NewPCG(worker, 3)), View{}
			for range 2000 {
				p := s.PoolFor("m")
				hashes := long(1+r.IntN(40), r.IntN(20), byte(r.IntN(4)))
				s.View(p, hashes, &v)
				for _, c := range v.Endpoints {
					if c.Requests < 0 || c.PromptTokens < 0 || c.Hit > len(hashes) {
						t.Errorf("impossible candidate %+v", c)
					}
				}
				e := v.Endpoints[r.IntN(len(v.Endpoints))].Endpoint
				everSeen.Store(e, true)
				id := s.Bookings.Reserve(e, Booking{For: Role(1 + r.IntN(3)), PromptTokens: int64(r.IntN(1000)), Uncached: 10, Work: time.Duration(r.IntN(1000))})
				s.Routed(p, e, hashes)
				if r.IntN(4) == 0 {
					s.Health.MarkFailed(e)
				} else {
					s.Health.MarkGood(e)
				}
				s.SetModels(e, []Model{{ID: "m"}})
				p.ObservePrompt(400, 100)
				requests.Go(func() { s.Bookings.Release(id) })
				if s.Bookings.Release(id) && s.Bookings.Release(id) { //nolint:staticcheck // the second must say no
					t.Error("released twice")
				}
			}
		})
	}
	requests.Wait()
	stop()
	background.Wait()
	require.Zero(t, s.Bookings.Reservations())
	everSeen.Range(func(e, _ any) bool {
		requests, tokens := e.(*Endpoint).Load()
		require.Zero(t, requests)
		require.Zero(t, tokens)
		require.Zero(t, e.(*Endpoint).state.queue.n.Load())
		require.Zero(t, e.(*Endpoint).state.queue.total.Load())
		return true
	})
}

func TestReserveAllocates(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, pd(1, 1))
	e := s.Pool("p").Endpoints()[0]
	budget.Allocs(t, 1000, 0, func() { s.Bookings.Release(s.Bookings.Reserve(e, answer(10))) })
}

func BenchmarkReserve(b *testing.B) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, pd(1, 1))
	e := s.Pool("p").Endpoints()[0]
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			s.Bookings.Release(s.Bookings.Reserve(e, answer(10)))
		}
	})
}

// Endpoints of a group are adjacent in a view, whichever endpoints are excluded.
func TestGroupAt(t *testing.T) {
	s := New(Options{})
	var eps []EndpointSpec
	for i, group := range []string{"b", "", "a", "b", "a", "b"} {
		eps = append(eps, EndpointSpec{Addr: fmt.Sprint(i), Role: RoleBoth, Group: group})
	}
	s.SetPool(PoolSpec{Name: "p"}, eps)
	var v View
	s.View(s.Pool("p"), nil, &v)
	groups := func() (all [][2]int) {
		for i := range v.Endpoints {
			from, to := v.GroupAt(i)
			all = append(all, [2]int{from, to})
		}
		return all
	}
	require.Equal(t, [][2]int{{0, 1}, {1, 3}, {1, 3}, {3, 6}, {3, 6}, {3, 6}}, groups())
	v.Endpoints = slices.Delete(v.Endpoints, 2, 4)
	require.Equal(t, [][2]int{{0, 1}, {1, 2}, {2, 4}, {2, 4}}, groups())
	v.Grouped = false
	require.Equal(t, [][2]int{{0, 4}, {0, 4}, {0, 4}, {0, 4}}, groups())
}
