package e2e

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
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

// chaosFleet returns the fleet of the chaos runs: a lease that outlives any request, and a decode step that keeps
// answers on the wire for a while. policy is vLLM's kv_load_failure_policy, pool more of the pool's configuration.
func chaosFleet(t *testing.T, policy, pool string) *fleet {
	f := start(t, options{prefills: 3, decodes: 3, pool: "  prefillTimeout: {base: 30s}\n" + pool, engineArgs: []string{
		"--lease", "10s", "--load-timeout", "200ms", "--decode-step", "1ms", "--prefill-speed", "50000", "--record=false",
		"--kv-load-failure", policy,
	}})
	f.lenient = true // a killed engine has lost its counts
	return f
}

// Requests continue while engines die (SIGKILL) and return at random, with one prefill and one decode engine always
// up: no client sees an error that a healthy endpoint could have avoided. Unavoidable are: an answer whose first byte
// the client had when its engine died; and a stream whose KV was at a prefill engine that died between the hops: vLLM
// begins streams before it fetches, and with the policy "fail", its default, ends such a one with an error event.
//
// TANDEM_CHAOS is the number of requests, 600 if it is not set; TANDEM_CHAOS_SEED changes the order in which engines
// die.
func TestChaos(t *testing.T) {
	long(t)
	for _, policy := range []string{"recompute", "fail"} {
		t.Run(policy, func(t *testing.T) { chaos(t, policy, "") })
	}
}

func chaos(t *testing.T, policy, pool string) {
	const clients = 12
	requests := fromEnv("TANDEM_CHAOS", 600)
	seed := uint64(fromEnv("TANDEM_CHAOS_SEED", 1))
	f := chaosFleet(t, policy, pool)
	bin, err := binaries()
	require.NoError(t, err)
	// An engine outside of the pool gives the reference.
	p := ports(t, 2)
	f.waitFor(startProcess(t, f.dir, "reference", filepath.Join(bin, "enginesim"), "--listen", p[0], "--side-channel", p[1], "--model", "tiny", "--record=false"), "http://"+p[0]+"/health")

	stop := make(chan struct{})
	kills := make(chan map[string]int)
	go func() { kills <- havoc(f, rand.New(rand.NewPCG(seed, 1)), stop) }()

	var next atomic.Int64
	var mu sync.Mutex
	seen := map[string]int{}
	var worst time.Duration
	began := time.Now()
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(requests); i = next.Add(1) {
				kind, took := chaosRequest(f, int(i), "http://"+p[0])
				mu.Lock()
				seen[kind]++
				worst = max(worst, took)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	close(stop)
	killed := <-kills

	var b strings.Builder
	fmt.Fprintf(&b, "%d requests in %v, seed %d; killed: %d prefill, %d decode engines; slowest answer %v\n", requests, took.Round(time.Millisecond), seed,
		killed["prefill"], killed["decode"], worst.Round(time.Millisecond))
	for _, kind := range slices.Sorted(maps.Keys(seen)) {
		fmt.Fprintf(&b, "  %6d  %s\n", seen[kind], kind)
	}
	for _, cause := range []string{"prefill", "decode", "stream", "moved", "hand_over_spent", "hand_over_expired"} {
		fmt.Fprintf(&b, "  %6v  replanned: %s\n", metric(t, f.admins[0], "tandem_replans_total", `cause="`+cause+`"`), cause)
	}
	t.Log(b.String())
	const lost = "stream 200 and an error event"
	if pool == insurance {
		for kind := range seen {
			if kind == "stream whole" || !strings.HasPrefix(kind, "stream") {
				continue
			}
			// those whose second engine was killed soon after it had taken over (docs/continue.md)
			died := metric(t, f.admins[0], "tandem_streams_continued_total", `result="died_again"`)
			require.LessOrEqual(t, float64(seen[kind]), died, kind)
		}
	}
	if policy == "fail" { // each prefill engine that died may have had the KV of the streams in flight
		require.LessOrEqual(t, seen[lost], clients*killed["prefill"])
		delete(seen, lost)
	}
	for kind, n := range seen {
		require.Contains(t, []string{"whole", "stream whole", "cut after its first words", "cut after its headers", "stream cut after its first words", "stream cut after its headers"}, kind, "%d times", n)
	}
	for _, e := range f.engines() {
		if e.running() {
			require.Zero(t, metric(t, "http://"+e.addr, "enginesim_violations_total"), e.addr)
			require.Eventually(t, func() bool { return metric(t, "http://"+e.addr, "enginesim_blocks_held") == 0 }, patience, 50*time.Millisecond, e.addr)
		}
	}
}

func fromEnv(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}

// havoc kills engines and restarts them, until stop; then it restarts all. One of each role stays up, and Tandem knows
// it.
func havoc(f *fleet, random *rand.Rand, stop chan struct{}) map[string]int {
	killed := map[string]int{}
	for {
		select {
		case <-stop:
			for _, e := range f.engines() {
				if !e.running() {
					f.restart(e)
				}
			}
			return killed
		case <-time.After(time.Duration(100+random.IntN(300)) * time.Millisecond):
		}
		e := f.engines()[random.IntN(6)]
		if !e.running() {
			f.restart(e)
			continue
		}
		list := f.prefills
		if e.role == "decode" {
			list = f.decodes
		}
		if slices.ContainsFunc(list, func(o *engine) bool { return o != e && o.running() && f.inUse(o) }) {
			_ = e.cmd.Process.Signal(syscall.SIGKILL)
			<-e.exited
			killed[e.role]++
		}
	}
}

// inUse reports whether Tandem sends requests to an engine.
func (f *fleet) inUse(e *engine) bool {
	var shown struct {
		Pools []struct {
			Awaited []string `json:"waiting_for_report"`
		}
	}
	require.NoError(f.t, getJSON(f.admins[0]+"/status.json", &shown))
	if slices.Contains(shown.Pools[0].Awaited, e.addr) {
		return false // it is not paired yet
	}
	for _, known := range f.known(0).Pools[0].Endpoints {
		if known.Address == e.addr {
			return !known.Failed
		}
	}
	return false
}

// chaosRequest sends one request and returns its result.
func chaosRequest(f *fleet, i int, reference string) (kind string, took time.Duration) {
	stream := i%2 == 0
	body := fmt.Sprintf(`{"model":"tiny","stream":%t,"ignore_eos":true,"max_tokens":%d,"messages":[{"role":"user","content":%q}]}`,
		stream, 5+i%60, fmt.Sprintf("%d ", i)+strings.Repeat("all is well. ", 10+i%200))
	return f.compared(fmt.Sprintf("chaos-%d", i), body, stream, reference)
}

// compared sends a request, and returns how its answer differs from that of a reference.
func (f *fleet) compared(id, body string, stream bool, reference string) (kind string, took time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	want, known := whole(ctx, reference, body)
	if !known {
		return "the reference does not answer", 0
	}
	began := time.Now()
	r := send(ctx, f.url, id, body)
	<-r.done
	took = time.Since(began)
	kind = r.kind(want)
	switch kind {
	case "200 whole":
		kind = "whole"
	case "200 and cut":
		kind = "cut after its first words"
		if text, _ := r.text(); text == "" {
			kind = "cut after its headers" // which vLLM sends before it begins to compute
		}
	case "200 and an error event":
	default:
		kind += fmt.Sprintf(" (%v) %.200s", r.err, r.body.String())
	}
	if stream {
		kind = "stream " + kind
	}
	return kind, took
}

// The cost of a killed prefill engine: the first request that is sent to it takes a little longer; those after it do
// not. It is reported, not required, because it depends on the load of the machine.
func TestCostOfAKilledPrefill(t *testing.T) {
	f := start(t, options{prefills: 2, decodes: 1})
	ask := func() time.Duration {
		got := f.post(apis[0].path, apis[0].body)
		require.Equal(t, 200, got.status, got.body)
		return got.took
	}
	median := func(n int) time.Duration {
		var all []time.Duration
		for range n {
			all = append(all, ask())
		}
		slices.Sort(all)
		return all[n/2]
	}
	median(50)
	before := median(100)
	replans := func() float64 { return metric(t, f.admins[0], "tandem_replans_total") }
	f.lenient = true
	require.NoError(t, f.prefills[0].cmd.Process.Signal(syscall.SIGKILL))
	<-f.prefills[0].exited
	var first time.Duration
	for range 100 {
		if first = ask(); replans() > 0 {
			break
		}
	}
	met := replans()
	require.LessOrEqual(t, met, 1.0, "one request at most met the dead engine; none, if a health check found it before")
	after := median(100)
	require.InDelta(t, met, replans(), 0, "and no other did")
	t.Logf("median before %v; the request that met the dead prefill %v, %v more; median after %v", before, first, first-before, after)
}
