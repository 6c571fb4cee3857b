package periodic

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// The function is called after each interval, with the time of the tick, and not after the context has ended.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3500*time.Millisecond)
		defer cancel()
		began := time.Now()
		var calls []time.Duration
		Run(ctx, time.Second, func(now time.Time) { calls = append(calls, now.Sub(began)) })
		require.Equal(t, []time.Duration{time.Second, 2 * time.Second, 3 * time.Second}, calls)
		require.Equal(t, 3500*time.Millisecond, time.Since(began))
	})
}
