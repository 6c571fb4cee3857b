// Package grafana holds the dashboard to Grafana's own schemas: those of the Grafana Foundation SDK, which is generated from
// them, panels and queries of Prometheus included. It is beside Prometheus' parsers in a module of its own: make observability.
package grafana

import (
	"os"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

// No member is unknown to Grafana, none has another kind than it wants, and values are among those that it takes.
func TestDashboard(t *testing.T) {
	plugins.RegisterDefaultPlugins()
	text, err := os.ReadFile("../../grafana/dashboards/tandem.json")
	if err != nil {
		t.Fatal(err)
	}
	var board dashboard.Dashboard
	if err := board.UnmarshalJSONStrict(text); err != nil {
		t.Fatal(err)
	}
	if err := board.Validate(); err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, p := range board.Panels {
		if p.Panel != nil {
			kinds[p.Panel.Type]++
		}
	}
	for _, kind := range []string{"timeseries", "stat", "heatmap"} {
		if kinds[kind] == 0 {
			t.Errorf("no panel of the kind %s: %v", kind, kinds)
		}
	}
}

// The schema refuses what Grafana does not know, so that the test above can fail.
func TestSchemaRefuses(t *testing.T) {
	plugins.RegisterDefaultPlugins()
	for _, text := range []string{`{"titel": "x"}`, `{"title": 1}`, `{"panels": [{"type": "stat", "gridPos": {"x": "left"}}]}`} {
		var board dashboard.Dashboard
		if err := board.UnmarshalJSONStrict([]byte(text)); err == nil {
			t.Errorf("%s is taken", text)
		}
	}
}
