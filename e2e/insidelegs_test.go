package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// second starts another Envoy with Tandem inside for the same engines. arrange may change its bootstrap, in dir.
func (f *fleet) second(arrange func(dir string, bootstrap []byte) []byte, args ...string) *fleet {
	t := f.t
	p := ports(t, 3)
	text, err := os.ReadFile(f.config)
	require.NoError(t, err)
	plain := func(url string) string { return strings.TrimSuffix(strings.TrimPrefix(url, "http://"), policyName) }
	other := strings.NewReplacer(plain(f.url), p[0], plain(f.envoyURL), p[1], plain(f.admins[0]), p[2]).Replace(string(text))
	out := &fleet{t: t, dir: t.TempDir(), url: "http://" + p[0], envoyURL: "http://" + p[1], admins: []string{"http://" + p[2]},
		prefills: f.prefills, decodes: f.decodes}
	out.config = filepath.Join(out.dir, "tandem.yaml")
	bootstrap := filepath.Join(out.dir, "envoy.yaml")
	require.NoError(t, os.WriteFile(out.config, []byte(other), 0o600))
	bin, err := binaries()
	require.NoError(t, err)
	printed, err := exec.Command(filepath.Join(bin, "tandem"), "envoy", "-f", out.config).Output()
	require.NoError(t, err)
	if arrange != nil {
		printed = arrange(out.dir, printed)
	}
	path := tool(t, "ENVOY", "envoy", ".tools/bin/envoy")
	args = append([]string{"-c", bootstrap, "-l", "warning", "--use-dynamic-base-id", "--concurrency", "2"}, args...)
	if f.routed {
		var o options
		routed(&o, func() string { return p[2] })
		printed = []byte(o.bootstrap(out))
		out.admins[0] += policyName
		path, args = "/usr/bin/env", append(append(o.envoyEnv(out), path), args...)
	}
	require.NoError(t, os.WriteFile(bootstrap, printed, 0o600))
	out.envoy = startProcess(t, out.dir, "envoy", path, args...)
	out.tandems = []*process{out.envoy}
	out.waitFor(out.envoy, out.envoyURL+"/ready")
	return out
}

// Several Envoys with Tandem inside share what they know by Redis: whose cache has which prompt, and what is booked.
func TestInsideSeveral(t *testing.T) { testInsideSeveral(t, false) }

// So do those whose route is another's, such as the Envoys of Envoy Gateway.
func TestInsideSeveralOnAnothersRoute(t *testing.T) { testInsideSeveral(t, true) }

func testInsideSeveral(t *testing.T, routed bool) {
	onlyInside(t)
	r := startRedis(t)
	f := start(t, options{inside: true, routed: routed, prefills: 2, decodes: 2, top: r.yaml(),
		engineArgs: []string{"--decode-step", "20ms"}})
	other := f.second(nil)

	for i := range 6 { // the prompt's P does not depend on the Envoy that is asked
		body := chat(fmt.Sprintf("%d: %s", i, strings.Repeat("a long prompt of its own ", 400)))
		first, again := fmt.Sprint("first-", i), fmt.Sprint("again-", i)
		require.Equal(t, 200, f.post("/v1/chat/completions", body, "x-request-id", first).status)
		soon(t, "the other Envoy knows it", func() bool { return other.known(0).Pools[0].Blocks == f.known(0).Pools[0].Blocks })
		require.Equal(t, 200, other.post("/v1/chat/completions", body, "x-request-id", again).status)
		p, _ := f.hops(first)
		q, _ := f.hops(again)
		require.Equal(t, p.Engine, q.Engine)
		require.Greater(t, q.CachedTokens, q.PromptTokens/2)
	}

	ctx, leave := context.WithCancel(t.Context())
	var answers sync.WaitGroup
	for i, at := range []*fleet{f, other, f, other, f} {
		body := fmt.Sprintf(`{"model":"tiny","prompt":"long answer %d","ignore_eos":true,"max_tokens":10000,"stream":true}`, i)
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, at.url+"/v1/completions", strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		answers.Go(func() {
			if resp, err := client.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
	}
	soon(t, "each knows what the other has booked", func() bool {
		return f.known(0).Reservations == 3 && f.known(0).others() == 2 && other.known(0).others() == 3
	})
	leave()
	answers.Wait()
	soon(t, "all is released", func() bool {
		return f.known(0).Reservations+f.known(0).others()+other.known(0).Reservations+other.known(0).others() == 0
	})
}

// No hook of the filter holds its worker for long, whatever the bodies are and however the legs go.
func TestInsideHooks(t *testing.T) {
	onlyInside(t)
	for _, o := range []options{
		{dialect: "nixl"}, {dialect: "nixl", pool: "  cachedTokens: prefill\n"}, {dialect: "sglang"}, {dialect: "mooncake"},
	} {
		t.Run(o.dialect+strings.TrimSpace(o.pool), func(t *testing.T) {
			o.inside, o.prefills, o.decodes = true, 1, 1
			f := start(t, o)
			var clients sync.WaitGroup
			for i := range 8 {
				clients.Go(func() {
					for n := range 40 {
						size := []int{10, 5_000, 80_000}[n%3] // 400 KB at most
						body := strings.Replace(apis[0].body, "Two hops", fmt.Sprint(i, " ", n, strings.Repeat(" word", size)), 1)
						got, err := f.try(context.Background(), http.MethodPost, apis[0].path, body)
						if err != nil || got.status != 200 {
							t.Errorf("%v %d %s", err, got.status, got.body)
						}
					}
				})
			}
			clients.Wait()
			all, short := metric(t, f.admins[0], "tandem_hook_seconds_count"), metric(t, f.admins[0], "tandem_hook_seconds_bucket", `le="0.005"`)
			t.Logf("%v hooks, %v of them took more than 5 ms, %v s in all", all, all-short, metric(t, f.admins[0], "tandem_hook_seconds_sum"))
			for _, hook := range []string{"request headers", "request body", "woken", "call done", "response headers", "response body", "complete", "destroy"} {
				label := fmt.Sprintf("hook=%q", hook)
				n, sum := metric(t, f.admins[0], "tandem_hook_seconds_count", label), metric(t, f.admins[0], "tandem_hook_seconds_sum", label)
				t.Logf("%s: %v, %.3f ms each, %v of more than 5 ms", hook, n, 1000*sum/max(n, 1),
					n-metric(t, f.admins[0], "tandem_hook_seconds_bucket", label, `le="0.005"`))
			}
			require.Greater(t, all, 1000.)
			speed(t, all == short, "no hook takes more than 5 ms")
		})
	}
}

// A library does not start in an Envoy of another release, which says why. TANDEM_OTHER_ENVOYS names some.
func TestInsideRefusesOtherReleases(t *testing.T) {
	if !runsInside() || os.Getenv("TANDEM_OTHER_ENVOYS") == "" {
		t.Skip("TANDEM_RUN=inside TANDEM_OTHER_ENVOYS=/path/to/envoy-1.38:...")
	}
	loadLibrary(t)
	bin, err := binaries()
	require.NoError(t, err)
	for i, envoy := range filepath.SplitList(os.Getenv("TANDEM_OTHER_ENVOYS")) {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			p, dir := ports(t, 5), t.TempDir()
			file, bootstrap := filepath.Join(dir, "tandem.yaml"), filepath.Join(dir, "envoy.yaml")
			require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, "envoy: {run: inside, listen: %q, admin: %q}\nadmin: {listen: %q}\n"+
				"pools:\n- {name: chat, kvTransfer: nixl, endpoints: [{address: %q, role: prefill}, {address: %q, role: decode}]}\n",
				p[0], p[1], p[2], p[3], p[4]), 0o600))
			printed, err := exec.Command(filepath.Join(bin, "tandem"), "envoy", "-f", file).Output()
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(bootstrap, printed, 0o600))
			run := startProcess(t, dir, "envoy", envoy, "-c", bootstrap, "--use-dynamic-base-id", "--concurrency", "1")
			<-run.exited
			said, err := os.ReadFile(run.log)
			require.NoError(t, err)
			require.Contains(t, string(said), "libtandem.so is for Envoy 1.39 and 1.40")
			require.Positive(t, run.cmd.ProcessState.ExitCode(), "it ends, and does not crash")
		})
	}
}
