// Package inferencepolicy holds what a cluster's resources say about the requests of pools.
package inferencepolicy

import "sync"

// Policy is the content of the cluster's resources (InferenceObjective, InferenceModelRewrite) about a pool's
// requests.
type Policy struct {
	// Objectives maps the name of an InferenceObjective to its priority. Missing names have priority 0; requests
	// below 0 may be shed.
	Objectives map[string]int32
	// Rewrites replace model names; the first that matches applies.
	Rewrites []Rewrite
}

// Policies holds the policy of each pool.
type Policies struct {
	inferencePolicies sync.Map // pool name to *Policy; few, and they seldom change
}

// Rewrite sends requests for a model to one of several others.
type Rewrite struct {
	Model   string // the requested model; "" matches any
	Targets []Target
}

// Target is one model and its share of the requests.
type Target struct {
	Model  string
	Weight int // relative to the sum over all targets; all 0: equal shares
}

// SetInferencePolicy sets the policy of a pool; nil removes it. The caller must not modify it afterwards.
func (s *Policies) SetInferencePolicy(pool string, in *Policy) {
	s.inferencePolicies.Store(pool, in)
}

// Priority returns the priority of an objective in a pool; 0 if the objective is unknown.
func (s *Policies) Priority(pool, objective string) (priority int32, known bool) {
	if in := s.inferencePolicy(pool); in != nil {
		priority, known = in.Objectives[objective]
	}
	return priority, known
}

// Rewritten returns the model that replaces the requested one, or "" to keep it. A rewrite that names the model
// comes before one that matches any. random chooses between several targets.
func (s *Policies) Rewritten(pool, model string, random uint64) string {
	in := s.inferencePolicy(pool)
	if in == nil {
		return ""
	}
	for _, name := range []string{model, ""} {
		for i := range in.Rewrites {
			if in.Rewrites[i].Model == name {
				return in.Rewrites[i].target(random)
			}
		}
	}
	return ""
}

func (r *Rewrite) target(random uint64) string {
	sum := 0
	for _, t := range r.Targets {
		sum += t.Weight
	}
	if len(r.Targets) == 0 {
		return ""
	}
	if sum == 0 {
		return r.Targets[random%uint64(len(r.Targets))].Model
	}
	at := int(random % uint64(sum))
	for _, t := range r.Targets {
		if at -= t.Weight; at < 0 {
			return t.Model
		}
	}
	return ""
}

func (s *Policies) inferencePolicy(pool string) *Policy {
	in, _ := s.inferencePolicies.Load(pool)
	known, _ := in.(*Policy)
	return known
}
