package replica

import (
	"log/slog"
	"math"
	"runtime"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"tandem/extproc/usage"
	"tandem/internal/memory"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/fleetmetrics"
)

// newRegistry returns the registry of all metrics. extproc registers its own, replica/fleetmetrics those of kvstate.
// Names are tandem_<part>_<what>_<unit>[_total], labels bounded; docs/metrics.md is written from their help texts.
func newRegistry(release string) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "tandem_build_info", Help: "Always 1; the labels say what runs.",
		ConstLabels: prometheus.Labels{"version": release, "goversion": runtime.Version()},
	})
	build.Set(1)
	r.MustRegister(build)
	return r
}

// registerMemory adds how much of the budget is taken.
func registerMemory(r prometheus.Registerer, b *memory.Budget) {
	gauge := func(name, help string, value func() int64) {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return float64(value()) }))
	}
	gauge("tandem_held_bytes", "Bytes of messages and bodies in memory: received and not handled, kept, or not yet written.", b.Load)
	gauge("tandem_held_bytes_limit", "Bytes beyond which requests are refused.", b.Limit)
}

// newUsage returns the recorder of what requests use; nil: the configuration has no usage.
func newUsage(u *configv1.Usage, r prometheus.Registerer, log *slog.Logger) (*usage.Recorder, error) {
	if u == nil {
		return nil, nil
	}
	return usage.New(usage.Options{
		TenantHeader: u.GetTenantHeader(), Tenants: int(u.GetTenants()), Ledger: u.GetLedger(),
	}, r, log)
}

// register adds what the fleet knows of engines, replicas and Redis.
func (f *fleet) register(r prometheus.Registerer) {
	r.MustRegister(fleetmetrics.Signals(f.state, f.scraper), fleetmetrics.Index(f.state, f.events), f.health)
	if f.store != nil {
		fleetmetrics.RegisterRedis(r, f.store, f.state, &f.noSlot)
	}
	if f.board != nil {
		fleetmetrics.RegisterNotices(r, f.board)
	}
}

// newBudget returns the budget of everything that is received and not handled: 1 GiB, or half of GOMEMLIMIT where that
// is less, and registers it with its metrics.
func newBudget(r prometheus.Registerer) *memory.Budget {
	limit := int64(1 << 30)
	if total := debug.SetMemoryLimit(-1); total != math.MaxInt64 {
		limit = min(limit, total/2)
	}
	budget := memory.New(limit)
	registerMemory(r, budget)
	return budget
}
