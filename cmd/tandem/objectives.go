package main

import (
	"strings"

	"tandem/extproc"
	"tandem/picker"
	configv1 "tandem/protos/config/v1"
)

// setObjectives is what the server is told of a pool's requests: what they want, and how they wait.
func setObjectives(policy *extproc.Policy, p *configv1.Pool) {
	policy.Place.Late = p.GetBinding() == "late"
	if q := p.GetQueue(); q != nil {
		policy.Waiting = extproc.Waiting{MaxTime: configv1.Duration(q.GetMaxWait()), Max: int(q.GetMaxWaiting())}
	}
	policy.LabelHeader = p.GetLabelHeader()
	switch p.GetEnginePriority() {
	case "vllm":
		policy.Priorities = extproc.VLLMPriority
	case "sglang":
		policy.Priorities = extproc.SGLangPriority
	}
	o := p.GetObjectives()
	policy.Objectives = extproc.Objectives{FromHeaders: o.GetFromHeaders(), Default: objective(o.GetDefault())}
	for _, n := range o.GetNamed() {
		policy.Objectives.Named = append(policy.Objectives.Named, objective(n))
	}
	switch o.GetOnMiss() {
	case "queue":
		policy.Objectives.Miss = picker.MissWait
	case "shed":
		policy.Objectives.Miss = picker.MissShed
	}
}

func objective(o *configv1.Objective) extproc.Objective {
	return extproc.Objective{
		Name: o.GetName(), Priority: o.GetPriority(), TTFT: configv1.Duration(o.GetTtft()), TPOT: configv1.Duration(o.GetTpot()),
	}
}

// listed are names as an endpoint has them.
func listed(names []string) string { return strings.Join(names, ",") }
