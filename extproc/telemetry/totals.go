package telemetry

import (
	"math"
	"math/bits"
	"sync/atomic"
	"time"

	"tandem/extproc/usage"
)

// Totals are counts since the server started, small enough to be read every second. The page and `tandem status`
// show the difference of two of them.
type Totals struct {
	// passes routed: two hops, one hop of a request that could be split, one hop of others
	Split, Alone, Pass         uint64
	Refused, Replans           uint64
	OK, Rejected, Failed, Gone uint64 // requests ended: answered, 4xx of an engine, failed, client left
	// requests whose ticket this replica refused, and requests of this replica that failed since one was refused
	TicketsRefused, TicketFailures uint64
	CachedTokens, ComputedTokens   uint64 // of prompts of split requests
	FirstByte, Prefill, Decisions  Durations
	Usage                          UsageTotals
}

// UsageTotals are counts of what requests used; 0 without the configuration's usage, but for first tokens.
type UsageTotals struct {
	Answer               uint64 // tokens of answers
	Judged, Kept         uint64 // requests that count for the pool's promise, and for which it was kept
	FirstToken, PerToken Durations
}

// Since returns the difference to an earlier count.
func (t *UsageTotals) Since(earlier *UsageTotals) UsageTotals {
	return UsageTotals{
		Answer: t.Answer - earlier.Answer, Judged: t.Judged - earlier.Judged, Kept: t.Kept - earlier.Kept,
		FirstToken: t.FirstToken.Since(&earlier.FirstToken), PerToken: t.PerToken.Since(&earlier.PerToken),
	}
}

// Since returns the difference to an earlier count.
func (t *Totals) Since(earlier *Totals) Totals {
	return Totals{
		Split: t.Split - earlier.Split, Alone: t.Alone - earlier.Alone, Pass: t.Pass - earlier.Pass,
		Refused: t.Refused - earlier.Refused, Replans: t.Replans - earlier.Replans,
		OK: t.OK - earlier.OK, Rejected: t.Rejected - earlier.Rejected,
		Failed: t.Failed - earlier.Failed, Gone: t.Gone - earlier.Gone,
		TicketsRefused: t.TicketsRefused - earlier.TicketsRefused,
		TicketFailures: t.TicketFailures - earlier.TicketFailures,
		CachedTokens:   t.CachedTokens - earlier.CachedTokens,
		ComputedTokens: t.ComputedTokens - earlier.ComputedTokens,
		FirstByte:      t.FirstByte.Since(&earlier.FirstByte), Prefill: t.Prefill.Since(&earlier.Prefill),
		Decisions: t.Decisions.Since(&earlier.Decisions), Usage: t.Usage.Since(&earlier.Usage),
	}
}

// Durations is a histogram of times with four buckets to an octave, starting at 16 us.
type Durations [durationBuckets]uint64

const durationBuckets = 104 // up to 16 us * 2^26, which is 18 minutes

// bucketOf returns the bucket of a time: octave, and quarter of it.
func bucketOf(d time.Duration) int {
	n := uint64(max(d, 0)) >> 12 // 4096 ns: four of them are the base of the first octave
	if n < 4 {
		return 0
	}
	octave := bits.Len64(n) - 3 // 0 for 4 to 7
	quarter := int(n>>octave) & 3
	return min(octave*4+quarter, durationBuckets-1)
}

// bucketTop returns the upper bound of bucket i.
func bucketTop(i int) time.Duration {
	return time.Duration(4+i%4+1) << (12 + i/4)
}

// Quantile returns the time below which the share q of all times lies; 0 if there are none. It is interpolated in a
// bucket, so it may be a quarter too long or too short.
func (h *Durations) Quantile(q float64) time.Duration {
	var n uint64
	for _, c := range h {
		n += c
	}
	if n == 0 {
		return 0
	}
	rank := uint64(math.Ceil(q * float64(n)))
	for i, c := range h {
		if c >= rank {
			low := time.Duration(0)
			if i > 0 {
				low = bucketTop(i - 1)
			}
			return low + time.Duration(float64(bucketTop(i)-low)*(float64(rank)-.5)/float64(c)) // amid its share
		}
		rank -= c
	}
	return bucketTop(durationBuckets - 1)
}

// Since returns the difference to an earlier count.
func (h *Durations) Since(earlier *Durations) (out Durations) {
	for i := range h {
		out[i] = h[i] - earlier[i]
	}
	return out
}

// Add adds another histogram's counts.
func (h *Durations) Add(other *Durations) {
	for i := range h {
		h[i] += other[i]
	}
}

// liveTotals are the counters behind Totals.
type liveTotals struct {
	split, alone, pass             atomic.Uint64
	refused, replans               atomic.Uint64
	ok, rejected, failed, gone     atomic.Uint64
	ticketsRefused, ticketFailures atomic.Uint64
	cachedTokens, computedTokens   atomic.Uint64
	firstByte, prefill, decisions  liveDurations
	usage                          liveUsage
}

type liveUsage struct {
	answer, judged, kept atomic.Uint64
	firstToken, perToken liveDurations
}

func (l *liveUsage) ended(u *usage.Used) {
	if u == nil {
		return
	}
	if u.Answer != nil {
		l.answer.Add(uint64(*u.Answer))
	}
	if u.Promise != "" && u.Promise != usage.Unknown {
		l.judged.Add(1)
	}
	if u.Promise == usage.Kept {
		l.kept.Add(1)
	}
	if u.PerToken > 0 {
		l.perToken.observe(u.PerToken)
	}
}

func (l *liveUsage) load() UsageTotals {
	return UsageTotals{
		Answer: l.answer.Load(), Judged: l.judged.Load(), Kept: l.kept.Load(), FirstToken: l.firstToken.load(),
		PerToken: l.perToken.load(),
	}
}

type liveDurations [durationBuckets]atomic.Uint64

func (h *liveDurations) observe(d time.Duration) { h[bucketOf(d)].Add(1) }

func (h *liveDurations) load() (out Durations) {
	for i := range h {
		out[i] = h[i].Load()
	}
	return out
}

func (l *liveTotals) decided(route string) {
	switch route {
	case "split", "pair":
		l.split.Add(1)
	case "decode_alone":
		l.alone.Add(1)
	default:
		l.pass.Add(1)
	}
}

func (l *liveTotals) ended(result string) {
	switch result {
	case "ok":
		l.ok.Add(1)
	case "refused":
		l.rejected.Add(1)
	case "failed":
		l.failed.Add(1)
	default:
		l.gone.Add(1)
	}
}

// Totals returns the current counts.
func (m *Metrics) Totals() Totals {
	l := &m.liveTotals
	return Totals{
		Split: l.split.Load(), Alone: l.alone.Load(), Pass: l.pass.Load(),
		Refused: l.refused.Load(), Replans: l.replans.Load(),
		OK: l.ok.Load(), Rejected: l.rejected.Load(), Failed: l.failed.Load(), Gone: l.gone.Load(),
		TicketsRefused: l.ticketsRefused.Load(), TicketFailures: l.ticketFailures.Load(),
		CachedTokens: l.cachedTokens.Load(), ComputedTokens: l.computedTokens.Load(),
		FirstByte: l.firstByte.load(), Prefill: l.prefill.load(), Decisions: l.decisions.load(),
		Usage: l.usage.load(),
	}
}
