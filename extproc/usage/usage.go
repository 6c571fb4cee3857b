// Package usage says what each request used and how long it took: tokens of prompt and answer, the time to the first
// token and between two. Envoy reads the tokens of answers as they pass it and reports them in its access log, so
// nothing here sees an answer (docs/adr/0067). [Of] is pure; a [Recorder] counts its results.
//
// Numbers of tokens are an engine's word. They are what the client got in usage, or nothing where it got none.
package usage

import (
	"time"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
)

// Used is what a request used, and how long it took. Counts are nil where the answer does not say them.
type Used struct {
	Model    string `json:"model,omitempty"`  // that the client asked for: an adapter's own name
	Tenant   string `json:"tenant,omitempty"` // as its header says
	Prompt   *int64 `json:"prompt_tokens,omitempty"`
	Cached   *int64 `json:"cached_tokens,omitempty"` // of the prompt's, found in a cache
	Answer   *int64 `json:"completion_tokens,omitempty"`
	Absurd   bool   `json:"absurd,omitempty"` // the answer reports no possible number of tokens: it is left out
	Streamed bool   `json:"streamed,omitempty"`
	// from the request's arrival to the first byte of the answer's body; only of streams
	FirstToken time.Duration `json:"first_token_ns,omitempty"`
	PerToken   time.Duration `json:"per_token_ns,omitempty"` // mean time between two tokens of a stream
	Promise    string        `json:"promise,omitempty"`      // what became of the pool's promise: see Kept and so on
}

// What became of a pool's promise for a request.
const (
	Kept = "kept"
	// Late: the first token, or a whole answer that was not streamed, came later than promised.
	Late = "late"
	// Slow: the first token was in time, those after it were not, on average.
	Slow   = "slow"
	Failed = "failed" // no answer, or not all of it
	// Unknown: the first token was in time, and the number of the others is not known.
	Unknown = "unknown"
)

// Promise is what a pool promises for its requests; 0: nothing.
type Promise struct{ FirstToken, PerToken time.Duration }

// maxName bounds names in bytes.
const maxName = 128

// Of returns what a request used whose last pass ended so. how is as telemetry.EndedAs has it.
func Of(t *kvtransfer.Ticket, e *ended.Pass, how string, promise Promise) *Used {
	u := &Used{Model: bounded(t.Model), Tenant: bounded(string(e.Usage.Tenant)), Streamed: t.Stream}
	u.count(&e.Usage)
	whole := max(e.Start.Add(e.Duration).Sub(t.Started), 0)
	if u.FirstToken = FirstToken(t, e); u.FirstToken > 0 {
		if last := max(e.Usage.LastByte, e.Usage.FirstBody); u.Answer != nil && *u.Answer > 1 {
			u.PerToken = (last - e.Usage.FirstBody) / time.Duration(*u.Answer-1)
		}
	}
	u.Promise = u.became(how, whole, promise)
	return u
}

// FirstToken returns the time from a request's arrival to the first byte of its answer's body, if it was streamed; 0:
// it was not, or Envoy does not report it. Engines send headers before the first token, and no event before it.
func FirstToken(t *kvtransfer.Ticket, e *ended.Pass) time.Duration {
	if !t.Stream || e.Usage.FirstBody <= 0 || e.Status >= 400 {
		return 0
	}
	return max(e.Start.Add(e.Usage.FirstBody).Sub(t.Started), 0)
}

// count takes the counts of an answer. Impossible figures are left out, and whatever follows from them.
func (u *Used) count(a *ended.Usage) {
	for _, c := range []*ended.Count{&a.In, &a.Out, &a.Cached, &a.CacheRead, &a.CacheWritten} {
		u.Absurd = u.Absurd || c.Absurd
	}
	if u.Absurd {
		return
	}
	if a.In.Said {
		n := a.In.Tokens + a.CacheRead.Tokens + a.CacheWritten.Tokens
		u.Prompt = &n
	}
	if cached := a.Cached.Tokens + a.CacheRead.Tokens; (a.Cached.Said || a.CacheRead.Said) && u.Prompt != nil {
		if cached > *u.Prompt {
			*u = Used{Model: u.Model, Tenant: u.Tenant, Streamed: u.Streamed, Absurd: true}
			return
		}
		u.Cached = &cached
	}
	if a.Out.Said {
		n := a.Out.Tokens
		u.Answer = &n
	}
}

// became returns what became of the promise; "": the request does not count, since its client left or the engine
// refused it.
func (u *Used) became(how string, whole time.Duration, p Promise) string {
	switch {
	case how == "failed":
		return Failed
	case how != "ok" || p == Promise{}:
		return ""
	case u.Streamed && u.FirstToken > p.FirstToken && p.FirstToken > 0:
		return Late
	case u.Streamed && u.Answer == nil:
		return Unknown
	case u.Streamed && u.PerToken > p.PerToken && p.PerToken > 0:
		return Slow
	case u.Streamed:
		return Kept
	}
	// An answer that comes whole is in time if its last token is.
	limit := p.FirstToken
	if u.Answer != nil {
		limit += time.Duration(max(*u.Answer-1, 0)) * p.PerToken
	}
	switch {
	case whole <= limit:
		return Kept
	case u.Answer == nil:
		return Unknown
	}
	return Late
}
