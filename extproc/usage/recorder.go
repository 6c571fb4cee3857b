package usage

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/internal/ledger"
)

// Options are what is recorded, and how.
type Options struct {
	TenantHeader string // in lower case; "": requests have no tenant
	Tenants      int    // that metrics name
	Ledger       string // file; "": none
}

// Recorder counts what requests used. It is safe for concurrent use. A nil one counts nothing.
type Recorder struct {
	Options
	Serves   func(pool, model string) bool // whether a pool is configured with a model, or its engines report it
	Promised func(pool string) Promise     // what a pool promises; set before requests come

	ledger          *ledger.Ledger // nil: none
	tenants, models *names

	tokens    *prometheus.CounterVec   // pool, model, tenant, kind
	endpoints *prometheus.CounterVec   // pool, endpoint, kind
	perToken  *prometheus.HistogramVec // pool, endpoint; seconds
	without   *prometheus.CounterVec   // pool, reason
	promises  *prometheus.CounterVec   // pool, tenant, result
}

// Kinds of tokens: label values.
const (
	kindPrompt = "prompt"
	kindCached = "cached" // of the prompt's
	kindAnswer = "generation"
)

// New returns a recorder with its metrics. All of its labels have bounded values, except endpoints: see ByEndpoint.
func New(o Options, r prometheus.Registerer, log *slog.Logger) (out *Recorder, err error) {
	to := promauto.With(r)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return to.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return to.NewHistogramVec(prometheus.HistogramOpts{
			Name: name, Help: help, Buckets: buckets, NativeHistogramBucketFactor: 1.1,
			NativeHistogramMaxBucketNumber: 100, NativeHistogramMinResetDuration: time.Hour,
		}, append([]string{"pool"}, labels...))
	}
	const kinds = " by kind (prompt, cached of the prompt's, generation), as answers say it."
	out = &Recorder{
		Options: o, Promised: func(string) Promise { return Promise{} },
		Serves:  func(string, string) bool { return false },
		tenants: newNames(o.Tenants, group), models: newNames(maxModels, otherModel),
		tokens: counter("tandem_tokens_total", "Tokens of requests"+kinds, "pool", "model", "tenant", "kind"),
		endpoints: counter("tandem_endpoint_tokens_total", "Tokens of requests that an endpoint answered,"+kinds,
			"pool", "endpoint", "kind"),
		perToken: histogram("tandem_time_per_output_token_seconds",
			"Mean time between two tokens of a request's answer, of streams.",
			prometheus.ExponentialBuckets(0.001, 2, 13), "endpoint"),
		without: counter("tandem_answers_without_usage_total",
			"Requests that ended well and whose tokens are not known, by reason (absent: the answer does not say "+
				"them, absurd: it reports no possible number).", "pool", "reason"),
		promises: counter("tandem_promises_total",
			"Requests by whether they met the pool's targets (kept, late, slow, failed, unknown).",
			"pool", "tenant", "result"),
	}
	if o.Ledger == "" {
		return out, nil
	}
	lines := counter("tandem_ledger_lines_total",
		"Lines of the ledger by result (written, dropped: too many waited, failed: the file cannot be written).",
		"result")
	for _, result := range []string{ledger.Written, ledger.Dropped, ledger.Failed} {
		lines.WithLabelValues(result)
	}
	out.ledger, err = ledger.Open(o.Ledger, log, func(result string) { lines.WithLabelValues(result).Inc() })
	return out, err
}

// Header is the name of the request header with the tenant; "": there is none.
func (r *Recorder) Header() string {
	if r == nil {
		return ""
	}
	return r.TenantHeader
}

// Ended returns what a request has used at its end, and counts it if mine is set: only one replica counts a request.
// endpoint answered it.
func (r *Recorder) Ended(t *kvtransfer.Ticket, e *ended.Pass, how, endpoint string, mine bool) *Used {
	if r == nil {
		return nil
	}
	u := Of(t, e, how, r.Promised(t.Pool))
	if mine {
		r.count(t, u, how, endpoint)
		if r.ledger != nil {
			r.ledger.Add(lineOf(t, e, u, how))
		}
	}
	return u
}

func (r *Recorder) count(t *kvtransfer.Ticket, u *Used, how, endpoint string) {
	answered := how == "ok"
	tenant, model := r.tenants.label(u.Tenant, answered), u.Model
	if !r.Serves(t.Pool, model) { // else it needs no place
		model = r.models.label(model, answered)
	}
	for _, of := range []struct {
		kind string
		n    *int64
	}{{kindPrompt, u.Prompt}, {kindCached, u.Cached}, {kindAnswer, u.Answer}} {
		if of.n != nil {
			r.tokens.WithLabelValues(t.Pool, model, tenant, of.kind).Add(float64(*of.n))
			r.endpoints.WithLabelValues(t.Pool, endpoint, of.kind).Add(float64(*of.n))
		}
	}
	switch {
	case how != "ok":
	case u.Absurd:
		r.without.WithLabelValues(t.Pool, "absurd").Inc()
	case u.Prompt == nil && u.Answer == nil:
		r.without.WithLabelValues(t.Pool, "absent").Inc()
	}
	if u.PerToken > 0 {
		r.perToken.WithLabelValues(t.Pool, endpoint).Observe(u.PerToken.Seconds())
	}
	if u.Promise != "" {
		r.promises.WithLabelValues(t.Pool, tenant, u.Promise).Inc()
	}
}

// Run writes the ledger, if there is one, until ctx ends.
func (r *Recorder) Run(ctx context.Context) {
	if r != nil && r.ledger != nil {
		r.ledger.Run(ctx)
	}
}

// ByEndpoint returns the metrics with a series for each endpoint, so that those of endpoints that have left can be
// dropped.
func (r *Recorder) ByEndpoint() []*prometheus.MetricVec {
	if r == nil {
		return nil
	}
	return []*prometheus.MetricVec{r.endpoints.MetricVec, r.perToken.MetricVec}
}

// Line is a request in the ledger. Times in ms count from the request's arrival.
type Line struct {
	Time     time.Time `json:"time"` // when the request ended
	ID       string    `json:"id"`   // the client's, or one that Envoy made: several requests may share it
	Key      string    `json:"key"`  // Envoy's own name of the request: no other has it
	Pool     string    `json:"pool"`
	Model    string    `json:"model"`
	Tenant   string    `json:"tenant"`
	Prefill  string    `json:"prefill,omitempty"` // endpoints
	Decode   string    `json:"decode,omitempty"`
	Status   int       `json:"status"` // that the client got; 0: none
	Ended    string    `json:"ended"`  // ok, refused, failed, client_gone
	Streamed bool      `json:"streamed"`
	Prompt   *int64    `json:"prompt_tokens"` // null: the answer does not say it
	Cached   *int64    `json:"cached_tokens"`
	Answer   *int64    `json:"completion_tokens"`
	Bytes    uint64    `json:"answer_bytes"`
	First    float64   `json:"first_token_ms,omitempty"`
	PerToken float64   `json:"per_token_ms,omitempty"`
	Took     float64   `json:"took_ms"`
	Promise  string    `json:"promise,omitempty"`
}

func lineOf(t *kvtransfer.Ticket, e *ended.Pass, u *Used, how string) *Line {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	end := e.Start.Add(e.Duration)
	return &Line{
		Time: end.UTC(), ID: bounded(string(e.RequestID)), Key: bounded(string(e.Reservation)), Pool: t.Pool,
		Model: u.Model, Tenant: u.Tenant, Prefill: t.Prefill, Decode: t.Decode, Status: e.Status, Ended: how,
		Streamed: u.Streamed, Prompt: u.Prompt, Cached: u.Cached, Answer: u.Answer, Bytes: e.Body,
		First: ms(u.FirstToken), PerToken: ms(u.PerToken), Took: ms(max(end.Sub(t.Started), 0)), Promise: u.Promise,
	}
}
