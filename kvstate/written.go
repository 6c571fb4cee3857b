package kvstate

import "time"

// How long an answer becomes and how long its tokens take no hop tells: Envoy carries answers past Tandem. The engines count both since they
// started. From two of these counts, one look apart, follow the mean answer of a pool and how much slower than modelled an endpoint decodes.

// What a decode step is taken to last until engines have told of some: a 70B-class model on eight H100s.
const (
	DecodeStep   = 0.012  // of each step, s
	DecodeAnswer = 0.0001 // and for each answer in its batch, s
	DecodeToken  = 2e-8   // and for each token of KV it reads, s
)

// Written is what an engine says it has written since it started. All 0: it does not say.
type Written struct {
	Answers int64         // that ended
	Tokens  int64         // of those
	Gaps    int64         // between two tokens of one answer
	GapTime time.Duration // of all of them
}

// since is what was written between two counts; false where nothing was, or the engine has begun anew.
func (w *Written) since(old Written) (d Written, ok bool) {
	d = Written{w.Answers - old.Answers, w.Tokens - old.Tokens, w.Gaps - old.Gaps, w.GapTime - old.GapTime}
	return d, old != (Written{}) && d != (Written{}) && min(d.Answers, d.Tokens, d.Gaps, int64(d.GapTime)) >= 0
}

const (
	answersNeeded = 20      // before their mean counts
	answersKept   = 1000    // beyond which old ones are forgotten
	longestAnswer = 1 << 20 // tokens; no engine writes more
)

// learnWritten notes what an endpoint wrote between two looks at its metrics. An endpoint that prefills, too, counts answers of one token
// for other endpoints, which say nothing.
func (e *Endpoint) learnWritten(d Written, before, after *Signals) {
	if e.load == nil || e.Role != RoleDecode {
		return
	}
	e.load.mu.Lock()
	defer e.load.mu.Unlock()
	if d.Answers > 0 && d.Tokens <= d.Answers*longestAnswer {
		e.load.answers.add(d)
	}
	apart := after.Looked.Sub(before.Looked).Seconds()
	if d.Gaps == 0 || d.GapTime <= 0 || before.Looked.IsZero() || apart <= 0 {
		return
	}
	now := after.Looked.UnixNano()
	// Each answer that runs is within a gap, so the gaps of a second are as long as there are answers.
	batch := max(d.GapTime.Seconds()/apart, 1)
	step := DecodeStep + DecodeAnswer*batch + DecodeToken*e.kvBetween(before, after)
	_, share := e.local.ahead(now) // prompts that it computed meanwhile are no part of its decode steps
	observed, modelled := Seconds(d.GapTime.Seconds()*(1-share)), Seconds(float64(d.Gaps)*step)
	var next speed
	if old := e.steps.Load(); old != nil {
		next = *old
	}
	next.add(observed, modelled, e.load.steps.ratio(1, now), now)
	e.steps.Store(&next)
	e.load.steps.add(observed, modelled, 1, now)
}

// kvBetween is how many tokens of KV the answers of an endpoint had between two looks.
func (e *Endpoint) kvBetween(before, after *Signals) float64 {
	if after.KVTokens > 0 && before.KVUsage >= 0 && after.KVUsage >= 0 {
		return (before.KVUsage + after.KVUsage) / 2 * float64(after.KVTokens)
	}
	return float64(e.tokens.Load() + e.Others().PromptTokens)
}

// answers are what a pool has lately written.
type answers struct{ n, tokens float64 }

func (a *answers) add(d Written) {
	a.n, a.tokens = a.n+float64(d.Answers), a.tokens+float64(d.Tokens)
	if a.n > answersKept {
		a.n, a.tokens = a.n/2, a.tokens/2
	}
}

// mean is how many tokens an answer has, 0 as long as too few were seen.
func (a *answers) mean() float64 {
	if a.n < answersNeeded {
		return 0
	}
	return max(a.tokens/a.n, 1)
}

// stepWithin is [Candidate.Step].
func (l *live) stepWithin(fleet float64, now int64) float64 {
	if steps := l.steps.Load(); steps != nil {
		return steps.within(fleet, now)
	}
	return fleet
}
