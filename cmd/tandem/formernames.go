package main

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// formerNames maps the former names of metrics to the names that replaced them. Both are exported for one release, so
// that dashboards and alerts can be changed after the update.
var formerNames = map[string]string{
	"tandem_engine_requests_elsewhere":  "tandem_engine_requests_external",
	"tandem_handovers_stranded_total":   "tandem_handovers_orphaned_total",
	"tandem_kv_events_blocks_aside":     "tandem_kv_events_orphan_blocks",
	"tandem_queue_requests_elsewhere":   "tandem_queue_requests_remote",
	"tandem_redirects_unfollowed_total": "tandem_redirects_not_followed_total",
	"tandem_tickets_spent_alone_total":  "tandem_tickets_consumed_locally_total",
}

// withFormerNames adds the metrics of a gatherer under their former names.
func withFormerNames(g prometheus.Gatherer) prometheus.Gatherer {
	return prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		families, err := g.Gather()
		byName := make(map[string]*dto.MetricFamily, len(families))
		for _, f := range families {
			byName[f.GetName()] = f
		}
		for _, former := range slices.Sorted(maps.Keys(formerNames)) {
			name := formerNames[former]
			if f := byName[name]; f != nil {
				help := "The former name of " + name + ", for one release."
				families = append(families, &dto.MetricFamily{Name: &former, Help: &help, Type: f.Type, Unit: f.Unit, Metric: f.GetMetric()})
			}
		}
		return families, err
	})
}
