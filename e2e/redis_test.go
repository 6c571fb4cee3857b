package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
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
		require.Eventually(t, func() bool {
			c, err := net.Dial("tcp", r.addr)
			if err == nil {
				_ = c.Close()
			}
			return err == nil
		}, 10*time.Second, 5*time.Millisecond)
		return p
	}
	r.process = r.start()
	return r
}

// do sends one command, as words, and returns the first line of the answer.
func (r *redis) do(words ...string) string {
	r.t.Helper()
	c, err := net.DialTimeout("tcp", r.addr, time.Second)
	require.NoError(r.t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	_, err = fmt.Fprintf(c, "%s\r\n", strings.Join(words, " "))
	require.NoError(r.t, err)
	line, err := bufio.NewReader(c).ReadString('\n')
	require.NoError(r.t, err)
	return strings.TrimSpace(line)
}

func (r *redis) yaml() string {
	return fmt.Sprintf("state: {redis: {url: %q, lease: 1s}}\n", "redis://"+r.addr+"/0")
}

// known is what a replica shows of its state.
type known struct {
	Reservations int `json:"reservations"`
	Pools        []struct {
		Blocks    int `json:"blocks"`
		Endpoints []struct {
			Address string `json:"address"`
			Others  int    `json:"others_requests"`
			Failed  bool   `json:"failed"`
		} `json:"endpoints"`
	} `json:"pools"`
}

func (k known) others() (n int) {
	for _, e := range k.Pools[0].Endpoints {
		n += e.Others
	}
	return n
}

func (f *fleet) known(replica int) (k known) {
	f.t.Helper()
	require.NoError(f.t, getJSON(f.admins[replica]+"/debug/state", &k))
	require.NotEmpty(f.t, k.Pools)
	return k
}

// ready is what a replica answers at /readyz.
func (f *fleet) ready(replica int) (status int, body string) {
	f.t.Helper()
	resp, err := client.Get(f.admins[replica] + "/readyz")
	require.NoError(f.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(f.t, err)
	return resp.StatusCode, string(text)
}

func (f *fleet) allReplicas(n int) {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		for i, admin := range f.admins {
			if f.tandems[i].running() && metric(f.t, admin, "tandem_replicas") != float64(n) {
				return false
			}
		}
		return true
	}, 15*time.Second, 10*time.Millisecond, "the replicas do not all know each other")
}

func chat(content string) string {
	return `{"model":"tiny","messages":[{"role":"user","content":` + strconv.Quote(content) + `}],"max_tokens":4}`
}

// What one replica routes, every other knows: within 100 ms, and mostly long before the answer is there.
func TestReplicasKnowWhatTheOthersRoute(t *testing.T) {
	r := startRedis(t)
	f := start(t, options{replicas: 3, top: r.yaml(), madeKeys: true})
	f.allReplicas(3)
	var slowest time.Duration
	for i := range 10 {
		a := f.post("/v1/chat/completions", chat(fmt.Sprintf("%d: %s", i, strings.Repeat("a long prompt of its own ", 400))))
		require.Equal(t, 200, a.status, a.body)
		began := time.Now()
		require.Eventually(t, func() bool {
			first := f.known(0).Pools[0].Blocks
			return first > 10*(i+1) && f.known(1).Pools[0].Blocks == first && f.known(2).Pools[0].Blocks == first
		}, 5*time.Second, time.Millisecond)
		slowest = max(slowest, time.Since(began))
	}
	t.Logf("known to all at most %v after the answer", slowest)
	require.Less(t, slowest, 200*time.Millisecond, "100 ms, and as much for three times /debug/state")
	status, body := f.ready(0)
	require.Equal(t, 200, status)
	require.Regexp(t, `^ok\nredis: up for .*, 3 replicas\n$`, body)
	require.Equal(t, "0", strings.TrimLeft(r.do("EXISTS", "no-such-key"), ":"))
}

// A killed replica takes its bookings with it as soon as its lease ends, although the answer that they are for runs on.
func TestKilledReplicasBookingsEndWithItsLease(t *testing.T) {
	r := startRedis(t)
	f := start(t, options{replicas: 2, top: r.yaml(), madeKeys: true, engineArgs: []string{"--decode-step", "20ms"}})
	f.allReplicas(2)
	var answers sync.WaitGroup
	for i := range 12 {
		answers.Go(func() {
			a := f.post("/v1/completions", fmt.Sprintf(`{"model":"tiny","prompt":"long answer %d","max_tokens":200,"stream":true}`, i))
			require.Equal(t, 200, a.status)
			require.Contains(t, a.body, "[DONE]")
		})
	}
	require.Eventually(t, func() bool {
		a, b := f.known(0), f.known(1)
		return a.Reservations+b.Reservations == 12 && a.Reservations > 0 && a.others() == b.Reservations && b.others() == a.Reservations
	}, 10*time.Second, 5*time.Millisecond, "each knows what the other has booked")
	f.tandems[0].stop(syscall.SIGKILL)
	began := time.Now()
	require.Eventually(t, func() bool { return f.known(1).others() == 0 }, 5*time.Second, 5*time.Millisecond)
	t.Logf("void after %v", time.Since(began))
	require.Less(t, time.Since(began), 1500*time.Millisecond, "a lease of 1 s")
	answers.Wait()
}

// traffic sends requests until it is told to stop, and counts them.
type traffic struct {
	sent, failed atomic.Int64
	first        atomic.Pointer[string]
	stop         func()
}

func (f *fleet) traffic(clients int) *traffic {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t := &traffic{}
	for i := range clients {
		running.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				a, err := f.try(context.Background(), http.MethodPost, "/v1/chat/completions", chat(fmt.Sprintf("client %d, %s turn %d", i, strings.Repeat("text ", 200), n)))
				t.sent.Add(1)
				if err != nil || a.status != 200 {
					t.failed.Add(1)
					text := fmt.Sprintf("%v %d %s", err, a.status, a.body)
					t.first.CompareAndSwap(nil, &text)
				}
			}
		})
	}
	t.stop = func() { cancel(); running.Wait() }
	f.t.Cleanup(t.stop)
	return t
}

func (t *traffic) require(tb testing.TB) {
	tb.Helper()
	first := ""
	if text := t.first.Load(); text != nil {
		first = *text
	}
	require.Zero(tb, t.failed.Load(), "of %d requests; the first: %s", t.sent.Load(), first)
}

// wait lets traffic flow until so many more requests are through, and for so long at least.
func (t *traffic) wait(tb testing.TB, requests int64, least time.Duration) {
	tb.Helper()
	until, enough := time.Now().Add(least), t.sent.Load()+requests
	require.Eventually(tb, func() bool { return t.sent.Load() >= enough && time.Now().After(until) }, least+60*time.Second, 5*time.Millisecond)
}

// Whatever becomes of Redis costs no request. Every replica stays ready, says what is wrong, and finds the others again.
// TANDEM_FAILURES=1 makes the outages as long as they are out there: 30 s.
func TestRedisOutagesCostNoRequest(t *testing.T) {
	long := 3 * time.Second // three leases
	if os.Getenv("TANDEM_FAILURES") != "" {
		long = 30 * time.Second
	}
	r := startRedis(t)
	f := start(t, options{replicas: 3, top: r.yaml(), madeKeys: true})
	f.allReplicas(3)
	load := f.traffic(6)
	load.wait(t, 50, 0)
	back := func(what string) {
		t.Helper()
		f.allReplicas(3)
		load.wait(t, 50, 0)
		load.require(t)
		for i := range 3 {
			status, body := f.ready(i)
			require.Equal(t, 200, status, what)
			require.Contains(t, body, "redis: up", what)
		}
	}
	down := func(what string) {
		t.Helper()
		load.wait(t, 50, long)
		load.require(t)
		for i := range 3 {
			status, body := f.ready(i)
			require.Equal(t, 200, status, what)
			require.Contains(t, body, "redis: not in use", what)
			require.Zero(t, metric(t, f.admins[i], "tandem_redis_up"), what)
		}
	}
	require.Equal(t, "+OK", r.do("FLUSHALL"))
	back("emptied")

	require.NoError(t, r.cmd.Process.Signal(syscall.SIGSTOP))
	down("frozen")
	require.NoError(t, r.cmd.Process.Signal(syscall.SIGCONT))
	back("thawed")

	r.stop(syscall.SIGKILL)
	down("killed")
	r.process = r.start()
	back("and back, empty")

	require.Equal(t, "+OK", r.do("CONFIG", "SET", "maxmemory", "1"))
	down("full")
	require.Equal(t, "+OK", r.do("CONFIG", "SET", "maxmemory", "0"))
	back("and no more")
	load.stop()
	load.require(t)
	t.Logf("%d requests, none failed", load.sent.Load())
}

// A replica starts without Redis, serves with keys of its own, and the others open what it sealed as soon as Redis is there.
func TestStartWithoutRedis(t *testing.T) {
	r := startRedis(t)
	r.stop(syscall.SIGKILL)
	f := start(t, options{replicas: 1, top: r.yaml(), madeKeys: true})
	load := f.traffic(4)
	load.wait(t, 20, 0)
	_, body := f.ready(0)
	require.Contains(t, body, "redis: not in use")
	r.process = r.start()
	require.Eventually(t, func() bool { return metric(t, f.admins[0], "tandem_redis_up") == 1 }, 10*time.Second, 10*time.Millisecond)
	load.wait(t, 20, 0)
	load.stop()
	load.require(t)
}

// A Redis Cluster of three serves as one Redis does, and goes on serving what it can when a node of it dies.
func TestRedisCluster(t *testing.T) {
	var nodes []*redis
	for range 3 {
		nodes = append(nodes, startRedis(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no"))
	}
	for i, n := range nodes {
		require.Equal(t, "+OK", n.do("CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(i*16384/3), strconv.Itoa((i+1)*16384/3-1)))
		require.Equal(t, "+OK", n.do("CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1)))
		if _, port, err := net.SplitHostPort(n.addr); i > 0 && err == nil {
			require.Equal(t, "+OK", nodes[0].do("CLUSTER", "MEET", "127.0.0.1", port))
		}
	}
	top := fmt.Sprintf("state: {redis: {url: %q, mode: cluster, nodes: [%q, %q], lease: 1s}}\n", "redis://"+nodes[0].addr, nodes[1].addr, nodes[2].addr)
	time.Sleep(2 * time.Second) // gossip
	f := start(t, options{replicas: 2, top: top, madeKeys: true})
	f.allReplicas(2)
	load := f.traffic(4)
	load.wait(t, 50, 0)
	nodes[2].stop(syscall.SIGKILL)
	load.wait(t, 50, 2*time.Second)
	load.stop()
	load.require(t)
	for i := range 2 {
		status, _ := f.ready(i)
		require.Equal(t, 200, status)
	}
}

// What engines say about their load is known: by a scrape of one replica alone, and from P along with its answers.
func TestEnginesAreAskedByOneReplica(t *testing.T) {
	r := startRedis(t)
	f := start(t, options{replicas: 3, top: r.yaml(), madeKeys: true})
	f.allReplicas(3)
	require.Eventually(t, func() bool {
		for _, admin := range f.admins {
			for _, e := range f.engines() {
				if metric(t, admin, "tandem_engine_signals_age_seconds", e.addr) == 0 {
					return false
				}
			}
		}
		return true
	}, 15*time.Second, 20*time.Millisecond, "every replica knows what every engine says")
	asked := func() (n float64) {
		for _, admin := range f.admins {
			n += metric(t, admin, "tandem_scrapes_total")
		}
		return n
	}
	before, began := asked(), time.Now()
	time.Sleep(6 * time.Second)
	rate := (asked() - before) / time.Since(began).Seconds() / float64(len(f.engines()))
	t.Logf("each engine is asked %.2f times a second", rate)
	require.Less(t, rate, .8, "one replica, every 2 s")
	require.Greater(t, rate, .3)

	// P's answer tells more than the scrape before it.
	newest := func() float64 {
		least := 1e9
		for _, e := range f.prefills {
			least = min(least, metric(t, f.admins[1], "tandem_engine_signals_age_seconds", e.addr))
		}
		return least
	}
	require.Eventually(t, func() bool {
		a := f.post("/v1/chat/completions", chat("a prompt"))
		return a.status == 200 && newest() < .1
	}, 5*time.Second, time.Millisecond)
}

// conversations sends chats of several turns, one turn after the other, several at a time, and returns the share of prompt
// tokens that prefill found cached.
func (f *fleet) conversations(n, turns int) float64 {
	queries := func(name string) (sum float64) {
		for _, e := range f.prefills {
			sum += metric(f.t, "http://"+e.addr, name)
		}
		return sum
	}
	var running sync.WaitGroup
	var next atomic.Int64
	for range 3 {
		running.Go(func() {
			for i := next.Add(1); i <= int64(n); i = next.Add(1) {
				text := fmt.Sprintf("conversation %d begins. ", i)
				for turn := range turns {
					text += fmt.Sprintf("turn %d: ", turn) + strings.Repeat("what was said in it ", 60)
					a := f.post("/v1/chat/completions", chat(text))
					require.Equal(f.t, 200, a.status, a.body)
				}
			}
		})
	}
	running.Wait()
	return queries("vllm:prefix_cache_hits_total") / queries("vllm:prefix_cache_queries_total")
}

// Four replicas that share what they know find as many prefixes as one does, and far more than four that do not.
func TestFourReplicasHitLikeOne(t *testing.T) {
	r := startRedis(t)
	share := func(replicas int, top string) float64 {
		var hits float64
		t.Run(fmt.Sprintf("%d replicas, redis %t", replicas, top != ""), func(t *testing.T) {
			f := start(t, options{prefills: 4, decodes: 2, replicas: replicas, top: top, engineArgs: []string{"--record=false", "--decode-step", "5ms", "--prefill-speed", "20000"}})
			if top != "" {
				f.allReplicas(replicas)
			}
			hits = f.conversations(60, 6)
		})
		return hits
	}
	one := share(1, "")
	four := share(4, r.yaml())
	apart := share(4, "")
	t.Logf("hit share: one replica %.3f, four sharing %.3f, four apart %.3f", one, four, apart)
	require.GreaterOrEqual(t, four, .97*one)
}
