//go:build vllm

package vllm

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/loopback"
	"tandem/e2e/realengines"
)

// stack is Envoy and Tandem in front of running engines.
type stack struct {
	front     engine // Envoy
	admin     string // Tandem's admin port
	prefill   []engine
	decode    []engine
	reference engine

	prefillDoors, decodeDoors doors // nil: Envoy connects to the engines themselves
}

// engines are all that take part in P/D.
func (s *stack) engines() []engine { return append(append([]engine{}, s.prefill...), s.decode...) }

// newStack starts Tandem and Envoy, and stops them with the test. Their logs are shown if it failed.
func newStack(t *testing.T) *stack {
	t.Helper()
	return startStack(t, runningEngines(t))
}

// newStackBehindDoors is newStack with a door before each engine.
func newStackBehindDoors(t *testing.T) *stack {
	t.Helper()
	s := runningEngines(t)
	s.prefillDoors, s.decodeDoors = newDoors(t, s.prefill), newDoors(t, s.decode)
	return startStack(t, s)
}

func runningEngines(t *testing.T) *stack {
	t.Helper()
	return &stack{
		prefill:   enginesFrom(t, "TANDEM_VLLM_PREFILL"),
		decode:    enginesFrom(t, "TANDEM_VLLM_DECODE"),
		reference: enginesFrom(t, "TANDEM_VLLM_REFERENCE")[0],
	}
}

func startStack(t *testing.T, s *stack) *stack {
	t.Helper()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	tandem, envoy := filepath.Join(root, "bin/tandem"), realengines.Envoy(t, root)
	require.FileExists(t, tandem, "make build")

	dir := t.TempDir()
	ports := freePorts(t, 5)
	s.front, s.admin = engine{"127.0.0.1:" + ports[3]}, "127.0.0.1:"+ports[2]
	config := filepath.Join(dir, "tandem.yaml")
	require.NoError(t, os.WriteFile(config, []byte(s.config(ports)), 0o600))

	realengines.Start(t, dir, "tandem", tandem, "serve", "-f", config)
	bootstrap, err := exec.CommandContext(t.Context(), tandem, "envoy", "-f", config).Output()
	require.NoError(t, err, "tandem envoy")
	bootstrapFile := filepath.Join(dir, "envoy.yaml")
	require.NoError(t, os.WriteFile(bootstrapFile, bootstrap, 0o600))
	realengines.Start(t, dir, "envoy", envoy, "-c", bootstrapFile, "--log-level", "warning", "--use-dynamic-base-id")

	require.Eventually(t, func() bool { return realengines.OK(s.admin, "/readyz") && realengines.OK(s.front.addr, "/v1/models") },
		30*time.Second, 100*time.Millisecond, "Tandem and Envoy did not become ready")
	return s
}

func (s *stack) config(ports []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `extProc: {listen: "127.0.0.1:%s"}
replan:  {listen: "127.0.0.1:%s"}
admin:   {listen: "127.0.0.1:%s"}
envoy:   {listen: "127.0.0.1:%s", admin: "127.0.0.1:%s"}
pools:
- name: tiny
  models: ["*"]
  kvTransfer: %s
  split: always
  decodeAlone: fallback
%s  endpoints:
`, ports[0], ports[1], ports[2], ports[3], ports[4], dialect(), turnsConfig()+membersConfig())
	for i, e := range s.prefill {
		fmt.Fprintf(&b, "  - {address: %q, role: prefill%s}\n", s.prefillDoors.before(i, e), bootstrap(e))
	}
	for i, e := range s.decode {
		fmt.Fprintf(&b, "  - {address: %q, role: decode}\n", s.decodeDoors.before(i, e))
	}
	return b.String()
}

// turnsConfig returns the settings of a pool whose engines keep answers. They keep them for longer (run.sh).
func turnsConfig() string {
	if !bidirectional() {
		return ""
	}
	return "  session: {header: x-session}\n  nixl: {bidirectional: true, reuseTokenIds: true, turnTtl: 30s}\n"
}

// membersConfig returns the settings of a pool of MultiConnector engines, as run.sh starts them.
func membersConfig() string {
	if dialect() != "multi" {
		return ""
	}
	return "  members: [nixl, shared]\n"
}

// before returns an engine's address: its door's, if it has one.
func (d doors) before(i int, e engine) string {
	if d == nil {
		return e.addr
	}
	return d[i].addr
}

// bootstrap returns the address at which run.sh put the bootstrap server of a Mooncake engine.
func bootstrap(e engine) string {
	_, port, err := net.SplitHostPort(e.addr)
	n, err2 := strconv.Atoi(port)
	if dialect() != "mooncake" || err != nil || err2 != nil {
		return ""
	}
	return fmt.Sprintf(", transfer: {bootstrapPort: %d}", n+2000)
}

// dialect returns the engines' KV transfer, as run.sh started them.
func dialect() string {
	if d := os.Getenv("TANDEM_VLLM_DIALECT"); d != "" {
		return d
	}
	return "nixl"
}

func enginesFrom(t *testing.T, variable string) []engine {
	t.Helper()
	value := os.Getenv(variable)
	require.NotEmpty(t, value, "%s: run these tests through run.sh", variable)
	var out []engine
	for addr := range strings.SplitSeq(value, ",") {
		out = append(out, engine{addr})
	}
	return out
}

func freePorts(t *testing.T, n int) []string {
	t.Helper()
	out := loopback.Addresses(t, n)
	for i, addr := range out {
		_, out[i], _ = net.SplitHostPort(addr)
	}
	return out
}
