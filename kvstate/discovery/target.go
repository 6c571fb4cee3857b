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
	renewed bool // the spec is another one: write even the same endpoints
}

// write sets the pool's endpoints, if they have changed.
func (t *target) write(next []kvstate.EndpointSpec) {
	same := t.written && slices.Equal(t.current, next)
	if same && !t.renewed {
		return
	}
	if t.written && !same {
		t.log.Info("endpoints changed", "pool", t.spec.Name, "before", len(t.current), "now", len(next))
	}
	t.current, t.written, t.renewed = slices.Clone(next), true, false
	t.state.SetPool(t.spec, next)
}
