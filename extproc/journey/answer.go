package journey

import (
	"net/http"
	"time"

	"tandem/extproc/answer"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// What becomes of D's answer on its way to the client.

// AnswerRule says what is done to the answer of a decode leg that uses P's KV.
type AnswerRule struct {
	Late time.Duration // if it begins later, it is checked ([Shared.IsOutdated]); 0: it may begin at any time
	Cut  bool          // the engine's own KV parameters are removed from it
}

// AnswerRule returns the rule for the answer to a ticket's leg.
func (s *Shared) AnswerRule(t *kvtransfer.Ticket) AnswerRule {
	if !t.Loads || t.Stage != kvtransfer.DecodeLeg {
		return AnswerRule{}
	}
	policy, _ := s.Passes.Policy(t.Pool)
	return AnswerRule{Late: policy.Dialect.LateAfter(), Cut: policy.Dialect.Expiry != nil}
}

// IsOutdated reports whether an answer that begins late may be made from KV that is another prompt's by now. Then it is
// counted, and the client must not get it.
func (s *Shared) IsOutdated(t *kvtransfer.Ticket, requestID string) bool {
	why := s.Outdated(t)
	if why == "" {
		return false
	}
	s.Passes.Observer.Outdated(t.Pool, t.Decode, string(why))
	s.Passes.Log.Warn("an answer is refused: its KV may have been another prompt's (docs/security.md#wrong-text)",
		"request_id", requestID, "reason", why, "prefill", t.Prefill, "decode", t.Decode)
	return true
}

// Rewriting is what a transport gives to have an answer rewritten.
type Rewriting struct {
	Status int // of the answer
	// Joined waits for the part of P's answer that belongs into a pair's; nil: there is none.
	Joined func() (prefill []byte, ok bool)
	// Inside: no script of Envoy's removes from answers what only Tandem may see, and nothing may wait for Redis.
	Inside bool
}

// Rewriter returns how D's answer to the leg of a ticket is rewritten; nil: it stays as it is.
func (s *Shared) Rewriter(t *kvtransfer.Ticket, r *Rewriting) (openai.Rewriter, error) {
	pair := t.Stage == kvtransfer.PairLegs
	switch {
	case r.Status != http.StatusOK:
		if r.Inside && pair && r.Status >= 400 && r.Status < 500 && !kvstate.Refuses(r.Status) {
			return answer.WithoutEcho{}, nil
		}
		return nil, nil
	case pair && r.Joined != nil:
		return &answer.Joined{Prefill: r.Joined}, nil
	case pair:
		return nil, nil
	}
	by, err := answer.Rewriter(t)
	if err != nil || !r.Inside || !s.AnswerRule(t).Cut {
		return by, err
	}
	if by == nil {
		return openai.CutParams{}, nil
	}
	return openai.Both{First: openai.CutParams{}, Second: by}, nil
}
