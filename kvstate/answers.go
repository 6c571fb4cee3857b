package kvstate

import "time"

// No hop shows the length of an answer or the time of its tokens, because answers do not pass through Tandem. The
// engines count both. The difference of two scrapes yields a pool's mean answer length, and how much slower than
// modelled an endpoint decodes.

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

// restarted reports whether the engine has lost its counts of before, and with them its KV cache. Times are left out:
// messages between replicas round them.
func (w *AnswerCounters) restarted(old AnswerCounters) bool {
	return w.Answers < old.Answers || w.Tokens < old.Tokens || w.Gaps < old.Gaps || w.Generated < old.Generated
}

// Written returns the tokens that the engine has written: those of finished answers if it reports no others.
func (w *AnswerCounters) Written() int64 { return max(w.Generated, w.Tokens) }

const (
	answersNeeded = 20      // before their mean is used
	answersKept   = 1000    // at which old samples are halved
	longestAnswer = 1 << 20 // tokens; no engine generates more
)

// learnAnswers records what an endpoint generated between two scrapes.
func (e *Endpoint) learnAnswers(d AnswerCounters, before, after *Signals) {
	if e.load == nil || e.Role&RoleDecode == 0 {
		return
	}
	e.load.mu.Lock()
	defer e.load.mu.Unlock()
	if d.Answers > 0 && d.Tokens <= d.Answers*longestAnswer {
		e.load.answers.add(d)
	}
	apart := after.ScrapedAt.Sub(before.ScrapedAt).Seconds()
	if d.Gaps == 0 || d.GapTime <= 0 || before.ScrapedAt.IsZero() || apart <= 0 {
		return
	}
	now := after.ScrapedAt.UnixNano()
	// Each running answer is within a gap, so the gaps of one second add up to the number of answers.
	batch := max(d.GapTime.Seconds()/apart, 1)
	step := DecodeStep + DecodeAnswer*batch + DecodeToken*e.kvBetween(before, after)
	_, share := e.local.ahead(now) // prompts are not part of its decode steps
	observed, modelled := Seconds(d.GapTime.Seconds()*(1-share)), Seconds(float64(d.Gaps)*step)
	var next speed
	if old := e.steps.Load(); old != nil {
		next = *old
	}
	next.add(observed, modelled, e.load.steps.ratio(1, now), now)
	e.steps.Store(&next)
	e.load.steps.add(observed, modelled, 1, now)
}

// kvBetween returns the tokens of KV that an endpoint's answers had between two scrapes.
func (e *Endpoint) kvBetween(before, after *Signals) float64 {
	if after.KVTokens > 0 && before.KVUsage >= 0 && after.KVUsage >= 0 {
		return (before.KVUsage + after.KVUsage) / 2 * float64(after.KVTokens)
	}
	return float64(e.tokens.Load() + e.RemoteLoad().PromptTokens)
}

// answers is the recent output of a pool.
type answers struct{ n, tokens float64 }

func (a *answers) add(d AnswerCounters) {
	a.n, a.tokens = a.n+float64(d.Answers), a.tokens+float64(d.Tokens)
	if a.n > answersKept {
		a.n, a.tokens = a.n/2, a.tokens/2
	}
}

// mean returns the mean tokens of an answer, 0 without enough of them.
func (a *answers) mean() float64 {
	if a.n < answersNeeded {
		return 0
	}
	return max(a.tokens/a.n, 1)
}

// stepWithin returns [Candidate.Step].
func (l *endpointState) stepWithin(fleet float64, now int64) float64 {
	if steps := l.steps.Load(); steps != nil {
		return steps.within(fleet, now)
	}
	return fleet
}
