package enginefacts

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// What engines answer, in the words of vLLM 0.32.0 and SGLang 0.5.23, and what of it is a fact.
func TestRead(t *testing.T) {
	long := strings.Repeat("x", 5000)
	for name, tt := range map[string]struct {
		answers map[string]string
		report  kvstate.Report
		check   func(t *testing.T, i *Info)
	}{
		"nothing": {check: func(t *testing.T, i *Info) { require.True(t, i.NoModels && i.NoMetrics && i.Answered) }},
		"a vLLM in production": {
			answers: map[string]string{
				"/version":   `{"version":"v0.32.0+cu129"}`,
				"/v1/models": `{"data":[{"id":"sql","root":"/adapters/sql","parent":"tiny","owned_by":"vllm"},{"id":"tiny","root":"/models/tiny","parent":null}]}`,
				"/metrics": `vllm:cache_config_info{block_size="16",cache_dtype="fp8",enable_prefix_caching="False",kv_cache_layout="None",prefix_caching_hash_algo="sha256",sliding_window="None"} 1` +
					"\nvllm:nixl_num_failed_transfers_total 0\n",
			},
			report: kvstate.Report{kvstate.FactRelease: "0.32.0", kvstate.FactModel: "/models/tiny", kvstate.FactBlockSize: "16", kvstate.FactKVDtype: "fp8",
				kvstate.FactSlidingWindow: "none", kvstate.FactHashing: "sha256"},
			check: func(t *testing.T, i *Info) {
				require.Equal(t, VLLM, i.Engine)
				require.True(t, i.NoCaching && i.NIXL && !i.Told)
			},
		},
		"a vLLM that tells how it was started": {
			answers: map[string]string{"/server_info": `{"vllm_config":{"model_config":{"model":"m","revision":"abc","dtype":"torch.bfloat16","quantization":"fp8"},
				"cache_config":{"block_size":32,"cache_dtype":"auto","sliding_window":4096},"parallel_config":{"tensor_parallel_size":4},"scheduler_config":{"disable_hybrid_kv_cache_manager":false},
				"speculative_config":{"method":"eagle3","model":"draft"},"attention_config":{"backend":"FLASH_ATTN"},"kv_transfer_config":null}}`},
			report: kvstate.Report{kvstate.FactModel: "m", kvstate.FactRevision: "abc", kvstate.FactQuantization: "fp8", kvstate.FactDtype: "bfloat16", kvstate.FactKVDtype: "auto",
				kvstate.FactBlockSize: "32", kvstate.FactAttention: "FLASH_ATTN", kvstate.FactSlidingWindow: "4096", kvstate.FactHybrid: "on", kvstate.FactSpeculation: "eagle3 draft",
				kvstate.FactRanks: "4", kvstate.FactRankMultiples: "4"},
			check: func(t *testing.T, i *Info) { require.True(t, i.Told && i.Connector == "") },
		},
		"its draft looks at the text alone": {
			answers: map[string]string{"/server_info": `{"vllm_config":{"model_config":{"model":"m"},"speculative_config":{"method":"ngram"}}}`},
			report: kvstate.Report{kvstate.FactModel: "m", kvstate.FactQuantization: "none", kvstate.FactSlidingWindow: "none",
				kvstate.FactSpeculation: "none"},
		},
		"an SGLang": {
			answers: map[string]string{"/server_info": `{"version":"0.5.23","disaggregation_mode":"decode","model_path":"m","dtype":"float32","kv_cache_dtype":"auto","page_size":16,"tp_size":2,"disaggregation_transfer_backend":"nixl"}`},
			report: kvstate.Report{kvstate.FactRelease: "0.5.23", kvstate.FactModel: "m", kvstate.FactDtype: "float32", kvstate.FactKVDtype: "auto", kvstate.FactBlockSize: "16",
				kvstate.FactQuantization: "none", kvstate.FactSpeculation: "none", kvstate.FactBackend: "nixl", kvstate.FactRanks: "2", kvstate.FactRankMultiples: "2"},
			check: func(t *testing.T, i *Info) { require.Equal(t, "decode", i.Mode) },
		},
		"one that lies at length": {
			answers: map[string]string{"/version": `{"version":"` + long + `"}`, "/v1/models": `[]`, "/server_info": `{"vllm_config":[]}`},
			report:  kvstate.Report{kvstate.FactRelease: long[:256]},
		},
	} {
		t.Run(name, func(t *testing.T) {
			mux := http.NewServeMux()
			for path, text := range tt.answers {
				mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(text)) })
			}
			s := httptest.NewServer(mux)
			defer s.Close()
			quick := false
			info := Read(t.Context(), enginehttp.New(0, func(*http.Transport) {}),
				&kvstate.Endpoint{EndpointSpec: kvstate.EndpointSpec{Addr: strings.TrimPrefix(s.URL, "http://")}}, func(*Info) { quick = true })
			require.True(t, quick)
			require.Equal(t, tt.report, info.Report)
			require.Empty(t, info.Late)
			if tt.check != nil {
				tt.check(t, &info)
			}
		})
	}
}
