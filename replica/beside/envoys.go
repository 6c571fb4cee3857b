package beside

import (
	"context"
	"sync"

	envoyconfigs "tandem/envoy-configs"
	"tandem/internal/guard"
	"tandem/kvstate/membership"
	configv1 "tandem/protos/config/v1"
	"tandem/replica"
	"tandem/replica/config"
	"tandem/replica/xds"
	"tandem/status"
)

// envoys serves Envoys the configuration that is in force, with the replicas that live where they come from Redis.
type envoys struct {
	replica.Behind
	xds *xds.Server

	mu     sync.Mutex
	config *configv1.Config // in force
	living []membership.Replica
	known  bool // living is known
}

// newEnvoys serves the configuration at the start. Replicas that come from Redis are not known yet: then Envoys
// wait, or go on with what another replica has served them.
func newEnvoys(b replica.Behind) (*envoys, error) {
	e := &envoys{Behind: b, xds: xds.New(b.Registry, b.Log), config: b.Config}
	resources, err := e.make(b.Config)
	if err != nil || config.ReplicasFromRedis(b.Config) {
		return e, err
	}
	return e, e.xds.Publish(resources)
}

// Publish implements [replica.Front].
func (f *front) Publish(cfg *configv1.Config) error {
	f.envoys.mu.Lock()
	defer f.envoys.mu.Unlock()
	f.envoys.config = cfg
	return f.envoys.serve()
}

// setReplicas serves Envoys the living replicas, if they are configured to come from Redis. If they are not known, the
// configured ones have to do.
func (e *envoys) setReplicas(living []membership.Replica, unknown error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.living, e.known = living, true
	if !config.ReplicasFromRedis(e.config) {
		return
	}
	if unknown != nil {
		e.Log.Warn("the replicas are not known: Envoys are served the configured ones", "why", unknown)
	} else {
		e.Log.Info("Envoys are served these replicas", "replicas", living)
	}
	if err := e.serve(); err != nil {
		e.Log.Error("Envoys go on with the former replicas", "err", err)
	}
}

// setFull notes whether Envoys get MaxReplicas other replicas, and not this one.
func (e *envoys) setFull(full bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if full = full && config.ReplicasFromRedis(e.config); e.NoSlot(full) != full && full {
		e.Log.Error("Envoys have as many replicas as they can, without this one", "most", envoyconfigs.MaxReplicas)
	}
}

// serve publishes the configuration in force, but not before its replicas are known. e.mu is held.
func (e *envoys) serve() error {
	if config.ReplicasFromRedis(e.config) && !e.known {
		return nil
	}
	resources, err := e.make(e.config)
	if err != nil {
		return err
	}
	return e.xds.Publish(resources)
}

// check returns an error if Envoys could not be served a configuration.
func (e *envoys) check(cfg *configv1.Config) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, err := e.make(cfg)
	return err
}

// make makes what Envoys get for a configuration. e.mu is held.
func (e *envoys) make(cfg *configv1.Config) (*envoyconfigs.Resources, error) {
	var living []envoyconfigs.Replica
	if config.ReplicasFromRedis(cfg) {
		for _, l := range e.living {
			living = append(living, envoyconfigs.Replica(l))
		}
	}
	return envoyconfigs.Dynamic(cfg, living...)
}

// followReplicas publishes where Envoys reach this replica, and follows which replicas live, until ctx ends.
func (e *envoys) followReplicas(ctx context.Context) {
	if e.Store == nil {
		return
	}
	select {
	case <-e.Joined:
	case <-ctx.Done():
		return
	}
	c := e.Config // as at the start: what it listens at takes a restart
	members := membership.New(e.Store, membership.Options{
		Self: func(ctx context.Context) (membership.Replica, error) {
			return membership.Self(ctx, c.GetExtProc().GetListen(), c.GetReplan().GetListen(), e.Settings.Advertise,
				c.GetState().GetRedis().GetUrl())
		},
		Slots: envoyconfigs.MaxReplicas, Changed: e.setReplicas, Full: e.setFull,
		Hold: 10 * config.Duration(c.GetState().GetRedis().GetLease()),
	})
	guard.Keep(ctx, "Redis", func() { members.Run(ctx) })
}

// Envoys implements [replica.Front].
func (f *front) Envoys() []status.Envoy {
	out := []status.Envoy{}
	for _, e := range append(f.envoys.xds.Envoys(), f.envoys.xds.Left()...) {
		out = append(out, status.Envoy(e))
	}
	return out
}

// Serves implements [replica.Front].
func (f *front) Serves() int { return len(f.envoys.xds.Envoys()) }
