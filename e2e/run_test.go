package e2e

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
)

// running is a `tandem run` that has said that it runs.
type running struct {
	cmd  *exec.Cmd
	said string // all that it printed until then
	dir  string // where it runs, and where its logs are
}

// portsChosen is held while `tandem run` looks for free ports and until it listens there: two at once choose the same.
var portsChosen sync.Mutex

// runTandem starts `tandem run` in a folder and waits until it says that it runs.
func runTandem(t *testing.T, dir string, args ...string) *running {
	t.Helper()
	portsChosen.Lock()
	defer portsChosen.Unlock()
	r := &running{cmd: tandemRun(t, dir, args...), dir: dir}
	out, err := r.cmd.StdoutPipe()
	require.NoError(t, err)
	var errs strings.Builder
	r.cmd.Stderr = &errs
	require.NoError(t, r.cmd.Start())
	t.Cleanup(func() { _ = r.cmd.Process.Kill(); _ = r.cmd.Wait() })
	for lines := bufio.NewScanner(out); !strings.Contains(r.said, "Ctrl-C ends both") && lines.Scan(); {
		r.said += lines.Text() + "\n"
	}
	require.Contains(t, r.said, "Ctrl-C ends both", &errs)
	return r
}

func tandemRun(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	bin, err := binaries()
	require.NoError(t, err)
	cmd := exec.Command(filepath.Join(bin, "tandem"), append([]string{"run", "--envoy", tool(t, "ENVOY", "envoy", ".tools/bin/envoy")}, args...)...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// end ends it as Ctrl-C does, and checks that nothing is left.
func (r *running) end(t *testing.T) {
	t.Helper()
	require.NoError(t, syscall.Kill(-r.cmd.Process.Pid, syscall.SIGINT))
	require.NoError(t, r.cmd.Wait())
	soon(t, "nothing is left running", func() bool { return len(withTMPDIR(t, r.dir)) == 0 })
	logs, err := filepath.Glob(filepath.Join(r.dir, "tandem-run-*"))
	require.NoError(t, err)
	require.Empty(t, logs)
}

// startSim starts a simulated engine at a free address, which it returns.
func startSim(t *testing.T, env []string, args ...string) string {
	t.Helper()
	bin, err := binaries()
	require.NoError(t, err)
	at := loopback.Addresses(t, 2)
	cmd := exec.Command(filepath.Join(bin, "enginesim"), append([]string{"--listen", at[0], "--side-channel", at[1]}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	soon(t, "the engine answers", func() bool {
		return exec.Command("curl", "-sf", "-o", "/dev/null", "http://"+at[0]+"/health").Run() == nil
	})
	return at[0]
}

// From two URLs to a split request: what `tandem run` prints is pasted into a shell as it stands.
func TestRun(t *testing.T) {
	t.Parallel()
	speed := []string{"--model", "tiny", "--prefill-speed", "20000", "--decode-step", "20ms"}
	p := startSim(t, nil, append([]string{"--role", "prefill"}, speed...)...)
	d := startSim(t, nil, append([]string{"--role", "decode"}, speed...)...)
	dir := t.TempDir()
	r := runTandem(t, dir, "--prefill", "http://"+p, "--decode", "http://"+d+"/")
	require.NotContains(t, r.said, "warning:", "the check of the side channel understands the engine")
	require.Contains(t, r.said, "side channel")
	var handed struct{ Given, Fetched, Violations int } // KV that nobody fetched would count as expired when its lease ends
	require.NoError(t, getJSON("http://"+p+"/sim/state", &handed))
	require.Equal(t, 1, handed.Given)
	require.Equal(t, 1, handed.Fetched)
	require.Zero(t, handed.Violations)
	page := regexp.MustCompile(`Page: (http://\S+)\n`).FindStringSubmatch(r.said)
	require.NotNil(t, page)
	require.NoError(t, exec.Command("curl", "-sfo", "/dev/null", page[1]).Run(), page[1])

	curls := regexp.MustCompile(`(?m)^  curl .*\n.*\n`).FindAllString(r.said, -1)
	require.Len(t, curls, 2)
	for _, curl := range curls {
		out, err := exec.Command("bash", "-c", "set -e\n"+strings.Replace(curl, "curl ", "curl -sf ", 1)).CombinedOutput()
		require.NoError(t, err, "%s%s", curl, out)
		require.Contains(t, string(out), `"finish_reason":"length"`)
	}
	bin, err := binaries()
	require.NoError(t, err)
	soon(t, "one of them was split", func() bool {
		cmd := exec.Command(filepath.Join(bin, "tandem"), "requests", "-o", "json") // in that folder tandem.yaml needs no name
		cmd.Dir = dir
		out, err := cmd.Output()
		require.NoError(t, err)
		var all []struct {
			Prefill, Decode string
			Status          int
		}
		require.NoError(t, json.Unmarshal(out, &all))
		return len(all) == 2 && all[0].Prefill == p && all[0].Decode == d && all[0].Status == 200
	})
	went := regexp.MustCompile(`Where they went:\n\n  (.*)\n`).FindStringSubmatch(r.said)
	require.NotNil(t, went)
	shown, err := exec.Command("bash", "-c", went[1]).CombinedOutput() // in another folder, by a shell that does not know tandem
	require.NoError(t, err, "%s: %s", went[1], shown)
	require.Regexp(t, `200 .* split +`+regexp.QuoteMeta(p)+" +"+regexp.QuoteMeta(d), string(shown))
	used, err := tandemRun(t, dir, "--engine", "http://"+p).CombinedOutput() // it would take over what runs
	require.Error(t, err)
	require.Contains(t, string(used), "tandem.yaml is the configuration of a Tandem that runs: end that one, or name another file")
	r.end(t)

	file := filepath.Join(dir, "tandem.yaml")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(text), "kvTransfer: nixl")
	runTandem(t, dir, "--engine", "http://"+p, "--engine", "http://"+d).end(t) // it writes its own file anew
	anew, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(anew), "roles: auto")

	mark, mine, _ := strings.Cut(string(text), "\n")
	require.Contains(t, mark, "Delete this line to keep what you change")
	require.NoError(t, os.WriteFile(file, []byte(mine), 0o600))
	out, err := tandemRun(t, dir, "--engine", "http://"+p).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "tandem.yaml is yours, and is not overwritten: `tandem run -f tandem.yaml` without engines")
	r = runTandem(t, dir) // the file says what is run, and the engines which model
	require.Contains(t, r.said, `{"model":"tiny",`)
	r.end(t)
	kept, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, mine, string(kept))
}

// Engines that want a key get it from Tandem, and from the client that pastes what `tandem run` prints. One engine alone is
// served, too, and the reader is told that nothing will be split.
func TestRunWithKey(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "engine.key"), []byte("secret\n"), 0o600))
	e := startSim(t, nil, "--role", "both", "--model", "tiny", "--api-key", "secret")
	out, err := tandemRun(t, dir, "--engine", e).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "tandem run: --api-key-file")
	r := runTandem(t, dir, "--engine", e, "--api-key-file", "engine.key")
	require.Contains(t, r.said, "pool default has one engine, so none of its requests is split")
	curls := regexp.MustCompile(`(?m)^  curl .*\n.*\n`).FindAllString(r.said, -1)
	require.Len(t, curls, 2)
	for _, curl := range curls {
		out, err := exec.Command("bash", "-c", strings.Replace(curl, "curl ", "curl -sf ", 1)).CombinedOutput()
		require.NoError(t, err, "%s%s", curl, out)
	}
	r.end(t)
}

// Engines that cannot work together are refused with what helps, and nothing is started.
func TestRunRefuses(t *testing.T) {
	t.Parallel()
	told := []string{"VLLM_SERVER_DEV_MODE=1"}
	p := startSim(t, told, "--role", "prefill", "--model", "tiny", "--lease", "120s")
	d := startSim(t, told, "--role", "decode", "--model", "tiny", "--bidirectional", "--decoder-ttl", "1s")
	other := startSim(t, nil, "--role", "decode", "--model", "large")
	sglang := startSim(t, nil, "--role", "decode", "--model", "tiny", "--connector", "sglang")
	gone := loopback.Addresses(t, 1)[0]
	for name, tt := range map[string]struct {
		args []string
		says string
	}{
		"an engine that is down": {[]string{"--prefill", p, "--decode", gone},
			"GET http://" + gone + "/health: dial tcp " + gone + ": connect: connection refused; start the engine, or correct the address or the scheme"},
		"nothing that decodes":    {[]string{"--prefill", p}, "no engine decodes: name one with --decode, or with --engine if it does both"},
		"another model":           {[]string{"--prefill", p, "--decode", other}, "of the engines with "},
		"another kind of engine":  {[]string{"--prefill", p, "--decode", sglang}, "engines of one pool speak one dialect"},
		"the role of another one": {[]string{"--prefill", d, "--decode", p}, "kv_role"},
		"a path":                  {[]string{"--engine", p + "/v2"}, "an engine has a scheme, a host and a port, and nothing else: http://" + p},
		"no engine":               {nil, "name the engines (--prefill URL --decode URL, or --engine URL for those that do both)"},
		"no Envoy":                {[]string{"--engine", p, "--envoy", "/nowhere"}, "no Envoy found at /nowhere, which --envoy or ENVOY names"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			out, err := tandemRun(t, dir, tt.args...).CombinedOutput()
			require.Error(t, err)
			require.Contains(t, string(out), tt.says)
			require.Empty(t, withTMPDIR(t, dir))
		})
	}
	dir := t.TempDir()
	r := runTandem(t, dir, "--engine", p, "--engine", d)
	text, err := os.ReadFile(filepath.Join(dir, "tandem.yaml"))
	require.NoError(t, err)
	require.Contains(t, string(text), "nixl: {lease: 2m0s, declineExpired: true}")
	require.Regexp(t, regexp.QuoteMeta(p)+`", role: prefill`, string(text), "as the engine says")
	require.Regexp(t, regexp.QuoteMeta(d)+`", role: decode`, string(text))
	r.end(t)
}
