package livecheck

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/kvstate/enginefacts"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
)

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
func dialectOf(info *enginefacts.Info) string {
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
		a.note("connector", info.Told)
		a.note("role", info.Told)
	}
	if info.NoCaching && d.Alike() != 0 {
		a.warn(at+".address",
			"the engine's prefix cache is off: prompts that begin alike are computed anew each time, and "+
				"Tandem sends them here for what it thinks is cached; start it without --no-enable-prefix-caching")
	}
	if info.Connector == "" {
		bare := info.Told || usesNIXL(&d) && info.Engine == enginefacts.VLLM && !info.NoMetrics && !info.NIXL &&
			a.version != "" && !kvtransfer.Older(a.version, 32)
		if needs := connectorsOf(&d); bare && needs != "" && e.GetRole() != "encode" &&
			(e.GetRole() != "both" || !d.PairsOnly()) {
			a.report(at+".address",
				"the engine runs without a KV connector, and the pool's kvTransfer is %s, which needs %s: "+
					"start it with --kv-transfer-config, or correct the address", p.GetKvTransfer(), needs)
		}
		return
	}
	a.checkRecompute(at + ".address")
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
	if e.GetRole() == "both" && d.Engines.EitherLeg && info.KVRole != "" && info.KVRole != "kv_both" {
		a.report(at+".role", "is both here, and the engine runs with kv_role %s: "+
			"correct the role, or start the engine with kv_both", info.KVRole)
	}
}

// checkRecompute reports an engine that would answer wrongly after a load of KV that failed: vLLM's newer runner, the
// default on GPUs, does not take back how far a request is computed (0.32.0 and 0.33.0, v1/worker/gpu/model_runner.py,
// update_requests writes it to the CPU's copy alone; vllm#49250). Connectors that load before a step, and report what
// failed, meet that; NIXL, Mooncake and the offload tiers load while the request waits, and do not.
func (a *engineAnswer) checkRecompute(at string) {
	if a.info.OnFailure != "recompute" {
		return
	}
	const why = "the engine runs with %s and kv_load_failure_policy recompute: with vLLM's newer runner " +
		"(0.32 and 0.33, the default on GPUs) an answer whose KV could not be loaded in step is wrong, " +
		"with a 200 (vllm#49250); "
	switch a.info.Connector {
	case "LMCacheConnectorV1", "FlexKVConnectorV1":
		a.report(at, why+"take the policy fail", a.info.Connector)
	case "MultiConnector":
		a.warn(at, why+"take the policy fail if one of its members is LMCache or FlexKV", a.info.Connector)
	}
}

// usesNIXL reports whether engines of a dialect run one of vLLM's NIXL connectors, whose metrics are there from the
// start.
func usesNIXL(d *kvtransfer.Dialect) bool {
	return slices.ContainsFunc(d.Reports.Connectors, func(name string) bool { return strings.HasPrefix(name, "Nixl") })
}

// connectorsOf names the connectors that engines of a dialect need; "": unknown, or none.
func connectorsOf(d *kvtransfer.Dialect) string {
	if len(d.Reports.Connectors) > 0 {
		return strings.Join(d.Reports.Connectors, " or ")
	}
	if d.Reports.Stores != nil {
		return "that of a store, such as " + d.Reports.Stores[0]
	}
	return ""
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

// unlike returns the differences between endpoint j and earlier ones that it would be paired with, in facts that both
// must share.
func unlike(path string, p *configv1.Pool, answers []engineAnswer, j int) (out []finding) {
	e, d, alike := p.GetEndpoints()[j], config.DialectOf(p), config.Alike(p)
	for fact := range kvstate.Facts {
		if !d.Alike().Has(fact) {
			continue
		}
		mine := answers[j].info.Report[fact]
		for i, other := range p.GetEndpoints()[:j] {
			theirs := answers[i].info.Report[fact]
			if answers[i].foreign || answers[j].foreign || kvstate.FactFits(fact, mine, theirs) ||
				!paired(p, e, other) {
				continue
			}
			says := fmt.Sprintf("%s[%d].address: the engine's %s is %s and that of %s[%d] is %s", path, j, fact, mine,
				path, i, theirs)
			if alike.Has(fact) {
				out = append(out, finding{text: says +
					": these two are never paired, since nobody has shown that they " +
					"take each other's KV; start them alike, or set different groups"})
			} else {
				out = append(out, finding{note: true, text: says + ", and pairUnlike has " + fact.Setting() +
					": these two are paired, although nobody has shown that their answers are right"})
			}
			break
		}
	}
	return out
}
