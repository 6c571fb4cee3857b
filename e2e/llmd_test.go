package e2e

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// llmd returns a checkout of llm-d/llm-d-router, which no package index has.
func llmd(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("TANDEM_LLMD")
	if dir == "" {
		t.Skip("takes llm-d's own code: set TANDEM_LLMD to a checkout of github.com/llm-d/llm-d-router")
	}
	return dir
}

// Tandem in place of llm-d's endpoint picker, with llm-d's own routing sidecar in front of the decode engine. It is
// built from the checkout, which takes minutes the first time. It listens on all addresses: run it in a network
// namespace.
func TestLLMDSidecar(t *testing.T) {
	dir := llmd(t)
	sidecar := filepath.Join(t.TempDir(), "pd-sidecar")
	build := exec.Command("go", "build", "-o", sidecar, "./cmd/pd-sidecar")
	build.Dir = dir
	text, err := build.CombinedOutput()
	require.NoError(t, err, "%s", text)

	bin, err := binaries()
	require.NoError(t, err)
	p := ports(t, 3)
	decode := startProcess(t, t.TempDir(), "decode", filepath.Join(bin, "enginesim"), "--listen", p[0],
		"--side-channel", p[1], "--role", "decode", "--model", "tiny")
	startProcess(t, t.TempDir(), "pd-sidecar", sidecar, "--secure-proxy=false", "--port", portOf(p[2]),
		"--model-server-port", portOf(p[0]))
	soon(t, "the sidecar leads to the engine", func() bool {
		resp, err := http.Get("http://" + p[2] + "/health")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		return resp.StatusCode == http.StatusOK && decode.running()
	})
	f := start(t, options{
		prefills: 2, extProcFields: ", protocol: endpointPicker", bootstrap: gatewayTo(p[2]),
		pools: fmt.Sprintf("pools:\n- name: chat\n  kvTransfer: nixl\n  split: always\n  decodeAlone: fallback\n"+
			"  handoff: sidecar\n  endpoints:\n  - {address: %%P, role: prefill}\n  - {address: %%P, role: prefill}\n"+
			"  - {address: %q, role: decode}\n", p[2]),
	})
	fetched := func() (n float64) {
		for _, e := range f.prefills {
			n += metric(t, "http://"+e.addr, "enginesim_handovers_total", `outcome="fetched"`)
		}
		return n
	}
	for i := range 20 {
		id := fmt.Sprintf("sidecar-%d", i)
		body := promptOf(2000)
		if i%2 == 0 {
			body = strings.Replace(body, "{", `{"stream":true,`, 1)
		}
		a := f.post("/v1/chat/completions", body, "x-request-id", id, "x-prefiller-host-port", "127.0.0.1:1")
		require.Equal(t, 200, a.status, "%.300s", a.body)
		require.Equal(t, i%2 == 0, strings.HasSuffix(a.body, "data: [DONE]\n\n"))
		soon(t, "decode has fetched the KV", func() bool { return fetched() == float64(i+1) })
	}
	asked := func(e *engine) int {
		return int(metric(t, "http://"+e.addr, "enginesim_requests_total", `path="/v1/chat/completions"`))
	}
	slices.SortFunc(f.prefills, func(a, b *engine) int { return asked(b) - asked(a) })
	require.Equal(t, 20, asked(f.prefills[0])+asked(f.prefills[1]))

	// A dead P costs what the sidecar makes of it, once: then Tandem names the other.
	f.prefills[0].stop(syscall.SIGKILL)
	seen := map[int]int{}
	for range 30 {
		seen[f.post("/v1/chat/completions", promptOf(2000)).status]++
		time.Sleep(10 * time.Millisecond)
	}
	t.Logf("a prefill engine is dead: %v", seen)
	require.GreaterOrEqual(t, seen[200], 28)
	f.prefills = f.prefills[1:]
}

// InferenceObjective and InferenceModelRewrite as llm-d ships them, in a real API server.
func TestKubeLLMDPolicies(t *testing.T) {
	dir := llmd(t)
	k := newKubelet(startCluster(t), 1)
	k.install(crds(t, "sigs.k8s.io/gateway-api-inference-extension@v1.5.0", "config/crd/bases/*.yaml")...)
	files, err := filepath.Glob(filepath.Join(dir, "config/crd/bases/llm-d.ai_*.yaml"))
	require.NoError(t, err)
	require.Len(t, files, 2)
	k.install(files...)
	k.mustApply(fmt.Sprintf(llmPool, k.ports[0]))
	k.args = append(k.args, "--decode-step", "20ms")
	k.start("inferencePool: {name: llm, intents: watch}", options{
		extProcFields: ", protocol: endpointPicker, endpointPicker: {shedRequests: 1}",
		pool:          "  handoff: direct\n", bootstrap: gatewayTo(),
	}, `release: "1"`)
	ask := func(model string, headers ...string) answer {
		return k.fleet.post("/v1/chat/completions", strings.Replace(promptOf(20), `"tiny"`, fmt.Sprintf("%q", model), 1),
			headers...)
	}
	require.Equal(t, 404, ask("gold").status)

	k.mustApply(`apiVersion: llm-d.ai/v1alpha2
kind: InferenceModelRewrite
metadata: {name: gold}
spec: {poolRef: {name: llm}, rules: [{matches: [{model: {value: gold}}], targets: [{modelRewrite: tiny, weight: 1}]}]}
`)
	soon(t, "the rewrite is followed", func() bool { return ask("gold").status == 200 })
	require.Contains(t, ask("gold").body, `"model":"gold"`, "the answer has the client's name")

	k.mustApply(`apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: batch}
spec: {priority: -1, poolRef: {name: llm}}
`)
	stop := make(chan struct{})
	go func() { // one request is always under way
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = k.fleet.try(t.Context(), http.MethodPost, "/v1/chat/completions", `{"model":"tiny","ignore_eos":true,`+
					`"min_tokens":100,"max_tokens":100,"messages":[{"role":"user","content":"Go on."}]}`)
			}
		}
	}()
	soon(t, "requests of negative priority are shed", func() bool {
		return ask("tiny", "x-llm-d-inference-objective", "batch").status == 429
	})
	require.Equal(t, 200, ask("tiny").status, "others are not")
	close(stop)

	for _, broken := range []string{
		"apiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nmetadata: {name: x}\nspec: {priority: high, poolRef: {name: llm}}\n",
		"apiVersion: llm-d.ai/v1alpha2\nkind: InferenceModelRewrite\nmetadata: {name: x}\nspec: {rules: [{targets: [{weight: 1}]}]}\n",
	} {
		status, answer := k.create(broken, "&dryRun=All")
		require.GreaterOrEqual(t, status, 400, answer)
	}
	k.fleet.lenient = true
}
