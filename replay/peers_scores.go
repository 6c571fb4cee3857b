package replay

import (
	"cmp"
	"math"
	"slices"
)

// llmd is llm-d's scheduler with the weights of its precise-prefix guide: 3 x prefix + 2 x queue + 2 x KV memory, each
// normalised to 0..1, decode first and independently of prefill. (llm-d-router v0.10: prefix-cache-scorer,
// queue-scorer, kv-cache-utilization-scorer.) Here it sees the engines' queues without delay; the real one scrapes
// them.
type llmd struct{ *peer }

func (l *llmd) prefill(j *job) int {
	n := len(l.prefills)
	least, most := math.MaxInt, 0
	for _, b := range l.booked {
		least, most = min(least, b), max(most, b)
	}
	return l.argmin(n, func(i int) float64 {
		queue := 1.0
		if most > least {
			queue = float64(most-l.booked[i]) / float64(most-least)
		}
		held := min(float64(l.tokens[i])/l.model.KVTokens, 1)
		return -(3*l.match(i, j) + 2*queue + 2*(1-held))
	})
}

func (l *llmd) decode(j *job) int {
	waiting := func(i int) int { return l.decodes[i].Waiting() }
	least, most := math.MaxInt, 0
	for i := range l.decodes {
		least, most = min(least, waiting(i)), max(most, waiting(i))
	}
	return l.argmin(len(l.decodes), func(i int) float64 {
		queue := 1.0
		if most > least {
			queue = float64(most-waiting(i)) / float64(most-least)
		}
		held := min(float64(l.kv[i])/l.model.KVTokens, 1)
		return -(3*l.decodeMatch(i, j) + 2*queue + 2*(1-held))
	})
}

func (l *llmd) late() bool { return false }

// dynamo is Dynamo's KV router. The cost of prefill is the blocks that a worker has to compute, the missing blocks of
// this prompt included. The cost of decode is its blocks, this prompt's included and without credit for held ones;
// decode is chosen when prefill has ended. (lib/kv-router/src/scheduling/selector/default.rs, defaults: overlap weight
// 1, temperature 0.)
type dynamo struct{ *peer }

func (d *dynamo) prefill(j *job) int {
	return d.argmin(len(d.prefills), func(i int) float64 {
		credit := j.CachedTokens(d.hit(i, j))
		return math.Max(float64(d.tokens[i]+j.Input-credit), 0)
	})
}

func (d *dynamo) decode(j *job) int {
	return d.argmin(len(d.decodes), func(i int) float64 { return float64(d.kv[i] + j.Input) })
}

func (d *dynamo) late() bool { return true }

// smg is the SGLang gateway's cache_aware policy for prefill, with the thresholds of its command line (64, 1.5, .3)
// or of its library (32, 1.1, .5), and power of two for decode. (model_gateway/src/policies/cache_aware.rs.)
type smg struct {
	*peer
	spread      int
	ratio, hits float64
}

func (s *smg) prefill(j *job) int {
	least, most := slices.Min(s.booked), slices.Max(s.booked)
	if most-least > s.spread && float64(most) > s.ratio*float64(least) {
		return s.leastBooked()
	}
	best := s.argmin(len(s.prefills), func(i int) float64 { return -float64(s.hit(i, j)) + float64(s.booked[i])/1e6 })
	if s.match(best, j) > s.hits {
		return best
	}
	return s.leastBooked()
}

func (s *smg) decode(*job) int { return s.twoChoices() }
func (s *smg) late() bool      { return false }

// aibrix is AIBrix's PD router with its default prefix_cache policy.
// (pkg/plugins/gateway/algorithms/pd_disaggregation.go: imbalance spread 16, one standard deviation, a tenth of the
// match against the share of the largest count.)
type aibrix struct{ *peer }

func (a *aibrix) prefill(j *job) int {
	least, most := slices.Min(a.booked), slices.Max(a.booked)
	if most-least > 16 {
		return a.leastBooked()
	}
	limit := meanAndDeviation(a.booked)
	return a.argmin(len(a.prefills), func(i int) float64 {
		if float64(a.booked[i]) > limit {
			return math.MaxFloat64
		}
		return (100-math.Floor(100*a.match(i, j)))*0.1 + float64(a.booked[i])/float64(max(most, 1))
	})
}

// meanAndDeviation returns the mean and the mean plus one standard deviation.
func meanAndDeviation(counts []int) float64 {
	sum, squares, n := 0.0, 0.0, float64(len(counts))
	for _, c := range counts {
		sum += float64(c)
		squares += float64(c) * float64(c)
	}
	mean := sum / n
	return mean + math.Sqrt(max(squares/n-mean*mean, 0))
}

func (a *aibrix) decode(*job) int {
	least, most := slices.Min(a.answers), slices.Max(a.answers)
	if most-least >= 16 {
		return a.leastAnswers()
	}
	fastest, free := 0.0, 0.0
	for _, d := range a.decodes {
		fastest, free = max(fastest, d.Throughput()), max(free, 1-d.Usage())
	}
	return a.argmin(len(a.decodes), func(i int) float64 {
		d := a.decodes[i]
		score := float64(a.answers[i])/float64(max(most, 1)) + 1 - d.Throughput()/max(fastest, 1)
		return score / max((1-d.Usage())/max(free, 1e-9), 1e-9)
	})
}

func (a *aibrix) late() bool { return false }

// mooncake is algorithm 1 of the Mooncake paper (FAST 25): the least estimated time to the first token, made of the
// queued work and the prefill of the uncached tokens, with the engines' true constants. Prefixes are not fetched from
// other instances.
type mooncake struct{ *peer }

func (m *mooncake) prefill(j *job) int {
	return m.argmin(len(m.prefills), func(i int) float64 {
		cached := j.CachedTokens(m.hit(i, j))
		return m.work[i] + m.prefillTime(j.Input-cached, cached)
	})
}

func (m *mooncake) decode(*job) int {
	best := 0
	for i := range m.decodes {
		if cmp.Or(cmp.Compare(m.answers[i], m.answers[best]), cmp.Compare(m.kv[i], m.kv[best])) < 0 {
			best = i
		}
	}
	return best
}

func (m *mooncake) late() bool { return false }
