package config

import (
	"fmt"
	"log/slog"
	"strings"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/latebinding"
	"tandem/extproc/migration"
	"tandem/extproc/pass"
	"tandem/extproc/paths"
	"tandem/extproc/plan"
	"tandem/picker"
	"tandem/picker/admission"
	configv1 "tandem/protos/config/v1"
)

// Policy returns the server's settings of a pool. arrivals has the notifications of its engines, if it takes them.
func Policy(
	c *configv1.Config, p *configv1.Pool, arrivals kvtransfer.Arrivals, log *slog.Logger,
) (policy pass.Policy, err error) {
	policy = pass.Policy{
		Policy: plan.Policy{
			Split:           p.GetSplit() != "never",
			RefuseLong:      p.GetLongPrompts() == "refuse",
			PrefillAttempts: int(p.GetPrefillAttempts()),
			AttemptsTime:    Duration(p.GetAttemptsTime()),
			StreamStart:     Duration(p.GetStreamStartTimeout()),
			WholeAnswer:     Duration(p.GetAnswerTimeout()),
			EncodeTimeout:   Duration(p.GetEncode().GetTimeout()),
			PrefillTimeout:  Duration(p.GetPrefillTimeout().GetBase()),
			PerToken:        Duration(p.GetPrefillTimeout().GetPerToken()),
			Place:           placement(p),
			Source:          sourceOf(p),
			Cached:          cachedTokens(c, p),
			AutoRoles:       p.GetRoles() == "auto",
			CleanupDecode:   p.GetStrandedBlocks() == "cleanupDecode",
		},
	}
	if e := p.GetKvEvents(); e != nil {
		policy.LearnTokens, policy.Tokens.Budget = true, Duration(e.GetTokenBudget())
		policy.Tokens.From = map[string]pass.TokenSource{
			"tokenize": pass.TokenizeTokens, "render": pass.RenderTokens,
		}[e.GetTokens()]
	}
	if policy.Paths, err = paths.New(p.GetEngine(), p.GetPaths()); err != nil {
		return policy, fmt.Errorf("paths: %w", err)
	}
	session := p.GetSession()
	policy.Session = pass.SessionKey{Header: session.GetHeader(), Cookie: session.GetCookie(), Body: session.GetBody()}
	setObjectives(&policy, p)
	if s := p.GetContinueStreams(); s != nil {
		policy.Streams = migration.Policy{On: true, Header: strings.ToLower(s.Header), Inexact: s.Inexact,
			MinAnswer: s.MinAnswerTokens, Most: int(s.MostTimes), Seeds: s.SeedSampled}
	}
	switch p.GetOnPrefillFailure() {
	case "decodeAlone":
		policy.OnFailure = plan.DecodeAlone
	case "fail":
		policy.OnFailure = plan.Fail
	}
	switch p.GetDecodeAlone() {
	case "never":
		policy.Alone = plan.AloneNever
	case "fallback":
		policy.Alone = plan.AloneFallback
	}
	switch p.GetHandoff() {
	case "sidecar":
		policy.Handoff = plan.HandoffSidecar
	case "direct":
		policy.Handoff = plan.HandoffDirect
	}
	policy.Dialect, err = newDialect(p, arrivals)
	if c := policy.Dialect.Concurrent; c != nil {
		policy.Peers = c.Peers.NewPeers(log)
	}
	return policy, err
}

// cachedTokens returns whose count of cached tokens clients of a pool get. Inside Envoy prefill's costs nothing.
func cachedTokens(c *configv1.Config, p *configv1.Pool) plan.CachedTokens {
	switch {
	case p.GetCachedTokens() == "decode":
		return plan.CachedOfDecode
	case Inside(c):
		return plan.CachedInPassing
	case p.GetCachedTokens() == "prefill":
		return plan.CachedByLeg
	}
	return plan.CachedOfDecode
}

// placement returns the picker's policy of a pool.
func placement(p *configv1.Pool) picker.Policy {
	place := picker.DefaultPolicy()
	place.MinPrefillTokens, place.AnswerWeight = p.GetMinPrefillTokens(), p.GetAnswerWeight()
	place.Promise = picker.Targets{
		TTFT: Duration(p.GetTargets().GetTtft()).Seconds(), TPOT: Duration(p.GetTargets().GetTpot()).Seconds(),
	}
	if p.KvEvents != nil {
		for tier, rate := range loadBandwidth(p) {
			place.Model.LoadBandwidth[tier] = float64(*rate)
		}
	}
	switch p.GetSplit() {
	case "always":
		place.Split = picker.SplitAlways
	case "never":
		place.Split = picker.SplitNever
	}
	if p.GetDecodeAlone() != "byCost" && place.Split == picker.SplitAuto {
		place.Split = picker.SplitAlways
	}
	return place
}

// loadBandwidth returns the pool's kvEvents.loadBandwidth in the order of [picker.LoadBandwidth].
func loadBandwidth(p *configv1.Pool) [len(picker.LoadBandwidth{})]*int64 {
	b := p.KvEvents.LoadBandwidth
	return [...]*int64{&b.CpuBytes, &b.DiskBytes, &b.RemoteBytes}
}

// sourceOf names the source of a pool's endpoints.
func sourceOf(p *configv1.Pool) string {
	d := p.GetDiscovery()
	switch {
	case d.GetFile() != nil:
		return "discovery.file " + d.GetFile().GetPath()
	case d.GetKubernetes() != nil:
		return fmt.Sprintf("discovery.kubernetes with the selector %q", d.GetKubernetes().GetSelector())
	case d.GetInferencePool() != nil:
		return "discovery.inferencePool " + d.GetInferencePool().GetName()
	case len(d.GetDns()) > 0:
		var names []string
		for _, n := range d.GetDns() {
			names = append(names, n.GetName())
		}
		return "discovery.dns " + strings.Join(names, ", ")
	}
	return "endpoints"
}

// newDialect returns the dialect of the pool's engines, the zero value if they have none.
func newDialect(p *configv1.Pool, arrivals kvtransfer.Arrivals) (kvtransfer.Dialect, error) {
	if p.GetKvTransfer() == "none" {
		return kvtransfer.Dialect{}, nil
	}
	o := DialectOptions(p)
	if TakesNotices(p) {
		o.Arrivals = arrivals
	}
	return kvtransfer.New(o)
}

// setObjectives sets the policy's fields about objectives and queueing.
func setObjectives(policy *pass.Policy, p *configv1.Pool) {
	policy.Place.Late = p.GetBinding() == "late"
	if q := p.GetQueue(); q != nil {
		policy.Waiting = latebinding.Limits{MaxTime: Duration(q.GetMaxWait()), Max: int(q.GetMaxWaiting())}
		if policy.Waiting.MaxTime > maxBufferedWait { // else Envoy may not wait for longer
			policy.Waiting.Memory = admission.MemoryWaits * policy.Waiting.MaxTime
		}
	}
	policy.LabelHeader = p.GetLabelHeader()
	switch p.GetEnginePriority() {
	case "vllm":
		policy.Priorities = plan.VLLMPriority
	case "sglang":
		policy.Priorities = plan.SGLangPriority
	}
	o := p.GetObjectives()
	policy.Objectives = pass.Objectives{FromHeaders: o.GetFromHeaders(), Default: objectiveOf(o.GetDefault())}
	for _, n := range o.GetNamed() {
		policy.Objectives.Named = append(policy.Objectives.Named, objectiveOf(n))
	}
	switch o.GetOnMiss() {
	case "queue":
		policy.Objectives.Miss = picker.MissWait
	case "shed":
		policy.Objectives.Miss = picker.MissShed
	}
}

func objectiveOf(o *configv1.Objective) pass.Objective {
	return pass.Objective{
		Name: o.GetName(), Priority: o.GetPriority(), TTFT: Duration(o.GetTtft()), TPOT: Duration(o.GetTpot()),
	}
}

// commas joins names in the form that an endpoint has them.
func commas(names []string) string { return strings.Join(names, ",") }
