package replica

import (
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/telemetry"
	"tandem/internal/guard"
	"tandem/replica/config"
	"tandem/replica/fleetmetrics"
	"tandem/replica/gatewayextension"
	"tandem/replica/xds"
)

var update = flag.Bool("update", false, "rewrite docs/metrics.md")

// everyMetric is a configuration with which all metrics are registered.
const everyMetric = `
envoyGateway: {listen: "127.0.0.1:2", services: ["tandem.default:9002"]}
notices: {listen: "127.0.0.1:1"}
usage: {ledger: "-"}
state: {redis: {url: "redis://127.0.0.1:1"}}
pools:
- name: chat
  kvTransfer: lmcache
  lmcache: {noticeTimeout: 1s}
  endpoints:
  - {address: "10.0.0.1:1", role: prefill}
  - {address: "10.0.0.2:1", role: decode, lmcache: {initPort: 7300, allocPort: 7400}}
`

// metricsRegistered returns all metrics that a replica registers, by name: their labels and help texts.
func metricsRegistered(t *testing.T) map[string]string {
	t.Helper()
	cfg, _, err := config.Parse([]byte(everyMetric))
	require.NoError(t, err)
	log := slog.New(slog.DiscardHandler)
	registry := newRegistry("")
	fleet, err := newFleet(t.Context(), cfg, Settings{}, log)
	require.NoError(t, err)
	fleet.register(registry)
	registry.MustRegister(fleetmetrics.Words(nil), fleetmetrics.Waiting(nil, nil)) // described only
	options, err := coreOptions(cfg, fleet, log)
	require.NoError(t, err)
	options.Memory = newBudget(registry)
	metrics := telemetry.NewMetrics(registry, fleet.state)
	metrics.Usage, err = newUsage(cfg.GetUsage(), registry, log)
	require.NoError(t, err)
	newRecorder(cfg, Settings{}, fleet.state, nil, registry, log)
	xds.New(registry, log)
	_, err = gatewayextension.New(cfg, guard.New(log, metrics.Panicked), registry, log)
	require.NoError(t, err)
	newReloader(FileSource(""), cfg, fleet, core.New(options, metrics), loaded{}, registry, log)

	descs := make(chan *prometheus.Desc)
	go func() { registry.Describe(descs); close(descs) }()
	shape := regexp.MustCompile(`fqName: "(tandem_\w+)", help: ("(?:[^"\\]|\\.)*"), (?:unit: "[^"]*", )?constLabels: {(.*)}, variableLabels: {(.*)}}`)
	out := map[string]string{}
	for d := range descs {
		m := shape.FindStringSubmatch(d.String())
		if m == nil {
			continue // of Go and the process
		}
		help, err := strconv.Unquote(m[2])
		require.NoError(t, err)
		var labels []string
		for _, label := range regexp.MustCompile(`(\w+)="|(\w+)(?:,|$)`).FindAllStringSubmatch(m[3]+","+m[4], -1) {
			if name := label[1] + label[2]; name != "" {
				labels = append(labels, "`"+name+"`")
			}
		}
		with := ""
		if len(labels) > 0 {
			with = " (" + strings.Join(labels, ", ") + ")"
		}
		out[m[1]] = with + ": " + help
	}
	return out
}

// docs/metrics.md has every metric, as its help text describes it.
func TestMetricsPage(t *testing.T) {
	all := metricsRegistered(t)
	require.Greater(t, len(all), 80)
	var page strings.Builder
	page.WriteString("# Metrics\n\nEvery metric of `/metrics` with its labels and its help text, written by `go test ./replica -update`.\n" +
		"[Operations](operations.md#metrics) has what the values of labels mean and what to look at.\n\n")
	for _, name := range slices.Sorted(maps.Keys(all)) {
		page.WriteString(wrapped(fmt.Sprintf("- `%s`%s", name, all[name])))
	}
	const file = "../docs/metrics.md"
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(page.String()), 0o600))
	}
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, page.String(), string(text), "go test ./replica -run TestMetricsPage -update")
}

// wrapped breaks an item of a list at 120 columns.
func wrapped(item string) string {
	var out strings.Builder
	width := 0
	for i, word := range strings.Fields(item) {
		switch {
		case i == 0:
		case width+1+len(word) > 120:
			out.WriteString("\n  ")
			width = 2
		default:
			out.WriteString(" ")
			width++
		}
		out.WriteString(word)
		width += len(word)
	}
	return out.String() + "\n"
}
