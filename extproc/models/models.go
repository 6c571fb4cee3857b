// Package models is what GET /v1/models and GET /v1/models/NAME answer: what all pools serve, as their configuration
// names it and their engines report it.
package models

import (
	"encoding/json"
	"net/url"
	"strings"
	"time"

	"tandem/kvstate"
)

// card is a model as vLLM describes it (0.32.0, openai/models/protocol.py), without the permissions.
type card struct {
	ID      string  `json:"id"`
	Object  string  `json:"object"`
	Created int64   `json:"created"`
	Owner   string  `json:"owned_by"`
	Root    *string `json:"root,omitempty"`
	Parent  *string `json:"parent,omitempty"`
	Length  int64   `json:"max_model_len,omitempty"`
}

// Answer returns the body for a path, with escapes and query as the client sent it. nil: the path names a model that
// no pool lists and no engine reports.
func Answer(state *kvstate.State, path string, created time.Time) []byte {
	name := NameIn(path)
	one := name != ""
	list := struct {
		Object string `json:"object"`
		Data   []card `json:"data"`
	}{"list", []card{}}
	seen := map[string]bool{}
	for _, pool := range state.Pools() {
		for _, m := range state.Models(pool) {
			if one && m.ID != name || !one && seen[m.ID] || one && state.PoolFor(name) != pool {
				continue
			}
			seen[m.ID] = true
			list.Data = append(list.Data, cardOf(m, created))
		}
	}
	switch {
	case !one:
		return marshal(list)
	case len(list.Data) == 0:
		return nil
	}
	return marshal(list.Data[0])
}

// NameIn returns the model that a path below /v1/models names, "" if it is another path.
func NameIn(path string) string {
	path, _, _ = strings.Cut(path, "?")
	if plain, err := url.PathUnescape(path); err == nil {
		path = plain
	}
	name, one := strings.CutPrefix(path, "/v1/models/")
	if !one {
		return ""
	}
	return name
}

func cardOf(m kvstate.Model, created time.Time) card {
	c := card{m.ID, "model", created.Unix(), m.Owner, nil, nil, m.MaxLength}
	if c.Owner == "" {
		c.Owner = "tandem"
	}
	if m.Root != "" {
		c.Root = &m.Root
	}
	if m.Parent != "" {
		c.Parent = &m.Parent
	}
	return c
}

func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		return []byte("null") // cannot be: there are only strings and numbers
	}
	return b
}
