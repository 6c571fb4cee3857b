package e2e

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// installAll installs everything that the manifests refer to.
func (c *cluster) installAll() {
	c.t.Helper()
	for _, release := range []struct{ module, pattern string }{ // as in deploy/crd_test.go
		{"sigs.k8s.io/gateway-api@v1.6.1", "config/crd/standard/*.yaml"},
		{"sigs.k8s.io/gateway-api-inference-extension@v1.5.0", "config/crd/bases/*.yaml"},
		{"github.com/envoyproxy/gateway@v1.9.1", "charts/gateway-helm/charts/crds/crds/generated/*.yaml"},
		{"istio.io/api@v1.29.0", "kubernetes/customresourcedefinitions.gen.yaml"},
		{"github.com/prometheus-operator/prometheus-operator@v0.85.0", "example/prometheus-operator-crd/*servicemonitors.yaml"},
		{"github.com/kedacore/keda/v2@v2.21.0", "config/crd/bases/keda.sh_scaledobjects.yaml"},
	} {
		c.install(crds(c.t, release.module, release.pattern)...)
	}
}

// rendered returns all manifests as files, and as kustomize and Helm render them.
func rendered(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, pattern := range []string{"envoy-gateway/[or]*.yaml", "envoy-gateway/extension/[lp]*.yaml", "inference-extension/*.yaml", "examples/*.yaml"} {
		files, err := filepath.Glob(filepath.Join("../deploy", pattern))
		require.NoError(t, err)
		for _, file := range files {
			out[strings.TrimPrefix(file, "../")] = printed(t, "cat", file)
		}
	}
	for _, dir := range []string{"base", "overlays/endpoint-picker", "overlays/monitoring"} {
		out["kustomize build deploy/kustomize/"+dir] = printed(t, kubeTool(t, "kustomize"), "build", "../deploy/kustomize/"+dir)
	}
	everything := "autoscaling.enabled=true,autoscaling.reservations=2000,serviceMonitor.enabled=true,networkPolicy.enabled=true,config.extProc.protocol=endpointPicker,inferencePool.enabled=true"
	engines := "engines.enabled=true,engines.autoscaling.enabled=true,redis.enabled=true,envoy.enabled=true,networkPolicy.enabled=true"
	for _, set := range []string{"", everything, engines, engines + ",engines.autoscaling.prometheus=http://prometheus:9090", "envoy.enabled=true,networkPolicy.enabled=true,redis.url=redis://redis:6379"} {
		out["helm template deploy/helm/tandem --set "+set] = printed(t, kubeTool(t, "helm"), "template", "router", "../deploy/helm/tandem", "--namespace", namespace, "--kube-version", "1.36", "--set", set)
	}
	return out
}

func printed(t *testing.T, name string, args ...string) string {
	t.Helper()
	text, err := exec.Command(name, args...).Output()
	require.NoError(t, err, "%s %v", name, args)
	return string(text)
}

// A real API server with the real CRDs, their CEL rules included, accepts every manifest in a dry run, and refuses
// broken ones.
func TestKubeManifests(t *testing.T) {
	c := startCluster(t)
	c.installAll()
	checked := 0
	manifests := rendered(t)
	for name, text := range manifests {
		for _, doc := range documents(text) {
			status, answer := c.create(doc, "&dryRun=All")
			// 409: startCluster has created it, so it was accepted before
			require.True(t, status < 300 || status == 409, "%s: status %d: %.900s\n%s", name, status, answer, doc)
			checked++
		}
	}
	t.Logf("%d objects of %d manifests are taken", checked, len(manifests))

	policy := manifests["deploy/envoy-gateway/extension/policy.yaml"]
	limits := manifests["deploy/envoy-gateway/extension/limit-tokens.yaml"]
	pool := manifests["deploy/inference-extension/inferencepool.yaml"]
	for _, b := range []struct{ manifest, old, broken, want string }{
		{policy, "request: {}", "request: {body: FullDuplexStreamed}}\n    failOpen: true\n    metadata: {",
			"FullDuplexStreamed"}, // a CEL rule
		{policy, "processingMode", "procesingMode", "unknown field"},
		{policy, "request: {}", "request: {body: Many}", "Many"},
		{limits, "    global:", "    local:", "response cost is not supported"},
		{pool, "targetPorts: [{number: 8000}]", "targetPorts: [{number: 8000}, {number: 8000}]", "unique"}, // another
		{pool, ", port: {number: 9002}", "", "port"},                                                       // and another
	} {
		require.Contains(t, b.manifest, b.old)
		refused := slices.ContainsFunc(documents(strings.Replace(b.manifest, b.old, b.broken, 1)), func(doc string) bool {
			status, answer := c.create(doc, "&dryRun=All")
			return status >= 400 && strings.Contains(answer, b.want)
		})
		require.True(t, refused, "%q is not refused", b.broken)
	}
}

// helm install makes a ticket key and keeps it over upgrades; its notes warn of replicas that share nothing.
func TestKubeHelm(t *testing.T) {
	c := startCluster(t)
	helm := func(args ...string) string {
		cmd := exec.Command(kubeTool(t, "helm"), append(args, "--namespace", namespace, "--kubeconfig", c.kubeconfig(adminToken))...)
		text, err := cmd.CombinedOutput()
		require.NoError(t, err, "%v: %s", args, text)
		return string(text)
	}
	key := func() string {
		return c.must("GET", "/api/v1/namespaces/"+namespace+"/secrets/router-ticket", "", "")
	}
	data := regexp.MustCompile(`"ticket.key":"([^"]+)"`)
	require.Contains(t, helm("install", "router", "../deploy/helm/tandem"), "WARNING: several replicas and no Redis")
	made := data.FindStringSubmatch(key())
	require.Len(t, made, 2)
	require.NotContains(t, helm("upgrade", "router", "../deploy/helm/tandem", "--set", "replicas=1"), "WARNING")
	require.Equal(t, made, data.FindStringSubmatch(key()), "an upgrade keeps the key")
	require.NotContains(t, helm("upgrade", "router", "../deploy/helm/tandem", "--set", "redis.url=redis://redis:6379"), "WARNING")
	status, _, err := c.ask(adminToken, "GET", "/api/v1/namespaces/"+namespace+"/secrets/router-ticket", "", "")
	require.NoError(t, err)
	require.Equal(t, 404, status, "replicas share a key through Redis")
}
