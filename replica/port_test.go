package replica

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// After a hot restart of Envoy a port is opened when the process before has closed it; else it has to be free.
func TestPortsOfAHotRestart(t *testing.T) {
	before, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := before.Addr().String()
	_, err = Settings{}.Listen(t.Context(), address)
	require.ErrorContains(t, err, "another program has "+address)

	l, err := Settings{HotRestart: true}.Listen(t.Context(), address)
	require.NoError(t, err)
	accepted := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err == nil {
			err = conn.Close()
		}
		accepted <- err
	}()
	require.NoError(t, before.Close())
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
		}
		return err == nil
	}, time.Minute, 10*time.Millisecond)
	require.NoError(t, <-accepted)
	require.NoError(t, l.Close())

	before, err = net.Listen("tcp", address)
	require.NoError(t, err)
	defer before.Close()
	l, err = Settings{HotRestart: true}.Listen(t.Context(), address)
	require.NoError(t, err)
	go func() {
		_, err := l.Accept()
		accepted <- err
	}()
	require.NoError(t, l.Close())
	require.ErrorIs(t, <-accepted, net.ErrClosed)
}
