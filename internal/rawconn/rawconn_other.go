//go:build !linux

package rawconn

import "net"

// New returns the connection as it is.
func New(nc net.Conn) net.Conn { return nc }
