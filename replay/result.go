package replay

// Spread is a distribution of times, in seconds.
type Spread struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
}

// Result is how a policy served a trace.
type Result struct {
	Policy      string  `json:"policy"`
	Requests    int     `json:"requests"`
	HitShare    float64 `json:"hitShare"`    // prompt tokens found in a cache, of all
	MaxMeanLoad float64 `json:"maxMeanLoad"` // prompt tokens computed by the busiest prefill endpoint over their mean
	TTFT        Spread  `json:"ttft"`        // from arrival to the first token of the answer
	TPOT        Spread  `json:"tpot"`        // between two tokens of an answer, over answers of at least two
	Goodput     float64 `json:"goodput"`     // share of requests that met both targets

	EndToEnd Spread  `json:"-"` // from arrival to the last token
	Alone    float64 `json:"-"` // share of requests that decode served alone
	Stuck    int     `json:"-"` // requests that never ended: they count as if they had at the end of the run
	// time that prefill endpoints worked, divided by the time in which requests arrived; above 1: they fell behind
	Demand float64 `json:"-"`
	Span   float64 `json:"-"` // seconds of virtual time until all had ended
	ttft   []float64
}

// FirstTokens returns the times to the first token, ascending.
func (r *Result) FirstTokens() []float64 { return r.ttft }

func newResult(name string, f *fleet, jobs []*job, c Config) *Result {
	r := &Result{Policy: name, Requests: len(jobs), Span: f.Now}
	var tpot, total []float64
	good, alone := 0, 0
	for _, j := range jobs {
		stuck := j.endAt == 0
		if stuck {
			r.Stuck++
			j.endAt = f.Now
			if j.firstAt == 0 {
				j.firstAt = f.Now
			}
		}
		first, each := j.firstAt-j.Arrival, 0.0
		r.ttft = append(r.ttft, first)
		total = append(total, j.endAt-j.Arrival)
		if j.Output > 1 && !j.refused() {
			each = (j.endAt - j.firstAt) / float64(j.Output-1)
			tpot = append(tpot, each)
		}
		if first <= c.TTFT && each <= c.TPOT && !stuck && !j.refused() {
			good++
		}
		if j.alone {
			alone++
		}
	}
	r.TTFT, r.TPOT, r.EndToEnd = spread(r.ttft), spread(tpot), spread(total)
	n := float64(len(jobs))
	r.Goodput, r.Alone = float64(good)/n, float64(alone)/n
	r.HitShare, r.MaxMeanLoad = f.shares()
	for _, p := range f.prefills {
		r.Demand += p.PromptTime / (jobs[len(jobs)-1].Arrival * float64(len(f.prefills)))
	}
	return r
}

// shares returns the hit share of the fleet and the balance of its prefill.
func (f *fleet) shares() (hit, maxMean float64) {
	var cached, computed, most, prefills float64
	for _, p := range f.prefills {
		prefills += float64(p.Computed)
		most = max(most, float64(p.Computed))
	}
	for _, e := range f.engines() {
		cached += float64(e.Cached)
		computed += float64(e.Computed)
	}
	maxMean = 1
	if prefills > 0 {
		maxMean = most / prefills * float64(len(f.prefills))
	}
	return cached / max(cached+computed, 1), maxMean
}

// spread sorts its argument.
func spread(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	var s Spread
	for _, v := range sorted(values) {
		s.Mean += v / float64(len(values))
	}
	s.P50, s.P90 = quantile(values, .5), quantile(values, .9)
	s.P95, s.P99 = quantile(values, .95), quantile(values, .99)
	return s
}

// quantile returns the least of the sorted values that at least a share q of them do not exceed.
func quantile(values []float64, q float64) float64 {
	return values[min(int(q*float64(len(values))), len(values)-1)]
}
