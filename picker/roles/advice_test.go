package roles

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// loaded is a fleet with fixed roles that computes so many seconds of prompts per second, and writes so many tokens per
// second of answers with 8,000 tokens of KV each. As many answers run at once as the engines need for that.
func loaded(prefills, decodes int, prompts, tokens float64) Fleet {
	const kv = 8000
	f := fleet(prefills+decodes, prefills, min(prompts, float64(prefills)), 0, 0, kv)
	for i := range f.Engines {
		f.Engines[i].Fixed = true
	}
	each := f.Model.DecodeAnswer + f.Model.DecodeToken*kv
	busy := min(each*tokens/float64(decodes), .99)
	answers := tokens / float64(decodes) * f.Model.DecodeStep / (1 - busy)
	for i := prefills; i < len(f.Engines); i++ {
		f.Engines[i].Answers, f.Engines[i].KV = answers, answers*kv
	}
	return f
}

// What the load needs is the same on any fleet that suffices: who scales by it comes to rest. On a fleet that does not
// suffice more is needed than there is.
func TestNeeds(t *testing.T) {
	for _, tokens := range []float64{0, 500, 2000, 8000, 20_000} {
		enough := loaded(1, 40, .5, tokens)
		want := enough.Needs().Answers
		for decodes := 1; decodes <= 40; decodes++ {
			f := loaded(1, decodes, .5, tokens)
			if got := f.Needs().Answers; float64(decodes) >= want {
				require.InDelta(t, want, got, 1e-6, "%v tokens/s on %d", tokens, decodes)
				step := f.Model.DecodeStep + f.Engines[1].Answers*(f.Model.DecodeAnswer+f.Model.DecodeToken*8000)
				require.LessOrEqual(t, step, margin*f.Promise.TPOT+1e-9)
				require.LessOrEqual(t, f.Engines[1].KV, fullKV*1e6+1e-6)
			} else {
				require.Greater(t, got, float64(decodes), "%v tokens/s on %d", tokens, decodes)
			}
		}
	}
	for name, c := range map[string]struct {
		change           func(*Fleet)
		prompts, answers float64
	}{
		"memory decides":      {func(*Fleet) {}, 2, 3.04},
		"prompts wait":        {func(f *Fleet) { f.Waiting, f.Engines[0].Backlog = 30, 21 }, 3, 3.04},
		"a shorter promise":   {func(f *Fleet) { f.Promise.TPOT = .03 }, 2, 3.744},
		"none":                {func(f *Fleet) { f.Promise.TPOT = 0 }, 2, 3.04},
		"one nobody can keep": {func(f *Fleet) { f.Promise.TPOT = .001 }, 2, 4.16},
		"less memory, where they do not fit": {func(f *Fleet) {
			for i := range f.Engines {
				f.Engines[i].Capacity = 2e5
			}
		}, 2, 7.347},
		"full engines work": {func(f *Fleet) {
			for i := range f.Engines {
				f.Engines[i].Usable = f.Engines[i].Answers == 0
			}
		}, 2, 3.04},
	} {
		f := loaded(2, 6, 1.7, 8000)
		c.change(&f)
		n := f.Needs()
		require.InDelta(t, c.prompts, n.Prompts, 1e-9, name)
		require.InDelta(t, c.answers, n.Answers, .01, name)
		require.Equal(t, Engines{All: 8, Prefills: 2, Decodes: 6}, n.Engines, name)
	}
	idle := fleet(8, 4, 0, 0, 0, 0)
	n := idle.Needs()
	require.Equal(t, Needs{prefills: 4, decodes: 4, Engines: Engines{All: 8, Prefills: 4, Decodes: 4, Either: true}}, n)
}

// advised gives advice of a fleet every few seconds for some time, and returns all changes of what is wanted.
func advised(a *Advisor, now *time.Time, whole bool, of time.Duration, f func() Fleet) (changes []string, last Advice) {
	for end := now.Add(of); now.Before(end); *now = now.Add(kvstate.Seconds(Every)) {
		state := f()
		got := a.Next(*now, &state, whole)
		if got.WantedPrefill != last.WantedPrefill || got.WantedDecode != last.WantedDecode {
			changes = append(changes, fmt.Sprintf("%d+%d", got.WantedPrefill, got.WantedDecode))
		}
		last = got
	}
	return changes, last
}

func TestAdvisor(t *testing.T) {
	now := time.Unix(1e9, 0)
	steady := func(prompts, tokens float64) func() Fleet {
		return func() Fleet { return loaded(4, 8, prompts, tokens) }
	}
	var a Advisor
	changes, _ := advised(&a, &now, false, 57*time.Second, steady(1.5, 8000))
	require.Empty(t, changes, "nothing is known in the first minute")
	changes, _ = advised(&a, &now, false, 10*time.Minute, steady(1.5, 8000))
	require.Equal(t, []string{"2+4"}, changes)
	changes, _ = advised(&a, &now, false, 12*time.Second, steady(4, 20_000))
	require.Equal(t, []string{"2+4"}, changes, "a burst changes nothing")
	changes, _ = advised(&a, &now, false, 5*time.Minute, steady(1.5, 8000))
	require.Equal(t, []string{"2+4"}, changes)
	changes, _ = advised(&a, &now, false, time.Minute, steady(3.3, 20_000))
	require.Equal(t, []string{"2+4", "4+8"}, changes, "what lasts does")
	changes, _ = advised(&a, &now, false, 4*time.Minute, steady(.5, 0))
	require.Equal(t, []string{"4+8"}, changes, "a number falls after five minutes")
	changes, last := advised(&a, &now, false, 2*time.Minute, steady(.5, 0))
	require.Equal(t, []string{"4+8", "1+1"}, changes, "and never to none")
	require.Equal(t, 4, last.Prefills)
	changes, last = advised(&a, &now, false, 10*time.Minute, func() Fleet {
		f := loaded(4, 8, 0, 0)
		for i := range f.Engines {
			f.Engines[i].Usable = false
		}
		return f
	})
	require.Equal(t, []string{"1+1"}, changes, "%+v", last)
	require.LessOrEqual(t, len(a.last), 101)

	a = Advisor{}
	changes, _ = advised(&a, &now, false, 2*time.Minute, steady(3, 20_000))
	require.Equal(t, []string{"4+8"}, changes)
	changes, _ = advised(&a, &now, false, time.Hour, func() Fleet {
		f := loaded(4, 8, 0, 0)
		for i := range f.Engines {
			f.Engines[i].Usable = i%4 == 3
		}
		return f
	})
	require.Equal(t, []string{"4+8"}, changes, "what one engine in four serves says nothing")

	a = Advisor{}
	advised(&a, &now, false, 2*time.Minute, func() Fleet { return loaded(2, 2, 3, 1000) })
	_, last = advised(&a, &now, false, 6*time.Second, func() Fleet {
		f := loaded(2, 2, 3, 1000)
		f.Engines[0].Usable, f.Engines[2].Usable = false, false
		return f
	})
	require.Equal(t, 1, last.Prefill, "one of each has failed, and answers need the other one")
	require.Equal(t, 1, last.Decode)

	a = Advisor{}
	changes, last = advised(&a, &now, true, 2*time.Minute, steady(2.5, 8000))
	require.Equal(t, []string{"0+6"}, changes, "without legs decode computes all prompts")
	require.Equal(t, "6 would serve this", first(last.Sentence()))
}

func first(s string, _ bool) string { return s }

// An autoscaler that follows the advice comes to rest, though engines take two minutes to start and the load is noisy,
// and has enough after each change of the traffic.
func TestScaledFleet(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 7))
		var a Advisor
		now := time.Unix(1e9, 0)
		type starting struct {
			at              time.Time
			prefill, decode int
		}
		var due []starting
		prefills, decodes, waiting := 1, 1, 0.0
		for phase, load := range [][2]float64{{.5, 1000}, {4, 12_000}, {1, 15_000}, {.1, 500}} {
			load[0], load[1] = load[0]*(.8+.4*random.Float64()), load[1]*(.8+.4*random.Float64())
			settled := Advice{}
			for s := 0; s < 2400; s += int(Every) {
				noise := func() float64 { return .9 + .2*random.Float64() }
				prompts, tokens := load[0]*noise(), load[1]*noise()
				waiting = max(waiting+(prompts-float64(prefills))*Every, 0)
				f := loaded(prefills, decodes, prompts, tokens)
				f.Waiting = waiting
				got := a.Next(now, &f, false)
				for len(due) > 0 && !due[0].at.After(now) {
					prefills, decodes = due[0].prefill, due[0].decode
					due = due[1:]
				}
				last := starting{prefill: prefills, decode: decodes}
				if len(due) > 0 {
					last = due[len(due)-1]
				}
				if got.WantedPrefill > 0 && (last.prefill != got.WantedPrefill || last.decode != got.WantedDecode) {
					due = append(due, starting{now.Add(2 * time.Minute), got.WantedPrefill, got.WantedDecode})
				}
				if s == 1500 {
					settled = got
				}
				now = now.Add(kvstate.Seconds(Every))
			}
			name := fmt.Sprintf("seed %d, phase %d: %v on %d+%d", seed, phase, load, prefills, decodes)
			require.Contains(t, []int{0, 1}, a.said.WantedPrefill-settled.WantedPrefill, name) // noise may add one, and it stays
			require.Contains(t, []int{0, 1}, a.said.WantedDecode-settled.WantedDecode, name)
			require.Less(t, waiting, 10., name)
			enough := loaded(40, 40, load[0], load[1])
			need := enough.Needs()
			require.GreaterOrEqual(t, float64(prefills), need.Prompts, name)
			require.GreaterOrEqual(t, float64(decodes), need.Answers, name)
			require.LessOrEqual(t, float64(prefills), math.Ceil(1.1*need.Prompts)+1, name)
			require.LessOrEqual(t, float64(decodes), math.Ceil(1.1*need.Answers)+1, name)
		}
	}
}

func TestSentence(t *testing.T) {
	have := func(prefills, decodes int) Engines {
		return Engines{All: prefills + decodes, Prefills: prefills, Decodes: decodes}
	}
	either := Engines{All: 7, Prefills: 5, Decodes: 2, Either: true}
	for _, c := range []struct {
		a     Advice
		want  string
		short bool
	}{
		{a: Advice{Engines: have(4, 4)}}, // not known yet
		{a: Advice{Engines: have(4, 4), WantedPrefill: 4, WantedDecode: 4, Prefill: 4}},
		{a: Advice{Engines: either, WantedPrefill: 3, WantedDecode: 4}},
		{Advice{Engines: have(4, 3), WantedPrefill: 3, WantedDecode: 5}, "decode is short by 2: 3 for prefill and 5 for decode would serve this", true},
		{Advice{Engines: have(2, 5), WantedPrefill: 3, WantedDecode: 5}, "prefill is short by 1: 3 for prefill and 5 for decode would serve this", true},
		{Advice{Engines: have(1, 1), WantedPrefill: 3, WantedDecode: 2},
			"prefill is short by 2 and decode by 1: 3 for prefill and 2 for decode would serve this", true},
		{Advice{Engines: either, WantedPrefill: 3, WantedDecode: 5}, "the pool is short by 1: 3 for prefill and 5 for decode would serve this", true},
		{Advice{Engines: have(0, 3), WantedDecode: 5}, "the pool is short by 2: 5 would serve this", true},
		{Advice{Engines: have(0, 3), WantedDecode: 2}, "2 would serve this", false},
		{Advice{Engines: either, WantedPrefill: 1, WantedDecode: 1}, "1 for prefill and 1 for decode would serve this", false},
		{Advice{Engines: have(4, 4), WantedPrefill: 2, WantedDecode: 4, Prefill: 4, Decode: 4}, "2 for prefill and 4 for decode would serve this", false},
		{Advice{Engines: have(4, 4), WantedPrefill: 2, WantedDecode: 4, Prefill: 3, Decode: 5},
			"2 for prefill and 4 for decode would serve this, and of those that are there 3 for prefill and 5 for decode would be faster", false},
	} {
		got, short := c.a.Sentence()
		require.Equal(t, c.want, got)
		require.Equal(t, c.short, short, got)
	}
}
