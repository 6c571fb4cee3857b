package kvstate

import (
	"time"

	"tandem/kvstate/lengths"
	"tandem/kvstate/speed"
)

// No hop shows the length of an answer or the time of its tokens, because answers do not pass through Tandem. The
// engines count both. The difference of two scrapes yields a pool's mean answer length, and how much slower than
// modelled an endpoint decodes. Where Envoy counts tokens, it says both of each request: see [Answered].

// Assumed decode speed until engines have reported theirs: a 70B-class model on eight H100s.
const (
	DecodeStep   = 0.012  // per step, s
	DecodeAnswer = 0.0001 // plus per answer in the batch, s
	DecodeToken  = 2e-8   // plus per token of KV that it reads, s
)

// AnswerCounters count what an engine has generated since it started. All 0: not reported.
type AnswerCounters struct {
	Answers int64         // finished ones of at least two tokens: those of one are prompts computed for other engines
	Tokens  int64         // of those
	Gaps    int64         // between two tokens of one answer
	GapTime time.Duration // sum over all gaps

	Generated int64 // tokens, those of running answers too; 0: not reported
}

// since returns the difference of two scrapes; false if nothing was generated, or if the engine has restarted.
func (w *AnswerCounters) since(old AnswerCounters) (d AnswerCounters, ok bool) {
	d = AnswerCounters{
		Answers: w.Answers - old.Answers, Tokens: w.Tokens - old.Tokens, Generated: w.Generated - old.Generated,
		Gaps: w.Gaps - old.Gaps, GapTime: w.GapTime - old.GapTime,
	}
	return d, d != (AnswerCounters{}) && min(d.Answers, d.Tokens, d.Gaps, int64(d.GapTime), d.Generated) >= 0
}

// restarted reports whether the engine has lost its earlier counts, and with them its KV cache. Times are left out:
// messages between replicas round them.
func (w *AnswerCounters) restarted(old AnswerCounters) bool {
	return w.Answers < old.Answers || w.Tokens < old.Tokens || w.Gaps < old.Gaps || w.Generated < old.Generated
}

// Written returns the tokens that the engine has written: those of finished answers if it reports no others.
func (w *AnswerCounters) Written() int64 { return max(w.Generated, w.Tokens) }

// learnAnswers records what an endpoint generated between two scrapes.
func (e *Endpoint) learnAnswers(d AnswerCounters, before, after *Signals) {
	if e.state.load == nil || e.Role&RoleDecode == 0 {
		return
	}
	e.state.load.mu.Lock()
	defer e.state.load.mu.Unlock()
	e.state.load.answers.Add(d.Answers, d.Tokens)
	apart := after.ScrapedAt.Sub(before.ScrapedAt).Seconds()
	if before.ScrapedAt.IsZero() || apart <= 0 {
		return
	}
	// Each running answer is within a gap, so the gaps of one second add up to the number of answers.
	learnSteps(e, d, d.GapTime.Seconds()/apart, e.kvBetween(before, after), after.ScrapedAt.UnixNano())
}

// scrapeInterval is the usual time between two scrapes, mostScrapes how many of them an answer counts for at most.
const (
	scrapeInterval = 2 * time.Second
	mostScrapes    = 30
)

// Answered records an answer that the endpoint gave, as Envoy counted it: the tokens of its prompt and of itself, and
// the time from the first to the last of its own, 0 if that is not known. An engine's own counters cover all answers
// and are better: where they exist, only the length for the model is new.
func Answered(e *Endpoint, model string, prompt, tokens int64, took time.Duration, now time.Time) {
	if e.state.load == nil || e.Role&RoleDecode == 0 || tokens <= 0 {
		return
	}
	e.state.load.byModel.Add(model, tokens)
	g, booked := UnknownSignals(), e.RemoteLoad()
	if known := e.state.signals.Load(); known.Trust(now) > 0 {
		g = *known
	}
	e.state.load.mu.Lock()
	defer e.state.load.mu.Unlock()
	if g.Answers.Answers == 0 {
		e.state.load.answers.Add(1, tokens)
	}
	if g.Answers.Gaps == 0 && tokens <= lengths.Longest {
		// The reservation of this one has ended, and with it its KV.
		kv := e.kvBetween(&g, &g)
		if g.KVTokens <= 0 {
			kv += float64(prompt)
		}
		// Requests and jobs are counted apart, so for a moment there may be more jobs than requests.
		batch := max(g.Running, e.state.requests.Load()-e.state.queue.n.Load()+booked.Requests-booked.Jobs, 0) + 1
		// An answer counts like the scrapes that would have been made during it.
		n := max(min(int64((took+scrapeInterval-1)/scrapeInterval)/batch, mostScrapes, tokens-1), 1)
		for range n {
			d := AnswerCounters{Gaps: (tokens - 1) / n, GapTime: took / time.Duration(n)}
			learnSteps(e, d, float64(batch), kv, now.UnixNano())
		}
	}
}

// AnswerTokens returns the mean tokens of a model's answers in a pool; 0 if too few were counted.
func AnswerTokens(p *Pool, model string) float64 { return p.load.byModel.Mean(model) }

// learnSteps records the times between tokens of answers that ran in a batch of that many, with so many tokens of KV.
// The caller holds e.load.mu.
func learnSteps(e *Endpoint, d AnswerCounters, batch, kv float64, now int64) {
	if d.Gaps <= 0 || d.GapTime <= 0 {
		return
	}
	step := DecodeStep + DecodeAnswer*max(batch, 1) + DecodeToken*kv
	_, share := e.state.local.ahead(now) // prompts are not part of its decode steps
	observed, modelled := Seconds(d.GapTime.Seconds()*(1-share)), Seconds(float64(d.Gaps)*step)
	var next speed.Learned
	if old := e.state.steps.Load(); old != nil {
		next = *old
	}
	e.state.load.steps = e.state.load.steps.Doubted(1, now, speed.DoubtPool)
	fleet := e.state.load.steps.Ratio(1, now)
	next = next.Doubted(fleet, now-int64(float64(d.GapTime)/max(batch, 1)), speed.DoubtEndpoint) // it wrote since then
	next.Add(observed, modelled, fleet, now)
	e.state.steps.Store(&next)
	e.state.load.steps.Add(observed, modelled, 1, now)
}

// kvBetween returns the tokens of KV that an endpoint's answers had between two scrapes.
func (e *Endpoint) kvBetween(before, after *Signals) float64 {
	if after.KVTokens > 0 && before.KVUsage >= 0 && after.KVUsage >= 0 {
		return (before.KVUsage + after.KVUsage) / 2 * float64(after.KVTokens)
	}
	return float64(e.state.tokens.Load() + e.RemoteLoad().PromptTokens)
}

// stepWithin returns [Candidate.Step].
func (l *endpointState) stepWithin(fleet float64, now int64) float64 {
	if steps := l.steps.Load(); steps != nil {
		return steps.Within(fleet, now)
	}
	return fleet
}
