package e2e

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
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

// A fleet runs for SOAK (a duration; `make soak`: 20m) under load and churn: engines die and return, are drained,
// weighted, removed from the configuration and added again; replicas of Tandem are stopped, killed and restarted;
// clients leave; with SOAK_REDIS=1 there is a Redis, which is restarted too. SOAK_REPLICAS (2) replicas serve
// SOAK_CLIENTS (8) clients. At the end everything that
// could leak is where it was: memory, goroutines and descriptors of the replica that ran all the time and of Envoy,
// reservations, the engines' ledgers. Every client got an answer, or the beginning of one whose engine was killed, or,
// for bodies over 64 KiB, which Envoy does not keep for another replica, a 503 with Retry-After if the replica with
// its request was killed (SIGKILL). SIGTERM costs no request anything.
//
// One prefill and one decode engine and the first replica are left alone: there is always a way to answer. Inside Envoy
// (TANDEM_RUN=inside; with TANDEM_ROUTE=another on a route as Envoy Gateway makes it) that replica is the only one, tokens
// are counted, and streams outlive their engines.
func TestSoak(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("SOAK"))
	if err != nil {
		t.Skip("set SOAK to a duration, or run make soak")
	}
	s := newSoak(t)
	s.load(min(15*time.Second, length/10), nil) // connections are made, and kept
	idle := s.settle()
	t.Logf("idle before: %v", idle)

	stop := make(chan struct{})
	var churn sync.WaitGroup
	churn.Go(func() { s.churn(rand.New(rand.NewPCG(uint64(fromEnv("SOAK_SEED", 1)), 2)), stop) })
	var samples []sample
	began := time.Now()
	s.load(length, func() {
		samples = append(samples, s.sample())
		if len(samples)%6 == 0 {
			t.Logf("%v: %d requests, %v, churn %v", time.Since(began).Round(time.Second), s.asked.Load(), samples[len(samples)-1], s.counts(s.churned))
		}
	})
	close(stop)
	churn.Wait()
	last := s.settle()
	t.Logf("%d requests in %v: %v\nchurn: %v\nidle before: %v\nidle after:  %v", s.asked.Load(), time.Since(began).Round(time.Second), s.counts(s.seen), s.counts(s.churned), idle, last)

	for kind := range s.seen {
		require.Contains(t, []string{"whole", "left", "cut by a killed engine", "lost with a killed replica"}, kind)
	}
	require.Zero(t, last.reservations)
	require.LessOrEqual(t, last.goroutines, idle.goroutines+20, "goroutines")
	require.LessOrEqual(t, last.files, idle.files+20, "descriptors of Tandem")
	require.LessOrEqual(t, last.envoyFiles, idle.envoyFiles+200, "descriptors of Envoy, which keeps connections to engines for a while")
	// The second half must be flat: caches and the prefix index have filled up before.
	mid, end := samples[len(samples)/2:len(samples)*3/4], samples[len(samples)*3/4:]
	for name, of := range map[string]func(sample) float64{
		"Tandem's heap":       func(s sample) float64 { return s.heap },
		"Tandem's memory":     func(s sample) float64 { return s.memory },
		"Tandem's goroutines": func(s sample) float64 { return s.goroutines },
		"Envoy's memory":      func(s sample) float64 { return s.envoyMemory },
	} {
		before, after := middle(mid, of), middle(end, of)
		t.Logf("%s, third and last quarter (medians): %.1f, %.1f", name, before, after)
		require.LessOrEqual(t, after, before*1.15+8, name)
	}
}

func middle(samples []sample, of func(sample) float64) float64 {
	var all []float64
	for _, s := range samples {
		all = append(all, of(s))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// soak is a fleet under churn.
type soak struct {
	*fleet
	redis   *process
	redisAt string
	asked   atomic.Int64
	mu      sync.Mutex
	seen    map[string]int // clients' results
	churned map[string]int

	replicaKilled atomic.Int64 // when one was, last
}

func newSoak(t *testing.T) *soak {
	s := &soak{seen: map[string]int{}, churned: map[string]int{}}
	o := options{prefills: 3, decodes: 3, replicas: max(fromEnv("SOAK_REPLICAS", 2), 2), serveArgs: []string{"-linger", "2s", "-log", "warn"}, engineArgs: []string{
		"--decode-step", "2ms", "--prefill-speed", "100000", "--lease", "5s", "--load-timeout", "200ms", "--record=false", "--kv-load-failure", "recompute"}}
	if runsInside() {
		o.replicas, o.pool, o.top = 1, insurance, "usage: {}\n"
	}
	if os.Getenv("SOAK_REDIS") != "" {
		tool(t, "REDIS_SERVER", "redis-server", ".tools/bin/redis-server")
		s.redisAt = ports(t, 1)[0]
		s.startRedis(t)
		o.top += fmt.Sprintf("state: {redis: {url: \"redis://%s/0\"}}\n", s.redisAt)
	}
	s.fleet = start(t, withOrders(t, o))
	s.lenient = true // killed engines have lost their counts; the soak checks the others itself
	return s
}

func (s *soak) startRedis(t *testing.T) {
	_, port, _ := strings.Cut(s.redisAt, ":")
	s.redis = startProcess(t, t.TempDir(), "redis", tool(t, "REDIS_SERVER", "redis-server", ".tools/bin/redis-server"),
		"--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
}

// sample is everything that could grow, of the replica that runs all the time and of Envoy. Memory in MiB.
type sample struct {
	heap, memory, goroutines, files, reservations float64
	envoyMemory, envoyFiles                       float64
}

func (s sample) String() string {
	return fmt.Sprintf("Tandem heap %.1f MiB, memory %.1f MiB, %v goroutines, %v files, %v reservations; Envoy %.1f MiB, %v files",
		s.heap, s.memory, s.goroutines, s.files, s.reservations, s.envoyMemory, s.envoyFiles)
}

func (s *soak) sample() sample {
	const mib = 1 << 20
	of := func(name string) float64 { return metric(s.t, s.admins[0], name) }
	return sample{
		heap: of("go_memstats_heap_inuse_bytes") / mib, memory: resident(s.tandems[0]), goroutines: of("go_goroutines"),
		files: of("process_open_fds"), reservations: of("tandem_reservations"),
		envoyMemory: resident(s.envoy), envoyFiles: openFiles(s.envoy),
	}
}

// resident returns the memory of a process in MiB.
func resident(p *process) float64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.cmd.Process.Pid))
	if fields := strings.Fields(string(text)); len(fields) > 1 {
		pages, _ := strconv.ParseFloat(fields[1], 64)
		return pages * float64(os.Getpagesize()) / (1 << 20)
	}
	return 0
}

func openFiles(p *process) float64 {
	list, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid))
	return float64(len(list))
}

// settle waits until nothing runs any more, and returns what is left.
func (s *soak) settle() sample {
	client.CloseIdleConnections()
	for _, e := range s.engines() {
		require.Eventually(s.t, func() bool {
			url := "http://" + e.addr
			return metric(s.t, url, "enginesim_blocks_held") == 0 && metric(s.t, url, "vllm:num_requests_running") == 0
		}, 30*time.Second, 50*time.Millisecond, "the ledger of %s %s", e.role, e.addr)
		require.Zero(s.t, metric(s.t, "http://"+e.addr, "enginesim_violations_total"), e.addr)
	}
	for _, admin := range s.admins {
		require.Eventually(s.t, func() bool { return metric(s.t, admin, "tandem_reservations") == 0 }, 30*time.Second, 50*time.Millisecond, "reservations of %s", admin)
	}
	var now sample
	for range 30 { // goroutines and descriptors of idle connections end a little later
		before := now
		now = s.sample()
		if now.goroutines == before.goroutines && now.files == before.files {
			break
		}
		<-time.After(time.Second)
	}
	return now
}

func (s *soak) counts(of map[string]int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, kind := range slices.Sorted(maps.Keys(of)) {
		out = append(out, fmt.Sprintf("%s %d", kind, of[kind]))
	}
	return strings.Join(out, ", ")
}

func (s *soak) count(of map[string]int, kind string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	of[kind]++
}

// load runs the clients for a time, and calls look every ten seconds.
func (s *soak) load(length time.Duration, look func()) {
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for i := range fromEnv("SOAK_CLIENTS", 8) {
		clients.Go(func() { s.client(i, stop) })
	}
	for began := time.Now(); time.Since(began) < length; {
		<-time.After(min(10*time.Second, length/20))
		if look != nil {
			look()
		}
	}
	close(stop)
	clients.Wait()
}

// client sends one request after another: of 400 prompts of 0.2 to 200 KB, streamed or not; it leaves one in 20.
func (s *soak) client(i int, stop chan struct{}) {
	random := rand.New(rand.NewPCG(uint64(i), 7))
	for {
		select {
		case <-stop:
			return
		default:
		}
		prompt := random.IntN(400)
		stream := random.IntN(2) == 0
		body := fmt.Sprintf(`{"model":"tiny","stream":%t,"ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":"%d %s"}]}`,
			stream, 4+random.IntN(40), prompt, strings.Repeat("all is well. ", []int{15, 100, 800, 15_000}[prompt%4]))
		patience := 60 * time.Second
		leaves := random.IntN(20) == 0
		if leaves {
			patience = time.Duration(random.IntN(150)) * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		got, err := s.try(ctx, http.MethodPost, "/v1/chat/completions", body)
		kind := soakKind(got, err, stream, leaves && ctx.Err() != nil)
		if got.status == 503 && prompt%4 == 3 && time.Since(time.Unix(0, s.replicaKilled.Load())) < 5*time.Second &&
			(strings.Contains(got.body, `"router_unavailable"`) || strings.Contains(got.body, `"endpoint_unavailable"`)) {
			kind = "lost with a killed replica" // while it decided, or while it planned a failed hop again
		}
		s.count(s.seen, kind)
		cancel()
		s.asked.Add(1)
	}
}

func soakKind(got answer, err error, stream, left bool) string {
	whole := err == nil && got.status == 200 && (!stream || strings.HasSuffix(got.body, "data: [DONE]\n\n"))
	switch {
	case whole:
		return "whole"
	case left:
		return "left"
	case got.status == 200:
		return "cut by a killed engine"
	case err != nil:
		return fmt.Sprintf("error %.120v", err)
	}
	return fmt.Sprintf("status %d: %.200s", got.status, got.body)
}

// churn makes one change after another until stop, and then restores everything.
func (s *soak) churn(random *rand.Rand, stop chan struct{}) {
	engines := append(slices.Clone(s.prefills[1:]), s.decodes[1:]...)
	paused := map[*engine]bool{}
	out := map[*engine]bool{} // of the configuration
	for {
		select {
		case <-stop:
			s.restore(engines, paused, out)
			return
		case <-time.After(time.Duration(200+random.IntN(1500)) * time.Millisecond):
		}
		e := engines[random.IntN(len(engines))]
		replica := min(1+random.IntN(max(len(s.tandems)-1, 1)), len(s.tandems)-1)
		did := ""
		switch n := random.IntN(20); {
		case n < 7 && e.running():
			_ = e.cmd.Process.Signal(syscall.SIGKILL)
			<-e.exited
			did = "engine killed"
		case n < 7:
			s.restart(e)
			did = "engine back"
		case n < 11 && !out[e]:
			paused[e] = !paused[e]
			s.pause(e, paused[e])
			did = map[bool]string{true: "endpoint paused", false: "endpoint resumed"}[paused[e]]
		case n < 15 && !paused[e]:
			out[e] = !out[e]
			s.configure(e, !out[e])
			did = map[bool]string{true: "endpoint taken out", false: "endpoint put in"}[out[e]]
		case n < 18 && replica == 0: // the one that runs all the time
			continue
		case n < 18 && s.tandems[replica].running():
			signal := map[bool]os.Signal{true: syscall.SIGTERM, false: syscall.SIGKILL}[n < 17]
			if signal == syscall.SIGKILL {
				s.replicaKilled.Store(time.Now().UnixNano())
			}
			s.tandems[replica].stop(signal)
			did = "replica ended by " + signal.String()
		case n < 18:
			s.startReplica(replica)
			for e, p := range paused { // orders of a single replica
				if p {
					s.pause(e, true)
				}
			}
			did = "replica back"
		case s.redis != nil && s.redis.running():
			s.redis.stop(syscall.SIGKILL)
			did = "Redis killed"
		case s.redis != nil:
			s.startRedis(s.t.(*testing.T))
			did = "Redis back"
		default:
			continue
		}
		s.count(s.churned, did)
	}
}

func (s *soak) startReplica(i int) {
	s.startTandem(i, filepath.Join(s.dir, fmt.Sprintf("tandem-%d.yaml", i)), s.admins[i])
}

func (s *soak) pause(e *engine, paused bool) {
	verb := map[bool]string{true: "pause", false: "resume"}[paused]
	for i, admin := range s.admins {
		if !s.tandems[i].running() {
			continue
		}
		req, _ := http.NewRequest(http.MethodPost, admin+"/api/pools/chat/endpoints/"+e.addr+"/"+verb, nil)
		req.Header.Set("Authorization", "Bearer "+token)
		if resp, err := client.Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}
}

// configure adds an endpoint to the configuration of all replicas, or removes it.
func (s *soak) configure(e *engine, in bool) {
	line := fmt.Sprintf("  - {address: %q, role: %s}\n", e.addr, e.role)
	for i := range s.admins {
		file := filepath.Join(s.dir, fmt.Sprintf("tandem-%d.yaml", i))
		if in {
			s.rewrite(file, "  endpoints:\n", "  endpoints:\n"+line)
		} else {
			s.rewrite(file, line, "")
		}
	}
}

func (s *soak) restore(engines []*engine, paused, out map[*engine]bool) {
	if s.redis != nil && !s.redis.running() {
		s.startRedis(s.t.(*testing.T))
	}
	for i, tandem := range s.tandems {
		if !tandem.running() {
			s.startReplica(i)
		}
	}
	for _, e := range engines {
		if !e.running() {
			s.restart(e)
		}
		if paused[e] {
			s.pause(e, false)
		}
		if out[e] {
			s.configure(e, true)
		}
	}
}
