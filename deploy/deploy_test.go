package deploy

import (
	"context"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	envoyconfigs "tandem/envoy-configs"
	"tandem/envoy-configs/livemodule"
	"tandem/replica/config"
)

var update = flag.Bool("update", false, "rewrite envoy-gateway/resources.yaml, override-host.yaml and testdata")

// mistakes of a manifest, each document read strictly as what it says it is.
func mistakes(t *testing.T, known schemas, manifest string) (found []string) {
	t.Helper()
	strict := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme.Scheme, scheme.Scheme, json.SerializerOptions{Yaml: true, Strict: true})
	for doc := range strings.SplitSeq("\n"+manifest, "\n---") {
		var object map[string]any
		require.NoError(t, yaml.UnmarshalStrict([]byte(doc), &object), doc)
		if len(object) == 0 {
			continue
		}
		version, _ := object["apiVersion"].(string)
		kind, _ := object["kind"].(string)
		if schema, ok := known[version+" "+kind]; ok {
			found = append(found, check("", object, schema)...)
		} else if _, _, err := strict.Decode([]byte(doc), nil, nil); err != nil {
			found = append(found, kind+": "+err.Error())
		}
	}
	return found
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(text)
}

func TestManifests(t *testing.T) {
	known := loadSchemas(t)
	for _, pattern := range []string{"kustomize/base/*.yaml", "kustomize/overlays/*/*.yaml", "envoy-gateway/*.yaml", "envoy-gateway/extension/*.yaml", "inference-extension/*.yaml", "examples/*.yaml"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, file := range files {
			switch filepath.Base(file) {
			case "kustomization.yaml", "helm-values.yaml":
			case "tandem.yaml":
				_, _, err := config.Load(file)
				require.NoError(t, err)
			default:
				require.Empty(t, mistakes(t, known, read(t, file)), file)
			}
		}
	}
	_, _, err := config.Load("compose/tandem.yaml")
	require.NoError(t, err)
}

// What is wrong is found: this validation is no formality.
func TestBrokenManifests(t *testing.T) {
	known := loadSchemas(t)
	resources, pool := read(t, "envoy-gateway/resources.yaml"), read(t, "inference-extension/inferencepool.yaml")
	deployment, hpa := read(t, "kustomize/base/deployment.yaml"), read(t, "examples/autoscaling.yaml")
	keda := read(t, "examples/autoscaling-keda.yaml")
	for _, c := range []struct{ manifest, old, broken, want string }{
		{resources, "sectionName: http", "sectionNam: http", "sectionNam: unknown field"},
		{resources, "requestID: PreserveOrGenerate", "requestID: Keep", "is not one of"},
		{resources, "port: 8080", "port: many", "is text, not integer"},
		{resources, "type: JSONPatch", "type: JSON", "is not one of"},
		{pool, "targetPorts: [{number: 8000}]", "targetPorts: [{number: 80000}]", "above 65535"},
		{pool, "targetPorts: [{number: 8000}]", "targetPorts: []", "at least 1"},
		{pool, "  selector: {matchLabels: {app: llm}}\n", "", ".spec.selector: is required"},
		{deployment, "containerPort: 9002", "containerport: 9002", `unknown field "spec.template.spec.containers[0].ports[0].containerport"`},
		{hpa, "scaleDown: {tolerance", "scaleDown: {tolerances", `unknown field "spec.behavior.scaleDown.tolerances"`},
		{keda, "minReplicaCount: 1", "minReplicas: 1", "minReplicas: unknown field"},
		{keda, `threshold: "1"`, "threshold: 1", "not string"},
		{deployment, "replicas: 2", "replicas: two", "Deployment"},
		{deployment, "kind: Deployment", "kind: Deploymint", `no kind "Deploymint"`},
	} {
		require.Contains(t, c.manifest, c.old)
		found := mistakes(t, known, strings.Replace(c.manifest, c.old, c.broken, 1))
		require.NotEmpty(t, found, c.broken)
		require.Contains(t, strings.Join(found, "\n"), c.want)
	}
}

// What the administrator of Envoy Gateway sets is what TestEnvoyGatewayExtension (e2e) runs with, but for the address.
func TestExtensionSettings(t *testing.T) {
	type settings struct {
		ExtensionManager struct{ Hooks any }
		EnvoyProxy       struct{ Bootstrap any }
	}
	var values struct {
		Config struct{ EnvoyGateway settings }
	}
	var run settings
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "envoy-gateway/extension/helm-values.yaml")), &values))
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "../e2e/testdata/gateway/envoy-gateway.yaml")), &run))
	require.NotNil(t, run.ExtensionManager.Hooks)
	require.NotNil(t, run.EnvoyProxy.Bootstrap)
	require.Equal(t, run, values.Config.EnvoyGateway)
}

// resources.yaml is what `tandem envoy --for envoy-gateway` prints, and override-host.yaml what it prints with that upstream.
func TestEnvoyGatewayResources(t *testing.T) {
	c, _, err := config.Load("envoy-gateway/tandem.yaml")
	require.NoError(t, err)
	for file, upstream := range map[string]envoyconfigs.Upstream{
		"envoy-gateway/resources.yaml":     envoyconfigs.OriginalDst,
		"envoy-gateway/override-host.yaml": envoyconfigs.OverrideHost,
	} {
		got, err := envoyconfigs.EnvoyGateway(c, envoyconfigs.GatewayOptions{Upstream: upstream})
		require.NoError(t, err)
		if *update {
			require.NoError(t, os.WriteFile(file, got, 0o644))
		}
		require.Equal(t, string(got), read(t, file), "run go test ./deploy -update")
	}
}

// tool is a program that scripts/kube-tools.sh built; without it a test says so and is skipped.
func tool(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("TANDEM_KUBE_BIN")
	if dir == "" {
		home, err := os.UserHomeDir()
		require.NoError(t, err)
		dir = filepath.Join(home, ".cache/tandem/bin")
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Skipf("%s is not built: scripts/kube-tools.sh %s", name, name)
	}
	return path
}

func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	text, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	require.NoError(t, err, string(text))
	return string(text)
}

func TestKustomize(t *testing.T) {
	kustomize, known := tool(t, "kustomize"), loadSchemas(t)
	for _, dir := range []string{"base", "overlays/endpoint-picker", "overlays/monitoring"} {
		built := output(t, kustomize, "build", filepath.Join("kustomize", dir))
		require.Empty(t, mistakes(t, known, built), dir)
		require.Contains(t, built, "readOnlyRootFilesystem: true")
		require.NotContains(t, built, "\n  name: tandem\n  labels:\n    app: ", dir)
	}
}

// The chart's alerts and dashboard are those of deploy/observability: a chart has no files from outside of its folder. Copy
// them when you change one.
func TestTheChartHasTheAlertsAndTheDashboard(t *testing.T) {
	require.Equal(t, read(t, "observability/alerts.yaml"), read(t, "helm/tandem/files/alerts.yaml"))
	require.Equal(t, read(t, "observability/grafana/dashboards/tandem.json"), read(t, "helm/tandem/files/dashboard.json"))
}

func TestHelm(t *testing.T) {
	helm, known := tool(t, "helm"), loadSchemas(t)
	every := []string{"--set", "autoscaling.enabled=true,autoscaling.reservations=2000,serviceMonitor.enabled=true,networkPolicy.enabled=true,redis.url=redis://tandem@redis:6379/0,redis.existingSecret=redis",
		"--set-json", `imagePullSecrets=[{"name":"pull"}]`, "--set-json", `affinity={"podAntiAffinity":{}}`, "--set-json", `tolerations=[{"operator":"Exists"}]`,
		"--set-json", `extraEnv=[{"name":"TZ","value":"UTC"}]`, "--set-json", `extraVolumes=[{"name":"x","emptyDir":{}}]`, "--set-json", `extraVolumeMounts=[{"name":"x","mountPath":"/x"}]`}
	picker := append(every, "--set", "config.extProc.protocol=endpointPicker,inferencePool.enabled=true",
		"--set-json", `config.pools=[{"name":"llm","kvTransfer":"nixl","handoff":"sidecar","discovery":{"inferencePool":{"name":"router"}}}]`)
	template := []string{"template", "router", "helm/tandem", "--namespace", "llm", "--kube-version", "1.36"}
	for name, args := range map[string][]string{"defaults": nil, "everything": every, "endpoint picker": picker, "with Envoy": {"--set", "envoy.enabled=true,networkPolicy.enabled=true"},
		"inside Envoy": append(every, "--set", "config.envoy.run=inside"), "inside Envoy, alone": {"--set", "config.envoy.run=inside"},
		"with all": {"--set", "engines.enabled=true,engines.autoscaling.enabled=true,redis.enabled=true,envoy.enabled=true,networkPolicy.enabled=true,serviceMonitor.enabled=true,prometheusRule.enabled=true,dashboard.enabled=true"}} {
		rendered := output(t, helm, append(template, args...)...)
		require.Empty(t, mistakes(t, known, rendered), name)
		checkConfigMap(t, rendered)
	}
	for wrong, why := range map[string]string{
		"replicas=none":                                               "replicas", // the schema of the values
		"redis.url=redis://:secret@redis:6379":                        "redis",    // it would stand in a ConfigMap
		"envoy.enabled=true,config.extProc.protocol=endpointPicker":   "its own Envoy",
		"resources.limits.memory=2GB":                                 "no quantity",
		"envoy.enabled=true,config.envoy.run=inside":                  "Tandem's own pods are Envoys",
		"engines.enabled=true,engines.prefill=1":                      "set both, or neither",
		"engines.enabled=true,engines.replicas=1":                     "engines/replicas",
		"engines.enabled=true,config.extProc.protocol=endpointPicker": "deploy engines by themselves",
		"redis.enabled=true,redis.url=redis://other:6379":             "another Redis",
		"replica=3":                           "replica",
		"inferencePool.targetPorts={80000}":   "targetPorts",
		"inferencePool.enabled=true":          "needs config.extProc.protocol",
		"networkPolicy.from=all":              "from",
		"config.pools[0].splitt=always":       "splitt",
		"config.envoy.maxBodyByte=1Mi":        "maxBodyByte",
		"config.pools[0].split=sometimes":     "split",
		"podDisruptionBudget.maxUnavailble=1": "maxUnavailble",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		text, err := exec.CommandContext(ctx, helm, append(template, "--set", wrong)...).CombinedOutput()
		cancel()
		require.Error(t, err, wrong)
		require.Contains(t, string(text), why)
	}
}

// Under any release's name the chart gives Prometheus the alerts and Grafana the dashboard as they are, in objects of that
// name, and its targets are one job: the alerts name it.
func TestHelmObserves(t *testing.T) {
	helm := tool(t, "helm")
	for _, release := range []string{"tandem", "router", "a-7"} {
		rendered := output(t, helm, "template", release, "helm/tandem", "--namespace", "llm", "--kube-version", "1.36", "--show-only",
			"templates/optional.yaml", "--set", "serviceMonitor.enabled=true,prometheusRule.enabled=true,prometheusRule.labels.prometheus=main,"+
				"dashboard.enabled=true,podDisruptionBudget.enabled=false")
		found := map[string]string{}
		for doc := range strings.SplitSeq(rendered, "\n---") {
			var object struct {
				Kind     string
				Metadata struct {
					Name   string
					Labels map[string]string
				}
				Spec any
				Data map[string]string
			}
			require.NoError(t, yaml.Unmarshal([]byte(doc), &object))
			switch found[object.Kind] = object.Metadata.Name; object.Kind {
			case "PrometheusRule":
				var rules any
				require.NoError(t, yaml.Unmarshal([]byte(read(t, "observability/alerts.yaml")), &rules))
				require.Equal(t, rules, object.Spec, release)
				require.Equal(t, "main", object.Metadata.Labels["prometheus"])
			case "ConfigMap":
				require.Equal(t, read(t, "observability/grafana/dashboards/tandem.json"), object.Data["tandem.json"], release)
				require.NotEmpty(t, object.Metadata.Labels["grafana_dashboard"], "Grafana's sidecar finds it")
			case "ServiceMonitor":
				require.Equal(t, "app.kubernetes.io/name", object.Spec.(map[string]any)["jobLabel"])
				require.Equal(t, "tandem", object.Metadata.Labels["app.kubernetes.io/name"], "up{job=\"tandem\"}")
			}
		}
		require.Equal(t, map[string]string{"PrometheusRule": release, "ConfigMap": release + "-dashboard", "ServiceMonitor": release}, found)
	}
}

// What a chart computes from its values.
func TestHelmValues(t *testing.T) {
	helm := tool(t, "helm")
	template := func(set ...string) string {
		return output(t, helm, append([]string{"template", "router", "helm/tandem", "--namespace", "llm", "--kube-version", "1.36"}, set...)...)
	}
	bootstrap := regexp.MustCompile(`checksum/bootstrap: \w+`)
	envoy := template("--set", "envoy.enabled=true")
	require.NotEmpty(t, bootstrap.FindString(envoy))
	require.Equal(t, bootstrap.FindString(envoy), bootstrap.FindString(template("--set", "envoy.enabled=true,config.envoy.maxBodyBytes=1000000")),
		"Envoy gets this over xDS")
	require.NotEqual(t, bootstrap.FindString(envoy), bootstrap.FindString(template("--set", "envoy.enabled=true,config.envoy.admin=127.0.0.1:9902")))
	once, again := template(), template()
	require.Equal(t, once, again, "helm template makes no key: the same values give the same text")
	require.Contains(t, template(), "kubectl -n llm create secret generic router-ticket")
	require.NotContains(t, template("--set", "redis.url=redis://redis:6379"), "router-ticket", "replicas share a key through Redis")
	for set, want := range map[string]string{
		"resources.limits.memory=2Gi":   `name: GOMEMLIMIT, value: "1932735283"`,
		"resources.limits.memory=1.5Gi": `name: GOMEMLIMIT, value: "1449551462"`,
		"resources.limits.memory=800M":  `name: GOMEMLIMIT, value: "720000000"`,
		"linger=5s":                     "terminationGracePeriodSeconds: 40",
		"linger=2m":                     "terminationGracePeriodSeconds: 155",
		"linger=1500ms":                 "terminationGracePeriodSeconds: 37",
		"config.pools[0].name=a,config.pools[0].kvTransfer=lmcache":    "- {name: tcp-notices, port: 7500, targetPort: tcp-notices}",
		"config.extProc.protocol=endpointPicker":                       "terminationGracePeriodSeconds: 620",
		"admin.existingSecret=admin":                                   "tokenFile: /etc/tandem-admin/token",
		"log.level=debug":                                              "--log, debug, --log-format, json]",
		"networkPolicy.enabled=true,networkPolicy.gateway=gateway-api": "gateway.networking.k8s.io/gateway-name",
		"networkPolicy.enabled=true,envoy.enabled=true":                "app.kubernetes.io/name: tandem-envoy",
		"serviceAccount.name=other":                                    "serviceAccountName: other",
	} {
		require.Contains(t, template("--set", set), want, set)
	}
}

// With run: inside the pods are Envoys that have Tandem loaded, by a bootstrap that the chart's configuration gives.
func TestHelmInside(t *testing.T) {
	helm := tool(t, "helm")
	rendered := output(t, helm, "template", "router", "helm/tandem", "--namespace", "llm", "--kube-version", "1.36", "--set",
		"config.envoy.run=inside,redis.enabled=true,engines.enabled=true,config.pools[0].engine=vllm,config.pools[0].name=chat,config.pools[0].kvTransfer=nixl",
		"--set-json", "config.pools[0].continueStreams={}")
	checkConfigMap(t, rendered)
	for _, want := range []string{
		`image: "tandem-envoy:`, "args: [envoy, -f, /etc/tandem/tandem.yaml, --output, /bootstrap/envoy.yaml]",
		"args: [-c, /bootstrap/envoy.yaml, --disable-hot-restart]", `GOMEMLIMIT, value: "966367641"`, "name: router-envoy",
		"redis://router-redis.llm.svc.cluster.local:6379", "serviceAccountName: router",
	} {
		require.Contains(t, rendered, want)
	}
	for _, without := range []string{"grpc-ext-proc", "http-replan", "ticket", "--xds", "serve, -f"} {
		require.NotContains(t, rendered, without)
	}
	_, text, _ := strings.Cut(rendered, "tandem.yaml: |\n")
	text, _, _ = strings.Cut(text, "\n---")
	cfg, _, err := config.Parse([]byte(text))
	require.NoError(t, err)
	require.True(t, config.Inside(cfg))
	bootstrap, err := envoyconfigs.Inside(cfg, "/etc/tandem/tandem.yaml")
	require.NoError(t, err)
	require.Contains(t, string(bootstrap), `"file":"/etc/tandem/tandem.yaml"`)
	require.Contains(t, string(bootstrap), "9902", "the port of the readiness of Envoy")
}

// With gateway.mode: module the chart has what `tandem envoy --for envoy-gateway` prints, for a Gateway of its own and for
// one that exists, and nothing of Tandem runs by itself.
func TestHelmModule(t *testing.T) {
	helm, known := tool(t, "helm"), loadSchemas(t)
	const dns = `config.pools=[{"name":"chat","kvTransfer":"nixl","discovery":{"dns":[{"name":"p.llm.svc.cluster.local","port":8000,"role":"prefill"},{"name":"d.llm.svc.cluster.local","port":8001,"role":"decode"}]}}]`
	const listed = `config.pools=[{"name":"chat","kvTransfer":"nixl","endpoints":[{"address":"10.0.0.1:8000","role":"prefill"},{"address":"10.0.0.2:8000","role":"decode"},{"address":"[fd00::3]:8000","role":"decode"}]}]`
	render := func(args ...string) string {
		return output(t, helm, append([]string{"template", "router", "helm/tandem", "--namespace", "llm", "--kube-version", "1.36",
			"--set", "gateway.mode=module"}, args...)...)
	}
	for name, args := range map[string][]string{
		"names": {"--set-json", dns}, "a list": {"--set-json", listed}, "a Gateway that exists": {"--set-json", dns, "--set", "gateway.attach=web/https"},
		"in a file": {"--set-json", dns, "--set", "gateway.file=true"},
	} {
		t.Run(name, func(t *testing.T) {
			rendered := render(args...)
			require.Empty(t, mistakes(t, known, rendered))
			o := envoyconfigs.ModuleOptions{GatewayOptions: envoyconfigs.GatewayOptions{Namespace: "llm", Name: "router"},
				Library: "/usr/lib/tandem/libtandem.so", Image: "tandem-envoy:0.1.0"}
			if strings.Contains(name, "exists") {
				o.Gateway = "web/https"
			}
			_, values, _ := strings.Cut(args[1], "=")
			text, err := yaml.JSONToYAML([]byte(`{"envoy":{"run":"inside","listen":"0.0.0.0:80"},"pools":` + values + "}"))
			require.NoError(t, err)
			cfg, _, err := config.Parse(text)
			require.NoError(t, err)
			o.Config, err = config.ForPolicy(text)
			require.NoError(t, err)
			if strings.Contains(name, "file") {
				o.File = "/etc/tandem/tandem.yaml"
			}
			printed, err := envoyconfigs.EnvoyGatewayModule(cfg, o)
			require.NoError(t, err)
			want, got := specs(t, string(printed)), specs(t, rendered)
			for _, title := range slices.Sorted(maps.Keys(want)) {
				if title == "EnvoyProxy router" { // has more: replicas and resources
					for _, part := range []string{"dynamicModules", "filterOrder", "shutdown"} {
						require.Equal(t, want[title].(map[string]any)[part], got[title].(map[string]any)[part], part)
					}
					continue
				}
				if !strings.HasPrefix(title, "ConfigMap") {
					require.Equal(t, want[title], got[title], title)
				}
			}
			all, err := livemodule.Read(strings.NewReader(rendered + "\n---\n{kind: Service, metadata: {name: d, namespace: llm}, spec: {clusterIP: None}}\n" + others))
			require.NoError(t, err)
			require.Empty(t, livemodule.Check(inNamespace(all, "llm"), "llm", "router"))
			for kind := range got {
				require.NotRegexp(t, "^(Deployment|Role|ServiceAccount|PodDisruptionBudget) ", kind)
			}
		})
	}
	t.Run("engines and Redis", func(t *testing.T) {
		for _, set := range []string{"engines.prefill=1,engines.decode=2", "engines.replicas=3"} {
			rendered := render("--set", "engines.enabled=true,redis.enabled=true,networkPolicy.enabled=true,gateway.libraryFrom=imageVolume,gateway.operator.admin=0.0.0.0:9090,"+set)
			require.Empty(t, mistakes(t, known, rendered))
			all, err := livemodule.Read(strings.NewReader(rendered))
			require.NoError(t, err)
			require.Empty(t, livemodule.Check(inNamespace(all, "llm"), "llm", "router"))
			_, text, _ := strings.Cut(rendered, "tandem.yaml: |\n")
			text, _, _ = strings.Cut(text, "\n  operator.yaml")
			file := filepath.Join(t.TempDir(), "tandem.yaml")
			require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
			cfg, _, err := config.LoadRouted(file)
			require.NoError(t, err)
			require.Equal(t, "redis://router-redis.llm.svc.cluster.local:6379", cfg.GetState().GetRedis().GetUrl())
			require.NotEmpty(t, cfg.GetPools()[0].GetDiscovery().GetDns())
			require.Contains(t, rendered, "reference: \"tandem-library:0.1.0\"")
			require.Contains(t, rendered, "app.kubernetes.io/managed-by: envoy-gateway")
			// An Envoy may have an answer of DNS that is as old as a cache of 30 s and the 5 s between its questions allow.
			count := strings.Count(rendered, "\n  strategy: {rollingUpdate:")
			require.Positive(t, count)
			for _, once := range []string{"\n  minReadySeconds: 40 ", "preStop: {sleep: {seconds: 40}}", "terminationGracePeriodSeconds: 335\n"} {
				require.Equal(t, count, strings.Count(rendered, once), once)
			}
		}
	})
	t.Run("the library is copied", func(t *testing.T) {
		rendered := render("--set-json", dns, "--set", "gateway.libraryFrom=initContainer,redis.url=redis://redis:6379/0,redis.existingSecret=redis")
		require.Empty(t, mistakes(t, known, rendered))
		require.Contains(t, rendered, "passwordFile: /etc/tandem-redis/password")
	})
	// Helm sets an element of a list anew.
	const pool = "config.pools[0].name=chat,config.pools[0].kvTransfer=nixl,config.pools[0].discovery.dns[0]."
	for wrong, why := range map[string]string{
		"gateway.class=eg": "is found by labels", "gateway.mode=modul": "mode", "gateway.attach=web": "NAME/SECTION",
		"envoy.enabled=true": "another Envoy", "envoyGateway.enabled=true": "another way", "serviceMonitor.enabled=true": "PodMonitor",
		pool + "name=d.other.svc,config.pools[0].discovery.dns[0].role=decode,config.pools[0].discovery.dns[0].port=1": "another namespace",
		pool + "name=p.llm.svc,config.pools[0].discovery.dns[0].role=prefill,config.pools[0].discovery.dns[0].port=1":  "one headless Service",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		text, err := exec.CommandContext(ctx, helm, "template", "router", "helm/tandem", "--namespace", "llm", "--kube-version", "1.36",
			"--set", "gateway.mode=module,"+wrong).CombinedOutput()
		cancel()
		require.Error(t, err, wrong)
		require.Contains(t, string(text), why)
	}
}

// others are resources that exist before: a Gateway, and its EnvoyProxy as the chart's notes say it.
const others = `---
{kind: Gateway, metadata: {name: web, namespace: llm}, spec: {infrastructure: {parametersRef: {kind: EnvoyProxy, name: web}}}}
---
kind: EnvoyProxy
metadata: {name: web, namespace: llm}
spec:
  dynamicModules: [{name: tandem, doNotClose: true, source: {type: Local, local: {path: /usr/lib/tandem/libtandem.so}}}]
  filterOrder:
  - {name: envoy.filters.http.dynamic_modules, after: envoy.filters.http.rbac}
  - {name: envoy.filters.http.dynamic_modules, after: envoy.filters.http.local_ratelimit}
  - {name: envoy.filters.http.dynamic_modules, after: envoy.filters.http.ratelimit}
  shutdown: {drainTimeout: 1800s}
`

// inNamespace is what a cluster has after an install: resources without a namespace are in the release's.
func inNamespace(all livemodule.Resources, namespace string) livemodule.Resources {
	for _, r := range all {
		if of, ok := r["metadata"].(map[string]any); ok && of["namespace"] == nil {
			of["namespace"] = namespace
		}
	}
	return all
}

// specs are the specifications of resources, by kind and name.
func specs(t *testing.T, manifests string) map[string]any {
	t.Helper()
	out := map[string]any{}
	for doc := range strings.SplitSeq(manifests, "\n---") {
		var r struct {
			Kind     string
			Metadata struct{ Name string }
			Spec     any
		}
		require.NoError(t, yaml.Unmarshal([]byte(doc), &r))
		if r.Kind != "" {
			out[r.Kind+" "+r.Metadata.Name] = r.Spec
		}
	}
	return out
}

// The engines that the chart deploys, and the pool that Tandem finds them by: equal ones that KEDA scales, and some of each
// role that HorizontalPodAutoscalers do.
func TestHelmEngines(t *testing.T) {
	helm, known := tool(t, "helm"), loadSchemas(t)
	for file, set := range map[string]string{
		"testdata/engines.yaml": "engines.enabled=true,engines.replicas=3,engines.autoscaling.enabled=true," +
			"engines.autoscaling.prometheus=http://prometheus.monitoring:9090,engines.args={--max-model-len=32768}",
		"testdata/engines-of-roles.yaml": "engines.enabled=true,engines.prefill=2,engines.decode=3,engines.model=org/model," +
			"engines.argsInstead={--role,$(ROLE)},engines.lease=60,networkPolicy.enabled=true",
		"testdata/engines-scaled.yaml": "engines.enabled=true,engines.prefill=2,engines.decode=3,engines.autoscaling.enabled=true",
	} {
		rendered := output(t, helm, "template", "router", "helm/tandem", "--namespace", "llm", "--kube-version", "1.36",
			"--show-only", "templates/engines.yaml", "--show-only", "templates/config.yaml", "--set", set)
		require.Empty(t, mistakes(t, known, rendered), file)
		checkConfigMap(t, rendered)
		if *update {
			require.NoError(t, os.WriteFile(file, []byte(rendered), 0o644))
		}
		require.Equal(t, rendered, read(t, file), "run go test ./deploy -update")
	}
}

// checkConfigMap reads the configuration that a chart rendered as the server would.
func checkConfigMap(t *testing.T, manifest string) {
	t.Helper()
	for doc := range strings.SplitSeq(manifest, "\n---") {
		var object struct {
			runtime.TypeMeta `json:",inline"`
			Data             map[string]string `json:"data"`
		}
		require.NoError(t, yaml.Unmarshal([]byte(doc), &object))
		if text, ours := object.Data["tandem.yaml"]; ours || object.Kind == "ConfigMap" && object.Data["tandem.json"] == "" {
			_, _, err := config.Parse([]byte(text))
			require.NoError(t, err, text)
		}
	}
}
