package status

import (
	"time"

	"tandem/kvstate"
)

// engineFigures are what an engine reports about itself.
type engineFigures struct {
	Running  int64   `json:"running"` // -1 here and below: not reported
	Waiting  int64   `json:"waiting"`
	External int64   `json:"external"` // of those, load that did not come through Tandem
	KVUsage  float64 `json:"kv_usage"`
	KVTokens int64   `json:"kv_tokens"`
	Age      float64 `json:"age_seconds"`  // of the oldest of these
	News     float64 `json:"news_seconds"` // of the newest, which may have come with an answer
	Trust    float64 `json:"trust"`
}

func engineReport(g *kvstate.Signals) *engineFigures {
	if g == nil {
		return nil
	}
	now := time.Now()
	return &engineFigures{
		g.Running, g.Waiting, g.External, g.KVUsage, g.KVTokens,
		g.Age(now).Seconds(), now.Sub(g.At).Seconds(), g.Trust(now),
	}
}

// State returns pools and endpoints as /debug/state shows them, for people and tests.
func State(state *kvstate.State) any {
	type endpoint struct {
		Name     string         `json:"name"`
		Address  string         `json:"address"`
		Role     string         `json:"role"`
		Group    string         `json:"group,omitempty"`
		Zone     string         `json:"zone,omitempty"`
		Node     string         `json:"node,omitempty"`
		LoRAs    string         `json:"loras,omitempty"`
		Labels   string         `json:"labels,omitempty"`
		Failed   bool           `json:"failed"`
		Paused   bool           `json:"paused"`
		Draining bool           `json:"draining,omitempty"` // its pod is on its way out
		Weight   int            `json:"weight"`
		Requests int64          `json:"requests"`
		Tokens   int64          `json:"prompt_tokens"`
		Others   int64          `json:"remote_requests,omitempty"` // reserved by other replicas
		Engine   *engineFigures `json:"engine,omitempty"`

		// failed KV loads: excluded as prefill by these decode endpoints, or as this part of every pair
		UnloadableBy []string `json:"unloadable_by,omitempty"`
		NoPairs      string   `json:"no_pairs,omitempty"`
	}
	type pool struct {
		Name      string     `json:"name"`
		Models    []string   `json:"models"`
		Blocks    int        `json:"blocks"` // in the prefix index
		Paused    bool       `json:"paused"`
		Endpoints []endpoint `json:"endpoints"`
	}
	out := struct {
		Reservations int    `json:"reservations"`
		Pools        []pool `json:"pools"`
	}{Reservations: state.Bookings.Reservations()}
	for _, p := range state.Pools() {
		shown := pool{Name: p.Spec.Name, Models: state.ModelNames(p), Paused: p.Paused(), Blocks: p.Blocks()}
		for _, e := range p.Endpoints() {
			requests, tokens := e.Load()
			others := e.RemoteLoad().Requests
			one := endpoint{
				e.Name, e.Addr, e.Role.String(), e.Group, e.Zone, e.Node, e.LoRAs, e.Labels, e.Failed(), e.Paused(),
				e.Draining, e.Weight(), requests, tokens, others, engineReport(e.Signals()), nil, "",
			}
			if f := e.LoadFaults(); f != nil {
				if one.UnloadableBy = f.Decodes; f.Parts != 0 {
					one.NoPairs = f.Parts.String()
				}
			}
			shown.Endpoints = append(shown.Endpoints, one)
		}
		out.Pools = append(out.Pools, shown)
	}
	return out
}
