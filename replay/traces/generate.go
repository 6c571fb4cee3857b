package traces

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"tandem/replay/engine"
)

// Kinds returns the names that [Generate] takes.
func Kinds() []string {
	return []string{"conversation", "agent", "mixed", "hot", "zipf", "apps", "rag", "reasoning"}
}

// Generate generates a trace of n requests. The names:
//
//	conversation   people who talk: a system prompt that all share, a few turns each of which repeats the earlier
//	               ones, a minute's thought between them
//	agent          programs that call tools: a handful of long instructions, many turns with short answers, seconds
//	               apart, each adding a tool's output
//	mixed          both in equal parts, and single prompts with nothing in common, of very different length
//	hot            single prompts, nine in ten behind one system prompt of 32k tokens
//	zipf           single prompts behind one of 40 prefixes of 2k to 32k tokens, the k-th as frequent as 1/k
//	apps           single prompts of ten applications with 16k tokens of instructions each
//	reasoning      single prompts whose answers have thousands of tokens
//	rag            questions about 400 documents of 1k to 16k tokens, the k-th as frequent as 1/k
//
// Requests arrive at rate per second. People and tools do not think faster when there are more of them: a higher rate
// means more sessions at a time.
func Generate(name string, n int, rate float64, seed uint64) (*Trace, error) {
	g := generator{random: rand.New(rand.NewPCG(seed, 2)), next: 1 << 32, duration: float64(n) / rate}
	var sessions []func()
	switch name {
	case "conversation":
		sessions = []func(){g.conversation}
	case "agent":
		sessions = []func(){g.agent}
	case "hot":
		sessions = []func(){g.hot}
	case "zipf":
		sessions = []func(){g.zipf}
	case "apps":
		sessions = []func(){g.app}
	case "reasoning":
		sessions = []func(){g.reasoning}
	case "rag":
		sessions = []func(){g.document}
	case "mixed":
		sessions = []func(){g.conversation, g.agent, g.single, g.single, g.single, g.single}
	default:
		return nil, fmt.Errorf("%q is not a trace that can be made up: one of %s", name, strings.Join(Kinds(), ", "))
	}
	if n < 1 || n > 1<<22 || !(rate > 0) || math.IsInf(rate, 1) {
		return nil, fmt.Errorf("a trace of %d requests, %v a second", n, rate)
	}
	for i := 0; len(g.out) < n; i++ {
		g.start = g.random.Float64()*(g.duration+sessionTime) - sessionTime
		sessions[i%len(sessions)]()
	}
	slices.SortStableFunc(g.out, ByArrival)
	t := &Trace{Name: name, Requests: g.out[:n]}
	t.MarkLast()
	t.again = func(rate float64) (*Trace, error) { return Generate(name, n, rate, seed) }
	return t, nil
}

// usualRate is the rate of the public conversation trace: 12,000 requests in an hour.
const usualRate = 12000.0 / 3600

// sessionTime is the time before the trace at which the first sessions began, so that the trace starts with sessions
// of every age.
const sessionTime = 300.0

type generator struct {
	random   *rand.Rand
	next     uint64 // the next unused block
	programs uint64
	start    float64
	duration float64
	out      []Request
}

// about draws a length from a log-normal distribution with that median and spread (standard deviation of its
// logarithm).
func (g *generator) about(median, spread float64) int {
	return max(int(median*math.Exp(spread*g.random.NormFloat64())), 1)
}

// history is the tokens of a session so far, as whole blocks; the remainder becomes a new block each time.
type history struct {
	blocks  []uint64
	tokens  int
	program uint64
}

// program returns the number of a program that makes more than one request.
func (g *generator) program() uint64 { g.programs++; return g.programs }

func (g *generator) fresh() uint64 { g.next++; return g.next }

// grow appends tokens to a history.
func (g *generator) grow(h *history, tokens int) {
	h.tokens += tokens
	for len(h.blocks) < h.tokens/engine.BlockTokens {
		h.blocks = append(h.blocks, g.fresh())
	}
}

// ask emits the history as a prompt, if its time is within the trace.
func (g *generator) ask(h *history, at float64, answer int) {
	if at < 0 || at >= g.duration {
		return
	}
	blocks := slices.Clone(h.blocks)
	if h.tokens%engine.BlockTokens > 0 || len(blocks) == 0 {
		blocks = append(blocks, g.fresh())
	}
	g.out = append(g.out, Request{Arrival: at, Input: h.tokens, Output: answer, Blocks: blocks,
		Program: h.program})
}

// shared returns a history that begins with the same tokens for all sessions of that id.
func shared(id uint64, tokens int) history {
	h := history{tokens: tokens}
	for i := range tokens / engine.BlockTokens {
		h.blocks = append(h.blocks, id<<16+uint64(i))
	}
	return h
}

// maxContext is the length at which contexts end, in tokens.
const maxContext = 120_000

func (g *generator) conversation() {
	h, at := shared(1, 2*engine.BlockTokens), g.start
	h.program = g.program()
	for turn := 0; ; turn++ {
		if turn == 0 {
			g.grow(&h, g.about(2500, 1.2)) // often with a document
		} else {
			g.grow(&h, g.about(150, 1))
		}
		answer := min(g.about(300, .7), 2000)
		if h.tokens > maxContext {
			return
		}
		g.ask(&h, at, answer)
		if g.random.Float64() < .3 {
			return
		}
		g.grow(&h, answer)
		at += 15 + g.random.ExpFloat64()*60
	}
}

func (g *generator) agent() {
	kind := g.random.Uint64N(6)
	h, at := shared(2+kind, int(4+2*kind)*engine.BlockTokens), g.start
	h.program = g.program()
	g.grow(&h, g.about(400, .8))
	for {
		answer := min(g.about(90, .8), 1500)
		if h.tokens > maxContext {
			return
		}
		g.ask(&h, at, answer)
		if g.random.Float64() < .08 {
			return
		}
		g.grow(&h, answer+g.about(700, 1.1))
		at += 2 + g.random.ExpFloat64()*6
	}
}

func (g *generator) single() {
	var h history
	g.grow(&h, min(g.about(1500, 1.4), maxContext))
	g.ask(&h, g.start, min(g.about(200, .9), 2000))
}

// reasoning emits a single prompt with a long answer, behind a system prompt that all share.
func (g *generator) reasoning() {
	h := shared(400, 2*engine.BlockTokens)
	g.grow(&h, min(g.about(600, 1), maxContext/4))
	g.ask(&h, g.start, min(g.about(3000, .8), 16_384))
}

// hot emits a single prompt; nine in ten follow one long system prompt.
func (g *generator) hot() {
	h := history{}
	if g.random.Float64() < .9 {
		h = shared(8, 64*engine.BlockTokens)
	}
	g.question(&h)
}

// question completes a single prompt and emits it.
func (g *generator) question(h *history) {
	g.grow(h, min(g.about(1000, 1), maxContext/4))
	g.ask(h, g.start, min(g.about(60, .8), 2000))
}

// zipf emits a single prompt behind one of 40 prefixes of 2k to 32k tokens; the k-th is as frequent as 1/k.
func (g *generator) zipf() {
	k := g.ranked(40)
	h := shared(100+k, int(4+(k*37)%61)*engine.BlockTokens)
	g.question(&h)
}

// app emits a single prompt of one of ten applications with 16k tokens of instructions each.
func (g *generator) app() {
	h := shared(200+g.random.Uint64N(10), 32*engine.BlockTokens)
	g.question(&h)
}

// document emits a question about one of 400 documents of 1k to 16k tokens behind instructions that all share. Some
// documents are far more popular than others.
func (g *generator) document() {
	k := g.ranked(400)
	h := shared(300, 2*engine.BlockTokens)
	h.blocks = append(h.blocks, shared(1000+k, int(2+(k*29)%31)*engine.BlockTokens).blocks...)
	h.tokens = len(h.blocks) * engine.BlockTokens
	g.question(&h)
}

// ranked draws a number below n; k is as frequent as 1/(k+1).
func (g *generator) ranked(n int) uint64 {
	sum := 0.0
	for k := range n {
		sum += 1 / float64(k+1)
	}
	x := g.random.Float64() * sum
	for k := range n {
		if x -= 1 / float64(k+1); x <= 0 {
			return uint64(k)
		}
	}
	return uint64(n - 1)
}
