package extproc

import (
	"time"

	"tandem/extproc/hedging"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/kvstate/standstill"
)

// lostAfter is how long an endpoint must be marked as failed before its requests are given up. A failed request or a
// stalled engine marks it for less.
const lostAfter = 3 * time.Second

// hedged reports whether a try at the replan port is a hedge: the try before it may still get its answer. Envoy
// sends the retry of a failed try sooner.
func hedged(t *kvtransfer.Ticket, took time.Duration) bool {
	return took >= hedging.After-hedging.Early && (t.Stage == kvtransfer.DecodeLeg || t.Stage == kvtransfer.PairLegs)
}

// lost reports whether the try of a hop at the decode endpoint is lost.
func lost(s *Server, t *kvtransfer.Ticket) bool {
	e := plan.EndpointOf(s.State, t.Pool, t.Decode)
	return e != nil && s.State.FailedFor(e) >= lostAfter || outdated(s, t) != "" ||
		overdue(s.passes.Since(t), answerLimit(s, t, e))
}

// outdated returns why the KV that a decode leg was to fetch may be another prompt's by now, if it has not fetched it;
// "" if nothing says so.
func outdated(s *Server, t *kvtransfer.Ticket) standstill.Reason {
	policy, _ := s.passes.Policy(t.Pool)
	d := plan.EndpointOf(s.State, t.Pool, t.Decode)
	if !t.Loads || d == nil || policy.Dialect.Lease == 0 {
		return ""
	}
	return s.State.Outdated(plan.EndpointOf(s.State, t.Pool, t.Prefill), d, time.Now().Add(-s.passes.Since(t)))
}

// answerLimit returns how long the answer may take to begin; 0: no limit. e may be nil.
func answerLimit(s *Server, t *kvtransfer.Ticket, e *kvstate.Endpoint) time.Duration {
	pool := s.State.Pool(t.Pool)
	if t.Stage != kvtransfer.DecodeLeg || pool == nil {
		return 0
	}
	tokens := t.PromptTokens
	if e != nil && !t.Split { // it computes its prompts one after the other
		_, booked := e.Load()
		tokens = max(tokens, booked)
	}
	policy, _ := s.passes.Policy(t.Pool)
	return policy.AnswerStart(t.Stream, pool.PrefillTime(tokens, policy.PerToken))
}
