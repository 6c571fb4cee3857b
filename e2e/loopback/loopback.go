// Package loopback gives tests and measurements addresses on 127.0.0.1 that belong to them while they run. A port that
// the kernel chose, and that was closed for a server to take, may be another process's before the server listens: the
// tests of several packages run at once.
//
// Ports are below those that Linux gives to connections (32768 and up) and above those that programs choose by
// themselves (Envoy Gateway: 18000 to 19001), and are given out in blocks. The process that listens at a block's first
// port owns the block: so tests that run at once, in this process or another, never get the same ones.
package loopback

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	firstBlock = 20_000
	blockSize  = 32
	blocks     = 390
)

// Addresses takes n free addresses for the duration of the test.
func Addresses(t testing.TB, n int) []string {
	t.Helper()
	addrs, letGo, err := Take(n)
	require.NoError(t, err)
	t.Cleanup(letGo)
	return addrs
}

// Take takes n free addresses until letGo is called. If letGo is dropped, they last until the next garbage collection.
func Take(n int) (addrs []string, letGo func(), err error) {
	var owners []net.Listener
	letGo = func() {
		for _, owner := range owners {
			_ = owner.Close()
		}
	}
	for at, tries := rand.IntN(blocks), 0; len(addrs) < n; at, tries = at+1, tries+1 {
		if tries == 3*blocks {
			letGo()
			return nil, nil, errors.New("no free ports")
		}
		first := firstBlock + at%blocks*blockSize
		owner, err := net.Listen("tcp", address(first))
		if err != nil {
			continue
		}
		owners = append(owners, owner)
		for port := first + 1; port < first+blockSize && len(addrs) < n; port++ {
			if isFree(port) {
				addrs = append(addrs, address(port))
			}
		}
	}
	return addrs, letGo, nil
}

func address(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// isFree reports whether a port is free, on all addresses.
func isFree(port int) bool {
	l, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
	if err == nil {
		_ = l.Close()
	}
	return err == nil
}

// Forward forwards a listener's connections to an address, until the listener is closed.
func Forward(l net.Listener, addr string) {
	for {
		in, err := l.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", addr)
		if err != nil {
			_ = in.Close()
			continue
		}
		for from, to := range map[net.Conn]net.Conn{in: out, out: in} {
			go func() {
				_, _ = io.Copy(to, from)
				_ = to.Close()
				_ = from.Close()
			}()
		}
	}
}
