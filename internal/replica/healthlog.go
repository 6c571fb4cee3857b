package replica

import (
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/kvstate"
)

// healthLog logs and counts each change of an endpoint between left out and back.
type healthLog struct {
	log     *slog.Logger
	changes *prometheus.CounterVec
}

func newHealthLog(log *slog.Logger) *healthLog {
	return &healthLog{log, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tandem_endpoint_health_changes_total",
		Help: "Times an endpoint was left out (out) or taken in again (up), and how that was noticed (request, time_limit, check, standstill, answer, replica).",
	}, []string{"endpoint", "to", "cause"})}
}

// changed is [kvstate.Options.HealthChanged].
func (h *healthLog) changed(e *kvstate.Endpoint, good bool, cause kvstate.HealthCause) {
	if good {
		h.changes.WithLabelValues(e.Addr, "up", string(cause)).Inc()
		h.log.Info("endpoint is back", "endpoint", e.Addr, "role", e.Role.String(), "cause", cause)
		return
	}
	h.changes.WithLabelValues(e.Addr, "out", string(cause)).Inc()
	h.log.Warn("endpoint is out", "endpoint", e.Addr, "role", e.Role.String(), "cause", cause)
}
