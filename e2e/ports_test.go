package e2e

import (
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// Ports for servers that tests start are taken from below those that Linux gives to connections (32768 and up), where any connection
// could take one before its server does. They are given out in blocks. Whoever listens at a block's first port owns the block: so
// tests that run at once, in this process or another, never get the same ones.
const (
	firstBlock = 10_000
	blockSize  = 64
	blocks     = 350
)

// ports takes n free ports, for as long as the test runs.
func ports(t testing.TB, n int) (addrs []string) {
	t.Helper()
	for at, tries := rand.IntN(blocks), 0; len(addrs) < n; at, tries = at+1, tries+1 {
		require.Less(t, tries, 3*blocks, "no free ports")
		first := firstBlock + at%blocks*blockSize
		owner, err := net.Listen("tcp", loopback(first))
		if err != nil {
			continue
		}
		t.Cleanup(func() { _ = owner.Close() })
		for port := first + 1; port < first+blockSize && len(addrs) < n; port++ {
			if isFree(port) {
				addrs = append(addrs, loopback(port))
			}
		}
	}
	return addrs
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// isFree reports whether nobody listens at a port, on any address.
func isFree(port int) bool {
	l, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
	if err == nil {
		_ = l.Close()
	}
	return err == nil
}

// twoInARow takes two ports that follow each other, and gives the first.
func twoInARow(free func() string) string {
	for first := portOf(free()); ; {
		next := portOf(free())
		n, _ := strconv.Atoi(first)
		if next == strconv.Itoa(n+1) {
			return first
		}
		first = next
	}
}
