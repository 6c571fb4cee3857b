package telemetry

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
)

// work is a phase of an ext_proc stream.
type work uint8

// The phases of an ext_proc stream.
const (
	PhaseReceive work = iota // waiting for Envoy, and thereby for the client or for P
	PhaseScan                // the body
	PhaseDecide              // view, pick, reservations, the leg's body, the ticket
	PhaseAnswer              // handing the reply to gRPC, flow control included
	works
)

// workRoles are the roles whose phases are measured.
var workRoles = [...]string{
	envoywire.RoleMain, envoywire.RolePrefillLeg, envoywire.RoleDecodeLeg, envoywire.RoleMirror,
	envoywire.RoleAnswerLeg, envoywire.RoleEncodeLeg,
}

// workOf returns the observers of all phases of all roles, so that streams need not look them up.
func workOf(h *prometheus.HistogramVec) (out [len(workRoles)][works]prometheus.Observer) {
	for i, role := range workRoles {
		for w, name := range [...]string{"receive", "scan", "decide", "answer"} {
			out[i][w] = h.WithLabelValues(role, name)
		}
	}
	return out
}

// Meter measures one stream: its phases, and its span if it is traced.
type Meter struct {
	Observer *Observer
	tracer   trace.Tracer // nil: no traces
	role     int          // position in workRoles
	Began    time.Time    // when the stream began
	since    time.Time    // when the current phase began
	Busy     time.Duration
	span     trace.Span // nil: not traced
	Exemplar exemplar   // of the span; nil: not traced
	Next     carrier    // the trace context for the next hop, if Envoy has none of its own
}

// Begin starts another stream; tracer is nil without traces.
func (x *Meter) Begin(role string, tracer trace.Tracer) {
	x.tracer = tracer
	x.Began = time.Now()
	x.since, x.Busy = x.Began, 0
	x.role = max(slices.Index(workRoles[:], role), 0)
}

// Reset clears the stream.
func (x *Meter) Reset() { x.Next, x.Exemplar = carrier{}, nil }

// Recording reports whether the stream is traced.
func (x *Meter) Recording() bool { return x.span != nil }

// LeaveOut excludes some time from the current phase.
func (x *Meter) LeaveOut(d time.Duration) { x.since = x.since.Add(d) }

// Processed counts the stream.
func (x *Meter) Processed(role string) {
	x.Observer.Metrics.Processed(role, x.since.Sub(x.Began), x.Busy, x.Exemplar)
}

// EndPhase ends a phase of the stream and starts the next one.
func (x *Meter) EndPhase(w work) {
	now := time.Now()
	took := now.Sub(x.since)
	x.since = now
	observe(x.Observer.Metrics.work[x.role][w], took, x.Exemplar)
	if w != PhaseReceive {
		x.Busy += took
	}
}

// expectations compare predicted and measured prefill hops: the numbers to watch when decisions look wrong.
type expectations struct {
	cached *prometheus.CounterVec   // pool, as; tokens
	time   *prometheus.CounterVec   // pool, as; seconds
	ratio  *prometheus.HistogramVec // pool
}

// compare counts one prefill hop that ended well.
func (m *Metrics) compare(t *kvtransfer.Ticket, got kvtransfer.Answer, took time.Duration) {
	if got.PromptTokens > 0 && got.CachedTokens >= 0 {
		m.expected.cached.WithLabelValues(t.Pool, "expected").Add(float64(t.ExpectedCached))
		m.expected.cached.WithLabelValues(t.Pool, "measured").Add(float64(got.CachedTokens))
	}
	if t.ExpectedPrefill > 0 && took > 0 {
		m.expected.time.WithLabelValues(t.Pool, "expected").Add(t.ExpectedPrefill.Seconds())
		m.expected.time.WithLabelValues(t.Pool, "measured").Add(took.Seconds())
		m.expected.ratio.WithLabelValues(t.Pool).Observe(took.Seconds() / t.ExpectedPrefill.Seconds())
	}
}
