//go:build cluster

package cluster

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The tutorial of Kubernetes, pasted from its first command to its last, by each of the two ways of its fourth step: one
// request is sent, and is split, and of all that was applied nothing is left. The engines are simulated, at the speed of
// a GPU, and the cluster has no load balancer, as kind has none.
func TestTutorial(t *testing.T) {
	c := startGateway(t)
	c.must("kubectl apply -f " + c.file("quickstart.yaml"))
	engines := filepath.Join(c.dir, "deploy/examples/vllm-nixl.yaml")
	text, err := os.ReadFile(engines)
	require.NoError(t, err)
	for _, r := range [][2]string{
		{`image: vllm/.*`, `image: tandem.test/enginesim:1`},
		{`args: .*kv_producer.*`, `args: [--listen, "0.0.0.0:8000", --side-channel, "$$(POD_IP):5600", --model, tiny, --prefill-speed, "8000", --decode-step, 8ms, --role, prefill, --lease, 120s]`},
		{`args: .*kv_consumer.*`, `args: [--listen, "0.0.0.0:8000", --side-channel, "$$(POD_IP):5600", --model, tiny, --prefill-speed, "8000", --decode-step, 8ms, --role, decode, --bidirectional, --decoder-ttl, 1s, --kv-load-failure, recompute]`},
		{` *resources: .*nvidia.*\n`, ``},
	} {
		pattern := regexp.MustCompile(r[0])
		require.Regexp(t, pattern, string(text))
		text = pattern.ReplaceAll(text, []byte(r[1]))
	}
	require.NoError(t, os.WriteFile(engines, text, 0o600))
	tutorial, err := os.ReadFile("../../docs/tutorial/kubernetes.md")
	require.NoError(t, err)
	steps := regexp.MustCompile(`(?m)^## \d\. `).Split(string(tutorial), -1)
	require.Len(t, steps, 7)
	extension, patches, found := strings.Cut(steps[4], "\n**An EnvoyPatchPolicy**")
	require.True(t, found)
	c.await("the Gateway has an Envoy", func() bool {
		return c.must("kubectl get deployment -n envoy-gateway-system -o name "+owner+"eg") != ""
	})
	c.must("kubectl rollout status --timeout=4m -n envoy-gateway-system deployment " + owner + "eg")
	before := c.kept()

	t.Run("extension", func(t *testing.T) {
		c := c.under(t)
		page := strings.Join([]string{steps[1], steps[2], steps[3], extension, steps[5], steps[6]}, "\n")
		c.walk(page, "eg")
		c.leaves(before)
	})
	t.Run("EnvoyPatchPolicy", func(t *testing.T) {
		c := c.under(t)
		const apis = "config.envoyGateway.extensionApis."
		c.configure(apis + "enableBackend=true," + apis + "enableEnvoyPatchPolicy=true")
		instead := regexp.MustCompile("`(tandem envoy .*delete -f -)`").FindStringSubmatch(steps[6])
		require.NotNil(t, instead)
		lines := regexp.MustCompile(`(?m)^    .*\n`).FindAllString(steps[6], -1)
		page := strings.Join([]string{steps[1], steps[2], steps[3], patches, steps[5], "    " + instead[1] + "\n" + strings.Join(lines[2:], "")}, "\n")
		page = strings.NewReplacer("gateway eg", "gateway tandem", "gateway-name=eg", "gateway-name=tandem", "8080:80", "8080:8080").Replace(page)
		c.walk(page, "tandem")
		c.leaves(before)
	})
}

// leaves waits until there is what was kept before, and nothing else.
func (c *cluster) leaves(before []string) {
	c.t.Helper()
	for began := time.Now(); !slices.Equal(before, c.kept()) && time.Since(began) < patience; time.Sleep(time.Second) {
	}
	require.Equal(c.t, before, c.kept())
}

// kept are the resources that a user sees, without Helm's own records of its releases.
func (c *cluster) kept() []string {
	return slices.DeleteFunc(c.names(), func(name string) bool { return strings.Contains(name, " sh.helm.release.") })
}

// walk runs the commands of a page, which are its lines that are indented by four, in one shell. What the page has run in
// another terminal, and what it says instead of an address, comes when its port is open. gateway is the name of its Gateway.
func (c *cluster) walk(page, gateway string) {
	c.t.Helper()
	script := "set -e; trap 'kill $(jobs -p)' EXIT\n"
	for _, m := range regexp.MustCompile(`(?m)^    (\S.*)$`).FindAllStringSubmatch(regexp.MustCompile("(?s)```.*?```").ReplaceAllString(page, ""), -1) {
		command := m[1]
		script += "echo; echo \"$SECONDS s: \"'$ " + strings.ReplaceAll(command, "'", `'\''`) + "'\n"
		if forward := regexp.MustCompile(`port-forward .*?(\d+)(:\d+)?$`).FindStringSubmatch(command); forward != nil {
			script += command + " > /dev/null &\nuntil (: < /dev/tcp/127.0.0.1/" + forward[1] + ") 2> /dev/null; do kill -0 $!; sleep 0.2; done\n"
			if strings.Contains(page, "`GATEWAY=127.0.0.1:"+forward[1]+"`") {
				script += "GATEWAY=127.0.0.1:" + forward[1] + "\n"
			}
			continue
		}
		script += command + "\n"
		if strings.HasPrefix(command, "kubectl wait --for=condition=Ready pod -l app=llm") {
			// Real engines load for minutes. Until then Envoy Gateway has made its Envoy.
			script += "for i in {1..300}; do kubectl get deployment -n envoy-gateway-system " + owner + gateway + " -o name | grep -q . && break; sleep 0.2; done\n"
		}
		if strings.HasSuffix(command, "| kubectl apply -f -") { // the image of its own Envoy is not here
			script += `kubectl patch envoyproxy tandem --type=merge -p '{"spec": {"provider": {"type": "Kubernetes", "kubernetes": {"envoyDeployment": {"container": {"image": "tandem.test/envoy:1.40.0"}}}}}}'` + "\n"
		}
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/bash", "-m", "-c", script)
	cmd.Dir, cmd.Env = c.dir, c.env
	out, err := cmd.CombinedOutput()
	c.t.Logf("%s\n(%.0f s)", out, time.Since(began).Seconds())
	require.NoError(c.t, err)
	require.Regexp(c.t, `"finish_reason":"(stop|length)"`, string(out))
	require.Regexp(c.t, `(?m)^ *(200|running) .* split +default/prefill-\S+ +default/decode-\S+ `, string(out))
}
