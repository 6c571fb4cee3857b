// Package redisserver gives tests a real redis-server of their own, which they may kill, freeze and start again.
package redisserver

import (
	"net"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
)

// startTime is how long a server may take to start, on a machine that may stand still for seconds.
const startTime = time.Minute

// Server is a redis-server that stores nothing on disk.
type Server struct {
	Addr string // host:port

	t    testing.TB
	path string
	args []string
	cmd  *exec.Cmd // nil: it is not running
}

// New starts a server that runs until the test ends. Tests skip without a redis-server ($REDIS_SERVER, or in PATH),
// unless TANDEM_REQUIRE_TOOLS is set: then they fail.
func New(t testing.TB, args ...string) *Server {
	t.Helper()
	path := os.Getenv("REDIS_SERVER")
	if path == "" {
		path = "redis-server"
	}
	path, err := exec.LookPath(path)
	if err != nil {
		const missing = "redis-server is missing: run scripts/tools.sh, or set REDIS_SERVER"
		require.Empty(t, os.Getenv("TANDEM_REQUIRE_TOOLS"), missing)
		t.Skip(missing)
	}
	addr := loopback.Addresses(t, 1)[0]
	_, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	args = append(args, "--bind", "127.0.0.1", "--port", port, "--dir", t.TempDir()) // a configuration file comes first
	if !slices.Contains(args, "--sentinel") {
		args = append(args, "--save", "", "--appendonly", "no")
	}
	s := &Server{Addr: addr, t: t, path: path, args: args}
	s.Start()
	t.Cleanup(s.Kill)
	return s
}

// Start starts a server that was killed, with the same address, and waits until it accepts connections.
func (s *Server) Start() {
	s.t.Helper()
	s.cmd = exec.Command(s.path, s.args...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(s.t, s.cmd.Start())
	require.Eventually(s.t, func() bool {
		c, err := net.Dial("tcp", s.Addr)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}, startTime, 5*time.Millisecond, "redis-server accepts connections")
}

// Kill ends the server as a crash does.
func (s *Server) Kill() {
	if s.cmd != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

// Signal sends a signal: SIGSTOP freezes the server, SIGCONT lets it go on.
func (s *Server) Signal(sig os.Signal) {
	s.t.Helper()
	require.NoError(s.t, s.cmd.Process.Signal(sig))
}
