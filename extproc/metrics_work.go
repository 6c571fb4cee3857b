package extproc

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/extproc/kvtransfer"
)

// work is a phase of an ext_proc stream.
type work uint8

const (
	workReceive work = iota // waiting for Envoy, and with it for the client or for P
	workScan                // the body
	workDecide              // view, pick, booking, the leg's body, the ticket
	workAnswer              // handing the reply to gRPC, flow control included
	works
)

func (m *Metrics) observeWork(h *prometheus.HistogramVec) {
	for i, role := range [...]string{"main", rolePrefillLeg, roleDecodeLeg, roleMirror, roleAnswerLeg, roleEncodeLeg} {
		for w, name := range [...]string{"receive", "scan", "decide", "answer"} {
			m.work[i][w] = h.WithLabelValues(role, name)
		}
	}
}

// did ends a phase of the exchange: what comes next began now.
func (x *exchange) did(w work) {
	now := time.Now()
	took := now.Sub(x.since)
	x.since = now
	observe(x.s.metrics.work[x.role][w], took, x.traced)
	if w != workReceive {
		x.busy += took
	}
}

// expectations are what was foreseen of prefill hops, beside what came: the numbers to watch when decisions look wrong.
type expectations struct {
	cached *prometheus.CounterVec   // pool, as; tokens
	time   *prometheus.CounterVec   // pool, as; seconds
	ratio  *prometheus.HistogramVec // pool
}

// compare counts one prefill hop that ended well.
func (e *expectations) compare(t *kvtransfer.Ticket, got kvtransfer.Answer, took time.Duration) {
	if got.PromptTokens > 0 && got.CachedTokens >= 0 {
		e.cached.WithLabelValues(t.Pool, "expected").Add(float64(t.ExpectedCached))
		e.cached.WithLabelValues(t.Pool, "measured").Add(float64(got.CachedTokens))
	}
	if t.ExpectedPrefill > 0 && took > 0 {
		e.time.WithLabelValues(t.Pool, "expected").Add(t.ExpectedPrefill.Seconds())
		e.time.WithLabelValues(t.Pool, "measured").Add(took.Seconds())
		e.ratio.WithLabelValues(t.Pool).Observe(took.Seconds() / t.ExpectedPrefill.Seconds())
	}
}
