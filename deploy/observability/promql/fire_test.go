package promql

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"go.yaml.in/yaml/v3"
)

// rules are the alerts as Prometheus gets them: what the chart renders, if helm is there (make deploy-check builds it), else
// the chart's file.
func rules(t *testing.T) map[string]rulefmt.Rule {
	t.Helper()
	const chart = "../../helm/tandem"
	text, err := os.ReadFile(chart + "/files/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if helm := helm(); helm == "" {
		t.Log("there is no helm: the chart's file is tried, not what the chart renders")
	} else {
		rendered, err := exec.Command(helm, "template", "router", chart, "--namespace", "llm", "--kube-version", "1.36",
			"--set", "prometheusRule.enabled=true", "--show-only", "templates/optional.yaml").Output()
		if err != nil {
			t.Fatal(err)
		}
		text = nil
		for doc := range strings.SplitSeq(string(rendered), "\n---") {
			var resource struct {
				Kind string
				Spec yaml.Node
			}
			if err := yaml.Unmarshal([]byte(doc), &resource); err != nil {
				t.Fatal(err)
			}
			if resource.Kind == "PrometheusRule" {
				if text, err = yaml.Marshal(&resource.Spec); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	groups, errs := rulefmt.Parse(text, false, model.UTF8Validation, parser.NewParser(parser.Options{}),
		slog.New(slog.DiscardHandler))
	for _, err := range errs {
		t.Fatal(err)
	}
	out := map[string]rulefmt.Rule{}
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			out[r.Alert] = r
		}
	}
	return out
}

func helm() string {
	home, _ := os.UserHomeDir()
	for _, path := range []string{os.Getenv("TANDEM_KUBE_BIN") + "/helm", filepath.Join(home, ".cache/tandem/bin/helm"), "helm"} {
		if found, err := exec.LookPath(path); err == nil {
			return found
		}
	}
	return ""
}

// end is when every test asks, two hours after the first sample.
const end = 120 * time.Minute

// fires reports whether an alert fires at the end: its expression has held for as long as it says.
func fires(t *testing.T, r *rulefmt.Rule, series string) bool {
	t.Helper()
	storage := promqltest.LoadedStorage(t, "load 1m\n  "+strings.Join(strings.Split(strings.TrimSpace(series), "\n"), "\n  ")+"\n")
	defer storage.Close()
	engine := promqltest.NewTestEngine(t, false, 5*time.Minute, 1e6)
	for at := end - time.Duration(r.For); at <= end; at += time.Minute {
		q, err := engine.NewInstantQuery(t.Context(), storage, nil, r.Expr, time.Unix(0, 0).Add(at))
		if err != nil {
			t.Fatal(err)
		}
		result := q.Exec(t.Context())
		if result.Err != nil {
			t.Fatalf("%s: %v", r.Alert, result.Err)
		}
		vector, err := result.Vector()
		if err != nil {
			t.Fatal(err)
		}
		q.Close()
		if len(vector) == 0 {
			return false
		}
	}
	return true
}

// healthy is a replica that works, under the name of a release that is not tandem. JOB stands for its labels.
const healthy = `
up{JOB} 1x120
tandem_build_info{JOB,version="1"} 1x120
tandem_endpoint_up{JOB,pool="chat",endpoint="e",role="decode"} 1x120
tandem_redis_up{JOB} 1x120
tandem_kv_events_connected{JOB,pool="chat",endpoint="e",rank="0"} 1x120
tandem_reservations{JOB} 5x120
tandem_decisions_total{JOB,pool="chat",route="split",reason=""} 0+600x120
tandem_request_duration_seconds_count{JOB,pool="chat",route="split",result="ok"} 0+600x120
`

// Every alert fires, under any release's name, of whatever job Prometheus says that the targets are; and none does while
// all is well.
func TestAlertsFire(t *testing.T) {
	all := rules(t)
	filled := func(series string) string {
		return strings.ReplaceAll(series, "JOB", `job="router",namespace="llm",service="router",instance="10.0.0.1:9090"`)
	}
	cases := map[string][]string{ // each of an alert's texts makes it fire
		"TandemDown": {
			"up{JOB} 1x60 0x60\ntandem_build_info{JOB} 1x60",
			`up{job="tandem",service="router",instance="10.0.0.1:9090"} 0x120`, // as the chart's ServiceMonitor names it: it never answered
			"up{JOB} 1x2 0x118\ntandem_build_info{JOB} 1x2",                    // for hours
		},
		"TandemGone": {
			"up{JOB} 1x60\ntandem_build_info{JOB} 1x60", // its targets vanish
			`up{job="router",service="other",instance="b"} 1x120` + "\nup{JOB} 1x60\ntandem_build_info{JOB} 1x60",
			`up{job="node"} 1x120`, // and nobody ever found them
		},
		"TandemRequestsFail": {`tandem_request_duration_seconds_count{JOB,pool="chat",result="failed"} 0+60x120
			tandem_request_duration_seconds_count{JOB,pool="chat",result="ok"} 0+600x120`},
		"TandemRefuses":          {`tandem_refusals_total{JOB,code="no_endpoint"} 0+60x120`},
		"TandemTicketsRefused":   {`tandem_tickets_refused_total{JOB} 0+6x120`},
		"TandemTicketKeysDiffer": {`tandem_ticket_keys_differ{JOB} 1x120`},
		"TandemEndpointOut":      {`tandem_endpoint_up{JOB,pool="chat",endpoint="e",role="decode"} 0x120`},
		"TandemEndpointFails": {`tandem_hop_duration_seconds_count{JOB,pool="chat",hop="decode",endpoint="e",result="failed"} 0+60x120
			tandem_hop_duration_seconds_count{JOB,pool="chat",hop="decode",endpoint="e",result="ok"} 0+60x120`},
		"TandemEngineSlow": {`tandem_endpoint_slowness{JOB,pool="chat",endpoint="e",leg="prefill"} 6x120`},
		"TandemNotSplitting": {`tandem_decisions_total{JOB,pool="chat",route="decode_alone",reason="no_prefill"} 0+60x120
			tandem_decisions_total{JOB,pool="chat",route="split",reason=""} 0+60x120`},
		"TandemQueueOverflows": {`tandem_queue_wait_seconds_count{JOB,pool="chat",end="expired"} 0+60x120
			tandem_queue_wait_seconds_count{JOB,pool="chat",end="bound"} 0+60x120`},
		"TandemReplans": {`tandem_replans_total{JOB,pool="chat",cause="decode"} 0+60x120
			tandem_decisions_total{JOB,pool="chat",route="split",reason=""} 0+60x120`},
		"TandemSlowToFirstByte": {`tandem_request_first_byte_seconds_bucket{JOB,pool="chat",le="1"} 0x120
			tandem_request_first_byte_seconds_bucket{JOB,pool="chat",le="60"} 0+60x120
			tandem_request_first_byte_seconds_bucket{JOB,pool="chat",le="+Inf"} 0+60x120`},
		"TandemStreamKillsEngines": {`tandem_streams_continued_total{JOB,pool="chat",result="died_again"} 0+1x120`},
		"TandemTargetsMissed": {`tandem_promises_total{JOB,pool="chat",result="late"} 0+60x120
			tandem_promises_total{JOB,pool="chat",result="kept"} 0+60x120`},
		"TandemTokensNotCounted": {`tandem_answers_without_usage_total{JOB,pool="chat",reason="absent"} 0+60x120`},
		"TandemSlow": {`tandem_ext_proc_phase_seconds_bucket{JOB,phase="scan",le="0.01"} 0x120
			tandem_ext_proc_phase_seconds_bucket{JOB,phase="scan",le="1"} 0+60x120
			tandem_ext_proc_phase_seconds_bucket{JOB,phase="scan",le="+Inf"} 0+60x120`},
		"TandemCachePredictionsOff": {`tandem_cached_tokens_compared_total{JOB,pool="chat",as="measured"} 0+60x120
			tandem_cached_tokens_compared_total{JOB,pool="chat",as="expected"} 0+60000x120`},
		"TandemPrefillPredictionsOff": {`tandem_prefill_seconds_compared_total{JOB,pool="chat",as="measured"} 0+600x120
			tandem_prefill_seconds_compared_total{JOB,pool="chat",as="expected"} 0+60x120`},
		"TandemHandoversOrphaned": {`tandem_handovers_orphaned_total{JOB,pool="chat",endpoint="e",reason="client_gone"} 0+120x120`},
		"TandemKVExpired":         {`tandem_kv_outdated_total{JOB,pool="chat",endpoint="e",reason="expired"} 0+6x120`},
		"TandemReservationsLeft":  {`tandem_reservations{JOB} 5x120`},
		"TandemRedisDown":         {`tandem_redis_up{JOB} 0x120`},
		"TandemReplicasDisagree":  {`tandem_redis_unknown_endpoints_total{JOB} 0+6x120`},
		"TandemKVEventsSilent":    {`tandem_kv_events_connected{JOB,pool="chat",endpoint="e",rank="0"} 0x120`},
		"TandemKVEventsLost":      {`tandem_kv_events_lost_total{JOB,pool="chat",endpoint="e",rank="0"} 0+6x120`},
		"TandemNoticesMissed": {`tandem_kv_notice_waits_total{JOB,result="missed"} 0+60x120
			tandem_kv_notice_waits_total{JOB,result="noticed"} 0+60x120`},
		"TandemReloadRefused": {`tandem_config_reloads_total{JOB,result="refused"} 0+6x120`},
	}
	for name, rule := range all {
		t.Run(name, func(t *testing.T) {
			if len(cases[name]) == 0 {
				t.Fatal("nothing shows that it can fire: give it series above")
			}
			for _, series := range cases[name] {
				if !fires(t, &rule, filled(series)) {
					t.Errorf("does not fire:\n%s", series)
				}
			}
			if fires(t, &rule, filled(healthy)) {
				t.Error("fires although all is well")
			}
		})
	}
	down, other := all["TandemDown"], `up{job="node",instance="n"} 0x120`
	if fires(t, &down, filled(healthy+other)) {
		t.Error("TandemDown fires for what is not Tandem")
	}
}
