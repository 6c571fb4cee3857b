package pass

import (
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/reclaim"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
	"tandem/kvstate/media"
	"tandem/kvstate/prefixindex"
)

// What P's answers teach. What follows from one for the request is package journey's.

// Answer is a prefill endpoint's answer, or Envoy's in its place.
type Answer struct {
	Code                int
	Body                []byte
	Over                bool // Body is not all
	Details, RetryAfter []byte
	Load                []byte // that the engine reports with it (ORCA)
	NoMemory            bool   // Body is not all, because there was no memory for it
	Inline              bool   // it came with pass 2
	Unsure              bool   // inside Envoy: it may come from another endpoint than the one that was asked
	Absent              bool   // inside Envoy: it comes from another endpoint
	Cut, Overdue        bool   // inside Envoy: it broke off after it had begun, or did not come in time
}

// Prefilled learns from P's answers, for one stream.
type Prefilled struct {
	shared *Shared
	Meter  *telemetry.Meter
	ID     string   // of the request
	Asked  int      // tokens of the prompt that P was asked with: an answer is continued; 0: unknown
	ids    []uint32 // scratch for token ids
}

// Cut counts an answer of P's whose rest will not come: P has finished, but the blocks that it keeps are not known.
func (s *Shared) Cut(t *kvtransfer.Ticket) {
	if policy, _ := s.Policy(t.Pool); policy.Dialect.Prefill != nil {
		s.Reclaim.Left(t, reclaim.AnswerCut)
	}
}

// ObserveLoad records the load that P reports with its answer.
func (x *Prefilled) ObserveLoad(t *kvtransfer.Ticket, load []byte) {
	e := plan.EndpointOf(x.shared.State, t.Pool, t.Prefill)
	if len(load) == 0 || e == nil {
		return
	}
	if signals, ok := enginehttp.ParseORCA(load); ok {
		signals.At = time.Now()
		x.shared.State.Observe(e, signals)
	}
}

// Computed records that P has computed a prompt in some time, and learns from its answer. pool may be nil: it has left.
func (x *Prefilled) Computed(pool *kvstate.Pool, t *kvtransfer.Ticket, got *kvtransfer.Answer, took time.Duration) {
	if pool != nil {
		x.shared.MarkGood(pool, t.Prefill)
		if x.Asked == 0 { // else a part of the answer is in the prompt
			x.learn(pool, t, got)
		}
		if got.PromptTokens > 0 {
			if x.Asked == 0 {
				LearnPrompt(pool, t, got.PromptTokens)
			}
			if t.Media == (media.Count{}) {
				pool.ObservePrefill(got.PromptTokens-max(got.CachedTokens, 0), took)
			}
		}
	}
	x.Meter.PromptRead(x.ID, t, *got, took)
}

// LearnPrompt learns from the number of tokens that P has counted in the prompt of its leg.
func LearnPrompt(pool *kvstate.Pool, t *kvtransfer.Ticket, tokens int64) {
	size := kvstate.PromptSize{Text: t.BodyBytes - t.OtherBytes, Counted: t.Counted, Media: t.Media}
	pool.LearnPrompt(t.Model, &size, tokens)
}

// learn records from P's answer the prompt's token ids, and how much of the prompt P had in its cache.
func (x *Prefilled) learn(pool *kvstate.Pool, t *kvtransfer.Ticket, got *kvtransfer.Answer) {
	// what was expected of a prompt with media is in part what its media were thought to have
	if e := pool.Endpoint(t.Prefill); e != nil && got.CachedTokens >= 0 && t.Media == (media.Count{}) {
		x.shared.State.ObserveCached(e, t.ExpectedCached, got.CachedTokens)
	}
	if t.Learn.Bytes == 0 || got.PromptIDs == nil {
		return
	}
	text := pool.TextOf(nil, t.Prompt, plan.MaxBlocks)
	if text == nil {
		return
	}
	if ids, ok := openai.TokenIDs(x.ids[:0], got.PromptIDs); ok {
		x.ids = ids
		x.Meter.Observer.Learned(pool.Spec.Name, "prefill", len(ids))
		learned := prefixindex.TextPrompt{Blocks: text, BlockBytes: plan.BlockBytes, Bytes: t.Learn.Bytes}
		prompt := prefixindex.TokenPrompt{IDs: ids, LoRA: t.Learn.LoRA, Salt: t.Learn.Salt}
		x.shared.State.LearnTokens(pool, learned, &prompt)
	}
}

// DoesNotContinue records that an engine of a pool does not continue what another one has begun.
func (s *Shared) DoesNotContinue(pool *kvstate.Pool, addr, requestID string) {
	if e := pool.Endpoint(addr); e != nil && e.DoesNotContinue(time.Now()) {
		s.Log.Warn("an engine does not continue the answers of others: asked with the token ids of one, "+
			"it began anew; for a while it is not asked to (docs/continue.md#engines-that-do-not-continue)",
			"pool", pool.Spec.Name, "endpoint", addr, "request_id", requestID)
	}
}

// MarkGood records that an endpoint of a pool has served a request.
func (s *Shared) MarkGood(pool *kvstate.Pool, addr string) {
	if e := pool.Endpoint(addr); e != nil {
		s.State.Health.MarkGood(e)
	}
}
