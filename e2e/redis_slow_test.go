package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// slowLink is a TCP proxy in front of a Redis that delays everything, in both directions.
type slowLink struct {
	addr  string
	delay atomic.Int64 // ns, each way
}

func slowLinkTo(t testing.TB, target string) *slowLink {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	s := &slowLink{addr: l.Addr().String()}
	go func() {
		for {
			client, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			server, dialed := net.Dial("tcp", target)
			if err != nil || dialed != nil {
				if err == nil {
					_ = client.Close()
				}
				continue
			}
			go s.carry(server, client)
			go s.carry(client, server)
		}
	}()
	return s
}

// carry forwards data from one side to the other, each piece its delay later, and closes both at the end.
func (s *slowLink) carry(to, from net.Conn) {
	type piece struct {
		data []byte
		due  time.Time
	}
	pieces := make(chan piece, 1024)
	go func() {
		for p := range pieces {
			time.Sleep(time.Until(p.due))
			_, _ = to.Write(p.data) // the other side ends if this one is gone
		}
		_, _ = to.Close(), from.Close()
	}()
	defer close(pieces)
	for {
		data := make([]byte, 64<<10)
		n, err := from.Read(data)
		if n > 0 {
			pieces <- piece{data[:n], time.Now().Add(time.Duration(s.delay.Load()))}
		}
		if err != nil {
			return
		}
	}
}

// A Redis that takes 60 ms to answer costs no request, and none waits for it: decisions are made without it, and their
// number is reported. Replicas' publications arrive that much later, but do arrive.
func TestSlowRedis(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	link := slowLinkTo(t, r.addr)
	f := start(t, options{replicas: 3, madeKeys: true, top: fmt.Sprintf("state: {redis: {url: %q, lease: 20s}}\n", "redis://"+link.addr+"/0")})
	f.allReplicas(3)
	f.oneKey()
	alone := func() (n float64) {
		for _, admin := range f.admins {
			n += metric(t, admin, "tandem_tickets_consumed_locally_total")
		}
		return n
	}
	load := f.traffic(4)
	load.wait(t, 100, time.Second)
	before := alone()
	link.delay.Store(int64(30 * time.Millisecond))
	load.wait(t, 100, 3*time.Second)
	require.Greater(t, alone(), before+50, "no request waits 60 ms")
	f.allReplicas(3)
	for i := range 3 {
		f.reportsReady(i, "redis: up", "slow is not down")
	}
	link.delay.Store(0)
	load.wait(t, 100, 2*time.Second) // those that Redis failed last do not ask it for 250 ms
	settled := alone()
	load.wait(t, 200, time.Second)
	t.Logf("%d requests; spent without Redis: %.0f before, %.0f after it was slow, %.0f in the 200 since", load.sent.Load(), before, settled, alone()-settled)
	load.stop()
	load.require(t)
	count, within := f.lag()
	require.Less(t, within["0.05"], count, "what was told meanwhile is seen to have been late")
	f.logLag()
}

// A master dies under load, Sentinels promote another, and no request is lost; then all replicas know each other
// again.
func TestRedisFailover(t *testing.T) {
	t.Parallel()
	master := startRedis(t)
	host, port, err := net.SplitHostPort(master.addr)
	require.NoError(t, err)
	follower := startRedis(t, "--replicaof", host+" "+port)
	sentinels := make([]*redis, 3)
	for i := range sentinels {
		file := filepath.Join(t.TempDir(), "sentinel.conf")
		require.NoError(t, os.WriteFile(file, fmt.Appendf(nil,
			"sentinel monitor shared %s %s 2\nsentinel down-after-milliseconds shared 500\nsentinel failover-timeout shared 2000\n", host, port), 0o600))
		sentinels[i] = startSentinel(t, file)
	}
	require.Eventually(t, func() bool {
		for _, s := range sentinels {
			if !strings.Contains(s.all("INFO sentinel"), "slaves=1,sentinels=3") {
				return false
			}
		}
		return true
	}, patience, 50*time.Millisecond, "sentinels know each other and the follower")
	top := fmt.Sprintf("state: {redis: {url: %q, mode: sentinel, sentinelMaster: shared, nodes: [%q, %q], lease: 1s}}\n", "redis://"+sentinels[0].addr, sentinels[1].addr, sentinels[2].addr)
	n := severalReplicas(3)
	f := start(t, options{replicas: n, top: top, madeKeys: true})
	f.allReplicas(n)
	f.oneKey()
	load := f.traffic(4)
	load.wait(t, 50, 0)
	master.stop(syscall.SIGKILL)
	began := time.Now()
	require.Eventually(t, func() bool { return strings.Contains(follower.all("INFO replication"), "role:master") }, patience, 20*time.Millisecond)
	made := time.Since(began)
	up := func(want float64) bool {
		for _, admin := range f.admins {
			if metric(t, admin, "tandem_redis_up") != want {
				return false
			}
		}
		return true
	}
	require.Eventually(t, func() bool { return up(1) }, patience, 10*time.Millisecond)
	f.allReplicas(n)
	t.Logf("another master after %v, all replicas with it after %v", made, time.Since(began))
	load.wait(t, 50, time.Second)
	load.stop()
	load.require(t)
	for i := range n {
		f.reportsReady(i, fmt.Sprintf("redis: up for .*, %d replica", n), "all are there")
	}
}

func startSentinel(t testing.TB, file string) *redis {
	t.Helper()
	path := tool(t, "REDIS_SERVER", "redis-server", ".tools/bin/redis-server")
	s := &redis{t: t, addr: ports(t, 1)[0]}
	_, port, err := net.SplitHostPort(s.addr)
	require.NoError(t, err)
	s.process = startProcess(t, filepath.Dir(file), "sentinel-"+port, path, file, "--sentinel", "--bind", "127.0.0.1", "--port", port)
	s.awaitPort()
	return s
}

// all sends one command and returns the whole answer, which is one bulk string; "" if the connection ends before: a
// promoted follower closes all connections.
func (r *redis) all(command string) string {
	r.t.Helper()
	c, err := net.DialTimeout("tcp", r.addr, patience)
	require.NoError(r.t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	_, err = fmt.Fprintf(c, "%s\r\n", command)
	require.NoError(r.t, err)
	answer := bufio.NewReader(c)
	head, err := answer.ReadString('\n')
	if err != nil {
		return ""
	}
	n, err := strconv.Atoi(strings.Trim(head, "$\r\n"))
	require.NoError(r.t, err, "%s", head)
	text := make([]byte, n)
	if _, err = io.ReadFull(answer, text); err != nil {
		return ""
	}
	return string(text)
}
