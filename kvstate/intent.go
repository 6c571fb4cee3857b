package kvstate

// Intents are what the cluster wants of a pool's requests, beside its endpoints.
type Intents struct {
	// Objectives are the priorities of requests by the name of their InferenceObjective. Missing names have priority 0;
	// requests below 0 may be shed.
	Objectives map[string]int32
	// Rewrites are other names for models, in the order to try them.
	Rewrites []Rewrite
}

// Rewrite gives requests for a model one of several others.
type Rewrite struct {
	Model   string // as asked for; "" matches any
	Targets []RewriteTarget
}

// RewriteTarget is one model and its share.
type RewriteTarget struct {
	Model  string
	Weight int // of the sum over all targets; all 0: equal shares
}

// SetIntents notes what the cluster wants of a pool's requests. in must not change any more; nil forgets it.
func (s *State) SetIntents(pool string, in *Intents) { s.intents.Store(pool, in) }

// Priority is that of an objective in a pool; 0 for one that the cluster does not know.
func (s *State) Priority(pool, objective string) (priority int32, known bool) {
	if in := s.intentsOf(pool); in != nil {
		priority, known = in.Objectives[objective]
	}
	return priority, known
}

// Rewritten is the model that a request of a pool goes to instead of the one it asks for, "" if it stays. The first rewrite
// that names the model counts, else the first that takes any. random decides between several targets.
func (s *State) Rewritten(pool, model string, random uint64) string {
	in := s.intentsOf(pool)
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

func (s *State) intentsOf(pool string) *Intents {
	in, _ := s.intents.Load(pool)
	known, _ := in.(*Intents)
	return known
}
