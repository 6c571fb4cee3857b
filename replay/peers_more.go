package replay

import (
	"math"
	"slices"
)

// inFlight is llm-d's scheduler with 2 x prefix + 1 x requests in flight, which it counts itself and so knows without
// delay. (llm-d-router v0.10: prefix-cache-scorer, active-request-scorer.)
type inFlight struct{ *peer }

func (l *inFlight) score(match float64, count int, all []int) float64 {
	most := slices.Max(all)
	return 2*match + float64(most-count)/float64(max(most, 1))
}

func (l *inFlight) prefill(j *job) int {
	return l.argmin(len(l.prefills), func(i int) float64 { return -l.score(l.match(i, j), l.booked[i], l.booked) })
}

func (l *inFlight) decode(j *job) int {
	return l.argmin(len(l.decodes), func(i int) float64 {
		return -l.score(l.decodeMatch(i, j), l.answers[i], l.answers)
	})
}

func (l *inFlight) late() bool { return false }

// trtllm is TensorRT-LLM's KvCacheAwareRouter on both legs: the matched share, less 1/64 for each request on the
// endpoint. (tensorrt_llm/serve/router.py.)
type trtllm struct{ *peer }

func (t *trtllm) prefill(j *job) int {
	return t.argmin(len(t.prefills), func(i int) float64 { return float64(t.booked[i])/64 - t.match(i, j) })
}

func (t *trtllm) decode(j *job) int {
	return t.argmin(len(t.decodes), func(i int) float64 { return float64(t.answers[i])/64 - t.decodeMatch(i, j) })
}

func (t *trtllm) late() bool { return false }

// loadAware is production-stack's loadaware routing on both legs: the matched share, less (load - mean) / mean.
// (vllm-project/production-stack, pull request 1035; beta 1.)
type loadAware struct{ *peer }

func (l *loadAware) prefill(j *job) int {
	return l.argmin(len(l.prefills), func(i int) float64 { return excess(l.booked, i) - l.match(i, j) })
}

func (l *loadAware) decode(j *job) int {
	return l.argmin(len(l.decodes), func(i int) float64 { return excess(l.answers, i) - l.decodeMatch(i, j) })
}

func (l *loadAware) late() bool { return false }

func excess(load []int, i int) float64 {
	sum := 0
	for _, n := range load {
		sum += n
	}
	mean := float64(sum) / float64(len(load))
	return (float64(load[i]) - mean) / math.Max(1, mean)
}

// powerOfTwo draws two endpoints and chooses the less loaded one, on both legs (SMG's and vllm-router's power_of_two).
type powerOfTwo struct{ *peer }

func (p *powerOfTwo) prefill(*job) int {
	a, b := p.random.IntN(len(p.prefills)), p.random.IntN(len(p.prefills))
	if p.booked[b] < p.booked[a] {
		return b
	}
	return a
}

func (p *powerOfTwo) decode(*job) int { return p.twoChoices() }
func (p *powerOfTwo) late() bool      { return false }

// bypass wraps a policy: decode computes a prompt itself if its own endpoint lacks only a few of its tokens. The
// decode endpoint is chosen first.
type bypass struct {
	*peer
	chooser
	tokens  int     // decode computes fewer missing tokens than this
	share   float64 // and only less than this share of the prompt
	anyHit  bool    // and only if it holds a part of the prompt
	through func(j *job) int
}

func (b *bypass) alone(j *job) (decode int, ok bool) {
	d := b.through(j)
	hit := j.CachedTokens(b.decodes[d].Held(j.Blocks))
	missing := j.Input - hit
	return d, missing < b.tokens && float64(missing) < b.share*float64(j.Input) && (hit > 0 || !b.anyHit)
}

// newBypass returns llm-d's prefix-based-pd-decider (nonCachedTokens; llm-d-router v0.10) over a policy.
func newBypass(p *peer, c chooser, tokens int) *bypass {
	return &bypass{peer: p, chooser: c, tokens: tokens, share: math.Inf(1), through: c.decode}
}

// newAggregated returns a peer that never splits: the endpoint that its formula for decode chooses serves both legs.
// Dynamo's, with overlap weight 1, counts the blocks to compute and the blocks held.
func newAggregated(name string, p *peer) chooser {
	c := map[string]chooser{
		"least-requests": &leastRequests{p}, "llm-d": &llmd{p}, "llm-d-in-flight": &inFlight{p}, "dynamo": &dynamo{p},
	}[name]
	if c == nil {
		return nil
	}
	b := newBypass(p, c, math.MaxInt)
	if name == "dynamo" {
		b.through = func(j *job) int { return dynamoWhole(p, j) }
	}
	return b
}

// dynamoWhole is Dynamo's choice of an endpoint that serves both legs.
func dynamoWhole(p *peer, j *job) int {
	return p.argmin(len(p.decodes), func(i int) float64 {
		credit := j.CachedTokens(p.decodes[i].Held(j.Blocks))
		return float64(p.decodes[i].Uncomputed() + j.Input - credit + p.kv[i] + j.Input)
	})
}

// newDynamoBypass returns Dynamo's conditional disaggregation with isl_bounding: effective ISL below 2,048 and below .7
// of the prompt on the decode worker that its router chooses by KV overlap. (Dynamo's docs,
// router-conditional-disagg-config.)
func newDynamoBypass(p *peer) *bypass {
	b := &bypass{peer: p, chooser: &dynamo{p}, tokens: 2048, share: 0.7}
	b.through = func(j *job) int {
		return p.argmin(len(p.decodes), func(i int) float64 {
			credit := j.CachedTokens(p.decodes[i].Held(j.Blocks))
			return float64(p.kv[i] + j.Input + j.Input - credit)
		})
	}
	return b
}

// newTRTBypass returns TensorRT-LLM's conditional disaggregation: decode computes the prompt if it holds a part of it
// and lacks at most that many tokens. (tensorrt_llm/serve: max_local_prefill_length.)
func newTRTBypass(p *peer, tokens int) *bypass {
	b := newBypass(p, &trtllm{p}, tokens+1)
	b.anyHit = true
	return b
}

// dynamoLoad is Dynamo's conditional disaggregation by load: decode computes the prompt if the prefill worker that the
// router chooses is busy (prefill_load), or also under the condition of isl_bounding (isl_or_load), unless decode is
// busy itself. (Dynamo's docs, router-conditional-disagg-policy. Busy: prefill with more than one full step of tokens
// reserved, the queue threshold 1 times max_num_batched_tokens, and decode above .9 of its KV; neither threshold has a
// default.)
type dynamoLoad struct {
	*bypass
	isl bool
}

const dynamoDecodeBusy = 0.9

func newDynamoLoad(p *peer, isl bool) *dynamoLoad { return &dynamoLoad{newDynamoBypass(p), isl} }

func (b *dynamoLoad) alone(j *job) (decode int, ok bool) {
	d, short := b.bypass.alone(j)
	if float64(b.kv[d]+j.Input) > dynamoDecodeBusy*b.model.KVTokens {
		return d, false
	}
	busy := float64(b.peer.tokens[b.chooser.prefill(j)]) > b.model.StepTokens
	return d, busy || b.isl && short
}
