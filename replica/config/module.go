package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
)

// Module is what Envoy's configuration says of the filter of a Tandem that it has loaded (filter_config; of Envoy
// Gateway: config of a policy's dynamicModule).
type Module struct {
	File string `json:"file"` // the configuration of the replica ...
	Log  string `json:"log"`  // the lowest level that is logged; "": info

	// The rest is for a route that is another's.
	Tandem json.RawMessage `json:"tandem"` // ... or the configuration itself
	Name   string          `json:"name"`   // of the replica; "": one of its own for this configuration
	Route  *ModuleRoute    `json:"route"`  // nil, with a file: routes are Tandem's own
}

// ModuleRoute is how legs get to their endpoints on another's route.
type ModuleRoute struct {
	Rule    *int   `json:"rule"`    // of the HTTPRoute, whose cluster calls go to
	Cluster string `json:"cluster"` // likewise, by its full name
	Strict  bool   `json:"strict"`  // that cluster connects to the endpoint that a call names, or to none
	Hold    bool   `json:"hold"`    // the cluster of D's leg has the filter hold
}

// moduleNames are those of replicas: a part of the paths of the operator's port.
var moduleNames = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)

// ReadModule reads it. With an error it has what could be read.
func ReadModule(text []byte) (m Module, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err = d.Decode(&m); err != nil {
		_ = json.Unmarshal(text, &m)
		return m, fmt.Errorf("the filter's configuration %.200q is not {file: /path/to/tandem.yaml}, nor that of a "+
			"route's policy (docs/howto/envoy-gateway-module.md): %w", text, err)
	}
	switch {
	case m.File == "" && m.Tandem == nil:
		return m, fmt.Errorf("the filter's configuration %.200q has neither tandem nor file", text)
	case m.File != "" && m.Tandem != nil:
		return m, errors.New("the filter's configuration has both tandem and file: leave one of them out")
	case m.Route != nil && m.Route.Rule != nil && (*m.Route.Rule < 0 || m.Route.Cluster != ""):
		return m, errors.New("route.rule is the number of an HTTPRoute's rule, from 0, and goes without route.cluster")
	case m.Name != "" && !moduleNames.MatchString(m.Name):
		return m, fmt.Errorf("name: %.80q is not of letters, digits, dots, - and _, 63 at most", m.Name)
	}
	return m, nil
}

// Routed reports whether the filter's route is another's. What names no route and cannot be read otherwise is: a
// printed bootstrap can be read.
func (m *Module) Routed() bool { return m.Route != nil || m.Tandem != nil || m.File == "" }
