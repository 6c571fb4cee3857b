package rpc

import (
	"bytes"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
)

// fed is a connection on which the peer says what it is made of, so many bytes at a time, and hangs up a second later.
type fed struct {
	data   []byte
	atOnce int
	closed chan struct{}
}

func (f *fed) Read(p []byte) (int, error) {
	if len(f.data) == 0 {
		select {
		case <-time.After(time.Second): // deadlines pass
		case <-f.closed:
		}
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), f.atOnce)], f.data)
	f.data = f.data[n:]
	return n, nil
}

func (f *fed) Write(p []byte) (int, error) {
	select {
	case <-f.closed:
		return 0, net.ErrClosed
	default:
		return len(p), nil
	}
}

func (f *fed) Close() error                   { close(f.closed); return nil }
func (*fed) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (*fed) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (*fed) SetDeadline(time.Time) error      { return nil }
func (*fed) SetReadDeadline(time.Time) error  { return nil }
func (*fed) SetWriteDeadline(time.Time) error { return nil }

// FuzzConn says anything after the preface: nothing panics, hangs, or is left over. Of the two arguments the first is how many bytes come at a
// time (0: all). The seeds are the transcripts.
func FuzzConn(f *testing.F) {
	for i, c := range transcripts {
		var said strings.Builder
		said.WriteString("SETTINGS\n")
		for line := range strings.Lines(c.text) {
			if w := strings.Fields(line); len(w) > 0 && w[0] != "<" && w[0] != "PASS" && w[0] != "CLOSE" {
				said.WriteString(line)
			}
		}
		f.Add(byte(i%3), (&rawPeer{t: f}).bytesOf(said.String()))
	}
	f.Fuzz(func(t *testing.T, atOnce byte, data []byte) {
		synctest.Test(t, func(t *testing.T) {
			s := newStand(t, Options{StreamWindow: firstWindow, ConnWindow: firstWindow, MaxStreams: 100, MaxMessage: 1 << 20})
			close(s.service.release)
			s.service.stubborn = s.service.release
			f := &fed{data: append(bytes.Clone([]byte(http2.ClientPreface)), data...), atOnce: int(atOnce), closed: make(chan struct{})}
			if atOnce == 0 {
				f.atOnce = 1 << 20
			}
			c := newConn(s.Server, f)
			s.conns[c] = struct{}{}
			if c.handshake() == nil {
				s.work(task{conn: c})
			} else {
				c.fail()
			}
			synctest.Wait()
			time.Sleep(2 * time.Second)
			s.settled(t, c)
			s.mu.Lock()
			left := len(s.conns)
			s.mu.Unlock()
			require.Zero(t, left, "the connection is still there")
		})
	})
}
