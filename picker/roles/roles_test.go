package roles

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/residency"
	"tandem/picker"
)

// fleet returns n engines, so many of which prefill, with answers spread over the others.
func fleet(n, prefills int, arriving, waiting, answers, kvEach float64) Fleet {
	policy := picker.DefaultPolicy()
	f := Fleet{Model: &policy.Model, Promise: policy.Promise, Weight: policy.AnswerWeight, Pace: 1,
		Arriving: arriving, Waiting: waiting, Mean: .2}
	for i := range n {
		e := Engine{At: i, Word: kvstate.RoleDecode, Usable: true, Capacity: 1e6}
		if i < prefills {
			e.Word = kvstate.RolePrefill
		} else {
			e.Answers = answers / float64(n-prefills)
			e.KV = e.Answers * kvEach
		}
		f.Engines = append(f.Engines, e)
	}
	return f
}

func TestWant(t *testing.T) {
	for name, c := range map[string]struct {
		f    Fleet
		want int
		why  Why
	}{
		"an idle fleet stays as it is":                   {fleet(8, 4, 0, 0, 0, 0), 4, Cheapest},
		"few prompts, many answers":                      {fleet(8, 4, .5, 0, 400, 4000), 1, Cheapest},
		"prompts that need most of the fleet":            {fleet(8, 4, 5, 0, 40, 8000), 6, PromptsNeed},
		"what waits needs engines, too":                  {fleet(8, 2, 1, 30, 40, 8000), 6, Cheapest},
		"too little for both: answers keep theirs":       {fleet(8, 4, 12, 500, 200, 8000), 6, AnswersNeed},
		"answers that fill the memory of half the fleet": {fleet(8, 6, 12, 500, 320, 10_000), 4, AnswersNeed},
		"never the last engine that decodes":             {fleet(8, 4, 30, 900, 0, 0), 7, AnswersNeed},
		"never the last engine that prefills":            {fleet(8, 4, 0, 0, 2000, 4000), 1, AnswersNeed},
		"two engines":                                    {fleet(2, 1, 3, 50, 10, 8000), 1, AnswersNeed},
		"one engine":                                     {fleet(1, 0, 3, 50, 10, 8000), 0, TooFewEngines},
		"a little more work changes nothing":             {fleet(8, 4, 3.7, 0, 80, 8000), 4, PromptsNeed},
		"nor does a little less":                         {fleet(8, 4, 2.9, 0, 80, 8000), 4, PromptsNeed},
	} {
		w := c.f.Want()
		require.Equal(t, c.want, w.Prefills, "%s: %+v", name, w)
		require.Equal(t, c.why, w.Why, "%s: %+v", name, w)
		require.Equal(t, len(c.f.Engines), w.Prefills+w.Decodes, name)
	}
}

// Slower engines need more of the fleet for the same answers, as do a shorter promise and less memory.
func TestAnswersNeed(t *testing.T) {
	base := fleet(8, 4, 1, 0, 200, 8000)
	need := func(change func(*Fleet)) float64 {
		f := fleet(8, 4, 1, 0, 200, 8000)
		change(&f)
		return f.Want().Answers
	}
	usual := base.Want().Answers
	require.InDelta(t, 200*8000/.8e6, usual, 1e-9, "memory decides here")
	require.Greater(t, need(func(f *Fleet) { f.Promise.TPOT = .025 }), usual)
	require.Greater(t, need(func(f *Fleet) { f.Pace = 2.5 }), usual)
	require.InDelta(t, 2*usual, need(func(f *Fleet) {
		for i := range f.Engines {
			f.Engines[i].Capacity = .5e6
		}
	}), 1e-9)
	require.Positive(t, need(func(f *Fleet) { f.Pace = 10 }), "a promise that no engine keeps")
	require.InDelta(t, usual, need(func(f *Fleet) { f.Promise = picker.Targets{} }), 1e-9, "without one memory decides")
}

// The engine with the fewest answers begins to prefill, the one with the least prompts waiting to decode. Engines that
// have failed count for nothing, and one with a long queue keeps its word.
func TestChanges(t *testing.T) {
	f := fleet(8, 4, 5, 0, 40, 8000)
	f.Engines[6].Answers = 2
	c := f.Changes()
	require.Len(t, c, 1, "one of eight at a time")
	require.Equal(t, Change{At: 6, Word: kvstate.RolePrefill, Want: c[0].Want}, c[0])
	require.Equal(t, 6, c[0].Want.Prefills)

	f = fleet(8, 4, .5, 0, 400, 4000)
	for i, queue := range []float64{1, .2, .5, 3} {
		f.Engines[i].Queue = queue
	}
	require.Equal(t, 1, f.Changes()[0].At)
	for i := range f.Engines[:4] {
		f.Engines[i].Queue = 3
	}
	require.Empty(t, f.Changes(), "their prompts are computed first")
	f.Engines[2].Queue, f.Engines[2].Usable = 0, false
	require.Empty(t, f.Changes())

	f = fleet(4, 2, 0, 0, 400, 4000)
	for i := range f.Engines {
		f.Engines[i].Fixed = i < 2
	}
	require.Equal(t, 1, f.Want().Prefills)
	require.Empty(t, f.Changes(), "those that prefill have a fixed role")

	f = fleet(32, 16, 1, 0, 1600, 4000)
	require.Len(t, f.Changes(), 4)
}

// A new fleet has half of its engines for either leg at once; one that joins gets the word of the smaller half.
func TestFirstWords(t *testing.T) {
	f := fleet(5, 0, 0, 0, 0, 0)
	for i := range f.Engines {
		f.Engines[i].Word = 0
	}
	words := map[kvstate.Role]int{}
	for _, c := range f.Changes() {
		words[c.Word]++
	}
	require.Equal(t, map[kvstate.Role]int{kvstate.RoleDecode: 3, kvstate.RolePrefill: 2}, words)
	f = fleet(4, 1, 0, 0, 0, 0)
	f.Engines[3].Word = 0
	require.Equal(t, []Change{{At: 3, Word: kvstate.RolePrefill}}, f.Changes())
	f = fleet(1, 0, 0, 0, 0, 0)
	f.Engines[0].Word = 0
	require.Equal(t, []Change{{At: 0, Word: kvstate.RoleDecode}}, f.Changes())
}

// Whatever the fleet: some usable engine is left for either leg, and the words come to rest.
func TestWordsAtRandom(t *testing.T) {
	for seed := range uint64(2000) {
		random := rand.New(rand.NewPCG(seed, 3))
		n := 2 + random.IntN(20)
		f := fleet(n, 1+random.IntN(n-1), 10*random.Float64(), float64(random.IntN(2))*100*random.Float64(),
			500*random.Float64(), 10_000*random.Float64())
		for i := range f.Engines {
			f.Engines[i].Usable = random.IntN(8) > 0
			f.Engines[i].Queue = 3 * random.Float64() * random.Float64()
			f.Engines[i].Backlog = f.Engines[i].Queue * random.Float64()
		}
		f.Promise.TPOT = []float64{0, .02, .05}[random.IntN(3)]
		quiet := 0
		for range 4 * n {
			before := f.sums()
			changes := f.Changes()
			after := f.sums()
			require.LessOrEqual(t, len(changes), max(n/8, 1), "seed %d", seed)
			if before.prefills > 0 && before.prefills < before.engines {
				require.Positive(t, after.prefills, "seed %d", seed)
				require.Less(t, after.prefills, after.engines, "seed %d", seed)
			}
			if quiet++; len(changes) > 0 {
				quiet = 0
			}
		}
		require.Greater(t, quiet, n, "seed %d: with the same load the words change for ever", seed)
	}
}

// The rule reads a fleet from a view: external requests, prompts of others and all replicas' work included.
func TestOf(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := kvstate.New(kvstate.Options{Now: func() time.Time { return now }})
	s.SetPool(kvstate.PoolSpec{Name: "p", Models: []string{"*"}}, []kvstate.EndpointSpec{
		{Addr: "a", Role: kvstate.RoleBoth}, {Addr: "b", Role: kvstate.RoleBoth}, {Addr: "e", Role: kvstate.RoleEncode},
		{Addr: "p", Role: kvstate.RolePrefill},
	})
	p := s.Pool("p")
	s.Bookings.Reserve(p.Endpoint("a"), kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 100, Uncached: 100, Work: 2 * time.Second})
	s.Bookings.Reserve(p.Endpoint("a"), kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 100, Uncached: 100, Work: 2 * time.Second})
	s.Bookings.Reserve(p.Endpoint("b"), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 1000})
	policy := picker.DefaultPolicy()
	var v kvstate.View
	s.View(p, nil, &v)
	f := Of(&v, &policy, 7)
	require.Len(t, f.Engines, 3, "encoders have no word")
	require.True(t, f.Engines[2].Fixed)
	require.False(t, f.Engines[0].Fixed)
	require.InDelta(t, 4, f.Engines[0].Queue, 1e-6)
	require.InDelta(t, 2, f.Engines[0].Backlog, 1e-6, "one of two is at work")
	require.Zero(t, f.Engines[0].Answers)
	require.Zero(t, f.Engines[0].KV, "prompts that wait to be computed are no answers")
	require.InDelta(t, 1, f.Engines[1].Answers, 0)
	require.InDelta(t, 1128, f.Engines[1].KV, 1e-6)
	before := f.Arriving
	require.Positive(t, before)
	s.SetWord(p.Endpoint("a"), kvstate.RolePrefill)
	s.SetWord(p.Endpoint("b"), kvstate.RoleDecode)
	s.View(p, nil, &v)
	f = Of(&v, &policy, 7)
	require.InDelta(t, before, f.Arriving, 1e-9, "work is the same, with words and without")
	require.Equal(t, kvstate.RolePrefill, f.Engines[0].Word)

	// The only engines that prefill are out: others do both legs until they are back or others have the word. Only one
	// word changes.
	s.Health.Mark(p.Endpoint("a"), false, kvstate.CauseCheck, "")
	s.Health.Mark(p.Endpoint("p"), false, kvstate.CauseCheck, "")
	s.SetWord(p.Endpoint("a"), kvstate.RolePrefill)
	s.View(p, nil, &v)
	f = Of(&v, &policy, 0)
	require.Equal(t, []kvstate.Role{kvstate.RolePrefill, kvstate.RoleDecode, kvstate.RolePrefill},
		[]kvstate.Role{f.Engines[0].Word, f.Engines[1].Word, f.Engines[2].Word})
}

// Engines serve whole requests, all at once, while two copies of the conversations that come back do not fit into their
// memory and few answers run, and have words again when these take clearly less, or clearly more answers run.
func TestWholeEngines(t *testing.T) {
	f := fleet(4, 2, 1, 0, 20, 4000)
	answers := func(each float64) {
		for i := range f.Engines {
			f.Engines[i].Answers = each
		}
	}
	f.Live, f.Memory = 1.9e6, 4e6
	for _, c := range f.Changes() {
		require.NotEqual(t, kvstate.RoleBoth, c.Word, "they fit")
	}
	f.Live = 2.1e6
	answers(7)
	for _, c := range f.Changes() {
		require.NotEqual(t, kvstate.RoleBoth, c.Word, "prompts would delay many answers")
	}
	answers(6)
	changes := f.Changes()
	require.Len(t, changes, 4)
	for _, c := range changes {
		require.Equal(t, kvstate.RoleBoth, c.Word)
		require.Equal(t, "two copies of the conversations that come back do not fit", c.Reason())
	}
	f.Live = 1.9e6
	require.Empty(t, f.Changes(), "not at once back")
	answers(10)
	require.Empty(t, f.Changes(), "nor for some answers more")
	several := fleet(4, 2, 1, 0, 20, 4000)
	several.Live, several.Memory, several.Engines = f.Live, f.Memory, slices.Clone(f.Engines)
	several.Engines[0].Answers = 11
	require.Len(t, several.Changes(), 4, "but for many")
	f.Live = 1.6e6
	words := map[kvstate.Role]int{}
	for _, c := range f.Changes() {
		words[c.Word]++
	}
	require.Equal(t, map[kvstate.Role]int{kvstate.RoleDecode: 2, kvstate.RolePrefill: 2}, words)
	f.Live, f.Memory = 2.1e6, 0
	for _, c := range f.Changes() {
		require.NotEqual(t, kvstate.RoleBoth, c.Word, "nobody knows their memory")
	}
}

// What takes memory counts where every endpoint may serve either leg, and says how much it has.
func TestMemoryOfAView(t *testing.T) {
	spec := func(role kvstate.Role) *kvstate.Endpoint {
		return &kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Role: role}}
	}
	m := &residency.Memory{Tokens: 1e6}
	both := kvstate.Candidate{Endpoint: spec(kvstate.RoleBoth), Usable: true, Memory: m}
	out, unknown, fixed := both, both, both
	out.Usable, unknown.Memory, fixed.Endpoint = false, nil, spec(kvstate.RoleDecode)
	loads, encodes := out, both // loads: its model, and has said nothing yet
	loads.Memory, encodes.Memory, encodes.Endpoint = nil, nil, spec(kvstate.RoleEncode)
	for want, all := range map[float64][]kvstate.Candidate{
		1e6: {both, out, loads, encodes}, 2e6: {both, both}, 0: {both, unknown},
	} {
		require.InDelta(t, want, memory(&kvstate.View{Endpoints: all}), 0)
	}
	require.Zero(t, memory(&kvstate.View{Endpoints: []kvstate.Candidate{both, fixed}}))
}
