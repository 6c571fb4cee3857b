// Package enginefacts reads what an engine says of itself: its release, its models, and how it was started, as far as
// that decides whether other engines can use its KV ([kvstate.Report]).
//
// vLLM answers /version, /v1/models and /metrics always, and /server_info with VLLM_SERVER_DEV_MODE=1 only. SGLang
// answers /server_info always. The first /server_info of a vLLM takes long, since it looks at the whole machine
// (0.32.0, serve/dev/server_info/api_router.py: 2.5 to 11 s on two cores), so it has a limit of its own.
package enginefacts

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// The time limits of questions.
const (
	Quick = 3 * time.Second  // of those that an engine answers at once
	Slow  = 20 * time.Second // of /server_info
)

// The engines, by the names that the setting engine has for them.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
	TRTLLM = "trtllm"
)

// Info is what an engine says of itself. "" and 0: it does not say.
type Info struct {
	Report    kvstate.Report
	Version   string   // vLLM at /version, SGLang at /server_info
	Mode      string   // SGLang: prefill, decode, null; "": another engine
	Bootstrap int32    // SGLang's --disaggregation-bootstrap-port
	Engine    string   // VLLM, SGLang or TRTLLM, if an answer reveals it
	Models    []string // ids of GET /v1/models, adapters included
	NoModels  bool     // GET /v1/models is 404
	Refused   int      // status of GET /v1/models if it wants a key: 401 or 403
	Told      bool     // vLLM has reported its settings: an empty Connector means that it has none
	Connector string   // vLLM's kv_connector
	KVRole    string   // vLLM's kv_role
	OnFailure string   // vLLM's kv_load_failure_policy
	TP        int32    // tensor-parallel ranks
	NoCaching bool     // vLLM's prefix cache is off
	NIXL      bool     // its metrics have those of the NIXL connector, which are there from the start (vLLM 0.32.0)
	Extra     Extra
	NoMetrics bool     // GET /metrics does not answer 200
	Late      []string // paths that were not answered within their limit
	Answered  bool     // it answered something
}

// Extra are the settings of vLLM's NIXL connector that decide about leases (0.32.0: nixl/base_scheduler.py). nil: not
// set.
type Extra struct {
	Lease         *float64 `json:"kv_lease_duration"`     // seconds for which P keeps KV
	Bidirectional bool     `json:"bidirectional_kv_xfer"` // D looks at when leases end
	TTL           *float64 `json:"decoder_kv_blocks_ttl"` // seconds for which D keeps its answers' KV, if Bidirectional
}

// Lease is vLLM's default of kv_lease_duration.
const Lease = 30 * time.Second

// LeaseTime returns how long P keeps KV: as set, or vLLM's default.
func (x *Extra) LeaseTime() time.Duration {
	if x.Lease == nil {
		return Lease
	}
	return time.Duration(*x.Lease * float64(time.Second))
}

// serverInfo is GET /server_info: of SGLang (0.5.23), and with config_format=json of vLLM (0.32.0).
type serverInfo struct {
	Version   string `json:"version"`
	Mode      string `json:"disaggregation_mode"`
	Bootstrap int32  `json:"disaggregation_bootstrap_port"`
	Backend   string `json:"disaggregation_transfer_backend"`
	Model     string `json:"model_path"`
	Revision  string `json:"revision"`
	Dtype     string `json:"dtype"`
	KVDtype   string `json:"kv_cache_dtype"`
	Quant     string `json:"quantization"`
	Draft     string `json:"speculative_algorithm"`
	Page      int    `json:"page_size"`
	TP        int32  `json:"tp_size"`
	VLLM      *struct {
		Model struct {
			Model, Revision, Dtype string
			Quantization           *string
		} `json:"model_config"`
		Cache struct {
			BlockSize int    `json:"block_size"`
			Dtype     string `json:"cache_dtype"`
			Layout    string `json:"kv_cache_layout"`
			Window    *int   `json:"sliding_window"`
			Hash      string `json:"prefix_caching_hash_algo"`
			Caching   *bool  `json:"enable_prefix_caching"`
		} `json:"cache_config"`
		Parallel struct {
			TP int32 `json:"tensor_parallel_size"`
		} `json:"parallel_config"`
		Attention struct {
			Backend string `json:"backend"`
		} `json:"attention_config"`
		Scheduler struct {
			NoHybrid *bool `json:"disable_hybrid_kv_cache_manager"`
		} `json:"scheduler_config"`
		Draft *struct {
			Method string `json:"method"`
			Model  string `json:"model"`
		} `json:"speculative_config"`
		KV *struct {
			Connector string `json:"kv_connector"`
			Role      string `json:"kv_role"`
			OnFailure string `json:"kv_load_failure_policy"`
			Extra     Extra  `json:"kv_connector_extra_config"`
		} `json:"kv_transfer_config"`
	} `json:"vllm_config"`
}

// maxAnswer bounds an answer: SGLang's /server_info has 37 KB, vLLM's 27 KB.
const maxAnswer = 4 << 20

// reader asks one engine.
type reader struct {
	ctx    context.Context
	client *enginehttp.Client
	engine *kvstate.Endpoint
	info   Info
}

// Read asks an engine everything. quickly, if it is not nil, gets the answers to all but /server_info. client has no
// time limit of its own.
func Read(ctx context.Context, client *enginehttp.Client, engine *kvstate.Endpoint, quickly func(*Info)) Info {
	r := reader{ctx: ctx, client: client, engine: engine}
	var version struct{ Version string }
	if r.read("/version", Quick, &version) == http.StatusOK {
		r.info.Version = version.Version
	}
	r.models()
	r.metrics()
	if quickly != nil {
		r.info.release()
		quickly(&r.info)
	}
	var reported serverInfo
	if r.read("/server_info?config_format=json", Slow, &reported) == http.StatusOK {
		r.info.take(&reported)
	}
	r.info.release()
	return r.info
}

// get asks for a path. 0: no answer.
func (r *reader) get(path string, limit time.Duration) (status int, body []byte) {
	ctx, stop := context.WithTimeout(r.ctx, limit)
	defer stop()
	status, body, err := r.client.GetAll(ctx, r.engine, path, maxAnswer)
	if err != nil {
		if ctx.Err() != nil && r.ctx.Err() == nil {
			path, _, _ = strings.Cut(path, "?")
			r.info.Late = append(r.info.Late, path)
		}
		return 0, nil
	}
	r.info.Answered = true
	return status, body
}

// read reads a JSON answer. 0: there was none.
func (r *reader) read(path string, limit time.Duration, into any) (status int) {
	status, body := r.get(path, limit)
	if status == http.StatusOK && json.Unmarshal(body, into) != nil {
		return 0
	}
	return status
}

func (r *reader) models() {
	var models struct {
		Data []struct {
			ID, Root, Parent string
			Owner            string `json:"owned_by"`
		}
	}
	status := r.read("/v1/models", Quick, &models)
	if status != http.StatusOK || len(models.Data) == 0 {
		r.info.NoModels = status == http.StatusNotFound
		if status == http.StatusUnauthorized || status == http.StatusForbidden {
			r.info.Refused = status
		}
		return
	}
	r.info.Engine = engineOwning(models.Data[0].Owner)
	for _, m := range models.Data {
		if m.Parent == "" {
			r.info.Report.Know(kvstate.FactModel, m.Root)
		}
		r.info.Models = append(r.info.Models, m.ID)
	}
}

// cacheConfig is a line of vLLM's metrics: its labels are the cache's configuration (v1/metrics/loggers.py).
var cacheConfig = regexp.MustCompile(`(?m)^vllm:cache_config_info\{(.*)\}`)

func (r *reader) metrics() {
	status, body := r.get("/metrics", Quick)
	r.info.NoMetrics = status != http.StatusOK
	line := cacheConfig.FindSubmatch(body)
	if line == nil {
		return
	}
	r.info.Engine = VLLM
	for f, name := range map[kvstate.Fact]string{
		kvstate.FactKVDtype: "cache_dtype", kvstate.FactBlockSize: "block_size",
		kvstate.FactKVLayout: "kv_cache_layout", kvstate.FactSlidingWindow: "sliding_window",
		kvstate.FactHashing: "prefix_caching_hash_algo",
	} {
		value := label(line[1], name)
		switch {
		case value == "None" && f == kvstate.FactSlidingWindow:
			value = "none"
		case value == "None":
			value = ""
		}
		r.info.Report.Know(f, value)
	}
	r.info.NIXL = bytes.Contains(body, []byte("\nvllm:nixl_"))
	r.info.NoCaching = label(line[1], "enable_prefix_caching") == "False"
}

// label returns the value of a label in a metric's line.
func label(labels []byte, name string) string {
	_, rest, found := bytes.Cut(append([]byte(","), labels...), []byte(","+name+`="`))
	value, _, ended := bytes.Cut(rest, []byte(`"`))
	if !found || !ended {
		return ""
	}
	return string(value)
}

// release takes the release into the report: builds for other hardware (0.32.0+cu129) are one release.
func (i *Info) release() {
	version, _, _ := strings.Cut(strings.TrimPrefix(i.Version, "v"), "+")
	i.Report.Know(kvstate.FactRelease, version)
}

// set stores a fact from the engine's own configuration, in place of one from another answer.
func (i *Info) set(f kvstate.Fact, value string) {
	if value != "" {
		i.Report[f] = ""
		i.Report.Know(f, value)
	}
}

func (i *Info) take(s *serverInfo) {
	i.Version = cmp.Or(i.Version, s.Version)
	if s.Mode != "" {
		i.Engine, i.Mode, i.Bootstrap, i.TP = SGLang, s.Mode, s.Bootstrap, s.TP
		i.set(kvstate.FactModel, s.Model)
		i.set(kvstate.FactRevision, s.Revision)
		i.set(kvstate.FactDtype, s.Dtype)
		i.set(kvstate.FactKVDtype, s.KVDtype)
		i.set(kvstate.FactQuantization, cmp.Or(s.Quant, "none"))
		i.set(kvstate.FactSpeculation, cmp.Or(s.Draft, "none"))
		i.set(kvstate.FactBackend, s.Backend)
		i.set(kvstate.FactBlockSize, number(s.Page))
	}
	if v := s.VLLM; v != nil {
		i.Engine, i.Told, i.TP = cmp.Or(i.Engine, VLLM), v.Model.Model != "", v.Parallel.TP
		if v.KV != nil {
			i.Connector, i.KVRole, i.Extra = v.KV.Connector, v.KV.Role, v.KV.Extra
			i.OnFailure = v.KV.OnFailure
		}
		i.set(kvstate.FactModel, v.Model.Model)
		i.set(kvstate.FactRevision, v.Model.Revision)
		i.set(kvstate.FactDtype, strings.TrimPrefix(v.Model.Dtype, "torch."))
		i.set(kvstate.FactKVDtype, v.Cache.Dtype)
		i.set(kvstate.FactBlockSize, number(v.Cache.BlockSize))
		i.set(kvstate.FactKVLayout, v.Cache.Layout)
		i.set(kvstate.FactHashing, v.Cache.Hash)
		i.set(kvstate.FactAttention, v.Attention.Backend)
		if off := v.Scheduler.NoHybrid; off != nil {
			i.set(kvstate.FactHybrid, map[bool]string{false: "on", true: "off"}[*off])
		}
		if i.Told {
			i.tell(v.Model.Quantization, v.Cache.Window)
			draft := "none"
			if d := v.Draft; d != nil && readsStates(d.Method) {
				draft = strings.TrimSpace(d.Method + " " + d.Model)
			}
			i.set(kvstate.FactSpeculation, draft)
		}
		i.NoCaching = i.NoCaching || v.Cache.Caching != nil && !*v.Cache.Caching
	}
	i.set(kvstate.FactRanks, number(int(i.TP)))
	i.set(kvstate.FactRankMultiples, number(int(i.TP)))
}

// tell sets facts for which null means none.
func (i *Info) tell(quantization *string, window *int) {
	q, w := "none", "none"
	if quantization != nil {
		q = *quantization
	}
	if window != nil {
		w = number(*window)
	}
	i.set(kvstate.FactQuantization, q)
	i.set(kvstate.FactSlidingWindow, w)
}

// readsStates reports whether a method of vLLM's speculative decoding reads hidden states, so that the draft model's KV
// travels too (0.32.0, SpeculativeConfig.use_eagle). The others look at the text, and P does not need them.
func readsStates(method string) bool {
	return slices.Contains([]string{"eagle", "eagle3", "mtp", "dflash", "dspark"}, method)
}

func number(n int) string {
	if n <= 0 {
		return ""
	}
	return strconv.Itoa(n)
}

// engineOwning returns the engine that names itself as the owner of its models: vLLM 0.32.0 (protocol.py, ModelCard),
// SGLang 0.5.23 (srt/entrypoints/openai/protocol.py), TensorRT-LLM 1.0 (serve/openai_protocol.py).
func engineOwning(owner string) string {
	return map[string]string{VLLM: VLLM, SGLang: SGLang, "tensorrt_llm": TRTLLM}[owner]
}

// Common returns the models that all engines serve, by the lists of each. Engines that list none are left out.
func Common(lists [][]string) (models []string) {
	for _, list := range lists {
		for _, model := range list {
			if !slices.Contains(models, model) && !slices.ContainsFunc(lists, func(other []string) bool {
				return len(other) > 0 && !slices.Contains(other, model)
			}) {
				models = append(models, model)
			}
		}
	}
	return models
}
