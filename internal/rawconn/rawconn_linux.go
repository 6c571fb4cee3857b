package rawconn

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// socket is a [*net.TCPConn], or what embeds one to say more of it or to hear of its end.
type socket interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

// conn is a socket whose reads and writes are raw; one goroutine at a time reads, and one writes.
type conn struct {
	socket
	raw syscall.RawConn
	in  reading
	out writing
}

// New returns a connection that reads and writes raw, or the connection as it is where that cannot be (as with TLS, which goes over a
// raw one). Of what embeds a TCP connection, Read and Write are not called any more, and everything else is.
func New(nc net.Conn) net.Conn {
	tcp, ok := nc.(socket)
	if !ok {
		return nc
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nc
	}
	c := &conn{socket: tcp, raw: raw}
	c.in.try, c.out.try = c.in.read, c.out.write // once, and not with every call
	return c
}

// failed makes an error look as the net package's does. One of the raw connection itself does already.
func (c *conn) failed(op string, errno syscall.Errno) error {
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError(op, errno)}
}

// reading is the read under way.
type reading struct {
	mu    sync.Mutex
	p     []byte
	n     int
	errno syscall.Errno
	try   func(fd uintptr) (done bool)
}

// Read implements [net.Conn].
func (c *conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	r := &c.in
	r.mu.Lock()
	defer r.mu.Unlock()
	r.p, r.n, r.errno = p, 0, 0
	err := c.raw.Read(r.try)
	r.p = nil
	switch {
	case err != nil:
		return 0, err
	case r.errno != 0:
		return 0, c.failed("read", r.errno)
	case r.n == 0:
		return 0, io.EOF
	}
	return r.n, nil
}

func (r *reading) read(fd uintptr) bool {
	n, errno := call(syscall.SYS_READ, fd, unsafe.Pointer(unsafe.SliceData(r.p)), len(r.p))
	hasRead(fd, r.p[:max(n, 0)])
	if errno == syscall.EAGAIN {
		return false
	}
	r.n, r.errno = n, errno
	return true
}

// writing is the write under way.
type writing struct {
	mu    sync.Mutex
	left  []syscall.Iovec
	errno syscall.Errno
	try   func(fd uintptr) (done bool)

	iovecs []syscall.Iovec // memory of left
}

// Write implements [net.Conn].
func (c *conn) Write(p []byte) (int, error) {
	w := &c.out
	w.mu.Lock()
	defer w.mu.Unlock()
	w.add(p)
	left, err := c.write()
	return len(p) - left, err
}

// WriteBuffers implements [Buffers].
func (c *conn) WriteBuffers(pieces net.Buffers) error {
	w := &c.out
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range pieces {
		w.add(p)
	}
	_, err := c.write()
	return err
}

func (w *writing) add(p []byte) {
	if len(p) > 0 {
		v := syscall.Iovec{Base: unsafe.SliceData(p)}
		v.SetLen(len(p)) // whose type is the architecture's
		w.iovecs = append(w.iovecs, v)
	}
}

// write writes what was added, and tells how many bytes it did not.
func (c *conn) write() (left int, err error) {
	w := &c.out
	w.left, w.errno = w.iovecs, 0
	err = c.raw.Write(w.try)
	if err == nil && w.errno != 0 {
		err = c.failed("writev", w.errno)
	}
	for _, v := range w.left {
		left += int(v.Len)
	}
	clear(w.iovecs) // it must not keep the pieces alive
	w.iovecs, w.left = w.iovecs[:0], nil
	return left, err
}

// maxIovecs is what the kernel takes in one call (UIO_MAXIOV).
const maxIovecs = 1024

func (w *writing) write(fd uintptr) bool {
	willWrite(fd)
	for len(w.left) > 0 {
		n, errno := call(syscall.SYS_WRITEV, fd, unsafe.Pointer(unsafe.SliceData(w.left)), min(len(w.left), maxIovecs))
		switch errno {
		case 0:
			w.wrote(n)
		case syscall.EAGAIN:
			return false
		default:
			w.errno = errno
			return true
		}
	}
	return true
}

// wrote takes n bytes off what is left.
func (w *writing) wrote(n int) {
	for len(w.left) > 0 && n >= int(w.left[0].Len) {
		n -= int(w.left[0].Len)
		w.left = w.left[1:]
	}
	if n > 0 {
		first := &w.left[0]
		first.Base = (*byte)(unsafe.Add(unsafe.Pointer(first.Base), n))
		first.SetLen(int(first.Len) - n)
	}
}

// call makes a system call that does not block, again where a signal came between.
func call(number, fd uintptr, p unsafe.Pointer, n int) (int, syscall.Errno) {
	for {
		r, _, errno := syscall.RawSyscall(number, fd, uintptr(p), uintptr(n))
		if errno != syscall.EINTR {
			return int(r), errno
		}
	}
}
