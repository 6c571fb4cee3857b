package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// 200 requests at once, of all kinds and sizes, some of whose clients leave: all others are answered, and the fleet's
// account (start) finds every ledger and every reservation at zero.
func TestManyAtOnce(t *testing.T) {
	f := start(t, options{prefills: 3, decodes: 2, pool: "  prefillTimeout: {base: 60s}\n", engineArgs: []string{"--decode-step", "1ms", "--prefill-speed", "400000"}})
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			size := []int{20, 2_000, 30_000, 90_000, 300_000}[i%5]
			api := apis[i%4]
			body := strings.Replace(api.body, "Two hops, please.", strings.Repeat(fmt.Sprintf("word%d ", i), size/7+1), 1)
			if i%3 == 0 {
				body = strings.Replace(body, "{", `{"stream":true,`, 1)
			}
			if i%17 == 0 {
				body = strings.Replace(body, "{", `{"n":2,`, 1)
			}
			ctx := context.Background()
			if i%10 == 9 { // these leave, at all kinds of moments
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, time.Duration(i)*time.Millisecond/2)
				defer cancel()
			}
			got, err := f.try(ctx, http.MethodPost, api.path, body)
			if ctx.Err() != nil {
				return
			}
			if err != nil || got.status != 200 {
				t.Errorf("request %d (%s, %d bytes): %v, status %d: %.300s", i, api.name, len(body), err, got.status, got.body)
			}
		})
	}
	wg.Wait()
	// A client that left between the hops leaves its blocks to the lease; nothing else may.
	f.lenient = metric(t, f.admins[0], "tandem_handovers_orphaned_total") > 0
}

// The load that kills an Envoy with ext_proc in a cluster within seconds (docs/adr/0001): large bodies, many clients.
// This layout has to survive it, also with the next Envoy. make attack sends 20 times as many requests: one of a
// thousand clients that leave is gone, and its end reported, before Tandem has read its request.
func TestLargeBodiesUnderLoad(t *testing.T) {
	long(t)
	f := start(t, options{pool: "  prefillTimeout: {base: 60s}\n", engineArgs: []string{"--record=false"}})
	for _, load := range []struct {
		size, clients, requests int
		leaves                  int // one client in this many leaves while its request is in flight; 0: none does
	}{
		{4_000_000, 8, 24, 0}, {1_000_000, 16, 64, 0}, {220_000, 64, 256, 0}, {700_000, 20, 160, 3},
	} {
		if os.Getenv("TANDEM_ATTACK") != "" {
			load.requests *= 20
		}
		work := make(chan int)
		var wg sync.WaitGroup
		for range load.clients {
			wg.Go(func() {
				for i := range work {
					ctx, cancel := context.Background(), func() {}
					if load.leaves > 0 && i%load.leaves == 0 {
						ctx, cancel = context.WithTimeout(ctx, time.Duration(i%40)*time.Millisecond)
					}
					body := fmt.Sprintf(`{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"%d %s"}]}`, i, strings.Repeat("0123456789", load.size/10))
					got, err := f.try(ctx, http.MethodPost, "/v1/chat/completions", body)
					left := ctx.Err() != nil
					cancel()
					if left {
						continue
					}
					if err != nil || got.status != 200 {
						t.Errorf("%d bytes, request %d: %v, status %d: %.200s", load.size, i, err, got.status, got.body)
					}
				}
			})
		}
		for i := range load.requests {
			work <- i
		}
		close(work)
		wg.Wait()
		require.True(t, f.envoy.running(), "Envoy has died at %d bytes", load.size)
		require.True(t, f.tandems[0].running(), "Tandem has died at %d bytes", load.size)
	}
	soon(t, "all memory is given back", func() bool { return metric(t, f.admins[0], "tandem_held_bytes") == 0 })
	// A client that left between the hops leaves its blocks to the lease.
	f.lenient = metric(t, f.admins[0], "tandem_handovers_orphaned_total") > 0
}

// A request that exceeds a connection's share of the memory budget is refused with 503, and only such.
func TestABodyWithoutMemoryIsRefused(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 1, decodes: 1, memory: "80MiB"}) // a budget of 40 MiB, 10 for each connection
	require.InDelta(t, 40<<20, metric(t, f.admins[0], "tandem_held_bytes_limit"), 0)
	for range 3 {
		got := f.post("/v1/chat/completions", chat(strings.Repeat("0123456789", 1_300_000)))
		require.Equal(t, 503, got.status, got.body)
		require.Contains(t, got.body, `"code":"server_busy"`)
		require.Equal(t, "1", got.header.Get("retry-after"))
		// The client has its answer a moment before Envoy ends the stream, which gives the memory back.
		soon(t, "all memory is given back", func() bool { return metric(t, f.admins[0], "tandem_held_bytes") == 0 })
		got = f.post("/v1/chat/completions", chat(strings.Repeat("0123456789", 100_000)))
		require.Equal(t, 200, got.status, got.body)
	}
}

// A server that is killed during a streamed answer does not harm it: the answer has no stream through the server.
// That holds where Envoy counts its tokens, too.
func TestKilledServerCutsNoAnswer(t *testing.T) {
	t.Parallel()
	for _, top := range []string{"", "usage: {}\n"} {
		t.Run(top, func(t *testing.T) {
			t.Parallel()
			killedServerCutsNoAnswer(t, top)
		})
	}
}

func killedServerCutsNoAnswer(t *testing.T, top string) {
	f := start(t, options{engineArgs: []string{"--decode-step", "10ms"}, top: top})
	const tokens = 150
	body := fmt.Sprintf(`{"model":"tiny","stream":true,"ignore_eos":true,"min_tokens":%d,"max_tokens":%d,"messages":[{"role":"user","content":"count"}]}`, tokens, tokens)
	req, err := http.NewRequest(http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, 200, resp.StatusCode)

	events, lines := 0, bufio.NewScanner(resp.Body)
	last := ""
	for lines.Scan() {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			events++
			last = data
		}
		if events == 20 && f.tandems[0].running() {
			require.NoError(t, f.tandems[0].cmd.Process.Signal(syscall.SIGKILL))
			<-f.tandems[0].exited
		}
	}
	require.NoError(t, lines.Err())
	require.Equal(t, "[DONE]", last)
	require.GreaterOrEqual(t, events, tokens)

	// After a restart, it serves.
	f.startTandem(0, f.config, f.admins[0])
	require.Eventually(t, func() bool { return f.post(apis[0].path, apis[0].body).status == 200 }, patience, 50*time.Millisecond)
}

// Two replicas share only the key: any of them serves any pass, and a killed one costs at most a health check's time.
func TestReplicas(t *testing.T) {
	t.Parallel()
	f := start(t, options{replicas: 2})
	for i := range 40 {
		got := f.post(apis[i%5].path, apis[i%5].body)
		require.Equal(t, 200, got.status, got.body)
	}
	for _, admin := range f.admins {
		require.Positive(t, metric(t, admin, "tandem_decisions_total"), "both replicas decide")
	}
	require.NoError(t, f.tandems[0].cmd.Process.Signal(syscall.SIGKILL))
	<-f.tandems[0].exited
	failed := 0
	for i := range 60 {
		if got := f.post(apis[i%5].path, apis[i%5].body); got.status != 200 {
			failed++
		}
	}
	require.Zero(t, failed, "requests lost while one of two replicas was down")
}

// The official client library, in a user's way.
func TestOpenAIClient(t *testing.T) {
	t.Parallel()
	python := tool(t, "TANDEM_PYTHON", "no-such-program", ".tools/venv/bin/python")
	f := start(t, options{})
	cmd := exec.Command(python, "testdata/openai_client.py", f.url+"/v1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "all good")
	require.Positive(t, metric(t, f.admins[0], "tandem_decisions_total", `route="split"`))
}

// The demo works, reports that the ledgers balance, and leaves nothing running.
func TestDemo(t *testing.T) {
	t.Parallel()
	envoy := tool(t, "ENVOY", "envoy", ".tools/bin/envoy")
	bin, err := binaries()
	require.NoError(t, err)
	cmd := exec.Command(filepath.Join(bin, "tandem"), "demo", "-envoy", envoy)
	if runsInside() {
		loadLibrary(t)
		cmd.Args = append(cmd.Args, "--inside", os.Getenv("ENVOY_DYNAMIC_MODULES_SEARCH_PATH"))
	}
	dir := t.TempDir()
	cmd.Env = append(os.Environ(), "TMPDIR="+dir)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "All ledgers balance.")
	soon(t, "nothing is left running", func() bool { return len(withTMPDIR(t, dir)) == 0 })
}

// A program that ends at the start is named at once.
func TestDemoNamesWhatEnded(t *testing.T) {
	t.Parallel()
	bin, err := binaries()
	require.NoError(t, err)
	cmd := exec.Command(filepath.Join(bin, "tandem"), "demo", "--envoy", "/bin/false")
	cmd.Env = append(os.Environ(), "TMPDIR="+t.TempDir())
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "envoy has ended: exit status 1; all programs' logs are in ")
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	out, err = exec.Command(filepath.Join(bin, "tandem"), "demo", "--envoy", "/bin/false", "--listen", taken.Addr().String()).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "--listen: listen tcp "+taken.Addr().String()+": bind: address already in use")
}

// withTMPDIR returns the processes with that directory in their environment, which children inherit: the engines'
// command lines do not contain it.
func withTMPDIR(t *testing.T, dir string) (left []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(t, err)
	for _, file := range files {
		if env, err := os.ReadFile(file); err == nil && slices.Contains(strings.Split(string(env), "\x00"), "TMPDIR="+dir) {
			left = append(left, file)
		}
	}
	return left
}

// Ctrl-C, which a terminal sends to the whole process group, leaves nothing running either.
func TestDemoInterrupted(t *testing.T) {
	t.Parallel()
	envoy := tool(t, "ENVOY", "envoy", ".tools/bin/envoy")
	bin, err := binaries()
	require.NoError(t, err)
	cmd := exec.Command(filepath.Join(bin, "tandem"), "demo", "--stay", "-envoy", envoy)
	dir := t.TempDir()
	cmd.Env = append(os.Environ(), "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	shown := ""
	for lines := bufio.NewScanner(out); !strings.Contains(shown, "Ctrl-C ends everything") && lines.Scan(); {
		shown += lines.Text() + "\n"
	}
	require.Contains(t, shown, "Ctrl-C ends everything")
	require.Greater(t, len(withTMPDIR(t, dir)), 6, "itself, four engines, Tandem and Envoy")
	require.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGINT))
	require.NoError(t, cmd.Wait())
	soon(t, "nothing is left running", func() bool { return len(withTMPDIR(t, dir)) == 0 })
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left, "its files are gone")
}

// Prefill's short answer comes to Tandem with pass 2, without its own stream; a long or invalid one comes over the
// leg's stream.
func TestShortAnswersAreInline(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	legs := func() float64 {
		return metric(t, f.admins[0], "tandem_ext_proc_duration_seconds_count", `role="prefill-leg"`)
	}
	for i := range 10 {
		a := apis[i%5]
		got := f.post(a.path, a.body)
		require.Equal(t, 200, got.status, got.body)
	}
	require.Zero(t, legs())
	require.Equal(t, 200, f.post("/v1/chat/completions", chat(strings.Repeat("many words and many blocks ", 20_000))).status)
	soon(t, "more block ids than a header is good for", func() bool { return legs() == 1 })
	for _, p := range f.prefills {
		f.inject(p, `{"mode":"status","status":500,"count":1}`)
	}
	require.Equal(t, 200, f.post("/v1/chat/completions", chat("after a failure")).status)
	soon(t, "a failure says why", func() bool { return legs() >= 2 })
}
