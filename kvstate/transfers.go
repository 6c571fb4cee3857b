package kvstate

import (
	"math"
	"time"
)

// KV goes from one engine to the other while the answer's headers are out already, so no hop tells how long that took. The
// engines themselves count it: bytes and seconds of all transfers since they started. From two of these counts, one scrape apart, follow how
// fast an endpoint fetches and how many bytes a token has. Both only correct what is assumed of a fleet of which nothing is known.

// What a transfer is taken to be until engines have told of some: a 70B-class model over one 200 Gbit/s port.
const (
	TransferLag       = 10 * time.Millisecond // of each, however short
	TransferBandwidth = 25e9                  // bytes/s
	TokenBytes        = 160e3                 // of KV for one token
)

// Moved is the KV that an engine says it has fetched from others since it started. All 0: it does not say.
type Moved struct {
	Transfers int64         // with tensor parallelism each rank makes its own
	Bytes     int64         // of all of them
	Time      time.Duration // likewise, each for itself: those that run at the same time both count
	Tokens    int64         // of prompts that were not computed for it; 0: not said
	Failed    int64         // transfers that failed; not among the others
}

// since is what was moved between two counts; false where nothing was, or the engine has begun anew.
func (m *Moved) since(old Moved) (d Moved, ok bool) {
	d = Moved{m.Transfers - old.Transfers, m.Bytes - old.Bytes, m.Time - old.Time, m.Tokens - old.Tokens, m.Failed - old.Failed}
	return d, old.Transfers > 0 && d.Transfers > 0 && d.Bytes > 0 && d.Time > 0 && d.Tokens >= 0
}

const (
	transferPrior = 0.2              // seconds of the model that the start counts for: a dozen usual transfers
	transferBound = 100.0            // nothing is taken for more than so many times faster or slower than assumed
	transferKept  = 10 * time.Minute // what was seen holds for so long after the last one
	transferNoise = 0.25             // of what is assumed: endpoints whose transfers differ by less are equal (2.5 ms of a short one's 10)
	transferLeap  = 4.0              // nor one scrape for more than so many times what is known: one that stalled says little of the next
	transferMost  = 60.0             // seconds of the model that one scrape counts for: one that tells of hours would outweigh all that follow
	transfersSeen = 200              // of an endpoint's before it is told from its pool: with fewer, chance would keep requests from one of two equals
	tokensNeeded  = 1 << 12          // before their bytes count
	tokensKept    = 1 << 22          // beyond which old ones are forgotten
	fewestBytes   = 64.0             // of a token: a toy model
	mostBytes     = float64(4 << 20) // of a token: more than any model has
)

// transfers are what a pool, or an endpoint in it, is seen to need for KV transfers: observed over assumed seconds, as a ratio of
// sums.
type transfers struct {
	observed, assumed float64
	n                 int64 // so many of them, in all
	at                int64 // ns since 1970: of the last one
}

// ratio is how many times the assumed time transfers take; prior is what it is taken for before any was seen, and again after some
// time in which none was: else who has been slow once would get none, and could not show that it is not any more.
func (t *transfers) ratio(prior float64, now int64) float64 {
	if now-t.at > int64(transferKept) {
		return prior
	}
	r := (t.observed + transferPrior*prior) / (t.assumed + transferPrior)
	return min(max(r, 1/transferBound), transferBound)
}

// add takes in what was moved over so many tensor-parallel ranks: each fetches its part of the bytes while the others do theirs.
func (t *transfers) add(d Moved, ranks int, prior float64, now int64) {
	assumed := float64(d.Transfers)*TransferLag.Seconds() + float64(d.Bytes)*float64(max(ranks, 1))/TransferBandwidth
	known := t.ratio(prior, now)
	if now-t.at > int64(transferKept) {
		t.observed, t.assumed, t.n = 0, 0, 0
	}
	t.at, t.n = now, t.n+d.Transfers
	observed := min(max(d.Time.Seconds(), assumed*known/transferLeap), assumed*known*transferLeap)
	if much := assumed / transferMost; much > 1 {
		observed, assumed = observed/much, assumed/much
	}
	t.observed = t.observed*speedDecay + observed
	t.assumed = t.assumed*speedDecay + assumed
}

// within is an endpoint's ratio in its pool: the pool's own unless it has been seen for long enough, and clearly differs.
func (t *transfers) within(pool float64, now int64) float64 {
	r := t.ratio(pool, now)
	if t.n < transfersSeen || r < pool*speedNoise && r > pool/speedNoise || math.Abs(r-pool) < transferNoise {
		return pool
	}
	return r
}

// learnMoved notes what an endpoint fetched. In a pool of several zones times say nothing that a price could use: nobody tells
// from where.
func (l *live) learnMoved(d Moved, ranks int, now int64) {
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
	var next transfers
	if old := l.moves.Load(); old != nil {
		next = *old
	}
	next.add(d, ranks, w.moves.ratio(1, now), now)
	w.moves.add(d, ranks, 1, now)
	l.moves.Store(&next)
}

// tokenBytes is what a token's KV is seen to be, 0 as long as too little was; w.mu is held.
func (w *workload) tokenBytes() float64 {
	if w.movedTokens < tokensNeeded {
		return 0
	}
	return math.Round(min(max(w.movedBytes/w.movedTokens, fewestBytes), mostBytes))
}

// transferWithin is [Candidate.Transfer].
func (l *live) transferWithin(pool float64, now int64) float64 {
	if m := l.moves.Load(); m != nil {
		return m.within(pool, now)
	}
	return pool
}

// Bandwidth is how fast KV comes to an endpoint of a pool, the lag of each transfer aside, bytes/s; 0: not learned.
func (s *State) Bandwidth(p *Pool, e *Endpoint) float64 {
	now := s.o.Now().UnixNano()
	m := e.moves.Load()
	if m == nil || now-m.at > int64(transferKept) {
		return 0
	}
	_, pool, _ := p.load.fleetSpeeds(now)
	return TransferBandwidth / m.within(pool, now)
}

// TokenBytes is the KV of a token, bytes; 0: not learned.
func (p *Pool) TokenBytes() float64 {
	p.load.mu.Lock()
	defer p.load.mu.Unlock()
	return p.load.tokenBytes()
}
