//go:build !linux

package rpc

import "net"

// wakeAt does nothing where poll may not heed a socket's low-water mark.
func wakeAt(net.Conn, int) {}
