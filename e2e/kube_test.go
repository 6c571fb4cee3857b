package e2e

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Discovery from a real API server (make e2e-kube): pods come and go, an InferencePool changes, the API server is gone for a
// while. Traffic through the real Envoy follows within a second, and no request is lost.

// start starts Envoy and Tandem, then pods of both roles, which discovery finds.
func (k *kubelet) start(discovery string, o options, labels ...string) (prefill, decode *pod) {
	k.t.Helper()
	o.launch = func(f *fleet) {
		k.fleet = f
		prefill, decode = k.run("prefill-0", "prefill", labels...), k.run("decode-0", "decode", labels...)
	}
	o.pools = "pools:\n- name: chat\n  kvTransfer: nixl\n  split: always\n  decodeAlone: fallback\n" + o.pool + "  discovery:\n    " + discovery + "\n"
	start(k.t, o)
	return prefill, decode
}

func TestKubePods(t *testing.T) {
	k := newKubelet(startCluster(t), 1)
	prefill0, decode0 := k.start(fmt.Sprintf("kubernetes: {selector: app=llm, ports: [%s]}", k.ports[0]), options{})
	load := k.fleet.wholeTraffic(6)
	load.more(t, 20)

	decode1 := k.prepare("decode-1", "decode")
	load.more(t, 20)
	require.Zero(t, k.asked(decode1.ranks...), "it is not ready")
	k.ready(decode1, true)
	k.comes("a decode pod becomes ready", decode1.ranks...)
	prefill1 := k.run("prefill-1", "prefill")
	k.comes("a prefill pod becomes ready", prefill1.ranks...)

	k.ready(decode1, false)
	k.goes(load, "a decode pod is not ready any more", decode1.ranks...)
	k.ready(decode1, true)
	k.comes("it is ready again", decode1.ranks...)

	k.ready(prefill1, false)
	k.goes(load, "a prefill pod is not ready any more", prefill1.ranks...)
	k.ready(prefill1, true)
	k.comes("it is ready again", prefill1.ranks...)

	// A rollout: the old pods go after new ones have come.
	k.remove(decode0)
	k.goes(load, "a decode pod is deleted", decode0.ranks...)
	k.finish(decode0)
	k.remove(prefill0)
	k.goes(load, "a prefill pod is deleted", prefill0.ranks...)
	k.finish(prefill0)
	require.Eventually(t, func() bool { return len(k.fleet.state(0)) == 2 }, within, 2*time.Millisecond, "they are forgotten")

	// Without the API server everything continues with the known state, and later changes are seen when it is back.
	k.kill()
	load.more(t, 60)
	k.startServer()
	decode2 := k.run("decode-2", "decode")
	began := time.Now()
	require.Eventually(t, func() bool { return k.asked(decode2.ranks...) > 0 }, time.Minute, 10*time.Millisecond)
	t.Logf("the API server was killed and is back, and a pod has come: asked after %v", time.Since(began).Round(time.Millisecond))
	k.end(load)
}

const llmPool = `apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: llm}
spec:
  selector: {matchLabels: {app: llm, release: "1"}}
  targetPorts: [{number: %s}]
  endpointPickerRef: {kind: Service, name: tandem, port: {number: 9002}}
`

const llmPoolPath = "/apis/inference.networking.k8s.io/v1/namespaces/" + namespace + "/inferencepools/llm"

func (k *kubelet) change(pool string) {
	k.t.Helper()
	k.must(http.MethodPatch, llmPoolPath, "application/merge-patch+json", pool)
}

func TestKubeInferencePool(t *testing.T) {
	k := newKubelet(startCluster(t), 2)
	k.install(crds(t, "sigs.k8s.io/gateway-api-inference-extension@v1.5.0", "config/crd/bases/*.yaml")...)
	k.mustApply(fmt.Sprintf(llmPool, k.ports[0]))
	prefill, decode := k.start("inferencePool: {name: llm}", options{}, `release: "1"`)
	load := k.fleet.wholeTraffic(6)
	load.more(t, 20)
	first, second := []*engine{prefill.ranks[0], decode.ranks[0]}, []*engine{prefill.ranks[1], decode.ranks[1]}

	k.change(fmt.Sprintf(`{"spec":{"targetPorts":[{"number":%s},{"number":%s}]}}`, k.ports[0], k.ports[1]))
	k.comes("a second target port: a data-parallel rank of every pod", second...)
	k.change(fmt.Sprintf(`{"spec":{"targetPorts":[{"number":%s}]}}`, k.ports[1]))
	k.goes(load, "the first target port is gone", first...)

	prefill2, decode2 := k.run("prefill-2", "prefill", `release: "2"`), k.run("decode-2", "decode", `release: "2"`)
	load.more(t, 20)
	require.Zero(t, k.asked(slices.Concat(prefill2.ranks, decode2.ranks)...), "the pool does not select them")
	k.change(`{"spec":{"selector":{"matchLabels":{"release":"2"}}}}`)
	k.comes("the selector changes", prefill2.ranks[1], decode2.ranks[1])
	k.goes(load, "the selector has changed", second...)

	status, text, err := k.ask(adminToken, http.MethodPatch, llmPoolPath, "application/merge-patch+json", `{"spec":{"targetPorts":[{"number":80000}]}}`)
	require.NoError(t, err)
	require.Equal(t, http.StatusUnprocessableEntity, status, text)
	load.more(t, 20)
	k.end(load)

	k.must(http.MethodDelete, llmPoolPath, "", "")
	require.Eventually(t, func() bool { return len(k.fleet.state(0)) == 0 }, within, 2*time.Millisecond, "a deleted pool is empty")
	require.Equal(t, 503, k.fleet.post(apis[0].path, apis[0].body).status)
	k.mustApply(strings.Replace(fmt.Sprintf(llmPool, k.ports[0]), `"1"`, `"2"`, 1))
	require.Eventually(t, func() bool { return len(k.fleet.state(0)) == 2 }, within, 2*time.Millisecond, "it is back")
	require.Equal(t, 200, k.fleet.post(apis[0].path, apis[0].body).status)
}

// crds returns files of CRDs in a Go module.
func crds(t *testing.T, module, pattern string) []string {
	t.Helper()
	cmd := exec.Command("go", "mod", "download", "-json", module)
	cmd.Dir = t.TempDir() // outside of our module
	text, err := cmd.Output()
	require.NoError(t, err, "%s", text)
	_, dir, _ := strings.Cut(string(text), `"Dir": "`)
	dir, _, _ = strings.Cut(dir, `"`)
	files, err := filepath.Glob(filepath.Join(dir, pattern))
	require.NoError(t, err)
	require.NotEmpty(t, files, module)
	return files
}

// The assertions of the Inference Extension's conformance suite about a gateway's traffic, with Tandem as the endpoint
// picker of an InferencePool whose pods have three ports each. (The suite itself needs a cluster that runs
// containers.)
func TestKubeConformance(t *testing.T) {
	k := newKubelet(startCluster(t), 3)
	k.install(crds(t, "sigs.k8s.io/gateway-api-inference-extension@v1.5.0", "config/crd/bases/*.yaml")...)
	k.mustApply(fmt.Sprintf(llmPool, strings.Join(k.ports, "}, {number: ")))
	var pods []*pod
	k.start("inferencePool: {name: llm}", options{
		extProcFields: ", protocol: endpointPicker", pool: "  handoff: direct\n", serveArgs: []string{"-conformance"},
		bootstrap: func(f *fleet) string {
			for _, name := range []string{"decode-1", "decode-2", "decode-3"} {
				pods = append(pods, k.run(name, "decode", `release: "1"`))
			}
			return gatewayTo()(f)
		},
	}, `release: "1"`)
	k.comesToState(5 * 3)
	for _, p := range pods {
		addrs := map[string]int{}
		for range 50 {
			a := k.fleet.post("/v1/chat/completions", promptOf(20), "test-epp-endpoint-selection", p.ip)
			require.Equal(t, 200, a.status, "%.300s", a.body)
			addrs[a.header.Get("x-conformance-test-served-endpoint")]++
		}
		require.Len(t, addrs, 3, "any port of the pod that the test names, and no other pod: %v", addrs)
		for _, e := range p.ranks {
			require.Positive(t, addrs[e.addr])
			for range 10 {
				a := k.fleet.post("/v1/chat/completions", promptOf(20), "test-epp-endpoint-selection", e.addr)
				require.Equal(t, e.addr, a.header.Get("x-conformance-test-served-endpoint"), "the port that the test names")
			}
		}
	}
	list := pods[0].ip + "," + pods[1].ip
	for range 20 {
		served := k.fleet.post("/v1/chat/completions", promptOf(20), "test-epp-endpoint-selection", list).header.Get("x-conformance-test-served-endpoint")
		require.True(t, strings.HasPrefix(served, pods[0].ip+":") || strings.HasPrefix(served, pods[1].ip+":"), served)
	}
	require.Equal(t, 503, k.fleet.post("/v1/chat/completions", promptOf(20), "test-epp-endpoint-selection", "127.9.9.9").status)
	k.fleet.lenient = true
}

// comesToState waits until the server knows n endpoints.
func (k *kubelet) comesToState(n int) {
	k.t.Helper()
	require.Eventually(k.t, func() bool { return len(k.fleet.state(0)) == n }, 30*time.Second, 5*time.Millisecond)
}

// The service account of the manifests has the permissions of discovery, and no more.
func TestKubeRole(t *testing.T) {
	c := startCluster(t)
	soon(t, "the API server knows the role that it has taken", func() bool {
		status, _, err := c.ask(tandemToken, http.MethodGet, podsPath, "", "")
		return err == nil && status == http.StatusOK
	})
	for _, path := range []string{podsPath, podsPath + "?watch=true&timeoutSeconds=1"} {
		status, text, err := c.ask(tandemToken, http.MethodGet, path, "", "")
		require.NoError(t, err)
		require.Equal(t, 200, status, text)
	}
	for _, path := range []string{"/api/v1/pods", "/api/v1/namespaces/default/pods", "/api/v1/namespaces/" + namespace + "/secrets", "/api/v1/nodes"} {
		status, _, err := c.ask(tandemToken, http.MethodGet, path, "", "")
		require.NoError(t, err)
		require.Equal(t, 403, status, path)
	}
	status, _, err := c.ask(tandemToken, http.MethodDelete, podsPath+"/any", "", "")
	require.NoError(t, err)
	require.Equal(t, 403, status)
}

// A thousand pods, of which ten a second are replaced while clients send requests: every answer is whole, and Tandem
// knows those that live. The pods are addresses that lead to four engines.
func TestKubeThousandPods(t *testing.T) {
	const pods, churned = 1000, 100
	k := newKubelet(startCluster(t), 1)
	var mu sync.Mutex
	alive := map[string]*thinPod{}
	next := 0
	o := options{prefills: 2, decodes: 2, engineArgs: []string{"--decode-step", "1ms", "--lease", "10s"}}
	o.launch = func(f *fleet) {
		k.fleet = f
		began := time.Now()
		k.each(16, pods, func(i int) {
			p := k.thin(i)
			mu.Lock()
			defer mu.Unlock()
			alive[p.addr] = p
		})
		next = pods
		t.Logf("%d pods made in %v", pods, time.Since(began).Round(time.Second))
	}
	o.pools = fmt.Sprintf("pools:\n- name: chat\n  kvTransfer: nixl\n  split: always\n  decodeAlone: fallback\n"+
		"  discovery:\n    kubernetes: {selector: app=llm, ports: [%s]}\n", k.ports[0])
	start(t, o)
	began := time.Now()
	k.knows(alive)
	t.Logf("all known %v after Tandem and Envoy had started", time.Since(began).Round(time.Millisecond))

	load := k.fleet.wholeTraffic(6)
	load.more(t, 50)
	var terminating []*thinPod
	for range churned {
		for _, p := range alive { // any
			k.must(http.MethodDelete, podsPath+"/"+p.name, "application/json",
				`{"kind":"DeleteOptions","apiVersion":"v1","gracePeriodSeconds":300}`)
			terminating = append(terminating, p)
			delete(alive, p.addr)
			break
		}
		p := k.thin(next)
		next++
		alive[p.addr] = p
		if len(terminating) > 20 { // it has had two seconds to finish its requests
			k.gone(terminating[0])
			terminating = terminating[1:]
		}
		time.Sleep(50 * time.Millisecond)
	}
	for _, p := range terminating {
		k.gone(p)
	}
	began = time.Now()
	k.knows(alive)
	t.Logf("%d pods replaced; all known %v after the last", churned, time.Since(began).Round(time.Millisecond))
	load.more(t, 50)
	load.end(t)
	resp, err := http.Get(k.fleet.admins[0] + "/metrics")
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	t.Logf("/metrics has %d KB", len(text)>>10)
	rss, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", k.fleet.tandems[0].cmd.Process.Pid))
	require.NoError(t, err)
	t.Logf("Tandem's memory: %s", regexp.MustCompile(`VmHWM:\s*(.*)`).FindSubmatch(rss)[1])
}

// each calls f for 0 to n - 1, in so many goroutines.
func (k *kubelet) each(goroutines, n int, f func(i int)) {
	var group sync.WaitGroup
	numbers := make(chan int)
	for range goroutines {
		group.Go(func() {
			for i := range numbers {
				f(i)
			}
		})
	}
	for i := range n {
		numbers <- i
	}
	close(numbers)
	group.Wait()
}
