package rawconn

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
)

// pair is a raw connection and the plain one at its other end.
func pair(t testing.TB) (raw net.Conn, plain *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	raw, err = Dial(new(net.Dialer))(context.Background(), "tcp", l.Addr().String())
	require.NoError(t, err)
	other, err := l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = raw.Close(); _ = other.Close() })
	return raw, other.(*net.TCPConn)
}

// small gives a connection a small buffer for what it writes.
func small(t *testing.T, nc net.Conn) {
	socket, err := nc.(syscall.Conn).SyscallConn()
	require.NoError(t, err)
	require.NoError(t, socket.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF, 16<<10) }))
}

// pieces cuts data at random, with empty pieces among them.
func pieces(r *rand.Rand, data []byte, most int) (cut net.Buffers) {
	for len(data) > 0 {
		n := min(r.IntN(most), len(data))
		cut, data = append(cut, data[:n]), data[n:]
	}
	return cut
}

// Everything arrives as it was sent, whichever way, through a buffer that is far too small for it, while both sides write.
func TestBothWays(t *testing.T) {
	const size = 1 << 20
	for name, most := range map[string]int{"more pieces than a call takes": 64, "pieces larger than the socket's buffer": 1 << 20} {
		t.Run(name, func(t *testing.T) {
			raw, plain := pair(t)
			small(t, raw)
			r := rand.New(rand.NewPCG(1, 2))
			data := make([]byte, size)
			for i := range data {
				data[i] = byte(r.Uint32())
			}
			cut := pieces(r, data, most)
			before := len(cut)

			var group sync.WaitGroup
			group.Go(func() { // there
				if w, ok := raw.(Buffers); ok {
					if err := w.WriteBuffers(cut); err != nil {
						t.Error(err)
					}
				}
				n, err := raw.Write(data)
				if n != size || err != nil {
					t.Error(n, err)
				}
			})
			group.Go(func() { // and back
				if _, err := plain.Write(data); err != nil {
					t.Error(err)
				}
			})
			group.Go(func() {
				got := make([]byte, size)
				if _, err := io.ReadFull(raw, got); err != nil || !bytes.Equal(got, data) {
					t.Error("back", err)
				}
			})
			twice := 1
			if _, ok := raw.(Buffers); ok {
				twice = 2
			}
			for range twice {
				got := make([]byte, size)
				_, err := io.ReadFull(plain, got)
				require.NoError(t, err)
				require.True(t, bytes.Equal(got, data))
			}
			group.Wait()
			require.Len(t, cut, before, "the pieces are the caller's")
			require.True(t, bytes.Equal(bytes.Join(cut, nil), data))
		})
	}
}

// A raw connection ends, and is ended, as any other.
func TestEnds(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(raw net.Conn, plain *net.TCPConn) error
		is   error
		late bool // it is a timeout
	}{
		"the peer has closed": {do: func(raw net.Conn, plain *net.TCPConn) error {
			_ = plain.Close()
			_, err := raw.Read(make([]byte, 1))
			return err
		}, is: io.EOF},
		"the peer closes while we wait": {do: func(raw net.Conn, plain *net.TCPConn) error {
			time.AfterFunc(time.Millisecond, func() { _ = plain.Close() })
			_, err := raw.Read(make([]byte, 1))
			return err
		}, is: io.EOF},
		"the peer has reset": {do: func(raw net.Conn, plain *net.TCPConn) error {
			_ = plain.SetLinger(0)
			_ = plain.Close()
			_, err := raw.Read(make([]byte, 1))
			return err
		}, is: syscall.ECONNRESET},
		"written to one who has reset": {do: func(raw net.Conn, plain *net.TCPConn) error {
			_ = plain.SetLinger(0)
			_ = plain.Close()
			_, _ = raw.Read(make([]byte, 1)) // the reset is here
			n, err := raw.Write(make([]byte, 10))
			if n != 0 {
				return errors.New("something was written")
			}
			return err
		}, is: syscall.EPIPE},
		"closed by ourselves while we read": {do: func(raw net.Conn, _ *net.TCPConn) error {
			time.AfterFunc(time.Millisecond, func() { _ = raw.Close() })
			_, err := raw.Read(make([]byte, 1))
			return err
		}, is: net.ErrClosed},
		"closed by ourselves before we write": {do: func(raw net.Conn, _ *net.TCPConn) error {
			_ = raw.Close()
			_, err := raw.Write(make([]byte, 1))
			return err
		}, is: net.ErrClosed},
		"nothing comes in time": {do: func(raw net.Conn, _ *net.TCPConn) error {
			_ = raw.SetReadDeadline(time.Now().Add(time.Millisecond))
			_, err := raw.Read(make([]byte, 1))
			return err
		}, is: os.ErrDeadlineExceeded, late: true},
		"nobody reads in time": {do: func(raw net.Conn, plain *net.TCPConn) error {
			go func() {
				_, _ = io.ReadFull(plain, make([]byte, 1)) // some of it is here
				_ = raw.SetWriteDeadline(time.Now())
			}()
			n, err := raw.Write(make([]byte, 64<<20))
			if n == 0 || n == 64<<20 {
				return errors.New("it is not said how much was written")
			}
			return err
		}, is: os.ErrDeadlineExceeded, late: true},
	} {
		t.Run(name, func(t *testing.T) {
			raw, plain := pair(t)
			err := c.do(raw, plain)
			require.ErrorIs(t, err, c.is)
			var ne net.Error
			require.Equal(t, c.late, errors.As(err, &ne) && ne.Timeout())
		})
	}
}

// After a deadline the connection goes on where it was, and an empty read or write is nothing.
func TestGoesOn(t *testing.T) {
	raw, plain := pair(t)
	require.NoError(t, raw.SetReadDeadline(time.Now().Add(-time.Second)))
	_, err := raw.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, raw.SetReadDeadline(time.Time{}))
	n, err := raw.Read(nil)
	require.NoError(t, err)
	require.Zero(t, n)
	n, err = raw.Write(nil)
	require.NoError(t, err)
	require.Zero(t, n)
	_, err = plain.Write([]byte("hello"))
	require.NoError(t, err)
	got := make([]byte, 9)
	n, err = raw.Read(got)
	require.NoError(t, err)
	require.Equal(t, "hello", string(got[:n]))
}

// owned is a connection with methods of its own, like that of extproc's Sources.
type owned struct {
	*net.TCPConn
	closed bool
}

func (o *owned) Close() error {
	o.closed = true
	return o.TCPConn.Close()
}

// What somebody has made of a connection is raw too, and stays what it is otherwise; what is no socket stays what it is.
func TestOthers(t *testing.T) {
	_, plain := pair(t)
	o := &owned{TCPConn: plain}
	raw := New(o)
	if runtime.GOOS == "linux" {
		require.Implements(t, (*Buffers)(nil), raw)
	}
	require.Implements(t, (*syscall.Conn)(nil), raw)
	require.NoError(t, raw.(interface{ CloseWrite() error }).CloseWrite())
	require.NoError(t, raw.Close())
	require.True(t, o.closed)

	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	require.Same(t, a, New(a))
}

// Neither way costs memory.
func TestAllocs(t *testing.T) {
	raw, plain := pair(t)
	out, in := make([]byte, 1000), make([]byte, 1000)
	cut := net.Buffers{out[:300], out[300:]}
	budget.Allocs(t, 100, 0, func() {
		if w, ok := raw.(Buffers); ok {
			_ = w.WriteBuffers(cut)
		} else {
			_, _ = raw.Write(out)
		}
		_, _ = io.ReadFull(plain, in)
		_, _ = plain.Write(in)
		_, _ = io.ReadFull(raw, in)
	})
}
