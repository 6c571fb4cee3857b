package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// commandsOf returns the commands of a page, which are its lines that are indented by four, in a list by eight. Those of
// a cluster, and what builds, are left out.
func commandsOf(page string) (out []string) {
	by, item, text := "    ", regexp.MustCompile(`^\d+\. `), regexp.MustCompile(`^\S`)
	for line := range strings.Lines(regexp.MustCompile("(?s)```.*?```").ReplaceAllString(page, "")) {
		switch {
		case item.MatchString(line):
			by = "        "
		case text.MatchString(line):
			by = "    "
		}
		command, indented := strings.CutPrefix(line, by)
		if command = strings.TrimSpace(command); indented && !regexp.MustCompile(`^(make|kubectl|helm) `).MatchString(command) {
			out = append(out, command)
		}
	}
	return out
}

// paste runs a script in one bash in a folder that has bin/, .tools/ and both on its PATH, and returns what it printed.
// Nothing that it started may be left when the test ends.
func paste(t *testing.T, dir, script string) string {
	t.Helper()
	bin, err := binaries()
	require.NoError(t, err)
	envoy := tool(t, "ENVOY", "envoy", ".tools/bin/envoy")
	require.NoError(t, os.MkdirAll(filepath.Join(dir, ".tools", "bin"), 0o700))
	require.NoError(t, os.Symlink(bin, filepath.Join(dir, "bin")))
	require.NoError(t, os.Symlink(envoy, filepath.Join(dir, ".tools", "bin", "envoy")))
	// What a failed script leaves running would hold its output open.
	bash := exec.Command("bash", "-m", "-c", "set -e; trap 'kill -9 $(jobs -p)' ERR\n"+script)
	bash.Dir = dir
	bash.Env = append(os.Environ(), "TMPDIR="+dir, "PATH="+bin+":"+filepath.Dir(envoy)+":"+os.Getenv("PATH"))
	out, err := bash.CombinedOutput()
	require.NoError(t, err, "%s\n%s", script, out)
	soon(t, "nothing is left running", func() bool { return len(withTMPDIR(t, dir)) == 0 })
	return string(out)
}

// yourEnvoy is the configuration of somebody's Envoy, with the route of docs/howto/existing-envoy.md.
const yourEnvoy = `admin: {address: {socket_address: {address: 127.0.0.1, port_value: 9901}}}
static_resources:
  listeners:
  - name: mine
    address: {socket_address: {address: 127.0.0.1, port_value: 10000}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: mine
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
ROUTES`

// The how-tos that work on a machine, pasted literally, at other ports, into a bash in which Tandem runs.
func TestHowTosPasted(t *testing.T) {
	t.Parallel()
	const serve, envoy = "tandem serve -f tandem.yaml > tandem.log 2>&1 &", "envoy -c envoy.yaml --disable-hot-restart > envoy.log 2>&1 &"
	ready := "curl --retry 60 --retry-all-errors --retry-delay 1 -fsS http://127.0.0.1:9090/readyz"
	for name, how := range map[string]struct {
		config string              // beside that of the page and the pool
		before []string            // commands
		after  map[string][]string // what the reader does by hand after a command
		check  func(t *testing.T, dir, out string)
	}{
		"rotate-keys": {
			config: "tickets: {keyFile: ticket.key}",
			before: []string{"openssl rand -hex 32 > ticket.key && chmod 600 ticket.key", serve, ready},
			check: func(t *testing.T, dir, _ string) {
				key, err := os.ReadFile(filepath.Join(dir, "ticket.key"))
				require.NoError(t, err)
				require.Regexp(t, `^[0-9a-f]{64}\n$`, string(key))
				log, err := os.ReadFile(filepath.Join(dir, "tandem.log"))
				require.NoError(t, err)
				require.GreaterOrEqual(t, strings.Count(string(log), "ticket keys changed"), 2)
			}},
		"upgrade": {
			before: []string{"tandem envoy -f tandem.yaml > envoy.yaml", serve},
			check: func(t *testing.T, _, out string) {
				require.Regexp(t, `(?s)valid.*Tandem .*ready`, out)
				require.NotRegexp(t, `(?m)^[<>]`, out, "the same binary makes the same bootstrap")
			}},
		"tls": {
			after: map[string][]string{"tandem serve -f tandem.yaml --check": {serve, ready}, "tandem envoy -f tandem.yaml > envoy.yaml": {envoy}},
			check: func(t *testing.T, _, out string) {
				require.Contains(t, out, `"id":"tiny"`)
				require.Contains(t, out, "ssl.fail_verify_error: 0")
				require.NotRegexp(t, `(fail_verify|connection_error|connect_fail)\w*: [1-9]`, out)
			}},
		"existing-envoy": {
			before: []string{"cat > your-envoy.yaml <<'end'\n" + yourEnvoy + "\nend"},
			after: map[string][]string{"tandem serve -f tandem.yaml &": {ready},
				"envoy --mode validate -c new-envoy.yaml": {"envoy -c new-envoy.yaml --disable-hot-restart > envoy.log 2>&1 &"}},
			check: func(t *testing.T, _, out string) {
				require.Contains(t, out, `"id":"tiny"`)
				require.Regexp(t, `(200|running) .* split `, out)
			}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			page, err := os.ReadFile("../docs/howto/" + name + ".md")
			require.NoError(t, err)
			p, d := startSim(t, nil, "--role", "prefill", "--model", "tiny"), startSim(t, nil, "--role", "decode", "--model", "tiny")
			at, dir := ports(t, 6), t.TempDir()
			places := []string{"10.0.1.1:8000", p, "10.0.2.1:8000", d, "MODEL", "tiny"}
			for i, port := range []string{"8080", "9901", "9002", "9003", "9090", "10000"} {
				_, its, _ := strings.Cut(at[i], ":")
				places = append(places, "127.0.0.1:"+port, at[i], "port_value: "+port, "port_value: "+its)
			}
			if routes := regexp.MustCompile("(?s)\n    ```\n(    routes:.*?)\n    ```").FindStringSubmatch(string(page)); routes != nil {
				places = append(places, "ROUTES", strings.ReplaceAll(routes[1], "    ", strings.Repeat(" ", 14)))
			}
			places = append(places, "extProc:\n", fmt.Sprintf("replan: {listen: %q}\nadmin: {listen: %q}\nextProc:\n  listen: %q\n", at[3], at[4], at[2]),
				"envoy:\n", fmt.Sprintf("envoy:\n  listen: %q\n  admin: %q\n", at[0], at[1]))
			text := strings.NewReplacer(places...).Replace(string(page))
			config := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindStringSubmatch(text)
			switch {
			case config == nil:
				config = []string{"", strings.NewReplacer(places...).Replace(how.config + "\nextProc:\nenvoy:\npools:\n- name: chat\n  kvTransfer: nixl\n  endpoints:\n" +
					"  - {address: 10.0.1.1:8000, role: prefill}\n  - {address: 10.0.2.1:8000, role: decode}\n")}
			case !strings.Contains(config[1], "envoy:\n"):
				config[1] = strings.NewReplacer(places...).Replace("extProc:\nenvoy:\n") + config[1]
			}
			require.NoError(t, os.WriteFile(filepath.Join(dir, "tandem.yaml"), []byte(config[1]), 0o600))
			commands := append([]string{}, how.before...)
			for _, command := range commandsOf(text) {
				commands = append(append(commands, command), how.after[command]...)
			}
			require.Greater(t, len(commands), 4)
			script := "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + strings.NewReplacer(places...).Replace(strings.Join(commands, "\n")+"\n")
			how.check(t, dir, paste(t, dir, script))
		})
	}
}
