// Package grafana holds the dashboard to Grafana's own schemas: those of the Grafana Foundation SDK, which is generated from
// them, panels and queries of Prometheus included. It is beside Prometheus' parsers in a module of its own: make observability.
package grafana

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

// strict reads a dashboard. The SDK (0.0.22) returns a list of errors for each panel with options, which is empty if there
// are none.
func strict(board *dashboard.Dashboard, text []byte) error {
	err := board.UnmarshalJSONStrict(text)
	var list cog.BuildErrors
	if errors.As(err, &list) && len(list) == 0 {
		return nil
	}
	return err
}

// No member is unknown to Grafana, none has another kind than it wants, and values are among those that it takes.
func TestDashboard(t *testing.T) {
	plugins.RegisterDefaultPlugins()
	text, err := os.ReadFile("../../grafana/dashboards/tandem.json")
	if err != nil {
		t.Fatal(err)
	}
	var board dashboard.Dashboard
	if err := strict(&board, text); err != nil {
		t.Fatal(err)
	}
	if err := board.Validate(); err != nil {
		t.Fatal(err)
	}
	var panels struct{ Panels []struct{ Type string } } // the SDK has none of panels with options
	if err := json.Unmarshal(text, &panels); err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, p := range panels.Panels {
		kinds[p.Type]++
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
	text, err := os.ReadFile("../../grafana/dashboards/tandem.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, wrong := range [][2]string{{`"title": "Tandem"`, `"titel": "Tandem"`}, {`"editable": true`, `"editable": 1`}, {`"x": 0`, `"x": "left"`},
		{`"wideLayout": true`, `"wideLayout": 1`}, {`"graphMode"`, `"graphmode"`}, {`"expr"`, `"exprs"`}} {
		if !bytes.Contains(text, []byte(wrong[0])) {
			t.Errorf("the dashboard has no %s", wrong[0])
		}
		var board dashboard.Dashboard
		if err := strict(&board, bytes.Replace(text, []byte(wrong[0]), []byte(wrong[1]), 1)); err == nil {
			t.Errorf("%s is taken", wrong[1])
		}
	}
}
