package sessions

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
)

// Kinds returns the names that [Generate] takes.
func Kinds() []string { return []string{"coding", "agentx", "people"} }

// Generate generates n sessions:
//
//	coding   agents that write code, with the statistics of 239 recorded ones (TestCoding has the table): tools
//	         answer in seconds, most of the time, and people in minutes; the context grows to 105k tokens in the
//	         median
//	agentx   the same with the lengths of vLLM's AgentX (vllm#57103): in the median 43 turns, prompts of 142k
//	         tokens and answers of 444. Its subagents are left out
//	people   conversations of people: a system prompt that all share, a few turns, a minute's thought between them
func Generate(kind string, n int, seed uint64) ([]Session, error) {
	g := &generator{random: rand.New(rand.NewPCG(seed, 21))}
	one := map[string]func() Session{"coding": g.coding, "agentx": g.agentX, "people": g.people}[kind]
	if one == nil || n < 1 || n > 1<<20 {
		return nil, fmt.Errorf("%d sessions of %q: names are %s", n, kind, strings.Join(Kinds(), ", "))
	}
	out := make([]Session, n)
	for i := range out {
		out[i] = one()
	}
	return out, nil
}

type generator struct{ random *rand.Rand }

// about draws from a log-normal distribution with that median and spread (standard deviation of its logarithm).
func (g *generator) about(median, spread float64) float64 {
	return median * math.Exp(spread*g.random.NormFloat64())
}

func (g *generator) tokens(median, spread float64) int { return max(int(g.about(median, spread)), 1) }

func (g *generator) chance(p float64) bool { return g.random.Float64() < p }

// agent is the statistics of a kind of agents.
type agent struct {
	turns       float64 // median
	began       float64 // tokens beside tools and system prompt at first, median
	resumed     float64 // share of sessions that go on with an earlier context, ...
	context     float64 // ... of so many tokens, median
	grows       float64 // tokens that tools add in a turn: median of the sessions' medians
	answer      float64 // tokens beside the first 80, median
	compact     float64 // tokens at which contexts are summarized
	compactedTo float64
}

func (g *generator) coding() Session {
	return g.agent(agent{turns: 46, began: 5000, resumed: .38, context: 150_000, grows: 480, answer: 145,
		compact: 160_000, compactedTo: 60_000})
}

func (g *generator) agentX() Session {
	return g.agent(agent{turns: 43, began: 40_000, resumed: .5, context: 120_000, grows: 1300, answer: 370,
		compact: 240_000, compactedTo: 60_000})
}

// agent generates a session of an agent.
func (g *generator) agent(a agent) Session {
	s := Session{Prefix: 1 + g.random.Uint64N(160)} // of versions and tools
	s.PrefixTokens = 12_000 + int(s.Prefix*37%79)*64
	t := Turn{Input: s.PrefixTokens + g.tokens(a.began, .5)}
	if g.chance(a.resumed) {
		t.Input = s.PrefixTokens + g.tokens(a.context, .75)
	}
	turns := min(g.tokens(a.turns, 1.15), 400)
	grows := g.about(a.grows, .7) * math.Pow(a.turns/float64(turns), .5) // short sessions grow faster
	compact := g.about(a.compact, .12)
	if g.chance(.25) {
		compact = 1e6
	}
	stop := Tool
	for range turns {
		t.Output = 80 + g.tokens(a.answer, 1.3)
		t.Stop = g.stop(stop)
		t.Service = 2.5 + float64(t.Output)/70
		s.Turns = append(s.Turns, t)
		before := t
		stop = t.Stop
		t = Turn{Think: g.think(stop), Back: 1, Had: before.Input + before.Output}
		switch {
		case float64(t.Had) > compact: // a summary takes the place of what was said
			t.Had, t.Input = s.PrefixTokens, s.PrefixTokens+g.tokens(a.compactedTo, .5)
		case g.chance(.015): // a part of the context is rewritten
			t.Input = before.Input + g.tokens(grows, 1.5)
			t.Had = int(.4 * g.random.Float64() * float64(before.Input))
		default:
			t.Input = t.Had + g.tokens(grows, 1.5)
		}
	}
	return s
}

// stop draws why an answer ends, after one that ended so.
func (g *generator) stop(before Stop) Stop {
	x := g.random.Float64()
	for i, p := range [3][3]float64{Tool: {.026, .924, .05}, End: {.04, .76, .2}, Other: {.68, .27, .05}}[before] {
		if x -= p; x < 0 {
			return Stop(i)
		}
	}
	return Tool
}

// think draws the seconds until a client asks again.
func (g *generator) think(after Stop) float64 {
	switch {
	case after == End:
		return g.about(230, 2)
	case after == Other:
		return g.about(120, 1.6)
	case g.chance(.13):
		return 5 + g.about(100, 1.4)
	}
	return 3 + g.about(4.3, 1.2)
}

func (g *generator) people() Session {
	s := Session{Prefix: 1, PrefixTokens: 1024}
	t := Turn{Input: s.PrefixTokens + g.tokens(2500, 1.2)} // often with a document
	for {
		t.Output, t.Stop = min(g.tokens(300, .7), 2000), End
		t.Service = 1 + float64(t.Output)/70
		s.Turns = append(s.Turns, t)
		if g.chance(.3) {
			return s
		}
		had := t.Input + t.Output
		t = Turn{Think: 10 + g.random.ExpFloat64()*55, Back: 1, Had: had, Input: had + g.tokens(150, 1)}
	}
}

// Statistics are quantiles of sessions: .1, .25, .5, .75, .9 and .99.
type Statistics struct {
	Name   string
	Values [6]float64
	Mean   float64
}

// Describe returns the statistics of sessions.
func Describe(all []Session) []Statistics {
	names := []string{"turns of a session", "prefix of a session", "first prompt", "longest prompt of a session",
		"prompt", "answer",
		"new tokens of a prompt", "s after tool use", "s after the end of a turn", "s after other ends",
		"share of a prompt that its session had"}
	of := make([][]float64, len(names))
	add := func(i int, x float64) { of[i] = append(of[i], x) }
	for _, s := range all {
		longest := 0
		for i, t := range s.Turns {
			longest = max(longest, t.Input)
			add(4, float64(t.Input))
			add(5, float64(t.Output))
			if i == 0 {
				continue
			}
			if t.Back == 1 {
				add(6, float64(t.Input-t.Had))
			}
			add(map[Stop]int{Tool: 7, End: 8, Other: 9}[s.Turns[i-1].Stop], t.Think)
			add(10, float64(t.Had)/float64(t.Input))
		}
		add(0, float64(len(s.Turns)))
		add(1, float64(s.PrefixTokens))
		add(2, float64(s.Turns[0].Input))
		add(3, float64(longest))
	}
	var out []Statistics
	for i, values := range of {
		x := Statistics{Name: names[i]}
		slices.Sort(values)
		for k, q := range []float64{.1, .25, .5, .75, .9, .99} {
			if len(values) > 0 {
				x.Values[k] = values[min(int(q*float64(len(values))), len(values)-1)]
			}
		}
		for _, v := range values {
			x.Mean += v / float64(len(values))
		}
		out = append(out, x)
	}
	return out
}
