// Package rawconn makes the reads and writes of TCP connections cheaper for a process that is idle most of the time.
//
// Go tells its runtime of every system call, lest a goroutine that blocks in one keep a processor. Where the process was idle, that wakes the
// runtime's monitor thread (sysmon), which then looks around every 20 us until all is idle again: on a virtual machine more work than the call.
// But a socket of Go's never blocks in a call; what waits is the poller. So the calls are made here without telling (syscall.RawSyscall).
//
// On Linux; elsewhere connections stay as they are.
package rawconn

import (
	"context"
	"net"
)

// Buffers is a connection that writes several pieces at once.
type Buffers interface {
	// WriteBuffers writes all pieces and leaves them as they are.
	WriteBuffers(pieces net.Buffers) error
}

// Dial is what a dialer's DialContext would be with raw connections, for [net/http.Transport].
func Dial(d *net.Dialer) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := d.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return New(nc), nil
	}
}
