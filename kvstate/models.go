package kvstate

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// Model is a model or an adapter, as an engine reports it (GET /v1/models).
type Model struct {
	ID        string
	Root      string // where it was loaded from; "": unknown
	Parent    string // the model that an adapter adapts; "": it is none
	Owner     string // owned_by: which engine serves it; "": none reports it
	MaxLength int64  // of a prompt and its answer together, in tokens; 0: unknown
}

// reportedModels is an endpoint's list, and its names.
type reportedModels struct {
	list []Model
	ids  []string
}

// SetModels records the models that an endpoint reports. Endpoints with equal lists share one, which is compared once.
func (s *State) SetModels(e *Endpoint, list []Model) {
	for _, p := range s.Pools() {
		for _, other := range p.endpoints {
			if known := other.state.models.Load(); known != nil && slices.Equal(known.list, list) {
				e.state.models.Store(known)
				return
			}
		}
	}
	next := &reportedModels{list: list}
	for _, m := range list {
		next.ids = append(next.ids, m.ID)
	}
	e.state.models.Store(next)
}

// reported returns what an endpoint of the pool reports of a model; nil if none does.
func (p *Pool) reported(model string) *Model {
	for _, e := range p.endpoints {
		if m := e.state.models.Load(); m != nil {
			if i := slices.Index(m.ids, model); i >= 0 {
				return &m.list[i]
			}
		}
	}
	return nil
}

// Models returns what a pool serves, in the order of the names: the models that it lists, the adapters that its
// endpoints are configured with or report, and, if it accepts any model, all that they report. Of endpoints that
// report a model differently the first counts, with the least length.
func (s *State) Models(p *Pool) []Model {
	all := map[string]Model{}
	for _, id := range p.Spec.Models {
		if id != "*" {
			all[id] = Model{ID: id}
		}
	}
	_, wildcard := p.serves("*")
	for _, e := range p.endpoints {
		for id := range strings.SplitSeq(e.LoRAs, ",") {
			if _, known := all[id]; !known && id != "" {
				all[id] = Model{ID: id}
			}
		}
	}
	for _, e := range p.endpoints {
		reported := e.state.models.Load()
		if reported == nil {
			continue
		}
		for _, m := range reported.list {
			known, serves := all[m.ID]
			switch {
			case known.Owner != "":
				if m.MaxLength > 0 && (known.MaxLength == 0 || m.MaxLength < known.MaxLength) {
					known.MaxLength = m.MaxLength
					all[m.ID] = known
				}
			case serves || wildcard || m.Parent != "":
				all[m.ID] = m
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b Model) int { return cmp.Compare(a.ID, b.ID) })
}

// ModelNames returns the names of Models.
func (s *State) ModelNames(p *Pool) (names []string) {
	for _, m := range s.Models(p) {
		names = append(names, m.ID)
	}
	return names
}

// Unlisted reports whether none of the pool's endpoints is known to serve a model, and at least one of them lists what
// it serves.
func (p *Pool) Unlisted(model string) bool {
	listed := false
	for _, e := range p.endpoints {
		if e.HasLoRA(model) {
			return false
		}
		if m := e.state.models.Load(); m != nil {
			if listed = true; slices.Contains(m.ids, model) {
				return false
			}
		}
	}
	return listed
}

// MayServe reports whether an endpoint of the pool lists a model, is configured with it, or has not said what it
// serves.
func (p *Pool) MayServe(model string) bool {
	return slices.ContainsFunc(p.endpoints, func(e *Endpoint) bool {
		m := e.state.models.Load()
		return m == nil || len(m.ids) == 0 || slices.Contains(m.ids, model) || e.HasLoRA(model)
	})
}

// Serves reports whether the pool is configured with a model by its name, or an endpoint reports it. Only this many
// names of a report count.
func (p *Pool) Serves(model string) bool {
	if named, _ := p.serves(model); named {
		return true
	}
	return slices.ContainsFunc(p.endpoints, func(e *Endpoint) bool {
		m := e.state.models.Load()
		return e.HasLoRA(model) || m != nil && slices.Contains(m.ids[:min(len(m.ids), maxReserved)], model)
	})
}

// maxReserved bounds the names that an endpoint's report makes known.
const maxReserved = 256
