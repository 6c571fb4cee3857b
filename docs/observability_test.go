package docs

import (
	"encoding/json"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

const observability = "../deploy/observability/"

// metricsOfTheCode are the names under which Tandem's code registers metrics, wherever in the tree.
func metricsOfTheCode(t *testing.T) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	for _, top := range []string{"../replica", "../extproc", "../kvstate", "../picker", "../status", "../replica/fleetmetrics", "../replica/xds", "../replica/gatewayextension"} {
		require.NoError(t, filepath.WalkDir(top, func(file string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
				return err
			}
			for _, m := range regexp.MustCompile(`"(tandem_[a-z0-9_]+)"`).FindAllStringSubmatch(read(t, file), -1) {
				out[m[1]] = true
			}
			return nil
		}))
	}
	require.Greater(t, len(out), 60)
	return out
}

// metricsIn are the metrics that a text names. Series of a histogram are it, and what ends in _ is no name.
func metricsIn(text string, known map[string]bool) map[string]bool {
	out := map[string]bool{}
	for _, name := range regexp.MustCompile(`\btandem_[a-z0-9_]+`).FindAllString(text, -1) {
		for _, suffix := range []string{"_bucket", "_count", "_sum"} {
			if base := strings.TrimSuffix(name, suffix); known[base] {
				name = base
			}
		}
		if !strings.HasSuffix(name, "_") {
			out[name] = true
		}
	}
	return out
}

// What alerts, dashboards and pages ask for, the code counts.
func TestAlertsDashboardsAndPagesNameWhatThereIs(t *testing.T) {
	known := metricsOfTheCode(t)
	files := []string{observability + "alerts.yaml", observability + "grafana/dashboards/tandem.json"}
	for _, page := range pages(t) {
		if page != "../CHANGELOG.md" { // which tells of what was
			files = append(files, page)
		}
	}
	for _, file := range files {
		for name := range metricsIn(read(t, file), known) {
			require.True(t, known[name], "%s names %s, which nothing counts", file, name)
		}
	}
}

// metrics.md has every metric: what replica's test registers for it is all there is. A panel is a matter of taste;
// which have none is logged.
func TestEveryMetricHasItsRow(t *testing.T) {
	known := metricsOfTheCode(t)
	rows := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^- `(\\w+)`").FindAllStringSubmatch(read(t, "metrics.md"), -1) {
		rows[m[1]] = true
	}
	shown := metricsIn(read(t, observability+"grafana/dashboards/tandem.json")+read(t, observability+"alerts.yaml"), known)
	for name := range known {
		require.True(t, rows[name], "metrics.md lacks %s: register it in replica's TestMetricsPage", name)
		if !shown[name] {
			t.Logf("%s is in no panel and no alert", name)
		}
	}
	for name := range rows {
		require.True(t, known[name], "metrics.md has %s, which nothing counts", name)
	}
}

type alerts struct {
	Groups []struct {
		Name  string `json:"name"`
		Rules []struct {
			Alert       string            `json:"alert"`
			Expr        string            `json:"expr"`
			For         string            `json:"for"`
			Labels      map[string]string `json:"labels"`
			Annotations map[string]string `json:"annotations"`
		} `json:"rules"`
	} `json:"groups"`
}

// Every alert says how bad it is, and what to do.
func TestAlertsHaveRunbooks(t *testing.T) {
	var a alerts
	require.NoError(t, yaml.UnmarshalStrict([]byte(read(t, observability+"alerts.yaml")), &a))
	operations := read(t, "operations.md")
	for _, r := range a.Groups[0].Rules {
		require.Contains(t, []string{"critical", "warning"}, r.Labels["severity"], r.Alert)
		require.NotEmpty(t, r.Annotations["summary"], r.Alert)
		require.Equal(t, `{{ or $externalLabels.tandemDocs "http://127.0.0.1:9090/docs" }}/operations.md#`+
			strings.ToLower(r.Alert), r.Annotations["runbook_url"])
		require.Contains(t, operations, "\n#### "+r.Alert+"\n", "operations.md has no runbook")
	}
	for _, m := range regexp.MustCompile(`(?m)^#### (Tandem\w+)$`).FindAllStringSubmatch(operations, -1) {
		require.Contains(t, read(t, observability+"alerts.yaml"), "alert: "+m[1]+"\n", "a runbook of no alert")
	}
}

// The dashboard is one that Grafana takes: panels with ids and places of their own, on the data source that the reader
// chooses, at first the one that is provisioned.
func TestDashboardIsWhole(t *testing.T) {
	var board struct {
		UID           string `json:"uid"`
		Title         string `json:"title"`
		SchemaVersion int    `json:"schemaVersion"`
		Templating    struct {
			List []struct {
				Name, Type string
				Query      any // of another kind for each type
				Current    struct{ Value string }
			}
		}
		Panels []struct {
			ID      int                      `json:"id"`
			Type    string                   `json:"type"`
			Title   string                   `json:"title"`
			GridPos struct{ H, W, X, Y int } `json:"gridPos"`
			Targets []struct {
				RefID      string               `json:"refId"`
				Datasource struct{ UID string } `json:"datasource"`
			} `json:"targets"`
		} `json:"panels"`
	}
	require.NoError(t, json.Unmarshal([]byte(read(t, observability+"grafana/dashboards/tandem.json")), &board))
	require.Equal(t, "tandem", board.UID)
	require.GreaterOrEqual(t, board.SchemaVersion, 36)
	provisioned := read(t, observability+"grafana/provisioning/datasources/prometheus.yaml")
	source := board.Templating.List[0]
	require.Equal(t, []any{"datasource", "datasource", "prometheus"}, []any{source.Name, source.Type, source.Query})
	require.Contains(t, provisioned, "uid: "+source.Current.Value+"\n")
	ids, cells := map[int]bool{}, map[[2]int]string{}
	for _, p := range board.Panels {
		require.False(t, ids[p.ID], "two panels %d", p.ID)
		ids[p.ID] = true
		require.LessOrEqual(t, p.GridPos.X+p.GridPos.W, 24, p.Title)
		for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
			for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
				require.Empty(t, cells[[2]int{x, y}], "%s lies on %s", p.Title, cells[[2]int{x, y}])
				cells[[2]int{x, y}] = p.Title
			}
		}
		refs := map[string]bool{}
		for _, target := range p.Targets {
			require.False(t, refs[target.RefID], "%s: two targets %s", p.Title, target.RefID)
			refs[target.RefID] = true
			require.Equal(t, "${datasource}", target.Datasource.UID, p.Title)
		}
	}
}

// compose is as much of the compose specification as compose.yaml may use.
type compose struct {
	Name     string `json:"name"`
	Services map[string]struct {
		Image       string            `json:"image"`
		NetworkMode string            `json:"network_mode"`
		Command     []string          `json:"command"`
		Environment map[string]string `json:"environment"`
		Volumes     []string          `json:"volumes"`
		DependsOn   []string          `json:"depends_on"`
		Restart     string            `json:"restart"`
	} `json:"services"`
	Volumes map[string]struct{} `json:"volumes"`
}

func TestComposeFileIsWhole(t *testing.T) {
	var c compose
	require.NoError(t, yaml.UnmarshalStrict([]byte(read(t, observability+"compose.yaml")), &c))
	require.Len(t, c.Services, 3)
	for name, s := range c.Services {
		require.Regexp(t, `^[a-z/]+:v?\d+\.\d+\.\d+$`, s.Image, "%s: images are pinned", name)
		for _, other := range s.DependsOn {
			require.Contains(t, c.Services, other)
		}
		for _, v := range s.Volumes {
			from, _, _ := strings.Cut(v, ":")
			if !strings.HasPrefix(from, ".") {
				require.Contains(t, c.Volumes, from)
				continue
			}
			found, err := filepath.Glob(observability + from)
			require.NoError(t, err)
			require.Len(t, found, 1, "%s mounts %s", name, from)
		}
	}
}
