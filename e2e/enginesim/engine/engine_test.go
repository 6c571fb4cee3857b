package engine

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestComputeTakesTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Engine{Cfg: &Config{}, Metrics: newMetrics("tiny", 0), prefillTurn: make(chan struct{}, 1)}
		var wg sync.WaitGroup
		started := time.Now()
		for range 4 {
			wg.Go(func() {
				if err := s.compute(t.Context(), time.Second); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.Equal(t, 4*time.Second, time.Since(started))
	})
}
