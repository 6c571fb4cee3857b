//go:build cluster

package cluster

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// One install of the chart leads from an empty namespace to requests over two engines, which are three equal ones, and
// simulated. Words and their reasons are there. Upgrades to engines of fixed roles and to Tandem inside Envoy serve, too.
func TestChartAlone(t *testing.T) {
	c := &cluster{t: t, dir: t.TempDir(), client: &http.Client{Timeout: time.Minute}}
	c.env = append(os.Environ(), "PATH="+os.Getenv("TANDEM_KUBE_BIN")+":"+os.Getenv("PATH"), "HOME="+c.dir)
	values := filepath.Join(c.dir, "values.yaml")
	require.NoError(t, os.WriteFile(values, []byte(`
image: {repository: registry.test/tandem, tag: v1}
redis: {enabled: true, image: "tandem.test/redis:1"}
envoy: {enabled: true, replicas: 1, image: "tandem.test/envoy:1.40.0"}
config: {pools: [{name: chat, kvTransfer: nixl, split: always}]}
engines:
  enabled: true
  replicas: 3
  image: tandem.test/enginesim:1
  argsInstead: [--listen, "0.0.0.0:8000", --side-channel, "$(POD_IP):5600", --role, $(ROLE), --model, tiny, --bidirectional, --lease, 120s]
  resources: {limits: {nvidia.com/gpu: null}}
  drainSeconds: 5
`), 0o600))
	chart, err := filepath.Abs("../../deploy/helm/tandem")
	require.NoError(t, err)
	c.show("helm install router " + chart + " --namespace llm --create-namespace -f " + values + " --wait --timeout 4m")
	c.gate = strings.TrimSpace(c.must("kubectl get service -n llm router-envoy -o jsonpath='{.spec.clusterIP}'"))
	c.splits("both")
	c.await("each of the three engines has a word", func() bool { // the last ones may have just started
		roles := c.must("kubectl get --raw /api/v1/namespaces/llm/services/router:9090/proxy/debug/roles")
		return strings.Count(roles, `"since"`) == 3
	})

	c.show("helm upgrade router " + chart + " --namespace llm -f " + values +
		" --set engines.prefill=1,engines.decode=2 --wait --timeout 4m")
	c.await("engines of both roles are gone", func() bool {
		return c.must("kubectl get pods -n llm -o name -l llm-d.ai/role=both") == ""
	})
	c.splits("prefill")

	c.show("helm upgrade router " + chart + " --namespace llm -f " + values + " --set engines.prefill=1,engines.decode=2," +
		"replicas=1,config.envoy.run=inside,inside.repository=registry.test/tandem-envoy,envoy.enabled=false --wait --timeout 4m")
	c.await("only Envoys with Tandem in them are left", func() bool {
		out := c.must("kubectl get pods -n llm -o jsonpath='{.items[*].spec.containers[*].image}'")
		return strings.Contains(out, "tandem-envoy:v1") && !strings.Contains(out, "registry.test/tandem:v1") && !strings.Contains(out, "tandem.test/envoy")
	})
	c.splits("prefill")
}

// splits sends requests until engines of a role have computed one more prompt for another engine.
func (c *cluster) splits(role string) {
	c.t.Helper()
	before := c.prefills(role)
	c.await("a request is split", func() bool {
		status, _ := c.chat("llm.test", "user")
		return status == "200" && c.prefills(role) > before
	})
}

// prefills counts the prompts that engines of a role have computed for others.
func (c *cluster) prefills(role string) int { return c.prefillsIn("llm", role) }

// prefillsIn is prefills of the engines in a namespace.
func (c *cluster) prefillsIn(namespace, role string) (n int) {
	c.t.Helper()
	pods := "kubectl get pods -n " + namespace + " -l app.kubernetes.io/name=tandem-engine,llm-d.ai/role=" + role + " -o jsonpath='{.items[*].status.podIP}'"
	for ip := range strings.FieldsSeq(c.must(pods)) {
		resp, err := c.client.Get("http://" + ip + ":8000/sim/requests")
		if err != nil { // it starts or ends
			continue
		}
		var list []seen
		err = json.NewDecoder(resp.Body).Decode(&list)
		resp.Body.Close()
		require.NoError(c.t, err)
		for _, s := range list {
			if s.Leg == "prefill" {
				n++
			}
		}
	}
	return n
}
