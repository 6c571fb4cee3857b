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

// smg113 is smg 1.13's pair (smg-project/smg, August 2026: policies/cache_aware.rs, power_of_two.rs; pull request
// 2466). Prefill is the endpoint that holds most of the prompt; if its requests are more than 1.5 times the mean and
// more than 64 above it, or nobody holds any, the one with the fewest. Decode is the one of two with the shorter wait,
//
//	1024 x (requests that wait or come) / (tokens per second, or 2,000) + .15 s x k/(1 - k), k: KV memory in use
//
// A request waits until decode's batch has a place for it, for 30 s, and is refused then.
type smg113 struct {
	*peer
	waiting []*job
}

func (s *smg113) prefill(j *job) int {
	best := s.argmin(len(s.prefills), func(i int) float64 { return -float64(s.hit(i, j)) + float64(s.booked[i])/1e6 })
	sum := 0.0
	for _, n := range s.booked {
		sum += float64(n)
	}
	mean, load := sum/float64(len(s.booked)), float64(s.booked[best])
	if s.hit(best, j) == 0 || load > 1.5*mean && load > mean+64 {
		return s.leastBooked()
	}
	return best
}

func (s *smg113) wait(i int) float64 {
	e := s.decodes[i]
	answers, _ := e.Requests()
	k := min(e.Usage(), .999)
	queued := float64(e.Waiting() + max(s.answers[i]-answers, 0))
	return 1024*queued/cmp.Or(e.Throughput(), 2000) + .15*k/(1-k)
}

func (s *smg113) decode(*job) int {
	n := len(s.decodes)
	a := s.random.IntN(n)
	b := (a + 1 + s.random.IntN(max(n-1, 1))) % n
	if s.wait(b) < s.wait(a) {
		return b
	}
	return a
}

func (s *smg113) late() bool { return false }

func (s *smg113) arrive(j *job) {
	ready(s.peer)
	s.waiting = append(s.waiting, j)
	s.admit()
	s.After(30, func() {
		if slices.Contains(s.waiting, j) {
			s.waiting = slices.DeleteFunc(s.waiting, func(o *job) bool { return o == j })
			refuse(s.fleet, j)
		}
	})
}

// admit sends the requests that wait, in order, while some batch has a place.
func (s *smg113) admit() {
	for len(s.waiting) > 0 && float64(slices.Min(s.answers)) < s.model.MaxAnswers {
		next := s.waiting[0]
		s.waiting = s.waiting[1:]
		s.peer.arrive(next)
	}
}

func (s *smg113) done(j *job) {
	s.peer.done(j)
	s.admit()
}

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
