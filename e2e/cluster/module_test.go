//go:build cluster

package cluster

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// moduleValues are those of the chart, with engines, for the Gateway of existing.yaml.
const moduleValues = `
gateway: {mode: module, attach: web/http, hostnames: [chat.test], operator: {admin: "0.0.0.0:9090", engines: [10.201.0.0/24]}}
image: {tag: v1}
replicas: 1
inside: {repository: registry.test/tandem-envoy}
redis: {image: "tandem.test/redis:1"}
resources: {requests: {cpu: 50m, memory: 64Mi}, limits: {memory: 1Gi}}
config: {pools: [{name: chat, kvTransfer: nixl, split: always, decodeAlone: fallback}]}
engines:
  enabled: true
  prefill: 2
  decode: 2
  image: tandem.test/enginesim:1
  argsInstead: [--listen, "0.0.0.0:8000", --side-channel, "$(POD_IP):5600", --role, $(ROLE), --model, tiny, --lease, 120s]
  resources: {limits: {nvidia.com/gpu: null}}
  drainSeconds: 20
`

// patientProbes keep the only Envoy in its Service where the machine has other work: after one answer that takes more than a
// second Envoy Gateway's take it out, and clients are refused the connection.
const patientProbes = "patch: {type: StrategicMerge, value: {spec: {template: {spec: {containers: " +
	"[{name: envoy, readinessProbe: &p {timeoutSeconds: 20}, livenessProbe: *p}, " +
	"{name: shutdown-manager, readinessProbe: *p, livenessProbe: *p}]}}}}}"

// Tandem in the Envoy of an Envoy Gateway in Kubernetes mode, by the chart: attached to a Gateway that serves another route,
// under load while everything changes, and taken off again without a trace. The other route is asked all the time.
func TestModule(t *testing.T) {
	c := start(t)
	c.configure("config.envoyGateway.extensionApis.enableBackend=true")
	values := filepath.Join(c.dir, "values.yaml")
	require.NoError(t, os.WriteFile(values, []byte(moduleValues), 0o600))
	chart, err := filepath.Abs("../../deploy/helm/tandem")
	require.NoError(t, err)
	before := c.names()

	// proxy writes the EnvoyProxy of the Gateway, as the chart's notes have it, and returns the command that names it there.
	proxy := func(c *cluster, more string, replicas int) (patch string) {
		notes := c.must("helm install chat " + chart + " --namespace default -f " + values + more + " --dry-run")
		_, text, _ := strings.Cut(notes, ":\n  apiVersion: gateway.envoyproxy.io/v1alpha1\n  kind: EnvoyProxy\n")
		text, patch, _ = strings.Cut(text, "\n\nIf the Gateway has none, name this one in it:\n")
		patch, _, _ = strings.Cut(patch, "\n")
		ours := fmt.Sprintf("envoyDeployment:\n          replicas: %d\n          %s\n", replicas, patientProbes)
		text = "  apiVersion: gateway.envoyproxy.io/v1alpha1\n  kind: EnvoyProxy\n" + strings.Replace(text, "envoyDeployment:\n", ours, 1) + "\n"
		require.NoError(t, os.WriteFile(filepath.Join(c.dir, "proxy.yaml"), []byte(text), 0o600))
		return patch
	}
	patch := proxy(c, "", 1)

	c.show("kubectl apply -f proxy.yaml") // its Envoys start once there is the ConfigMap, which the chart brings
	c.show(patch)
	c.show("helm install chat " + chart + " --namespace default -f " + values + " --wait --timeout 6m")
	c.await("the Gateway's Envoy has the library", func() bool {
		out := c.must("kubectl get pods -n envoy-gateway-system " + ofWeb + " -o jsonpath='{.items[*].spec.containers[*].image}'")
		return strings.Contains(out, "tandem-envoy:v1") && !strings.Contains(out, "tandem.test/envoy:")
	})
	c.splitsAt("chat.test")
	c.show("tandem envoy --for envoy-gateway --check --namespace default --name chat")

	other := c.load("llm.test", 1)
	step := func(name string, do func(c *cluster)) {
		t.Run(name, func(t *testing.T) {
			c := c.under(t)
			chats := c.load("chat.test", 4)
			do(c)
			n, wrong := chats.end()
			t.Logf("%d requests, wrong: %v", n, wrong)
			require.Empty(t, wrong)
		})
	}
	step("400 requests, and engines are killed", func(c *cluster) {
		c.show("kubectl delete --grace-period=0 --force $(kubectl get pod -o name -l llm-d.ai/role=decode,app.kubernetes.io/name=tandem-engine | head -1)")
		time.Sleep(3 * time.Second)
		c.show("kubectl delete --grace-period=0 --force $(kubectl get pod -o name -l llm-d.ai/role=prefill,app.kubernetes.io/name=tandem-engine | head -1)")
		c.must("kubectl wait --timeout=3m deployment/chat-prefill deployment/chat-decode --for=condition=Available")
		time.Sleep(10 * time.Second)
	})
	step("engines are rolled", func(c *cluster) {
		c.show("kubectl rollout restart deployment/chat-prefill deployment/chat-decode")
		c.must("kubectl rollout status --timeout=4m deployment/chat-prefill")
		c.must("kubectl rollout status --timeout=4m deployment/chat-decode")
	})
	step("the policy changes", func(c *cluster) {
		c.show("helm upgrade chat " + chart + " --namespace default -f " + values + " --set config.pools[0].prefillAttempts=2")
		time.Sleep(10 * time.Second)
	})
	step("the Gateway's Envoy is rolled", func(c *cluster) {
		c.show("kubectl rollout restart -n envoy-gateway-system deployment " + ofWeb)
		c.must("kubectl rollout status --timeout=4m -n envoy-gateway-system deployment " + ofWeb)
	})
	step("two Envoys share a Redis", func(c *cluster) {
		const more = " --set redis.enabled=true"
		c.show("helm upgrade chat " + chart + " --namespace default -f " + values + more + " --wait --timeout 6m")
		proxy(c, more, 2)
		c.show("kubectl apply -f proxy.yaml")
		c.show("kubectl rollout restart -n envoy-gateway-system deployment " + ofWeb) // where Redis is takes a restart
		c.must("kubectl rollout status --timeout=4m -n envoy-gateway-system deployment " + ofWeb)
		c.agree()
		c.show("helm upgrade chat " + chart + " --namespace default -f " + values)
		proxy(c, "", 1)
		c.show("kubectl apply -f proxy.yaml")
		c.await("one Envoy is left", func() bool { return len(c.envoys()) == 1 })
	})
	t.Run("a policy that is not valid", func(t *testing.T) {
		c := c.under(t)
		const path = `[{"op":"replace","path":"/spec/dynamicModule/0/config/tandem/pools/0/kvTransfer","value":"%s"},{"op":"replace","path":"/spec/dynamicModule/0/config/name","value":"%s"}]`
		c.must("kubectl patch envoyextensionpolicy chat --type=json -p '" + fmt.Sprintf(path, "nixel", "fresh") + "'")
		c.await("its route is refused with the reason", func() bool {
			status, body := c.chat("chat.test", "")
			return status == "503" && strings.Contains(body, "nixel")
		})
		c.must("kubectl patch envoyextensionpolicy chat --type=json -p '" + fmt.Sprintf(path, "nixl", "default.chat") + "'")
		c.await("it serves again", func() bool { status, _ := c.chat("chat.test", ""); return status == "200" })
	})
	n, wrong := other.end()
	t.Logf("the other route: %d requests, wrong: %v", n, wrong)
	require.Empty(t, wrong)

	c.show("kubectl delete envoyextensionpolicy chat")
	c.await("an engine answers alone", func() bool {
		was := c.prefillsIn("default", "prefill")
		status, _ := c.chat("chat.test", "")
		return status == "200" && c.prefillsIn("default", "prefill") == was
	})
	c.show("helm uninstall chat --wait")
	c.must(`kubectl patch gateway web --type=json -p '[{"op":"remove","path":"/spec/infrastructure/parametersRef"}]'`)
	c.must("kubectl delete -f proxy.yaml")
	c.await("all is as before", func() bool { return slices.Equal(before, c.names()) })
	c.await("the Gateway's Envoy is Envoy Gateway's again", func() bool {
		return !strings.Contains(c.must("kubectl get pods -A -o jsonpath='{.items[*].spec.containers[*].image}'"), "tandem-envoy")
	})
	c.await("the other route serves", func() bool { return c.status() == "200" })
}

// envoys returns the addresses of the Gateway's Envoys.
func (c *cluster) envoys() []string {
	c.t.Helper()
	return strings.Fields(c.must("kubectl get pods -n envoy-gateway-system " + ofWeb + " -o jsonpath='{.items[*].status.podIP}'"))
}

// agree holds two Envoys to what they share: prompts that came to one go to the same engine if they come to the other.
func (c *cluster) agree() {
	c.t.Helper()
	admin := func(ip, path string) string {
		resp, err := c.client.Get("http://" + ip + ":9090" + path)
		if err != nil {
			return err.Error() // it starts
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		return string(text)
	}
	var at []string
	c.await("both know of each other", func() bool {
		at = c.envoys()
		return len(at) == 2 && !slices.ContainsFunc(at, func(ip string) bool {
			return !strings.Contains(admin(ip, "/default.chat.file/readyz"), "2 replicas")
		})
	})
	for i := range 6 {
		prompt := fmt.Sprint(i, strings.Repeat(" shared", 10_000))
		status, body := c.ask(at[i%2]+":10080", "chat.test", "", prompt)
		require.Equal(c.t, "200", status, body)
		time.Sleep(2 * time.Second) // until they have told each other
		status, body = c.ask(at[1-i%2]+":10080", "chat.test", "", prompt)
		require.Equal(c.t, "200", status, body)
		var answer struct {
			Usage struct {
				Details struct {
					Cached int `json:"cached_tokens"` // inside Envoy prefill's count
				} `json:"prompt_tokens_details"`
			}
		}
		require.NoError(c.t, json.Unmarshal([]byte(body), &answer), body)
		require.Greater(c.t, answer.Usage.Details.Cached, 5_000, "the other Envoy's request found its prompt")
	}
}

// names are the resources that a user sees, without those that come and go by themselves.
func (c *cluster) names() []string {
	c.t.Helper()
	out := c.must("kubectl get services,deployments,configmaps,secrets,serviceaccounts,roles,rolebindings,poddisruptionbudgets,networkpolicies," +
		"gateways,httproutes,backends,envoyproxies,envoypatchpolicies,backendtrafficpolicies,clienttrafficpolicies,envoyextensionpolicies -A --no-headers " +
		"-o custom-columns=K:.kind,S:.metadata.namespace,N:.metadata.name")
	set := map[string]bool{}
	for line := range strings.Lines(out) {
		set[strings.Join(strings.Fields(line), " ")] = true
	}
	return slices.Sorted(maps.Keys(set))
}

// splitsAt asks a host until engines of the release have computed a prompt for others.
func (c *cluster) splitsAt(host string) {
	c.t.Helper()
	before := c.prefillsIn("default", "prefill")
	c.await("a request is split", func() bool {
		status, _ := c.chat(host, "user")
		return status == "200" && c.prefillsIn("default", "prefill") > before
	})
}

// load is requests of a host, as fast as they are answered.
type load struct {
	stop  atomic.Bool
	group sync.WaitGroup
	mu    sync.Mutex
	n     int
	wrong map[string]int // what else than 200 was answered
}

func (c *cluster) load(host string, clients int) *load {
	l := &load{wrong: map[string]int{}}
	for range clients {
		l.group.Go(func() {
			for !l.stop.Load() {
				status, body := c.chat(host, "load")
				whole := status == "200" && strings.Contains(body, `"finish_reason"`)
				l.mu.Lock()
				if l.n++; !whole {
					l.wrong[status+" "+body[:min(len(body), 200)]]++
				}
				l.mu.Unlock()
			}
		})
	}
	return l
}

func (l *load) end() (int, map[string]int) {
	l.stop.Store(true)
	l.group.Wait()
	return l.n, l.wrong
}
