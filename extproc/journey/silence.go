package journey

import (
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/kvstate/standstill"
)

// An answer that is not streamed sends nothing until it is complete, so no time limit can tell a slow decode endpoint
// from one that has stopped. What Tandem knows of the endpoint can.

// Silence is how long to wait for D's answer before asking whether it will come.
const Silence = 10 * time.Second

// Outdated returns why the KV that a decode leg was to fetch may be another prompt's by now, if it has not fetched it;
// "" if nothing says so.
func (s *Shared) Outdated(t *kvtransfer.Ticket) standstill.Reason {
	policy, _ := s.Passes.Policy(t.Pool)
	d := plan.EndpointOf(s.Passes.State, t.Pool, t.Decode)
	if !t.Loads || d == nil || policy.Dialect.Lease == 0 {
		return ""
	}
	prefill := plan.EndpointOf(s.Passes.State, t.Pool, t.Prefill)
	return s.Passes.State.Outdated(prefill, d, time.Now().Add(-s.Passes.Since(t)))
}

// Lost reports whether a decode leg without an answer so far will get none: its endpoint has failed for a while, its KV
// may be another prompt's, or its time is over. An engine whose core stands still may only be slow, so it is waited for
// if no other one can take the request.
func (s *Shared) Lost(t *kvtransfer.Ticket) bool {
	e := plan.EndpointOf(s.Passes.State, t.Pool, t.Decode)
	limit := s.answerLimit(t, e)
	health := &s.Passes.State.Health
	failed := e != nil && health.FailedFor(e) >= lostAfter &&
		(!health.StandsStill(e) || s.AnotherDecodes(t) || health.FailedFor(e) >= s.stillLimit(t))
	return failed || s.Outdated(t) != "" || limit > 0 && s.Passes.Since(t) >= limit
}

// AnotherDecodes reports whether another endpoint than the ticket's may decode, as far as is known.
func (s *Shared) AnotherDecodes(t *kvtransfer.Ticket) bool { return s.othersDecode(t, t.Excluded) }

// lostAfter is how long an endpoint must be marked as failed before its requests are given up. A failed request or a
// stalled engine marks it for less.
const lostAfter = 3 * time.Second

// stillLimit returns how long an endpoint that stands still is waited for where no other one can serve: as long as a
// stream may take to begin. Real vLLM compiles for 2 to 25 s; what stands for longer hangs.
func (s *Shared) stillLimit(t *kvtransfer.Ticket) time.Duration {
	policy, _ := s.Passes.Policy(t.Pool)
	return policy.StreamStart
}

// answerLimit returns how long the answer may take to begin; 0: no limit. e may be nil.
func (s *Shared) answerLimit(t *kvtransfer.Ticket, e *kvstate.Endpoint) time.Duration {
	pool := s.Passes.State.Pool(t.Pool)
	if t.Stage != kvtransfer.DecodeLeg || pool == nil {
		return 0
	}
	tokens := t.PromptTokens
	if e != nil && !t.Split { // it computes its prompts one after the other
		_, booked := e.Load()
		tokens = max(tokens, booked)
	}
	policy, _ := s.Passes.Policy(t.Pool)
	return policy.AnswerStart(t.Stream, pool.PrefillTime(tokens, policy.PerToken))
}
