package kvstate

import (
	"math"
	"time"

	"tandem/kvstate/speed"
)

// A KV transfer happens after the answer's headers were sent, so no hop shows how long it took. The engines count
// it: bytes and seconds of all transfers since they started. The difference of two scrapes shows how fast an
// endpoint fetches KV, and how many bytes a token has. These observations correct the defaults below.

// Assumed transfer speed until engines have reported some: a 70B-class model over one 200 Gbit/s port.
const (
	TransferLag       = 10 * time.Millisecond // of each transfer, however short
	TransferBandwidth = 25e9                  // bytes/s
	TokenBytes        = 160e3                 // of KV for one token
)

// TransferCounters count the KV that an engine has fetched from others since it started. All 0: not reported.
type TransferCounters struct {
	Transfers int64         // with tensor parallelism each rank makes its own
	Bytes     int64         // of all transfers
	Time      time.Duration // sum over all transfers, concurrent ones included
	Tokens    int64         // of prompts whose KV was fetched instead of computed; 0: not reported
	Failed    int64         // failed transfers, which are not counted above
}

// since returns the difference of two reports; false if nothing was transferred, or if the engine has restarted.
func (m *TransferCounters) since(old TransferCounters) (d TransferCounters, ok bool) {
	d = TransferCounters{
		m.Transfers - old.Transfers, m.Bytes - old.Bytes, m.Time - old.Time,
		m.Tokens - old.Tokens, m.Failed - old.Failed,
	}
	return d, old.Transfers > 0 && d.Transfers > 0 && d.Bytes > 0 && d.Time > 0 && d.Tokens >= 0
}

const (
	transferPrior = 0.2              // weight of the prior, in modelled seconds: a dozen usual transfers
	transferBound = 1000.0           // the largest ratio to the model, either way: 25 MB/s
	transferKept  = 10 * time.Minute // how long observations are used after the last one
	// relative to the model: endpoints whose transfers differ by less are equal (2.5 ms of a short one's 10).
	transferNoise = 0.25
	// One scrape counts at most this many times the known ratio, or the one that the scrape before it showed: a stalled
	// transfer says little about the next, and two in a row are a slow network.
	transferLeap = 4.0
	// modelled seconds that one scrape counts for at most: one over hours would outweigh all that follow.
	transferMost = 60.0
	// transfers of an endpoint before it is distinguished from its pool: with fewer, chance would keep requests
	// from one of two equals.
	transfersSeen = 200
	tokensNeeded  = 1 << 12          // before their bytes are used
	tokensKept    = 1 << 22          // at which old samples are halved
	fewestBytes   = 64.0             // per token: a toy model
	mostBytes     = float64(4 << 20) // per token: more than any model has
)

// transferRatio learns the transfer time of a pool or an endpoint: observed over assumed seconds, as a ratio of
// sums.
type transferRatio struct {
	observed, assumed float64
	last              float64 // what the last scrape showed by itself; 0: there was none
	n                 int64   // number of transfers
	at                int64   // time of the last one, Unix ns
}

// ratio returns the transfer time relative to the assumed one. prior is returned without observations, and again
// when the last one is too old.
func (t *transferRatio) ratio(prior float64, now int64) float64 {
	if now-t.at > int64(transferKept) {
		return prior
	}
	r := (t.observed + transferPrior*prior) / (t.assumed + transferPrior)
	return min(max(r, 1/transferBound), transferBound)
}

// doubted is [speed.Learned.Doubted].
func (t transferRatio) doubted(prior float64, now int64, from time.Duration) transferRatio {
	trust := speed.Trust(time.Duration(now-t.at), from)
	if trust == 1 {
		return t
	}
	r := prior + trust*(t.ratio(prior, now)-prior)
	t.assumed *= trust
	t.observed = r*(t.assumed+transferPrior) - transferPrior*prior
	return t
}

// add adds the transfers of some tensor-parallel ranks. Each rank fetches its part of the bytes at the same time as
// the others.
func (t *transferRatio) add(d TransferCounters, ranks int, prior float64, now int64) {
	assumed := float64(d.Transfers)*TransferLag.Seconds() + float64(d.Bytes)*float64(max(ranks, 1))/TransferBandwidth
	known := t.ratio(prior, now)
	if now-t.at > int64(transferKept) {
		t.observed, t.assumed, t.n, t.last = 0, 0, 0, 0
	}
	least, most := known, known
	if t.last > 0 {
		least, most = min(known, t.last), max(known, t.last)
	}
	t.at, t.n, t.last = now, t.n+d.Transfers, d.Time.Seconds()/assumed
	observed := min(max(d.Time.Seconds(), assumed*least/transferLeap), assumed*most*transferLeap)
	if much := assumed / transferMost; much > 1 {
		observed, assumed = observed/much, assumed/much
	}
	t.observed = t.observed*speed.Decay + observed
	t.assumed = t.assumed*speed.Decay + assumed
}

// within returns an endpoint's ratio: the pool's unless the endpoint has enough observations and clearly differs.
func (t *transferRatio) within(pool float64, now int64) float64 {
	left := t.doubted(pool, now, speed.DoubtEndpoint)
	r := left.ratio(pool, now)
	if t.n < transfersSeen || r < pool*speed.Noise && r > pool/speed.Noise || math.Abs(r-pool) < transferNoise {
		return pool
	}
	return r
}

// learnTransfers records what an endpoint fetched. In a pool with several zones the times are not used, because the
// reports do not say where the KV came from.
func (l *endpointState) learnTransfers(d TransferCounters, ranks int, now int64) {
	w := l.load
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if d.Tokens > 0 {
		w.movedTokens, w.movedBytes = w.movedTokens+float64(d.Tokens), w.movedBytes+float64(d.Bytes)
		if w.movedTokens > tokensKept {
			w.movedTokens, w.movedBytes = w.movedTokens/2, w.movedBytes/2
		}
	}
	if w.zoned {
		return
	}
	var next transferRatio
	if old := l.transferTime.Load(); old != nil {
		next = *old
	}
	w.transferTime = w.transferTime.doubted(1, now, speed.DoubtPool)
	pool := w.transferTime.ratio(1, now)
	next = next.doubted(pool, now, speed.DoubtEndpoint)
	next.add(d, ranks, pool, now)
	w.transferTime.add(d, ranks, 1, now)
	l.transferTime.Store(&next)
}

// tokenBytes returns the observed KV bytes per token, 0 without enough observations. The caller holds w.mu.
func (w *workload) tokenBytes() float64 {
	if w.movedTokens < tokensNeeded {
		return 0
	}
	return math.Round(min(max(w.movedBytes/w.movedTokens, fewestBytes), mostBytes))
}

// learnedTokenBytes is tokenBytes for callers without w.mu.
func (w *workload) learnedTokenBytes() float64 {
	if w == nil {
		return 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.tokenBytes()
}

// transferWithin returns [Candidate.Transfer].
func (l *endpointState) transferWithin(pool float64, now int64) float64 {
	if m := l.transferTime.Load(); m != nil {
		return m.within(pool, now)
	}
	return pool
}

// Bandwidth returns the observed rate of KV transfers to an endpoint of a pool, in bytes/s, not counting the latency of
// each transfer; 0: not learned.
func (s *State) Bandwidth(p *Pool, e *Endpoint) float64 {
	now := s.o.Now().UnixNano()
	m := e.state.transferTime.Load()
	if m == nil || now-m.at > int64(transferKept) {
		return 0
	}
	_, pool, _ := p.load.fleetSpeeds(now)
	return TransferBandwidth / m.within(pool, now)
}

// TokenBytes returns the KV bytes per token; 0: not learned.
func (p *Pool) TokenBytes() float64 { return p.load.learnedTokenBytes() }
