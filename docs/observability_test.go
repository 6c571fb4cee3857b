package docs

import (
	"encoding/json"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

const observability = "../deploy/observability/"

// metricsOfTheCode are the names under which Tandem's code registers metrics.
func metricsOfTheCode(t *testing.T) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	for _, pattern := range []string{"../extproc/metrics*.go", "../cmd/tandem/*.go"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, f := range files {
			for _, m := range regexp.MustCompile(`"(tandem_[a-z_]+)"`).FindAllStringSubmatch(read(t, f), -1) {
				out[m[1]] = true
			}
		}
	}
	require.Greater(t, len(out), 20)
	return out
}

// What alerts and dashboards ask for, the code counts.
func TestAlertsAndDashboardsAskForWhatThereIs(t *testing.T) {
	known := metricsOfTheCode(t)
	for _, file := range []string{"alerts.yaml", "grafana/dashboards/tandem.json"} {
		for _, name := range regexp.MustCompile(`\btandem_[a-z_]+`).FindAllString(read(t, observability+file), -1) {
			for _, suffix := range []string{"_bucket", "_count", "_sum"} {
				if base := strings.TrimSuffix(name, suffix); known[base] {
					name = base
				}
			}
			require.True(t, known[name], "%s asks for %s, which nothing counts", file, name)
		}
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
		require.Equal(t, "docs/operations.md#"+strings.ToLower(r.Alert), r.Annotations["runbook"])
		require.Contains(t, operations, "\n#### "+r.Alert+"\n", "operations.md has no runbook")
	}
	for _, m := range regexp.MustCompile(`(?m)^#### (Tandem\w+)$`).FindAllStringSubmatch(operations, -1) {
		require.Contains(t, read(t, observability+"alerts.yaml"), "alert: "+m[1]+"\n", "a runbook of no alert")
	}
}

// The dashboard is one that Grafana takes: panels with ids and places of their own, on the data source that is provisioned.
func TestDashboardIsWhole(t *testing.T) {
	var board struct {
		UID           string `json:"uid"`
		Title         string `json:"title"`
		SchemaVersion int    `json:"schemaVersion"`
		Panels        []struct {
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
			require.Contains(t, provisioned, "uid: "+target.Datasource.UID+"\n", p.Title)
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
