package rpc

import (
	"net"
	"syscall"
)

// wakeAt makes the kernel report a connection readable when it has n bytes, and not before.
func wakeAt(nc net.Conn, n int) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, n) })
}
