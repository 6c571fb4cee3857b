package e2e

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// redis is a redis-server of the test's own.
type redis struct {
	*process
	t     testing.TB
	addr  string
	start func() *process
}

func startRedis(t testing.TB, args ...string) *redis {
	t.Helper()
	path := tool(t, "REDIS_SERVER", "redis-server", ".tools/bin/redis-server")
	r := &redis{t: t, addr: ports(t, 1)[0]}
	dir := t.TempDir()
	_, port, err := net.SplitHostPort(r.addr)
	require.NoError(t, err)
	r.start = func() *process {
		p := startProcess(t, dir, "redis-"+port, path, append([]string{"--bind", "127.0.0.1", "--port", port, "--dir", dir, "--save", "", "--appendonly", "no"}, args...)...)
		r.awaitPort()
		return p
	}
	r.process = r.start()
	return r
}

func (r *redis) awaitPort() {
	r.t.Helper()
	require.Eventually(r.t, func() bool {
		c, err := net.Dial("tcp", r.addr)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}, patience, 5*time.Millisecond)
}

// do sends one command, as words, and returns the first line of the answer.
func (r *redis) do(words ...string) string {
	r.t.Helper()
	c, err := net.DialTimeout("tcp", r.addr, patience)
	require.NoError(r.t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	_, err = fmt.Fprintf(c, "%s\r\n", strings.Join(words, " "))
	require.NoError(r.t, err)
	line, err := bufio.NewReader(c).ReadString('\n')
	require.NoError(r.t, err)
	return strings.TrimSpace(line)
}

// yaml has a lease that outlives the pauses of a busy machine.
func (r *redis) yaml() string { return r.leased("20s") }

// briefly has a short lease that a test can wait for: replicas may be taken for dead, and return, at any time.
func (r *redis) briefly() string { return r.leased("1s") }

func (r *redis) leased(lease string) string {
	return fmt.Sprintf("state: {redis: {url: %q, lease: %s}}\n", "redis://"+r.addr+"/0", lease)
}
