package main

import (
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	envoyconfigs "tandem/envoy-configs"
	"tandem/internal/xds"
	configv1 "tandem/protos/config/v1"
	"tandem/status"
)

// newXDS serves Envoys the configuration that is in force.
func newXDS(config *configv1.Config, r prometheus.Registerer, log *slog.Logger) (*xds.Server, error) {
	resources, err := envoyconfigs.Dynamic(config)
	if err != nil {
		return nil, err
	}
	s := xds.New(r, log)
	return s, s.Publish(resources)
}

// envoysOf returns the function by which the status gets the Envoys of an xDS server.
func envoysOf(s *xds.Server) func() []status.Envoy {
	return func() []status.Envoy {
		out := []status.Envoy{}
		for _, e := range s.Envoys() {
			out = append(out, status.Envoy(e))
		}
		return out
	}
}
