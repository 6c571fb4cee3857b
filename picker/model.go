package picker

import (
	"math"

	"tandem/kvstate"
)

// Model is what work costs on the engines of a pool: seconds for tokens. Its prefill times are corrected by what is
// learned of each endpoint (kvstate.Candidate.Speed, Transfer and Step), so it is the shape that matters most.
// [DefaultModel] has the figures of a 70B-class model on eight H100s; they are those of docs/decision.md.
type Model struct {
	PrefillStep    float64 // of one engine step that prefills, s
	PrefillToken   float64 // of a token computed, s
	PrefillContext float64 // of a token computed for each token before it (attention), s
	StepTokens     float64 // prompt tokens in one step (vLLM: max_num_batched_tokens)

	DecodeStep   float64 // of one engine step that decodes, s
	DecodeAnswer float64 // and for each answer in its batch, s
	DecodeToken  float64 // and for each token of KV it reads, s
	KVTokens     float64 // that the KV cache of one endpoint holds which does not say so itself
	MaxAnswers   float64 // in one batch (vLLM: max_num_seqs)

	TokenBytes  float64 // of KV for one token
	Bandwidth   float64 // of a transfer within a zone, or where zones are not known, bytes/s
	NodeGain    float64 // how many times faster one within a machine is; at least 1
	ZoneGap     float64 // how many times slower one between two zones is; at least 1
	TransferLag float64 // of a transfer, however short, s
}

// DefaultModel is a 70B-class model: prefill at 16,000 tokens/s in steps of 8,192, 160 KB of KV a token, 25 GB/s.
func DefaultModel() Model {
	return Model{
		PrefillStep: 0.005, PrefillToken: 1.0 / 16000, PrefillContext: 1.3e-9, StepTokens: 8192,
		DecodeStep: kvstate.DecodeStep, DecodeAnswer: kvstate.DecodeAnswer, DecodeToken: kvstate.DecodeToken, KVTokens: 1e6, MaxAnswers: 256,
		TokenBytes: kvstate.TokenBytes, Bandwidth: kvstate.TransferBandwidth, NodeGain: 2, ZoneGap: 10, TransferLag: kvstate.TransferLag.Seconds(),
	}
}

// prefill is the time to compute so many tokens after so many that are cached.
func (m *Model) prefill(uncached, cached float64) float64 {
	return m.PrefillStep*m.steps(uncached) + m.PrefillToken*uncached + m.PrefillContext*uncached*(cached+uncached/2)
}

// between is the part of a prefill's time that the tokens from one place of the prompt to another take.
func (m *Model) between(from, to float64) float64 {
	return m.PrefillToken*(to-from) + m.PrefillContext*(to-from)*(from+to)/2
}

// steps is in how many engine steps so many tokens are computed.
func (m *Model) steps(tokens float64) float64 { return math.Ceil(tokens / m.StepTokens) }

// decode is the time of one step of a batch of so many answers with so much KV: every one of them gets one token.
func (m *Model) decode(answers, kv float64) float64 {
	return m.DecodeStep + m.DecodeAnswer*answers + m.DecodeToken*kv
}

// FullStep is the time of one full prefill step: how much work an endpoint should have ahead so as not to run dry.
func (m *Model) FullStep() float64 { return m.StepTokens * m.PrefillToken }
