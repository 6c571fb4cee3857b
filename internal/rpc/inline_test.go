package rpc

import (
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/test/bufconn"
)

// written counts how often a server writes.
type written struct {
	*bufconn.Listener
	n atomic.Int32
}

type writtenConn struct {
	net.Conn
	n *atomic.Int32
}

func (w *written) Accept() (net.Conn, error) {
	nc, err := w.Listener.Accept()
	return writtenConn{nc, &w.n}, err
}

func (w writtenConn) Write(p []byte) (int, error) {
	w.n.Add(1)
	return w.Conn.Write(p)
}

// bubble runs a test with a raw peer that has said hello. At its end nothing may be left.
func bubble(t *testing.T, o Options, f func(t *testing.T, s *stand, p *rawPeer)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, o)
		p := newRawPeer(t, s.pipe(t, 1<<20))
		p.say("SETTINGS")
		synctest.Wait()
		p.heard()
		f(t, s, p)
		_ = p.nc.Close()
		s.end(t)
	})
}

// What comes together is answered together: of every eight streams' answers one write is made.
func TestInlineAnswersAreWrittenTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, l := newStand(t, Options{}), &written{Listener: bufconn.Listen(1 << 20)}
		s.serve(l)
		nc, err := l.Dial()
		require.NoError(t, err)
		p := newRawPeer(t, nc)
		p.play(hello)
		var together strings.Builder
		for i := range 20 {
			fmt.Fprintf(&together, "HEADERS %d /t/once\nDATA %d x END\n", 2*i+1, 2*i+1)
		}
		frames := p.bytesOf(together.String())
		before := l.n.Load()
		_, err = p.nc.Write(frames)
		require.NoError(t, err)
		synctest.Wait()
		require.Equal(t, int32(3), l.n.Load()-before)
		require.Len(t, p.heard(), 20*3)
		_ = p.nc.Close()
		s.end(t)
	})
}

// A handler that waits, for whatever, holds up no other stream of its connection. The answers are in the order of the streams that do not wait.
func TestInlineWaitsHoldUpNobody(t *testing.T) {
	waits := map[string]string{
		"for a message":       "HEADERS 1 /t/echo\nDATA 1 a",
		"for something else":  "HEADERS 1 /t/wait\nDATA 1 a END",
		"for a stream's room": "SETTINGS INITIAL=1000\nHEADERS 1 /t/push\nDATA 1 3x600 END",
	}
	for name, begin := range waits {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{}, func(t *testing.T, s *stand, p *rawPeer) {
				for line := range strings.Lines(begin) {
					p.say(line)
				}
				for i := range 5 {
					p.say(fmt.Sprintf("HEADERS %d /t/once", 2*i+3))
					p.say(fmt.Sprintf("DATA %d x END", 2*i+3))
				}
				synctest.Wait()
				var order []string
				for _, line := range p.heard() {
					if strings.Contains(line, "re x") {
						order = append(order, line)
					}
				}
				require.Equal(t, []string{"DATA 3 re x", "DATA 5 re x", "DATA 7 re x", "DATA 9 re x", "DATA 11 re x"}, order)
				close(s.service.release)
			})
		})
	}
}

// Of one read, the streams behind one that waits are taken over by whoever reads next.
func TestInlineHandsOnWhatIsReady(t *testing.T) {
	bubble(t, Options{}, func(t *testing.T, s *stand, p *rawPeer) {
		frames := p.bytesOf(`
			HEADERS 1 /t/once
			DATA 1 x END
			HEADERS 3 /t/wait
			DATA 3 x END
			HEADERS 5 /t/wait
			DATA 5 x END
			HEADERS 7 /t/once
			DATA 7 x END`)
		_, err := p.nc.Write(frames)
		require.NoError(t, err)
		synctest.Wait()
		heard := p.heard()
		require.Len(t, heard, 6)
		require.Equal(t, "DATA 7 re x", heard[4])
		close(s.service.release)
		synctest.Wait()
		require.Len(t, p.heard(), 6)
	})
}

// A small message before one that is larger than the window: the peer gets the credit without which it could not go on, whether the handler
// has begun to wait for the second, or was not started before the first part of it came, or reads nothing before the window is full.
func TestInlineSmallBeforeLarge(t *testing.T) {
	for _, how := range []string{"waits", "starts", "late"} {
		bubble(t, Options{StreamWindow: firstWindow}, func(t *testing.T, s *stand, p *rawPeer) {
			p.say("HEADERS 1 " + map[bool]string{true: "/t/late", false: "/t/collect"}[how == "late"])
			left, credit := append(message("x"), message(strings.Repeat("y", 200_000))...), firstWindow
			for len(left) > 0 {
				n := min(len(left), credit, minFrame)
				if how == "waits" && credit == firstWindow {
					n = len(message("x"))
				}
				if n == 0 && how == "late" {
					close(s.service.release)
					how = "released"
				} else {
					require.Positive(t, n, "stuck")
					require.NoError(t, p.fr.WriteData(1, n == len(left), left[:n]))
				}
				left, credit = left[n:], credit-n
				synctest.Wait()
				for _, line := range p.heard() {
					var more int
					if _, err := fmt.Sscanf(line, "WINDOW 1 %d", &more); err == nil {
						credit += more
					}
				}
			}
			p.play(`
PING
< PING pingping ACK`)
		})
	}
}

// What is ready when the peer breaks the protocol is not run, nor left lying.
func TestInlineReadyWhenThePeerIsWrong(t *testing.T) {
	bubble(t, Options{}, func(t *testing.T, _ *stand, p *rawPeer) {
		_, err := p.nc.Write(p.bytesOf("HEADERS 1 /t/echo\nDATA 1 a END\nFRAME 6 0 0 00"))
		require.NoError(t, err)
		p.play(`
< GOAWAY 1 FRAME_SIZE_ERROR
< HANGS UP`)
	})
}

// A stream with a large message is no work for who reads the connection.
func TestInlineHeavy(t *testing.T) {
	bubble(t, Options{}, func(t *testing.T, _ *stand, p *rawPeer) {
		p.say("HEADERS 1 /t/collect")
		p.say("DATA 1 x*200000 END")
		synctest.Wait()
		require.Contains(t, p.heard(), "DATA 1 1 of 200000")
	})
}

// Handlers count until they return: who resets its streams does not get to have more of them run.
func TestMaxStreams(t *testing.T) {
	bubble(t, Options{MaxStreams: 2}, func(_ *testing.T, _ *stand, p *rawPeer) {
		p.play(`
HEADERS 1 /t/echo
HEADERS 3 /t/echo
HEADERS 5 /t/echo
< RST 5 REFUSED_STREAM
RST 1
HEADERS 7 /t/echo END
< HEADERS 7 status=200 grpc-status=0 END
DATA 3 a END
< HEADERS 3 status=200
< DATA 3 a
< HEADERS 3 grpc-status=0 END`)
	})
	synctest.Test(t, func(t *testing.T) {
		s, running := newStand(t, Options{MaxStreams: 2}), make(chan struct{})
		s.service.stubborn = running
		p := newRawPeer(t, s.pipe(t, 1<<20))
		p.play(hello + `
HEADERS 1 /t/stubborn END
HEADERS 3 /t/stubborn END
PASS 1ms
RST 1
RST 3
HEADERS 5 /t/once END
< RST 5 REFUSED_STREAM`)
		close(running)
		synctest.Wait()
		p.play(`
HEADERS 7 /t/collect END
< HEADERS 7 status=200
< DATA 7 0 of 0
< HEADERS 7 grpc-status=0 END`)
		_ = p.nc.Close()
		s.end(t)
	})
}

// A peer that asks and does not read is not listened to, until it is left; and what it has asked for does not pile up.
func TestPeerThatDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		nc := s.pipe(t, 64<<10)
		go func() {
			p := &rawPeer{t: t, nc: nc}
			_, _ = nc.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
			_, _ = nc.Write(p.bytesOf("SETTINGS\nHEADERS 1 /t/beside\nDATA 1 x*60000\nWINDOW 0 1000000\nWINDOW 1 1000000\nDATA 1 x*60000"))
			time.Sleep(time.Millisecond) // until the handler cannot write any more
			ping := p.bytesOf("PING")
			for {
				if _, err := nc.Write(ping); err != nil {
					return
				}
			}
		}()
		time.Sleep(time.Second)
		synctest.Wait()
		most := 0
		s.mu.Lock()
		open := len(s.conns)
		for c := range s.conns {
			c.mu.Lock()
			most = max(most, len(c.out.tail))
			c.mu.Unlock()
		}
		s.mu.Unlock()
		require.Equal(t, 1, open)
		require.Less(t, most, maxControl+readBuffer+64<<10)
		time.Sleep(quietTime + answerTime)
		synctest.Wait()
		s.mu.Lock()
		open = len(s.conns)
		s.mu.Unlock()
		require.Zero(t, open)
		s.end(t)
	})
}
