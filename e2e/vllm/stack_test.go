//go:build vllm

package vllm

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

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
	s.front.addr, s.admin = realengines.Serve(t, s.pool(), "usage: {}")
	return s
}

func (s *stack) pool() string {
	var b strings.Builder
	fmt.Fprintf(&b, `- name: tiny
  models: ["*"]
  kvTransfer: %s
  split: always
  decodeAlone: fallback
%s  endpoints:
`, dialect(), membersConfig()+eventsConfig())
	for i, e := range s.prefill {
		fmt.Fprintf(&b, "  - {address: %q, role: prefill%s%s}\n", s.prefillDoors.before(i, e), bootstrap(e), ranks(e))
	}
	for i, e := range s.decode {
		fmt.Fprintf(&b, "  - {address: %q, role: decode%s}\n", s.decodeDoors.before(i, e), ranks(e))
	}
	return b.String()
}

// membersConfig returns the settings of a pool of MultiConnector engines, as run.sh starts them.
func membersConfig() string {
	if dialect() != "multi" {
		return ""
	}
	return "  members: [nixl, shared]\n"
}

// eventsConfig returns the settings of a pool whose engines publish KV events: those with ranks do (run.sh).
func eventsConfig() string {
	if os.Getenv("TANDEM_VLLM_RANKS") == "" {
		return ""
	}
	return "  kvEvents: {replayPort: 1}\n" // each engine has its own
}

// ranks returns the fields of an engine with data-parallel ranks behind its port.
func ranks(e engine) string {
	n := os.Getenv("TANDEM_VLLM_RANKS")
	_, port, err := net.SplitHostPort(e.addr)
	at, err2 := strconv.Atoi(port)
	if n == "" || err != nil || err2 != nil {
		return ""
	}
	return fmt.Sprintf(", dataParallelRanks: %s, kvEventsPort: %d, kvReplayPort: %d", n, at+3000, at+4000)
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
