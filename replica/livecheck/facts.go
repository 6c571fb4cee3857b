package livecheck

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

// engineInfo is an engine's report about itself. "" and 0: not reported.
type engineInfo struct {
	Version   string   // vLLM at /version, SGLang at /server_info
	Mode      string   // SGLang: prefill, decode, null; "": another engine
	Bootstrap int32    // SGLang's --disaggregation-bootstrap-port
	Engine    string   // one of kvtransfer's Engine constants, if an answer reveals it
	Models    []string // ids of GET /v1/models, adapters included
	NoModels  bool     // GET /v1/models is 404
	Refused   int      // status of GET /v1/models if it wants a key: 401 or 403
	Connector string   // vLLM's kv_connector
	KVRole    string   // vLLM's kv_role
	TP        int32    // tensor-parallel ranks
	Extra     transferExtra
	NoMetrics bool // GET /metrics does not answer 200
	Facts     map[kvtransfer.Fact]string
}

// serverInfo is GET /server_info: of SGLang (0.5.23), and with config_format=json of vLLM (0.32) if it runs with
// VLLM_SERVER_DEV_MODE=1.
type serverInfo struct {
	Version   string `json:"version"`
	Mode      string `json:"disaggregation_mode"`
	Bootstrap int32  `json:"disaggregation_bootstrap_port"`
	Backend   string `json:"disaggregation_transfer_backend"`
	Model     string `json:"model_path"`
	Revision  string `json:"revision"`
	Dtype     string `json:"dtype"`
	KVDtype   string `json:"kv_cache_dtype"`
	Page      int    `json:"page_size"`
	TP        int32  `json:"tp_size"`
	VLLM      struct {
		Model struct{ Model, Revision, Dtype string } `json:"model_config"`
		Cache struct {
			Dtype string `json:"cache_dtype"`
		} `json:"cache_config"`
		Parallel struct {
			TP int32 `json:"tensor_parallel_size"`
		} `json:"parallel_config"`
		KV *struct {
			Connector string        `json:"kv_connector"`
			Role      string        `json:"kv_role"`
			Extra     transferExtra `json:"kv_connector_extra_config"`
		} `json:"kv_transfer_config"`
	} `json:"vllm_config"`
}

// cacheConfig is a line of vLLM's metrics: its labels are the cache's configuration (v1/metrics/loggers.py).
var cacheConfig = regexp.MustCompile(`(?m)^vllm:cache_config_info\{(.*)\}`)

// engineName returns the name of one of kvtransfer's engines for people; "" if it is none of them.
func engineName(engine string) string {
	switch engine {
	case kvtransfer.EngineVLLM:
		return "vLLM"
	case kvtransfer.EngineSGLang:
		return "SGLang"
	case kvtransfer.EngineTRTLLM:
		return "TensorRT-LLM"
	}
	return ""
}

// engineOwning returns the engine that names itself as the owner of its models: vLLM 0.32.0 (protocol.py, ModelCard),
// SGLang 0.5.23 (srt/entrypoints/openai/protocol.py), TensorRT-LLM 1.0 (serve/openai_protocol.py).
func engineOwning(owner string) string {
	return map[string]string{
		kvtransfer.EngineVLLM: kvtransfer.EngineVLLM, kvtransfer.EngineSGLang: kvtransfer.EngineSGLang,
		"tensorrt_llm": kvtransfer.EngineTRTLLM,
	}[owner]
}

// maxInfo bounds an answer of /server_info or /metrics: SGLang's info has 37 KB, vLLM's 27 KB.
const maxInfo = 4 << 20

func readInfo(ctx context.Context, client *enginehttp.Client, engine *kvstate.Endpoint) (info engineInfo) {
	info.Facts = map[kvtransfer.Fact]string{}
	last := 0 // status
	read := func(path string, into any) bool {
		status, body, err := client.GetAll(ctx, engine, path, maxInfo)
		last = status
		return err == nil && status == http.StatusOK && json.Unmarshal(body, into) == nil
	}
	var version struct{ Version string }
	if read("/version", &version) {
		info.Version = version.Version
	}
	var reported serverInfo
	if read("/server_info?config_format=json", &reported) {
		info.take(&reported)
	}
	var models struct {
		Data []struct {
			ID, Root string
			Owner    string `json:"owned_by"`
		}
	}
	if read("/v1/models", &models) && len(models.Data) > 0 {
		info.know(kvtransfer.FactModel, models.Data[0].Root)
		info.Engine = cmp.Or(info.Engine, engineOwning(models.Data[0].Owner))
		for _, m := range models.Data {
			info.Models = append(info.Models, m.ID)
		}
	} else {
		info.NoModels = last == http.StatusNotFound
		if last == http.StatusUnauthorized || last == http.StatusForbidden {
			info.Refused = last
		}
	}
	if info.Mode != "" {
		return info
	}
	status, body, err := client.GetAll(ctx, engine, "/metrics", maxInfo)
	if info.NoMetrics = err != nil || status != http.StatusOK; !info.NoMetrics {
		if line := cacheConfig.FindSubmatch(body); line != nil {
			info.Engine = kvtransfer.EngineVLLM
			info.know(kvtransfer.FactKVDtype, label(line[1], "cache_dtype"))
			info.know(kvtransfer.FactBlockSize, label(line[1], "block_size"))
		}
	}
	return info
}

func (i *engineInfo) take(s *serverInfo) {
	if s.VLLM.Model.Model != "" {
		i.Engine = kvtransfer.EngineVLLM
	}
	if s.Mode != "" {
		i.Engine = kvtransfer.EngineSGLang
	}
	i.Version, i.Mode, i.Bootstrap = cmp.Or(i.Version, s.Version), s.Mode, s.Bootstrap
	i.TP = max(s.TP, s.VLLM.Parallel.TP)
	if s.VLLM.KV != nil {
		i.Connector, i.KVRole, i.Extra = s.VLLM.KV.Connector, s.VLLM.KV.Role, s.VLLM.KV.Extra
	}
	i.know(kvtransfer.FactModel, cmp.Or(s.Model, s.VLLM.Model.Model))
	i.know(kvtransfer.FactRevision, cmp.Or(s.Revision, s.VLLM.Model.Revision))
	i.know(kvtransfer.FactDtype, strings.TrimPrefix(cmp.Or(s.Dtype, s.VLLM.Model.Dtype), "torch."))
	i.know(kvtransfer.FactKVDtype, cmp.Or(s.KVDtype, s.VLLM.Cache.Dtype))
	i.know(kvtransfer.FactBackend, s.Backend)
	if s.Page > 0 {
		i.know(kvtransfer.FactBlockSize, strconv.Itoa(s.Page))
	}
}

// know stores a fact, unless it is known already.
func (i *engineInfo) know(f kvtransfer.Fact, value string) {
	if value != "" && i.Facts[f] == "" {
		i.Facts[f] = value
	}
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

// checkEngine reports an engine that does not speak the pool's dialect, or is not the one that the pool names. Nothing
// else of such an engine can be compared.
func (a *engineAnswer) checkEngine(at string, p *configv1.Pool) (right bool) {
	d, is := config.DialectOf(p), a.info.Engine
	speaks := d.Engine
	if d.Engines.VLLM {
		speaks = kvtransfer.EngineVLLM
	}
	switch {
	case is == "":
	case engineName(speaks) != "" && speaks != is:
		a.report(at+".address", "the engine is %s, and the pool's kvTransfer is %s, which only %s speaks: "+
			"set kvTransfer to %s, or correct the address",
			engineName(is), p.GetKvTransfer(), engineName(speaks), dialectOf(&a.info))
		return false
	case engineName(p.GetEngine()) != "" && p.GetEngine() != is:
		a.report(at+".address", "the engine is %s, and the pool's engine is %s: "+
			"set engine to %s, or correct the address", engineName(is), p.GetEngine(), is)
		return false
	}
	return true
}

// dialectOf names the dialects that fit an engine.
func dialectOf(info *engineInfo) string {
	var names, all []string
	for _, d := range kvtransfer.All() {
		if slices.Contains(d.Reports.Connectors, info.Connector) {
			names = append(names, d.Name)
		}
		if d.Engine == info.Engine {
			all = append(all, d.Name)
		}
	}
	switch {
	case len(names) > 0:
		return strings.Join(names, " or ")
	case len(all) > 1:
		return "one of " + strings.Join(all, ", ")
	}
	return strings.Join(all, "")
}

// unserved returns a finding for each model of a pool that no engine of a leg serves, as far as they list their models.
func unserved(path string, p *configv1.Pool, answers []engineAnswer) (out []finding) {
	for m, model := range p.GetModels() {
		decode, prefill := unservedLeg(p, answers, model, "decode"), unservedLeg(p, answers, model, "prefill")
		f := cmp.Or(decode, prefill)
		if f == nil {
			continue
		}
		none, serve := "no "+f.leg+" endpoint serves it", f.serves()
		if decode != nil && prefill != nil && decode.at != prefill.at {
			none, serve = "no endpoint serves it", prefill.serves()+", "+decode.serves()
		}
		out = append(out, finding{note: !decode.isChecked() && !prefill.isChecked(), text: fmt.Sprintf(
			"%s.models[%d]: %q: %s; %s: correct the name, or start the engines with --served-model-name",
			path, m, model, none, serve)})
	}
	return out
}

// notServed is a leg without an engine that serves a model, and the first engine of the leg.
type notServed struct {
	leg, at string
	models  []string // of that engine
	checked bool     // engines refuse requests for other names
}

func (n *notServed) serves() string {
	return fmt.Sprintf("%s (%s) serves %s", n.at, n.leg, strings.Join(n.models, ", "))
}

func (n *notServed) isChecked() bool { return n != nil && n.checked }

// unservedLeg returns nil if an engine of the leg serves the model, or if none lists its models.
func unservedLeg(p *configv1.Pool, answers []engineAnswer, model, leg string) *notServed {
	at, serves, checked := "", []string(nil), false
	for i, e := range p.GetEndpoints() {
		if e.GetRole() != leg && e.GetRole() != "both" || len(answers[i].info.Models) == 0 {
			continue
		}
		listed := append(slices.Clone(answers[i].info.Models), e.GetLoras()...)
		if model == "*" || slices.Contains(listed, model) {
			return nil
		}
		if at == "" {
			at, serves = e.GetAddress(), listed
		}
		// SGLang and TensorRT-LLM ignore the name
		checked = checked || answers[i].info.Engine == kvtransfer.EngineVLLM || answers[i].info.Engine == ""
	}
	if at == "" {
		return nil
	}
	return &notServed{leg, at, serves, checked}
}

// checkVLLM compares the pool's dialect, and an endpoint's role, with the connector of a vLLM.
func (a *engineAnswer) checkVLLM(at string, p *configv1.Pool, e *configv1.Endpoint) {
	d, info := config.DialectOf(p), &a.info
	if len(d.Reports.Connectors) > 0 {
		a.note("connector", info.Connector != "")
		a.note("role", info.KVRole != "")
	}
	if info.Connector == "" {
		return
	}
	takers := dialectsTaking(info.Connector)
	if len(d.Reports.Connectors) > 0 && !slices.Contains(d.Reports.Connectors, info.Connector) {
		a.report(at+".address", "the engine runs with %s, and the pool's kvTransfer is %s, which takes %s: %s",
			info.Connector, p.GetKvTransfer(), strings.Join(d.Reports.Connectors, " or "), remedy(takers))
	}
	// a connector that no dialect names may be that of a store
	if d.Reports.Stores != nil && len(takers) > 0 && !slices.Contains(takers, d.Name) {
		a.report(at+".address", "the engine runs with %s, which uses no store, and the pool's kvTransfer is %s: %s",
			info.Connector, p.GetKvTransfer(), remedy(takers))
	}
	wrong := map[string]string{"kv_producer": "decode", "kv_consumer": "prefill"}
	if role := wrong[info.KVRole]; role != "" && e.GetRole() == role {
		a.report(at+".role", "is %s here, and the engine runs with kv_role %s: "+
			"correct the role, or start the engine otherwise", role, info.KVRole)
	}
}

// dialectsTaking returns the names of the dialects that take a connector.
func dialectsTaking(connector string) (names []string) {
	for _, d := range kvtransfer.All() {
		if slices.Contains(d.Reports.Connectors, connector) || slices.Contains(d.Reports.Stores, connector) {
			names = append(names, d.Name)
		}
	}
	return names
}

// remedy is what to do about a connector that other dialects take.
func remedy(dialects []string) string {
	if len(dialects) == 0 {
		return "start the engine otherwise, or correct the address"
	}
	return "set kvTransfer to " + strings.Join(dialects, " or ") + ", or start the engine otherwise"
}

// checkRanks compares transfer.tensorParallelSize with the engine's report, if it is set or required.
func (a *engineAnswer) checkRanks(at string, p *configv1.Pool, e *configv1.Endpoint) {
	set := e.GetTransfer().GetTensorParallelSize()
	if set == 0 && !config.DialectOf(p).Reports.Ranks {
		return
	}
	a.note("tensor-parallel size", a.info.TP > 0)
	if a.info.TP > 0 && max(set, 1) != a.info.TP {
		a.report(at+".transfer.tensorParallelSize", "is %d here, and the engine says %d: correct it",
			max(set, 1), a.info.TP)
	}
}

// unlike returns the differences between endpoint j and an earlier one that it may be paired with, in facts that both
// must share.
func unlike(path string, p *configv1.Pool, answers []engineAnswer, j int) (out []finding) {
	e := p.GetEndpoints()[j]
	for _, fact := range config.DialectOf(p).Reports.Alike {
		mine := answers[j].info.Facts[fact]
		for i, other := range p.GetEndpoints()[:j] {
			theirs := answers[i].info.Facts[fact]
			if mine == "" || theirs == "" || theirs == mine || !paired(p, e, other) {
				continue
			}
			text := fmt.Sprintf("%s[%d].address: the engine's %s is %s and that of %s[%d] is %s: "+
				"they do not take each other's KV; start them alike, or set different groups",
				path, j, fact, mine, path, i, theirs)
			out = append(out, finding{text: text})
			break
		}
	}
	return out
}
