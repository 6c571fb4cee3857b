package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
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

// A fleet is changed while requests run: its configuration, its keys, its replicas, its engines. No client may notice.

const token = "e2e-operator-token"

// withOrders returns the configuration of a fleet that takes orders.
func withOrders(t *testing.T, o options) options {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte(token), 0o600))
	o.adminFields = fmt.Sprintf(", tokenFile: %q", file)
	return o
}

// order gives all replicas the same order.
func (f *fleet) order(method, path, body string) {
	f.t.Helper()
	for _, admin := range f.admins {
		req, err := http.NewRequest(method, admin+path, strings.NewReader(body))
		require.NoError(f.t, err)
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := client.Do(req)
		require.NoError(f.t, err)
		text, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		require.Equal(f.t, 200, resp.StatusCode, "%s %s: %s", method, path, text)
	}
}

// wholeTraffic is clients that send one request after another, streamed and not, until end. They pause in between: the
// test checks that none is lost, not their number.
type wholeTraffic struct {
	stop  chan struct{}
	wg    sync.WaitGroup
	asked atomic.Int64
	each  []atomic.Int64 // by client
	mu    sync.Mutex
	seen  map[string]int // results and their numbers
}

func (f *fleet) wholeTraffic(clients int) *wholeTraffic {
	c := &wholeTraffic{stop: make(chan struct{}), each: make([]atomic.Int64, clients), seen: map[string]int{}}
	for i := range clients {
		c.wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-c.stop:
					return
				case <-time.After(pause):
				}
				kind := f.oneOf(i, n)
				c.asked.Add(1)
				c.each[i].Add(1)
				c.mu.Lock()
				c.seen[kind]++
				c.mu.Unlock()
			}
		})
	}
	return c
}

// pause is the time between two requests of a test's client.
const pause = 10 * time.Millisecond

// oneOf sends request n of a client and returns its result, "whole" if all is well.
func (f *fleet) oneOf(i, n int) string {
	body := fmt.Sprintf(`{"model":"tiny","stream":%t,"ignore_eos":true,"min_tokens":8,"max_tokens":8,"messages":[{"role":"user","content":"%d %d %s"}]}`,
		n%2 == 0, i, n, strings.Repeat("all is well. ", 20))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	got, err := f.try(ctx, http.MethodPost, "/v1/chat/completions", body)
	switch {
	case err != nil:
		return fmt.Sprintf("error: %.200v", err)
	case got.status != 200:
		return fmt.Sprintf("%d: %.200s", got.status, got.body)
	case n%2 == 0 && !strings.HasSuffix(got.body, "data: [DONE]\n\n"):
		return "a stream that was cut: ..." + got.body[max(0, len(got.body)-200):]
	}
	return "whole"
}

// more waits until n more requests have been answered.
func (c *wholeTraffic) more(t *testing.T, n int64) {
	t.Helper()
	goal := c.asked.Load() + n
	require.Eventually(t, func() bool { return c.asked.Load() >= goal }, patience, 5*time.Millisecond, "requests have stopped")
}

// turn waits until all requests in flight have been answered.
func (c *wholeTraffic) turn(t *testing.T) {
	t.Helper()
	for i := range c.each {
		goal := c.each[i].Load() + 1
		require.Eventually(t, func() bool { return c.each[i].Load() >= goal }, patience, 5*time.Millisecond, "client %d waits", i)
	}
}

// end stops the clients; all answers must be whole.
func (c *wholeTraffic) end(t *testing.T) {
	t.Helper()
	close(c.stop)
	c.wg.Wait()
	t.Logf("%d requests: %v", c.asked.Load(), c.seen)
	require.Equal(t, []string{"whole"}, slices.Collect(maps.Keys(c.seen)))
}

// said waits until a replica has logged a text n times.
func (f *fleet) said(i int, text string, n int) {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		log, _ := os.ReadFile(f.tandems[i].log)
		return bytes.Count(log, []byte(text)) >= n
	}, patience, 10*time.Millisecond, "%q was not logged by replica %d", text, i)
}

// rewrite changes a replica's configuration file by replacing a text.
func (f *fleet) rewrite(file, old, now string) {
	f.t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(f.t, err)
	require.Contains(f.t, string(text), old)
	require.NoError(f.t, os.WriteFile(file+".new", []byte(strings.Replace(string(text), old, now, 1)), 0o600))
	require.NoError(f.t, os.Rename(file+".new", file))
}

// state returns a replica's status of its endpoints, by address.
func (f *fleet) state(i int) map[string]shownEndpoint {
	f.t.Helper()
	var s struct {
		Pools []struct {
			Endpoints []shownEndpoint `json:"endpoints"`
		} `json:"pools"`
	}
	require.NoError(f.t, getJSON(f.admins[i]+"/debug/state", &s))
	out := map[string]shownEndpoint{}
	for _, p := range s.Pools {
		for _, e := range p.Endpoints {
			out[e.Address] = e
		}
	}
	return out
}

type shownEndpoint struct {
	Address  string `json:"address"`
	Paused   bool   `json:"paused"`
	Draining bool   `json:"draining"`
	Weight   int    `json:"weight"`
	Requests int64  `json:"requests"`
}

func TestReloadUnderLoad(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 2, decodes: 2, engineArgs: []string{"--decode-step", "1ms", "--lease", "10s"}})
	load := f.wholeTraffic(6)
	load.more(t, 20)

	d := f.decodes[1]
	line := fmt.Sprintf("  - {address: %q, role: decode}\n", d.addr)
	f.rewrite(f.config, line, strings.Replace(line, "}", ", weight: 0}", 1))
	f.said(0, "configuration changed", 1)
	soon(t, "it is paused", func() bool { return f.state(0)[d.addr].Paused }) // the log is a moment ahead
	require.Eventually(t, func() bool { return f.state(0)[d.addr].Requests == 0 }, patience, 10*time.Millisecond, "what runs there ends")
	before := len(f.requests("", d))
	load.more(t, 30)
	require.Len(t, f.requests("", d), before, "and nothing new comes")

	// An endpoint gone, the pool renamed, another policy, and a port that cannot change live: all in one step.
	f.rewrite(f.config, strings.Replace(line, "}", ", weight: 0}", 1), "")
	f.rewrite(f.config, "name: chat\n", "name: talk\n  onPrefillFailure: decodeAlone\n")
	f.rewrite(f.config, "replan: {listen: \"127.0.0.1:", "replan: {listen: \"127.0.0.2:")
	require.NoError(t, f.tandems[0].cmd.Process.Signal(syscall.SIGHUP))
	f.said(0, "these changes take a restart of tandem", 1)
	f.said(0, "paths=[replan.listen", 1)
	soon(t, "it is gone", func() bool { _, known := f.state(0)[d.addr]; return !known }) // the log is a moment ahead
	load.more(t, 30)

	// An invalid configuration changes nothing.
	f.rewrite(f.config, "  onPrefillFailure: decodeAlone\n", "  onPrefillFailure: never\n")
	f.said(0, "configuration not reloaded", 1)
	require.InDelta(t, 1, metric(t, f.admins[0], "tandem_config_reloads_total", `result="refused"`), 0)
	load.more(t, 30)

	// And back.
	f.rewrite(f.config, "  onPrefillFailure: never\n", "")
	f.rewrite(f.config, "  endpoints:\n", "  endpoints:\n"+line)
	require.Eventually(t, func() bool { _, back := f.state(0)[d.addr]; return back }, patience, 10*time.Millisecond)
	before = len(f.requests("", d))
	soon(t, "it is asked again", func() bool { return len(f.requests("", d)) > before })
	load.end(t)
}

func TestOrdersUnderLoad(t *testing.T) {
	t.Parallel()
	f := start(t, withOrders(t, options{replicas: 2, engineArgs: []string{"--decode-step", "1ms"}}))
	load := f.wholeTraffic(6)
	load.more(t, 20)
	for _, e := range f.engines() { // all of them in turn; prefill and decode
		f.order("POST", "/api/pools/chat/endpoints/"+e.addr+"/drain", "")
		before := len(f.requests("", e))
		load.more(t, 20)
		require.Len(t, f.requests("", e), before, "drained")
		f.order("POST", "/api/pools/chat/endpoints/"+e.addr+"/resume", "")
		soon(t, "it is asked again", func() bool { return len(f.requests("", e)) > before })
		load.more(t, 20)
	}
	f.order("PUT", "/api/pools/chat/endpoints/"+f.decodes[0].addr+"/weight", `{"weight": 1}`)
	require.Equal(t, 1, f.state(1)[f.decodes[0].addr].Weight)
	load.more(t, 20)
	load.end(t)

	f.order("POST", "/api/pools/chat/pause", "")
	got := f.post(apis[0].path, apis[0].body)
	require.Equal(t, 503, got.status)
	require.Equal(t, "5", got.header.Get("Retry-After"))
	var e struct {
		Error struct{ Code string }
	}
	require.NoError(t, json.Unmarshal([]byte(got.body), &e))
	require.Equal(t, "pool_paused", e.Error.Code)
	f.order("POST", "/api/pools/chat/resume", "")
	require.Equal(t, 200, f.post(apis[0].path, apis[0].body).status)
}

// Ticket keys change in three steps, each on one replica after the other, and no request notices.
func TestKeyRotationUnderLoad(t *testing.T) {
	t.Parallel()
	f := start(t, options{replicas: 2, separateKeys: true, engineArgs: []string{"--decode-step", "1ms", "--prefill-speed", "20000"}})
	load := f.wholeTraffic(8)
	load.more(t, 20)
	older, newer := strings.Repeat("0123456789abcdef", 4), strings.Repeat("fedcba9876543210", 4)
	for step, keys := range []string{older + "\n" + newer, newer + "\n" + older, newer} {
		for i := range f.tandems {
			file := filepath.Join(f.dir, fmt.Sprintf("ticket-%d.key", i))
			require.NoError(t, os.WriteFile(file, []byte(keys+"\n"), 0o600))
			f.said(i, "ticket keys changed", step+1)
			load.turn(t) // the last of all requests with older tickets has ended
			load.more(t, 20)
		}
	}
	load.end(t)
	for _, admin := range f.admins {
		require.Zero(t, metric(t, admin, "tandem_tickets_refused_total"))
		require.Positive(t, metric(t, admin, "tandem_decisions_total"))
	}
}

// Replicas of Tandem, then engines, are restarted one after the other under load: replicas by SIGTERM, engines after
// they were drained. No client sees an error, even during a streamed answer.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	f := start(t, withOrders(t, options{replicas: 2, serveArgs: []string{"-linger", "5s"}, engineArgs: []string{"--decode-step", "1ms"}}))
	load := f.wholeTraffic(6)
	load.more(t, 20)
	for i := range f.tandems {
		f.tandems[i].stop(syscall.SIGTERM)
		load.more(t, 20)
		f.startTandem(i, filepath.Join(f.dir, fmt.Sprintf("tandem-%d.yaml", i)), f.admins[i])
		before := metric(t, f.admins[i], "tandem_decisions_total")
		require.Eventually(t, func() bool { return metric(t, f.admins[i], "tandem_decisions_total") > before }, patience, 20*time.Millisecond,
			"the new replica gets its share")
	}
	for _, e := range f.engines() {
		path := "/api/pools/chat/endpoints/" + e.addr
		f.order("POST", path+"/drain", "")
		require.Eventually(t, func() bool { return metric(t, "http://"+e.addr, "enginesim_blocks_held") == 0 }, patience, 10*time.Millisecond,
			"what it prefilled is fetched")
		e.stop(syscall.SIGTERM)
		load.more(t, 20)
		f.restart(e)
		f.order("POST", path+"/resume", "")
		require.Eventually(t, func() bool { return len(f.requests("", e)) > 0 }, patience, 20*time.Millisecond, "it works again")
	}
	load.end(t)
	f.account()
	f.lenient = true // a restarted engine loses its counts
}

// envoyFinds waits until Envoy has checked all replicas twice from now on, and found them healthy.
func (f *fleet) envoyFinds() {
	f.t.Helper()
	looked := func(cluster string) (n float64) {
		text, err := readURL(f.envoyURL + "/stats?filter=health_check.success")
		require.NoError(f.t, err)
		found := regexp.MustCompile(`(?m)^cluster\.` + cluster + `\.health_check\.success: (\d+)$`).FindStringSubmatch(text)
		require.NotNil(f.t, found, text)
		n, err = strconv.ParseFloat(found[1], 64)
		require.NoError(f.t, err)
		return n
	}
	for _, cluster := range []string{"tandem-extproc", "tandem-replan"} {
		enough := looked(cluster) + 2*float64(len(f.admins))
		soon(f.t, "Envoy finds all replicas well", func() bool {
			text, err := readURL(f.envoyURL + "/clusters")
			flags := regexp.MustCompile(`(?m)^`+cluster+`::\S+::health_flags::(\S+)$`).FindAllStringSubmatch(text, -1)
			well := err == nil && len(flags) == len(f.admins) && !slices.ContainsFunc(flags, func(m []string) bool { return m[1] != "healthy" })
			return well && looked(cluster) >= enough
		})
	}
}

func readURL(url string) (string, error) {
	resp, err := client.Get(url)
	if err != nil {
		return "", err
	}
	a, err := readAnswer(resp)
	return a.body, err
}

// Replicas are killed (SIGKILL) one after the other under load, with requests in progress: another replica decides
// these instead (Envoy keeps sent bodies up to 64 KiB), and a hop that fails meanwhile finds a working replan port.
func TestKilledReplicasLoseNothing(t *testing.T) {
	t.Parallel()
	f := start(t, options{replicas: 2})
	f.lenient = true // a leg whose reader was killed is run again; the first one's blocks wait for their lease
	ask := f.wholeTraffic(8)
	ask.more(t, 100)
	for round := range 4 {
		i := round % 2
		f.inject(f.prefills[i], `{"mode":"reset-before-headers","leg":"any","count":8}`)
		require.NoError(t, f.tandems[i].cmd.Process.Signal(syscall.SIGKILL))
		<-f.tandems[i].exited
		ask.more(t, 150)
		f.startTandem(i, filepath.Join(f.dir, fmt.Sprintf("tandem-%d.yaml", i)), f.admins[i])
		f.envoyFinds() // a request that loses both replicas before that is lost
		ask.more(t, 50)
	}
	ask.end(t)
}

// Clients that leave at any moment, most of all between the hops, leave no reservation behind.
func TestLeaversLeaveNothing(t *testing.T) {
	t.Parallel()
	f := start(t, options{engineArgs: []string{"--lease", "1s", "--prefill-speed", "10000", "--decode-step", "4ms"}})
	f.lenient = true // their blocks on P wait for the lease, and the ledger reports them; this test is about Tandem's reservations
	var wg sync.WaitGroup
	for i := range 16 {
		random := rand.New(rand.NewPCG(uint64(i), 7))
		wg.Go(func() {
			for n := range 200 {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+random.IntN(120))*time.Millisecond)
				_, _ = f.try(ctx, http.MethodPost, "/v1/completions", fmt.Sprintf(`{"model":"tiny","max_tokens":4,"stream":%t,"prompt":"%d %d %s"}`,
					n%2 == 0, i, n, strings.Repeat("and so on ", random.IntN(100))))
				cancel()
			}
		})
	}
	wg.Wait()
	require.Eventually(t, func() bool { return metric(t, f.admins[0], "tandem_reservations") == 0 }, patience, 20*time.Millisecond, "bookings are left")
}

// A pool is renamed, or its dialect changes, while P works on a request. It is planned again, and nobody is blamed: the
// request gets its answer from the only pair there is.
func TestThePoolChangesBetweenTheHops(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "trtllm", "sglang", "mooncake", "nixl-push"} { // inline, by the leg's filter, both legs at once
		for name, change := range map[string][2]string{
			"renamed":         {"name: chat\n", "name: talk\n"},
			"no longer split": {"kvTransfer: " + dialect + "\n", "kvTransfer: none\n"},
		} {
			if dialect != "nixl" && name != "renamed" {
				continue // a decode engine of theirs answers no request alone
			}
			t.Run(dialect+", "+name, func(t *testing.T) {
				t.Parallel()
				f := start(t, options{dialect: dialect, prefills: 1, decodes: 1, engineArgs: []string{"--prefill-speed", "2000", "--lease", "5s"}}) // of what P hands over for nothing
				done := make(chan answer, 1)
				go func() {
					done <- f.post("/v1/chat/completions", `{"model":"tiny","max_tokens":4,"messages":[{"role":"user","content":"`+strings.Repeat("once more ", 2500)+`"}]}`)
				}()
				soon(t, "P works", func() bool { return metric(t, "http://"+f.prefills[0].addr, "vllm:num_requests_running") > 0 })
				f.rewrite(f.config, change[0], change[1])
				require.NoError(t, f.tandems[0].cmd.Process.Signal(syscall.SIGHUP))
				f.said(0, "configuration changed", 1)
				got := <-done
				require.Equal(t, 200, got.status, got.body)
				replans := metric(t, f.admins[0], "tandem_replans_total", `cause="pool_gone"`)
				if dialect == "nixl" || dialect == "trtllm" || replans != 0 { // of a pair D may answer before P has, and P's part is done
					require.InDelta(t, 1, replans, 0)
				}
				require.Zero(t, metric(t, f.admins[0], "tandem_replans_total", `cause="prefill"`))
				require.Zero(t, metric(t, f.admins[0], "tandem_endpoint_health_changes_total"))
				soon(t, "nothing stays reserved", func() bool { return f.state(0)[f.decodes[0].addr].Requests == 0 })
			})
		}
	}
}
