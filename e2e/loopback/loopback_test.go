package loopback

import (
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Concurrent callers get different addresses, and all of them can be listened on.
func TestAddresses(t *testing.T) {
	var mu sync.Mutex
	var all []string
	var asking sync.WaitGroup
	for range 8 {
		asking.Go(func() {
			some := Addresses(t, 2*blockSize)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, some...)
		})
	}
	asking.Wait()
	require.Len(t, all, 16*blockSize)
	slices.Sort(all)
	require.Len(t, slices.Compact(slices.Clone(all)), len(all))
	for _, addr := range all[:blockSize] {
		l, err := net.Listen("tcp", addr)
		require.NoError(t, err)
		require.NoError(t, l.Close())
	}
}
