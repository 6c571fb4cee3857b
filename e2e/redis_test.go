package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// known is a replica's view of its state.
type known struct {
	Reservations int `json:"reservations"`
	Pools        []struct {
		Blocks    int `json:"blocks"`
		Endpoints []struct {
			Address string `json:"address"`
			Others  int    `json:"remote_requests"`
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

// ready returns what a replica answers at /readyz.
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
	}, patience, 10*time.Millisecond, "the replicas do not all know each other")
}

// oneKey waits until replicas that generate their keys can open each other's tickets. One that started while Redis was
// slow seals with a key of its own at first, and learns the others' a second later.
func (f *fleet) oneKey() {
	f.t.Helper()
	soon(f.t, "all replicas have one key", func() bool {
		for range 10 * len(f.admins) {
			if f.post("/v1/chat/completions", chat("whose key is it?")).status != 200 {
				return false
			}
		}
		return true
	})
}

// reportsReady waits until a replica is ready and reports this state of Redis.
func (f *fleet) reportsReady(replica int, want, what string) {
	f.t.Helper()
	soon(f.t, fmt.Sprintf("%s: replica %d says %q", what, replica, want), func() bool {
		status, body := f.ready(replica)
		require.Equal(f.t, 200, status, what)
		return regexp.MustCompile(want).MatchString(body)
	})
}

func chat(content string) string {
	return `{"model":"tiny","messages":[{"role":"user","content":` + strconv.Quote(content) + `}],"max_tokens":4}`
}

// Every replica knows what another one routes; within 100 ms if the machine has time, and mostly long before the
// answer is there.
func TestReplicasKnowWhatTheOthersRoute(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	f := start(t, options{replicas: 3, top: r.yaml(), madeKeys: true})
	f.allReplicas(3)
	f.oneKey()
	known := f.known(0).Pools[0].Blocks
	var after []time.Duration
	for i := range 10 {
		a := f.post("/v1/chat/completions", chat(fmt.Sprintf("%d: %s", i, strings.Repeat("a long prompt of its own ", 400))))
		require.Equal(t, 200, a.status, a.body)
		began := time.Now()
		require.Eventually(t, func() bool {
			first := f.known(0).Pools[0].Blocks
			return first > known+10*(i+1) && f.known(1).Pools[0].Blocks == first && f.known(2).Pools[0].Blocks == first
		}, patience, time.Millisecond)
		after = append(after, time.Since(began))
	}
	slices.Sort(after)
	t.Logf("known to all after %v", after)
	speed(t, after[len(after)-1] < 200*time.Millisecond, "100 ms, and as much for three times /debug/state")
	f.reportsReady(0, `^ok\nredis: up for .*, 3 replicas\n$`, "all are there")
	require.Equal(t, "0", strings.TrimLeft(r.do("EXISTS", "no-such-key"), ":"))
}

// A killed replica's reservations end with its lease, although their answers continue.
func TestKilledReplicasBookingsEndWithItsLease(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	f := start(t, options{replicas: 2, top: r.briefly(), engineArgs: []string{"--decode-step", "20ms"}})
	f.allReplicas(2)
	ctx, leave := context.WithCancel(t.Context())
	var answers sync.WaitGroup
	const streams = 16 // each of them takes minutes, unless the client leaves; chance gives each replica some
	for i := range streams {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/completions", strings.NewReader(fmt.Sprintf(`{"model":"tiny","prompt":"long answer %d","ignore_eos":true,"max_tokens":10000,"stream":true}`, i)))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		answers.Go(func() {
			resp, err := client.Do(req)
			if err != nil {
				t.Errorf("answer %d: %v", i, err)
				return
			}
			defer resp.Body.Close()
			if _, err = io.Copy(io.Discard, resp.Body); !errors.Is(err, context.Canceled) {
				t.Errorf("answer %d has ended before the client left: %v", i, err)
			}
		})
	}
	require.Eventually(t, func() bool {
		a, b := f.known(0), f.known(1)
		return a.Reservations+b.Reservations == streams && a.Reservations > 0 && a.others() == b.Reservations && b.others() == a.Reservations
	}, patience, 5*time.Millisecond, "each knows what the other has booked")
	f.tandems[0].stop(syscall.SIGKILL)
	began := time.Now()
	// A reservation's own limit is 15 minutes.
	require.Eventually(t, func() bool { return f.known(1).others() == 0 }, patience, 5*time.Millisecond)
	t.Logf("void after %v", time.Since(began))
	speed(t, time.Since(began) < 2*time.Second, "a lease of 1 s")
	leave()
	answers.Wait()
}

// traffic sends requests until it is stopped, and counts them.
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
				if os.Getenv("TANDEM_SPEED") == "" {
					time.Sleep(pause)
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

// wait lets traffic flow until that many more requests are done, and for at least that time.
func (t *traffic) wait(tb testing.TB, requests int64, least time.Duration) {
	tb.Helper()
	until, enough := time.Now().Add(least), t.sent.Load()+requests
	require.Eventually(tb, func() bool { return t.sent.Load() >= enough && time.Now().After(until) }, least+60*time.Second, 5*time.Millisecond)
}

// Nothing that happens to Redis costs a request. Every replica stays ready, reports the problem, and finds the others
// again. TANDEM_FAILURES=1 makes the outages as long as real ones: 30 s.
func TestRedisOutagesCostNoRequest(t *testing.T) {
	t.Parallel()
	long := 3 * time.Second // three leases
	if os.Getenv("TANDEM_FAILURES") != "" {
		long = 30 * time.Second
	}
	n := severalReplicas(3)
	r := startRedis(t)
	f := start(t, options{replicas: n, top: r.briefly(), madeKeys: true})
	f.allReplicas(n)
	f.oneKey()
	load := f.traffic(6)
	load.wait(t, 50, 0)
	back := func(what string) {
		t.Helper()
		f.allReplicas(n)
		load.wait(t, 50, 0)
		load.require(t)
		for i := range n {
			f.reportsReady(i, "redis: up", what)
		}
	}
	down := func(what string) {
		t.Helper()
		load.wait(t, 50, long)
		load.require(t)
		for i := range n {
			f.reportsReady(i, "redis: not in use", what)
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

// A replica starts without Redis, serves with keys of its own, and the others open its tickets as soon as Redis is
// there.
func TestStartWithoutRedis(t *testing.T) {
	t.Parallel()
	r := startRedis(t)
	r.stop(syscall.SIGKILL)
	f := start(t, options{replicas: 1, top: r.yaml(), madeKeys: true})
	load := f.traffic(4)
	load.wait(t, 20, 0)
	_, body := f.ready(0)
	require.Contains(t, body, "redis: not in use")
	r.process = r.start()
	require.Eventually(t, func() bool { return metric(t, f.admins[0], "tandem_redis_up") == 1 }, patience, 10*time.Millisecond)
	load.wait(t, 20, 0)
	load.stop()
	load.require(t)
}

// A Redis Cluster of three serves as one Redis does, and continues as far as possible when a node of it dies.
func TestRedisCluster(t *testing.T) {
	t.Parallel()
	var nodes []*redis
	var buses []string
	for range 3 {
		bus := portOf(ports(t, 1)[0])
		buses = append(buses, bus)
		nodes = append(nodes, startRedis(t, "--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no"))
	}
	for i, n := range nodes {
		require.Equal(t, "+OK", n.do("CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(i*16384/3), strconv.Itoa((i+1)*16384/3-1)))
		require.Equal(t, "+OK", n.do("CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1)))
		if _, port, err := net.SplitHostPort(n.addr); i > 0 && err == nil {
			require.Equal(t, "+OK", nodes[0].do("CLUSTER", "MEET", "127.0.0.1", port, buses[i]))
		}
	}
	top := fmt.Sprintf("state: {redis: {url: %q, mode: cluster, nodes: [%q, %q], lease: 20s}}\n", "redis://"+nodes[0].addr, nodes[1].addr, nodes[2].addr)
	soon(t, "the cluster is whole", func() bool {
		for _, n := range nodes {
			if text := n.all("CLUSTER INFO"); !strings.Contains(text, "cluster_state:ok") || !strings.Contains(text, "cluster_known_nodes:3") || !strings.Contains(text, "cluster_slots_assigned:16384") {
				return false
			}
		}
		return true
	})
	f := start(t, options{replicas: 2, top: top, madeKeys: true})
	f.allReplicas(2)
	f.oneKey()
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

// Engines' load reports are known: from one replica's scrapes, and from P along with its answers.
func TestEnginesAreAskedByOneReplica(t *testing.T) {
	t.Parallel()
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
	}, patience, 20*time.Millisecond, "every replica knows what every engine says")
	asked := func() (n float64) {
		for _, admin := range f.admins {
			n += metric(t, admin, "tandem_scrapes_total")
		}
		return n
	}
	began := time.Now() // if the machine stalls, the rate is lower than it seems
	before := asked()
	// Six times: this would reveal two scraping replicas, and a one-second stall at the beginning is not mistaken for
	// that.
	soon(t, "each is asked six times", func() bool { return asked() >= before+6*float64(len(f.engines())) })
	rate := (asked() - before) / time.Since(began).Seconds() / float64(len(f.engines()))
	t.Logf("each engine is asked %.2f times a second", rate)
	require.Less(t, rate, .8, "one replica, every 2 s")

	// P's answer has newer figures than the scrape before it.
	require.Eventually(t, func() bool {
		type endpoint struct {
			Engine struct {
				Age  float64 `json:"age_seconds"`
				News float64 `json:"news_seconds"`
			}
		}
		var state struct {
			Pools []struct{ Endpoints []endpoint }
		}
		if f.post("/v1/chat/completions", chat("a prompt")).status != 200 || getJSON(f.admins[1]+"/debug/state", &state) != nil {
			return false
		}
		return slices.ContainsFunc(state.Pools[0].Endpoints, func(e endpoint) bool { return e.Engine.News < e.Engine.Age-.5 })
	}, patience, time.Millisecond)
}
