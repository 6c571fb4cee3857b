package connector

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/internal/enginesim/engine"
)

// Prompts that each have a part of the buffer wait for each other: routers prevent this by pushing one after the
// other.
func TestLMCacheBufferDeadlock(t *testing.T) {
	e, err := engine.New(&engine.Config{Models: []string{"tiny"}, Blocks: 128, BlockSize: 16}, io.Discard)
	require.NoError(t, err)
	b := newBuffer(&Node{Engine: e, cfg: &Config{
		Config: *e.Cfg, Lease: time.Minute, lmcacheConfig: lmcacheConfig{Tp: 1, PdBuffer: 1024, PdTimeout: 50 * time.Millisecond},
	}})
	require.NoError(t, b.alloc("a", "a", 40))
	require.NoError(t, b.alloc("b", "b", 24))
	require.Error(t, b.alloc("a", "a", 16))
	require.EqualValues(t, 1, e.Metrics.Violations.Total())
	b.timeout = time.Hour
	freed := make(chan error, 1)
	go func() { freed <- b.alloc("a", "a", 16) }()
	b.drop("b", b.arrived["b"])
	require.NoError(t, <-freed)
}
