package picker

import (
	"math"

	"tandem/kvstate"
)

// Model is the cost model of a pool's engines: seconds for tokens. Learned factors of each endpoint correct its
// times (kvstate.Candidate.Speed, Transfer and Step), so its shape matters most. [DefaultModel] has the figures of
// a 70B-class model on eight H100s, which are those of docs/decision.md.
type Model struct {
	PrefillStep    float64 // of one prefill step, s
	PrefillToken   float64 // per computed token, s
	PrefillContext float64 // per computed token for each token before it (attention), s
	StepTokens     float64 // prompt tokens in one step (vLLM: max_num_batched_tokens)

	DecodeStep   float64 // of one decode step, s
	DecodeAnswer float64 // per answer in its batch, s
	DecodeToken  float64 // per token of KV that it reads, s
	KVTokens     float64 // capacity of an endpoint's KV cache that does not report it
	MaxAnswers   float64 // in one batch (vLLM: max_num_seqs)

	TokenBytes  float64 // KV bytes of one token
	Bandwidth   float64 // of a transfer within a zone, or if zones are unknown, bytes/s
	NodeGain    float64 // how many times faster within a node; at least 1
	ZoneGap     float64 // how many times slower between zones; at least 1
	TransferLag float64 // of a transfer, however short, s

	LoadBandwidth LoadBandwidth // at which an endpoint loads KV that it keeps outside GPU memory
}

// LoadBandwidth is a rate in bytes/s by tier: CPU memory, disk, a remote store. All are above 0.
type LoadBandwidth [len(kvstate.Loads{})]float64

// DefaultModel is a 70B-class model: prefill at 16,000 tokens/s in steps of 8,192, 160 KB of KV a token, 25 GB/s.
func DefaultModel() Model {
	return Model{
		PrefillStep: 0.005, PrefillToken: 1.0 / 16000, PrefillContext: 1.3e-9, StepTokens: 8192,
		DecodeStep: kvstate.DecodeStep, DecodeAnswer: kvstate.DecodeAnswer, DecodeToken: kvstate.DecodeToken,
		KVTokens: 1e6, MaxAnswers: 256,
		TokenBytes: kvstate.TokenBytes, Bandwidth: kvstate.TransferBandwidth, NodeGain: 2, ZoneGap: 10,
		TransferLag: kvstate.TransferLag.Seconds(), LoadBandwidth: LoadBandwidth{25e9, 5e9, 2e9},
	}
}

// prefill returns the time to compute tokens after cached ones.
func (m *Model) prefill(uncached, cached float64) float64 {
	return m.PrefillStep*m.steps(uncached) + m.PrefillToken*uncached + m.PrefillContext*uncached*(cached+uncached/2)
}

// between returns the part of a prefill's time for the tokens between two positions of the prompt.
func (m *Model) between(from, to float64) float64 {
	return m.PrefillToken*(to-from) + m.PrefillContext*(to-from)*(from+to)/2
}

// steps returns the number of engine steps for tokens.
func (m *Model) steps(tokens float64) float64 { return math.Ceil(tokens / m.StepTokens) }

// decode returns the time of one step of a batch of answers with kv tokens of KV: each answer gets one token.
func (m *Model) decode(answers, kv float64) float64 {
	return m.DecodeStep + m.DecodeAnswer*answers + m.DecodeToken*kv
}

// FullStep returns the time of a full prefill step: the work that an endpoint should have ahead, so that it is
// never idle.
func (m *Model) FullStep() float64 { return m.StepTokens * m.PrefillToken }
