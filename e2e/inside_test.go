package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// library builds libtandem.so once, unless TANDEM_LIBRARY names a folder that has it (bin/, after `make carrier`). All
// that it links is compiled for a library, which takes minutes the first time.
var library = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("TANDEM_LIBRARY"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := binaries()
	if err != nil {
		return "", err
	}
	build := exec.Command("go", "build", "-buildmode=c-shared", "-o", filepath.Join(dir, "libtandem.so"), "../carrier")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the library: %w\n%s", err, out)
	}
	return dir, nil
})

// runsInside reports whether tests run Tandem inside Envoy.
func runsInside() bool { return os.Getenv("TANDEM_RUN") == "inside" }

func onlyInside(t testing.TB) {
	t.Helper()
	if !runsInside() {
		t.Skip("make e2e-inside: the library takes minutes to compile")
	}
}

// loadLibrary has Envoys find it. Without a C compiler the test is skipped.
func loadLibrary(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil && os.Getenv("TANDEM_LIBRARY") == "" {
		t.Skip("gcc is missing: the library inside Envoy cannot be built")
	}
	dir, err := library()
	require.NoError(t, err)
	require.NoError(t, os.Setenv("ENVOY_DYNAMIC_MODULES_SEARCH_PATH", dir)) //nolint:usetesting // for tests beside it, too
}

// Tandem inside Envoy: what every way of running it must do. `make e2e-inside` also runs other tests this way.
func TestInside(t *testing.T) {
	onlyInside(t)
	server := startRedis(t)
	f := start(t, options{
		inside: true, prefills: 1, decodes: 1, top: server.yaml(),
	})
	chat := apis[0]
	long := strings.Replace(chat.body, "Two hops", strings.Repeat("word ", 80_000)+"Two hops", 1) // 400 KB

	t.Run("a long body", func(t *testing.T) {
		got := f.post(chat.path, long, "x-request-id", "long")
		require.Equal(t, 200, got.status, got.body)
		p, d := f.hops("long")
		require.Equal(t, "prefill", p.Leg)
		require.Equal(t, "decode", d.Leg)
		require.Positive(t, d.ExternalTokens)
	})
	t.Run("P refuses the request, and D too", func(t *testing.T) {
		got := f.post(chat.path, strings.Replace(chat.body, `"max_tokens":12`, `"max_tokens":-1`, 1), "x-request-id", "refused")
		require.Equal(t, 400, got.status, got.body)
		require.Contains(t, got.body, `"error"`)
		require.NotContains(t, got.body, "kv_transfer_params")
		require.Len(t, f.requests("refused", f.decodes...), 1)
	})
	t.Run("D fails once", func(t *testing.T) {
		f.inject(f.decodes[0], `{"mode":"status","status":500,"leg":"decode","count":1}`)
		defer f.clear(f.decodes[0])
		got := f.post(chat.path, chat.body, "x-request-id", "again")
		require.Equal(t, 200, got.status, got.body)
		require.Len(t, f.requests("again", f.decodes...), 2, "there is no other D")
	})
	t.Run("a client leaves", func(t *testing.T) {
		for i := range 20 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*2*time.Millisecond)
			_, err := f.try(ctx, http.MethodPost, chat.path, long)
			cancel()
			if err != nil {
				require.ErrorIs(t, err, context.DeadlineExceeded)
			}
		}
		soon(t, "all is released", func() bool { return metric(t, f.admins[0], "tandem_reservations") == 0 })
	})
	t.Run("steering headers are not the client's", func(t *testing.T) {
		got := f.post(chat.path, chat.body, "x-request-id", "forged", "x-gateway-destination-endpoint", "127.0.0.1:1",
			"x-tandem-leg", "pass", "x-tandem-attempt", "x", "x-data-parallel-rank", "7")
		require.Equal(t, 200, got.status, got.body)
		_, d := f.hops("forged")
		require.NotContains(t, d.Headers, "X-Data-Parallel-Rank")
		require.NotContains(t, d.Headers, "X-Tandem-Attempt")
	})
	t.Run("too large", func(t *testing.T) {
		got, err := f.try(t.Context(), http.MethodPost, chat.path, `{"model":"tiny","prompt":"`+strings.Repeat("x", 65<<20)+`"}`)
		if err == nil { // Envoy may end the connection while the client still sends
			require.Equal(t, 413, got.status)
		} else {
			require.True(t, errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET), "%v", err)
		}
	})
	t.Run("D is killed", func(t *testing.T) {
		f.lenient = true
		f.decodes[0].stop(syscall.SIGKILL)
		got := f.post(chat.path, chat.body)
		require.Equal(t, 503, got.status, got.body)
		require.Contains(t, got.body, `"type":"api_error"`)
		f.restart(f.decodes[0])
		soon(t, "it serves again", func() bool { return f.post(chat.path, chat.body).status == 200 })
	})
}

// Go's threads may nap longer than Envoy's, whose timers stay exact (docs/adr/0087).
func TestInsideNaps(t *testing.T) {
	onlyInside(t)
	f := start(t, options{inside: true, prefills: 1, decodes: 1})
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", f.envoy.cmd.Process.Pid))
	require.NoError(t, err)
	own, err := os.ReadFile("/proc/self/timerslack_ns")
	require.NoError(t, err)
	slack := map[string]int{} // the first word of a thread's name, and its slack in ns: how many threads
	for _, task := range tasks {
		name, _ := os.ReadFile(task + "/comm")
		text, err := os.ReadFile("/proc/" + filepath.Base(task) + "/timerslack_ns")
		if err != nil {
			t.Skip(err) // it takes CAP_SYS_NICE
		}
		kind, _, _ := strings.Cut(string(name), ":")
		slack[strings.TrimSpace(kind)+" "+strings.TrimSpace(string(text))]++
	}
	usual := strings.TrimSpace(string(own))
	require.Positive(t, slack["wrk "+usual], "%v", slack)
	require.Zero(t, slack["wrk 4000000"], "%v", slack)
	require.Positive(t, slack["envoy 4000000"], "%v", slack)
	require.Positive(t, slack["envoy "+usual], "Envoy's main thread: %v", slack)
}

// One engine of both roles answers alone, and the other D takes over from one that dies.
func TestInsideOtherFleets(t *testing.T) {
	onlyInside(t)
	chat := apis[0]
	t.Run("one of both roles", func(t *testing.T) {
		f := start(t, options{inside: true, prefills: 0, decodes: 1, decodeRole: "both", split: "auto"})
		got := f.post(chat.path, chat.body, "x-request-id", "alone")
		require.Equal(t, 200, got.status, got.body)
		require.Equal(t, chat.body, f.requests("alone", f.decodes...)[0].Body, "the client's bytes")
	})
	t.Run("D hangs", func(t *testing.T) {
		f := start(t, options{inside: true, prefills: 1, decodes: 2})
		f.lenient = true
		require.NoError(t, f.decodes[0].cmd.Process.Signal(syscall.SIGSTOP))
		defer func() { _ = f.decodes[0].cmd.Process.Signal(syscall.SIGCONT) }()
		for i := range 4 { // some of them go there
			got := f.post(chat.path, chat.body, "x-request-id", fmt.Sprint("hung-", i))
			require.Equal(t, 200, got.status, got.body)
		}
	})
	t.Run("the other D", func(t *testing.T) {
		f := start(t, options{inside: true, prefills: 1, decodes: 2})
		f.lenient = true
		f.decodes[0].stop(syscall.SIGKILL)
		for i := range 6 {
			got := f.post(chat.path, chat.body, "x-request-id", fmt.Sprint("moved-", i))
			require.Equal(t, 200, got.status, got.body)
			require.Len(t, f.requests(fmt.Sprint("moved-", i), f.decodes[1]), 1)
		}
	})
}
