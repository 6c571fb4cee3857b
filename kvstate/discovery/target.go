package discovery

import (
	"log/slog"
	"slices"

	"tandem/kvstate"
)

// target is the pool that a source writes.
type target struct {
	state   *kvstate.State
	spec    kvstate.PoolSpec
	log     *slog.Logger
	current []kvstate.EndpointSpec
	written bool
}

// write sets the pool's endpoints, if they have changed.
func (t *target) write(next []kvstate.EndpointSpec) {
	if t.written && slices.Equal(t.current, next) {
		return
	}
	if t.written {
		t.log.Info("endpoints changed", "pool", t.spec.Name, "before", len(t.current), "now", len(next))
	}
	t.current, t.written = slices.Clone(next), true
	t.state.SetPool(t.spec, next)
}
