package livecheck

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
	"tandem/replica/config"
)

// recorded is an engine with a real one's answers, some of them replaced: old, new, old, new, ...
func recorded(t *testing.T, answers map[string]string, replace ...string) (addr string) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	if answers["/metrics"] == "" {
		mux.HandleFunc("/metrics", func(http.ResponseWriter, *http.Request) {})
	}
	for path, file := range answers {
		text, err := os.ReadFile(filepath.Join("testdata", file))
		require.NoError(t, err)
		for i := 0; i < len(replace); i += 2 {
			if strings.Contains(string(text), replace[i]) {
				text = []byte(strings.ReplaceAll(string(text), replace[i], replace[i+1]))
			}
		}
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(text) })
	}
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func pairOf(dialect, prefill, more, decode string) string {
	return fmt.Sprintf("pools: [{name: x, kvTransfer: %s, endpoints: [{role: prefill, address: %q%s}, {role: decode, address: %q}]}]", dialect, prefill, more, decode)
}

// SGLang reports everything that a decode server compares at the handshake.
func TestCheckLiveSGLangFacts(t *testing.T) {
	info := map[string]string{"/server_info": "sglang-0.5.23-server_info.json"}
	const decodes = `"disaggregation_mode":"decode"`
	prefill := recorded(t, info)
	_, port, _ := strings.Cut(prefill, ":") // a port that is open
	mode := `"disaggregation_mode":"prefill"`
	prefill = recorded(t, info, `"disaggregation_bootstrap_port":27101`, `"disaggregation_bootstrap_port":`+port)
	more := ", transfer: {bootstrapPort: " + port + "}"
	require.Empty(t, live(t, pairOf("sglang", prefill, more, recorded(t, info, mode, decodes))))
	for _, tt := range []struct{ old, new, fact, mine, theirs string }{
		{`"page_size":16`, `"page_size":64`, "block size", "64", "16"},
		{`"kv_cache_dtype":"auto"`, `"kv_cache_dtype":"fp8_e5m2"`, "KV cache dtype", "fp8_e5m2", "auto"},
		{`"dtype":"float32"`, `"dtype":"bfloat16"`, "dtype", "bfloat16", "float32"},
		{`"disaggregation_transfer_backend":"nixl"`, `"disaggregation_transfer_backend":"mooncake"`, "transfer backend", "mooncake", "nixl"},
	} {
		require.Equal(t, []string{fmt.Sprintf("pools[0].endpoints[1].address: the engine's %s is %s and that of pools[0].endpoints[0] is %s: these two are never paired, since nobody has shown "+
			"that they take each other's KV; start them alike, or set different groups", tt.fact, tt.mine, tt.theirs)}, live(t, pairOf("sglang", prefill, more, recorded(t, info, mode, decodes, tt.old, tt.new))), tt.fact)
	}
	require.Equal(t, []string{"pools[0].endpoints[0].transfer.tensorParallelSize: is 4 here, and the engine says 1: correct it"},
		live(t, pairOf("sglang", prefill, ", transfer: {tensorParallelSize: 4, bootstrapPort: "+port+"}", recorded(t, info, mode, decodes))))
}

// vLLM reports connector, role, ranks, dtype and revision if it runs with VLLM_SERVER_DEV_MODE=1; model, block size
// and KV dtype always.
func TestCheckLiveVLLMFacts(t *testing.T) {
	always := map[string]string{"/v1/models": "vllm-0.32.0-models.json", "/metrics": "vllm-0.32.0-metrics.txt", "/version": "vllm-0.32.0-version.json"}
	all := map[string]string{"/v1/models": "vllm-0.32.0-models.json", "/metrics": "vllm-0.32.0-metrics.txt", "/version": "vllm-0.32.0-version.json", "/server_info": "vllm-0.32.0-server_info.json"}
	const role, consumer = `"kv_role":"kv_producer"`, `"kv_role":"kv_consumer"`
	prefill, decode := recorded(t, all), recorded(t, all, role, consumer)
	require.Empty(t, live(t, pairOf("nixl", prefill, "", decode)))
	require.Empty(t, live(t, pairOf("nixl", recorded(t, always), "", decode)))

	require.Equal(t, []string{
		"pools[0].endpoints[0].role: is prefill here, and the engine runs with kv_role kv_consumer: correct the role, or start the engine otherwise",
		"pools[0].endpoints[1].role: is decode here, and the engine runs with kv_role kv_producer: correct the role, or start the engine otherwise",
	}, live(t, pairOf("nixl", decode, "", prefill)))
	wrong := live(t, pairOf("mooncake", prefill, "", decode))
	require.Contains(t, wrong, "pools[0].endpoints[0].address: the engine runs with NixlConnector, and the pool's kvTransfer is mooncake, which takes MooncakeConnector: "+
		"set kvTransfer to nixl, or start the engine otherwise")
	require.Equal(t, "pools[0].endpoints[0].address: the engine runs with NixlConnector, which uses no store, and the pool's kvTransfer is shared: "+
		"set kvTransfer to nixl, or start the engine otherwise", live(t, pairOf("shared", prefill, "", decode))[0])
	const connector = `"kv_connector":"NixlConnector"`
	for _, store := range []string{"LMCacheConnectorV1", "MooncakeStoreConnector"} {
		changed := strings.Replace(connector, "NixlConnector", store, 1)
		require.Empty(t, live(t, pairOf("shared", recorded(t, all, connector, changed), "", recorded(t, all, role, consumer, connector, changed))))
	}
	require.Equal(t, []string{"pools[0].endpoints[0].transfer.tensorParallelSize: is 2 here, and the engine says 1: correct it"},
		live(t, pairOf("nixl", prefill, ", transfer: {tensorParallelSize: 2}", decode)))
	for _, tt := range []struct{ old, new, fact, mine, theirs string }{
		{`"dtype":"torch.float32"`, `"dtype":"torch.bfloat16"`, "dtype", "bfloat16", "float32"},
		{`"revision":null`, `"revision":"abc"`, "", "", ""},     // the other one does not report it
		{`cache_dtype="auto"`, `cache_dtype="fp8"`, "", "", ""}, // the configuration of the server counts
		{`"cache_dtype":"auto"`, `"cache_dtype":"fp8"`, "KV cache dtype", "fp8", "auto"},
	} {
		found := live(t, pairOf("nixl", prefill, "", recorded(t, all, role, consumer, tt.old, tt.new)))
		if tt.fact == "" {
			require.Empty(t, found)
			continue
		}
		require.Equal(t, []string{fmt.Sprintf("pools[0].endpoints[1].address: the engine's %s is %s and that of pools[0].endpoints[0] is %s: these two are never paired, since nobody has shown "+
			"that they take each other's KV; start them alike, or set different groups", tt.fact, tt.mine, tt.theirs)}, found, tt.fact)
	}
	found := live(t, pairOf("nixl", recorded(t, always), "", recorded(t, always, `cache_dtype="auto"`, `cache_dtype="fp8"`)))
	require.Len(t, found, 1)
	require.Contains(t, found[0], "KV cache dtype is fp8")

	// vLLM takes blocks of another size for its own, and its metrics tell the size (2026-11-28: 100 of 100 answers were wrong)
	other := recorded(t, always, `,block_size="32"`, `,block_size="64"`)
	found = live(t, pairOf("nixl", recorded(t, always), "", other))
	require.Len(t, found, 1)
	require.Contains(t, found[0], "block size is 64 and that of pools[0].endpoints[0] is 32: these two are never paired")
	found = live(t, strings.Replace(pairOf("nixl", recorded(t, always), "", other), "name: x", "name: x, pairUnlike: [blockSize]", 1))
	require.Len(t, found, 1)
	require.Contains(t, found[0], "and pairUnlike has blockSize: these two are paired, although nobody has shown")

	// an answer after a failed load would be wrong: with connectors that load in step, and with no others
	const fails, recomputes = `"kv_load_failure_policy":"fail"`, `"kv_load_failure_policy":"recompute"`
	for name, wrong := range map[string]bool{"LMCacheConnectorV1": true, "FlexKVConnectorV1": true, "MooncakeStoreConnector": false} {
		changed := strings.Replace(connector, "NixlConnector", name, 1)
		found := live(t, pairOf("shared", recorded(t, all, connector, changed), "", recorded(t, all, role, consumer, connector, changed, fails, recomputes)))
		require.Equal(t, wrong, len(found) == 1 && strings.Contains(found[0], "vllm#49250"), "%s %q", name, found)
	}
	require.Empty(t, live(t, pairOf("nixl", prefill, "", recorded(t, all, role, consumer, fails, recomputes))))

	// nothing is compared with an engine that tells that it has no connector
	found = live(t, pairOf("nixl", prefill, "", recorded(t, all, `"kv_transfer_config"`, `"kv_transfer_config":null,"unused"`)))
	require.Equal(t, []string{"pools[0].endpoints[1].address: the engine runs without a KV connector, and the pool's kvTransfer is nixl, which needs " +
		"NixlConnector or NixlPullConnector: start it with --kv-transfer-config, or correct the address"}, found)
	found = live(t, pairOf("nixl", prefill, "", recorded(t, all, role, consumer, `enable_prefix_caching="True"`, `enable_prefix_caching="False"`)))
	require.Len(t, found, 1)
	require.Contains(t, found[0], "the engine's prefix cache is off")
}

// The first /server_info of a vLLM takes 2.5 to 11 s, and what it says is waited for.
func TestCheckLiveWaits(t *testing.T) {
	t.Parallel()
	slow := func(role string) string {
		text, err := os.ReadFile("testdata/vllm-0.32.0-server_info.json")
		require.NoError(t, err)
		mux := http.NewServeMux()
		for _, path := range []string{"/health", "/metrics"} {
			mux.HandleFunc(path, func(http.ResponseWriter, *http.Request) {})
		}
		mux.HandleFunc("/server_info", func(w http.ResponseWriter, _ *http.Request) {
			time.Sleep(4 * time.Second)
			_, _ = w.Write([]byte(strings.Replace(string(text), "kv_producer", role, 1)))
		})
		s := httptest.NewServer(mux)
		t.Cleanup(s.Close)
		return strings.TrimPrefix(s.URL, "http://")
	}
	found := live(t, pairOf("nixl", slow("kv_consumer"), "", slow("kv_consumer")))
	require.Equal(t, []string{"pools[0].endpoints[0].role: is prefill here, and the engine runs with kv_role kv_consumer: correct the role, or start the engine otherwise"}, found)
}

// A vLLM is no SGLang, whatever its models are called, and the other way around.
func TestCheckLiveEngine(t *testing.T) {
	always := map[string]string{"/v1/models": "vllm-0.32.0-models.json", "/metrics": "vllm-0.32.0-metrics.txt"}
	onlyModels := map[string]string{"/v1/models": "vllm-0.32.0-models.json"}
	dev := map[string]string{"/server_info": "vllm-0.32.0-server_info.json"}
	maps.Copy(dev, always)
	const isVLLM = "the engine is vLLM, and the pool's kvTransfer is sglang, which only SGLang speaks: set kvTransfer to "
	const address = "pools[0].endpoints[%d].address: "
	found := live(t, pairOf("sglang", recorded(t, always), "", recorded(t, dev)))
	require.Len(t, found, 2)
	require.True(t, strings.HasPrefix(found[0], fmt.Sprintf(address, 0)+isVLLM+"one of lmcache, "), found[0])
	require.Equal(t, fmt.Sprintf(address, 1)+isVLLM+"nixl, or correct the address", found[1])

	sglang := recorded(t, onlyModels, `"owned_by":"vllm"`, `"owned_by":"sglang"`)
	trtllm := recorded(t, onlyModels, `"owned_by":"vllm"`, `"owned_by":"tensorrt_llm"`)
	require.Equal(t, []string{
		fmt.Sprintf(address, 0) + "the engine is SGLang, and the pool's kvTransfer is nixl, which only vLLM speaks: set kvTransfer to sglang, or correct the address",
		fmt.Sprintf(address, 1) + "the engine is TensorRT-LLM, and the pool's kvTransfer is nixl, which only vLLM speaks: set kvTransfer to one of trtllm, trtllm-generation-first, or correct the address",
	}, live(t, pairOf("nixl", sglang, "", trtllm)))
	require.Equal(t, []string{fmt.Sprintf(address, 0) + "the engine is SGLang, and the pool's engine is vllm: set engine to sglang, or correct the address"},
		live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: none, engine: vllm, endpoints: [{address: %q}]}]", sglang)))
	require.Empty(t, live(t, fmt.Sprintf("pools: [{name: x, kvTransfer: none, endpoints: [{address: %q}, {address: %q}]}]", sglang, trtllm)))
}

// A pool's model that no engine serves is an error, but for engines that ignore the name.
func TestCheckLiveModels(t *testing.T) {
	answers := map[string]string{"/v1/models": "vllm-0.32.0-models.json"}
	tiny, second, other := recorded(t, answers), recorded(t, answers), recorded(t, answers, `"id":"tiny"`, `"id":"other"`)
	pool := func(models, prefill, decode, more string) string {
		return fmt.Sprintf("pools: [{name: x, models: [%s], kvTransfer: nixl, endpoints: [{role: prefill, address: %q}, "+
			"{role: decode, address: %q%s}]}]", models, prefill, decode, more)
	}
	none := func(i int, model, leg, at, serves string) string {
		return fmt.Sprintf("pools[0].models[%d]: %q: no %s endpoint serves it; %s (%s) serves %s: "+
			"correct the name, or start the engines with --served-model-name", i, model, leg, at, leg, serves)
	}
	for _, models := range []string{"tiny", `"*"`} {
		require.Empty(t, live(t, pool(models, second, tiny, "")), models)
	}
	require.Equal(t, []string{fmt.Sprintf("pools[0].models[1]: \"tini\": no endpoint serves it; %s (prefill) serves tiny, "+
		"%s (decode) serves tiny: correct the name, or start the engines with --served-model-name", second, tiny)},
		live(t, pool("tiny, tini", second, tiny, "")))
	require.Equal(t, []string{none(0, "tiny", "prefill", other, "other")}, live(t, pool("tiny", other, tiny, "")))
	require.Equal(t, []string{none(0, "sql", "prefill", second, "tiny")}, live(t, pool("sql", second, tiny, ", loras: [sql]")))
	require.Empty(t, live(t, pool("tini", engineOf(t, ""), engineOf(t, ""), "")), "no engine lists its models")

	sglang := recorded(t, answers, `"owned_by":"vllm"`, `"owned_by":"sglang"`)
	c, _, err := config.Parse(fmt.Appendf(nil, "pools: [{name: x, models: [tini], kvTransfer: none, endpoints: [{address: %q}]}]", sglang))
	require.NoError(t, err)
	report := Check(t.Context(), c, false)
	require.NoError(t, report.Err())
	var text strings.Builder
	report.Print(&text)
	require.Contains(t, text.String(), "warning: "+none(0, "tini", "decode", sglang, "tiny"))
}

// What an engine reports neither steers a terminal nor looks like a line of the report.
func TestReportsAreShownPlain(t *testing.T) {
	const hostile = `\u001b[2J\npools[0]: all is well\u202e\u009b31m\u007f`
	answers := map[string]string{
		"/v1/models": "vllm-0.32.0-models.json", "/metrics": "vllm-0.32.0-metrics.txt", "/version": "vllm-0.32.0-version.json",
		"/server_info": "vllm-0.32.0-server_info.json",
	}
	good := recorded(t, answers)
	bad := recorded(t, answers, `"id":"tiny"`, `"id":"x`+hostile+`"`, `0.32.0`, `0.32.0`+hostile, "NixlConnector", "Y"+hostile)
	c, _, err := config.Parse(fmt.Appendf(nil, "pools: [{name: x, models: [tiny], kvTransfer: nixl, endpoints: "+
		"[{role: prefill, address: %q}, {role: decode, address: %q}]}]", bad, good))
	require.NoError(t, err)
	report := Check(t.Context(), c, false)
	require.Error(t, report.Err())
	var text strings.Builder
	report.Print(&text)
	got := text.String() + report.Err().Error()
	for _, kept := range []string{"0.32.0?[2J?pools[0]: all is well??31m?", "serves x?[2J", "runs with Y?[2J"} {
		require.Contains(t, got, kept)
	}
	for line := range strings.Lines(got) {
		require.NotEqual(t, 0, strings.Index(line, "pools[0]: all"), "a line of the engine's")
		require.True(t, utf8.ValidString(line))
		for _, r := range strings.TrimSuffix(line, "\n") {
			require.True(t, unicode.IsPrint(r), "%q: %q", line, r)
		}
	}
}

// The report lists what was asked and compared, what engines do not report, and what was not asked.
func TestPrint(t *testing.T) {
	always := map[string]string{
		"/v1/models": "vllm-0.32.0-models.json", "/metrics": "vllm-0.32.0-metrics.txt", "/version": "vllm-0.32.0-version.json",
	}
	all := map[string]string{"/server_info": "vllm-0.32.0-server_info.json"}
	maps.Copy(all, always)
	prefill, decode, gone := recorded(t, all), recorded(t, always), loopback.Addresses(t, 1)[0]
	c, _, err := config.Parse(fmt.Appendf(nil, `pools:
- {name: chat, kvTransfer: nixl, endpoints: [{role: prefill, address: %q}, {role: decode, address: %q}]}
- {name: whole, kvTransfer: none, models: [w], endpoints: [{address: %q}]}
- {name: pods, kvTransfer: none, models: [p], discovery: {dns: [{name: engines.test, port: 8000}]}}
`, prefill, decode, gone))
	require.NoError(t, err)
	var text strings.Builder
	Check(t.Context(), c, false).Print(&text)
	got := strings.NewReplacer(prefill, "P", decode, "D", gone, "GONE").Replace(text.String())
	require.Equal(t, `pool endpoint role engine release compared
chat P prefill vLLM 0.32.0 health, connector, role, lease of KV, release, model, KV cache dtype, block size, sliding window
chat D decode vLLM 0.32.0 health, release, model, KV cache dtype, block size, sliding window
whole GONE both NO ANSWER - -
not compared at P, since it is not reported: model revision, KV cache layout, attention backend, hybrid KV cache manager
not compared at D, since it is not reported: connector, role, model revision, quantization, dtype, KV cache layout, attention backend, hybrid KV cache manager, speculative decoding, tensor-parallel size
chat: kvTransfer nixl needs NixlConnector or NixlPullConnector: compare that with kv_connector in --kv-transfer-config of the engines that do not report it
vLLM reports its connector and role only if it runs with VLLM_SERVER_DEV_MODE=1
recommended: chat: decode does not look at when the lease of KV ends, for nixl.declineExpired is not set: see docs/security.md, Wrong text
not asked: pools[2]: pods discovers its endpoints when the server runs
`, regexp.MustCompile(` {2,}`).ReplaceAllString(got, " "))
}
