package fleetmetrics

import (
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/kvstate"
)

// HealthLog logs and counts each change of an endpoint between left out and back.
type HealthLog struct {
	log *slog.Logger
	*prometheus.CounterVec
}

// NewHealthLog returns one whose counter is not registered yet.
func NewHealthLog(log *slog.Logger) *HealthLog {
	return &HealthLog{log, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tandem_endpoint_health_changes_total",
		Help: "Times an endpoint was left out (out) or taken in again (up), and how that was noticed (request, " +
			"time_limit, check, standstill, answer, replica).",
	}, []string{"endpoint", "to", "cause"})}
}

// Changed is [kvstate.Options.HealthChanged].
func (h *HealthLog) Changed(e *kvstate.Endpoint, good bool, cause kvstate.HealthCause, why string) {
	if good {
		h.WithLabelValues(e.Addr, "up", string(cause)).Inc()
		h.log.Info("endpoint is back", "endpoint", e.Addr, "role", e.Role.String(), "cause", cause)
		return
	}
	h.WithLabelValues(e.Addr, "out", string(cause)).Inc()
	more := []any{"endpoint", e.Addr, "role", e.Role.String(), "cause", cause}
	if why != "" {
		more = append(more, "why", why)
	}
	h.log.Warn("endpoint is out", more...)
}
