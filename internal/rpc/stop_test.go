package rpc

import (
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// stopping tells GracefulStop to begin, and when it has ended.
func (s *stand) stopping() chan struct{} {
	stopped := make(chan struct{})
	go func() { s.GracefulStop(); close(stopped) }()
	return stopped
}

func requireOpen(t *testing.T, ch chan struct{}) {
	t.Helper()
	synctest.Wait()
	select {
	case <-ch:
		require.Fail(t, "too soon")
	default:
	}
}

// A graceful stop says goodbye in two steps: what the peer sent before it heard the first is served, and after the second nothing more
// begins. When the last stream has ended the connection does.
func TestGracefulStop(t *testing.T) {
	bubble(t, Options{}, func(t *testing.T, s *stand, p *rawPeer) {
		p.play(`
HEADERS 1 /t/echo
DATA 1 a
< HEADERS 1 status=200
< DATA 1 a`)
		stopped := s.stopping()
		requireOpen(t, stopped)
		p.play(`
< GOAWAY 2147483647 NO_ERROR
< PING farewell
HEADERS 3 /t/once
DATA 3 before END
< HEADERS 3 status=200
< DATA 3 re before
< HEADERS 3 grpc-status=0 END`)
		requireOpen(t, stopped)
		p.play(`
ANSWER farewell
HEADERS 5 /t/once
DATA 5 x END
DATA 1 b
< GOAWAY 3 NO_ERROR
< RST 5 REFUSED_STREAM
< DATA 1 b`)
		requireOpen(t, stopped)
		p.play(`
BYTES 1 - END
< HEADERS 1 grpc-status=0 END
< HANGS UP`)
		<-stopped
	})
}

// A peer that does not answer is told its last stream after a second; who has no stream is let go at once.
func TestGracefulStopOfSilentPeers(t *testing.T) {
	bubble(t, Options{}, func(t *testing.T, s *stand, p *rawPeer) {
		begun, stopped := time.Now(), s.stopping()
		<-stopped
		synctest.Wait()
		require.Equal(t, goAwayTime, time.Since(begun))
		require.Equal(t, []string{"GOAWAY 2147483647 NO_ERROR", "PING farewell", "GOAWAY 0 NO_ERROR", "HANGS UP"}, p.heard())
	})
}

// Who has not finished saying hello when the server stops may do so, and is sent away.
func TestGracefulStopDuringHandshake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{})
		nc := s.pipe(t, 1<<20)
		synctest.Wait()
		stopped := s.stopping()
		requireOpen(t, stopped)
		p := newRawPeer(t, nc)
		p.play(`
SETTINGS
HEADERS 1 /t/once
DATA 1 x END
< SETTINGS
< WINDOW 0 67043329
< GOAWAY 2147483647 NO_ERROR
< PING farewell
< SETTINGS ACK
< HEADERS 1 status=200
< DATA 1 re x
< HEADERS 1 grpc-status=0 END
ANSWER farewell
< GOAWAY 1 NO_ERROR
< HANGS UP`)
		<-stopped
		s.end(t)
	})
	synctest.Test(t, func(t *testing.T) { // and who says nothing does not hold it up
		s := newStand(t, Options{})
		_ = s.pipe(t, 1<<20)
		synctest.Wait()
		begun := time.Now()
		<-s.stopping()
		require.Equal(t, goAwayTime, time.Since(begun))
		s.end(t)
	})
}

// A stream that is reset before its handler's turn came is the last to end, too.
func TestGracefulStopEndsAfterReset(t *testing.T) {
	for _, method := range []string{"/t/wait", "/t/beside"} {
		bubble(t, Options{}, func(_ *testing.T, s *stand, p *rawPeer) {
			stopped := s.stopping()
			synctest.Wait()
			p.heard()
			p.say("HEADERS 1 " + method)
			p.say("DATA 1 x*200000")
			p.say("RST 1")
			p.say("ANSWER farewell")
			<-stopped
		})
	}
}

// Stop ends a GracefulStop that would wait for ever: the handlers find their streams cancelled.
func TestStop(t *testing.T) {
	bubble(t, Options{}, func(t *testing.T, s *stand, p *rawPeer) {
		for _, line := range []string{"HEADERS 1 /t/wait", "DATA 1 a", "HEADERS 3 /t/echo", "HEADERS 5 /t/beside", "HEADERS 7 /t/echo", "DATA 7 a", "BYTES 7 0000000002aa"} {
			p.say(line)
		}
		stopped := s.stopping()
		time.Sleep(20 * time.Second)
		requireOpen(t, stopped)
		s.Stop()
		<-stopped
		synctest.Wait()
		require.Zero(t, s.idle.Load())
	})
}

// What is written last arrives, though the peer has said more that nobody will read: a connection that is closed so would be reset.
func TestGracefulStopLosesNothing(t *testing.T) {
	s := newStand(t, Options{MaxMessage: 8 << 20})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.serve(l)
	nc, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer nc.Close()
	p := &rawPeer{t: t, nc: nc}
	_, err = nc.Write(append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), p.bytesOf(`
SETTINGS INITIAL=100000000
WINDOW 0 100000000
HEADERS 1 /t/push
DATA 1 1x3000000 END`)...))
	require.NoError(t, err)
	require.Eventually(t, func() bool { // it is all written, as far as the system takes it
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.lastID == 1
		}
		return false
	}, 10*time.Second, time.Millisecond)
	stopped := s.stopping()
	_, err = nc.Write(p.bytesOf("ANSWER farewell\nPING\nPING"))
	require.NoError(t, err)
	<-time.After(20 * time.Millisecond) // in which a server that hangs up at once would
	_, err = nc.Write(p.bytesOf("PING"))
	require.NoError(t, err)
	all, err := io.ReadAll(nc)
	require.NoError(t, err)
	require.Greater(t, len(all), 3_000_000)
	_ = nc.Close()
	<-stopped
	require.NoError(t, <-s.served)
}
