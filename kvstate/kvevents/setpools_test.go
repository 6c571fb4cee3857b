package kvevents

import (
	"context"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
	"tandem/kvstate"
)

// Where a pool listens may change while the collector runs.
func TestSetPools(t *testing.T) {
	addr := loopback.Addresses(t, 1)[0]
	listens := func() bool {
		c, err := (&net.Dialer{Timeout: 30 * time.Second}).DialContext(t.Context(), "tcp", addr)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}
	c := NewCollector(Options{State: kvstate.New(kvstate.Options{}), Log: slog.New(slog.DiscardHandler)})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	require.False(t, listens())
	c.SetPools(map[string]Source{"a": {Listen: addr}})
	require.Eventually(t, listens, 30*time.Second, 10*time.Millisecond)
	c.SetPools(map[string]Source{"b": {Listen: addr, Ranks: 2}})
	c.SetPools(nil)
	require.Eventually(t, func() bool { return !listens() }, 30*time.Second, 10*time.Millisecond)
	stop()
	require.NoError(t, <-done)
}
