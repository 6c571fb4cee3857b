package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Streams are metrics of streams that outlive their engine, in pools that want that (docs/continue.md).
type Streams struct {
	insured   *prometheus.CounterVec   // pool, result
	continued *prometheus.CounterVec   // pool, cause, result
	pauses    *prometheus.HistogramVec // pool, cause; seconds
}

func (r registry) continuing() Streams {
	return Streams{
		insured: r.counter("tandem_streams_insured_total",
			"Requests of pools with continueStreams: insured, or why their answer cannot be continued.",
			"pool", "result"),
		continued: r.counter("tandem_streams_continued_total",
			"Insured streams whose engine was to be replaced, by cause (reset, ended, different, anew, silent, moved, "+
				"slow_client) and result: continued, finished (only the end was missing), stayed (no other endpoint "+
				"took it), or why the stream ended.",
			"pool", "cause", "result"),
		pauses: r.histogram("tandem_stream_pause_seconds",
			"Time from the last byte of an insured stream's engine to the first one of the engine that continued it.",
			hopBuckets(), "pool", "cause"),
	}
}

// Insured counts a request of a pool whose streams are continued: "insured", or why its answer cannot be.
func (s *Streams) Insured(pool, result string) { s.insured.WithLabelValues(pool, result).Inc() }

// Continued counts a stream of which another engine was asked to continue the answer.
func (s *Streams) Continued(pool, cause, result string) {
	s.continued.WithLabelValues(pool, cause, result).Inc()
}

// Paused counts the silence of a stream that was continued.
func (s *Streams) Paused(pool, cause string, silence time.Duration) {
	s.pauses.WithLabelValues(pool, cause).Observe(silence.Seconds())
}
