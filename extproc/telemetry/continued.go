package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// continuedMetrics are about streams that outlive their engine, in pools that want that (docs/continue.md).
type continuedMetrics struct {
	insured   *prometheus.CounterVec   // pool, result
	continued *prometheus.CounterVec   // pool, cause, result
	pauses    *prometheus.HistogramVec // pool, cause; seconds
}

func (r registry) continuing() continuedMetrics {
	return continuedMetrics{
		insured: r.counter("tandem_streams_insured_total",
			"Requests of pools with continueStreams: insured, or why their answer cannot be continued.",
			"pool", "result"),
		continued: r.counter("tandem_streams_continued_total",
			"Insured streams whose engine was to be replaced, by cause (reset, ended, error, different, silent, moved) "+
				"and result: continued, finished (only the end was missing), stayed (no other endpoint took it), or why "+
				"the stream ended.",
			"pool", "cause", "result"),
		pauses: r.histogram("tandem_stream_pause_seconds",
			"Time from the last byte of an insured stream's engine to the first one of the engine that continued it.",
			hopBuckets(), "pool", "cause"),
	}
}

// Insured counts a request of a pool whose streams are continued: "insured", or why its answer cannot be.
func (m *Metrics) Insured(pool, result string) { m.insured.WithLabelValues(pool, result).Inc() }

// Continued counts a stream whose engine was to be replaced.
func (m *Metrics) Continued(pool, cause, result string) {
	m.continued.WithLabelValues(pool, cause, result).Inc()
}

// Paused counts the silence of a stream that was continued.
func (m *Metrics) Paused(pool, cause string, silence time.Duration) {
	m.pauses.WithLabelValues(pool, cause).Observe(silence.Seconds())
}
