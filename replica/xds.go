package replica

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	envoyconfigs "tandem/envoy-configs"
	"tandem/internal/guard"
	"tandem/kvstate/membership"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
	"tandem/replica/xds"
	"tandem/status"
)

// newXDS serves Envoys the configuration that is in force. Replicas that come from Redis are not known yet: then Envoys
// wait, or go on with what another replica has served them.
func newXDS(cfg *configv1.Config, r prometheus.Registerer, log *slog.Logger) (*xds.Server, error) {
	resources, err := envoyconfigs.Dynamic(cfg)
	if err != nil {
		return nil, err
	}
	s := xds.New(r, log)
	if replicasFromRedis(cfg) {
		return s, nil
	}
	return s, s.Publish(resources)
}

func replicasFromRedis(cfg *configv1.Config) bool { return cfg.GetEnvoy().GetReplicas() == "redis" }

// setReplicas serves Envoys the living replicas, if they are configured to come from Redis. If they are not known, the
// configured ones have to do.
func (r *reloader) setReplicas(living []membership.Replica, unknown error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.living, r.livingKnown = living, true
	if !replicasFromRedis(r.config) {
		return
	}
	if unknown != nil {
		r.log.Warn("the replicas are not known: Envoys are served the configured ones", "why", unknown)
	} else {
		r.log.Info("Envoys are served these replicas", "replicas", living)
	}
	if err := r.serveEnvoys(r.config); err != nil {
		r.log.Error("Envoys go on with the former replicas", "err", err)
	}
}

// setFull notes whether Envoys get MaxReplicas other replicas, and not this one.
func (r *reloader) setFull(full bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if full = full && replicasFromRedis(r.config); r.fleet.noSlot.Swap(full) != full && full {
		r.log.Error("Envoys have as many replicas as they can, without this one", "most", envoyconfigs.MaxReplicas)
	}
}

// serveEnvoys publishes a configuration, but not before its replicas are known. r.mu is held.
func (r *reloader) serveEnvoys(cfg *configv1.Config) error {
	if replicasFromRedis(cfg) && !r.livingKnown {
		return nil
	}
	resources, err := r.resources(cfg)
	if err != nil {
		return err
	}
	return r.xds.Publish(resources)
}

// resources makes what Envoys get for a configuration. r.mu is held.
func (r *reloader) resources(cfg *configv1.Config) (*envoyconfigs.Resources, error) {
	var living []envoyconfigs.Replica
	if replicasFromRedis(cfg) {
		for _, l := range r.living {
			living = append(living, envoyconfigs.Replica(l))
		}
	}
	return envoyconfigs.Dynamic(cfg, living...)
}

// followReplicas publishes where Envoys reach this replica, and follows which replicas live, until ctx ends.
func (f *fleet) followReplicas(ctx context.Context, cfg *configv1.Config, host string, reload *reloader) {
	if f.store == nil || config.Inside(cfg) {
		return
	}
	select {
	case <-f.joined:
	case <-ctx.Done():
		return
	}
	members := membership.New(f.store, membership.Options{
		Self: func(ctx context.Context) (membership.Replica, error) {
			return membership.Self(ctx, cfg.GetExtProc().GetListen(), cfg.GetReplan().GetListen(), host,
				cfg.GetState().GetRedis().GetUrl())
		},
		Slots: envoyconfigs.MaxReplicas, Changed: reload.setReplicas, Full: reload.setFull,
		Hold: 10 * config.Duration(cfg.GetState().GetRedis().GetLease()),
	})
	guard.Keep(ctx, "Redis", func() { members.Run(ctx) })
}

// envoysOf returns the function by which the status gets the Envoys of an xDS server.
func envoysOf(s *xds.Server) func() []status.Envoy {
	return func() []status.Envoy {
		out := []status.Envoy{}
		for _, e := range append(s.Envoys(), s.Left()...) {
			out = append(out, status.Envoy(e))
		}
		return out
	}
}
