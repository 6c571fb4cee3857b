// Package promql holds the alerts and the dashboard to Prometheus' own parsers. It is a module of its own, so that Prometheus
// is no dependency of Tandem: go test here, or `make observability`.
package promql

import (
	"encoding/json"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

// TestAlerts is what `promtool check rules` does.
func TestAlerts(t *testing.T) {
	groups, errs := rulefmt.ParseFile("../alerts.yaml", false, model.UTF8Validation, parser.NewParser(parser.Options{}), slog.New(slog.DiscardHandler))
	for _, err := range errs {
		t.Error(err)
	}
	if len(errs) == 0 && len(groups.Groups[0].Rules) < 10 {
		t.Error("the alerts are gone")
	}
}

// TestDashboard parses what every panel asks, with Grafana's variables filled in.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile("../grafana/dashboards/tandem.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	n := 0
	fill := strings.NewReplacer("$__rate_interval", "1m", "$pool", ".*", "$instance", ".*")
	for _, p := range board.Panels {
		for _, target := range p.Targets {
			n++
			if _, err := parser.NewParser(parser.Options{}).ParseExpr(fill.Replace(target.Expr)); err != nil {
				t.Errorf("%s: %s: %v", p.Title, target.Expr, err)
			}
		}
	}
	if n < 30 {
		t.Errorf("%d questions: panels are gone", n)
	}
}
