//go:build sglang

package sglang

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/realengines"
)

// stack is Envoy and Tandem in front of running servers.
type stack struct {
	front, admin    string
	prefill, decode []string
	reference       string
}

func servers(t *testing.T, variable string) []string {
	t.Helper()
	value := os.Getenv(variable)
	require.NotEmpty(t, value, "%s: run these tests through run.sh", variable)
	return strings.Split(value, ",")
}

// newStack starts Tandem and Envoy, and stops them with the test. With whole the pool has a server that does both.
func newStack(t *testing.T, whole bool) *stack {
	t.Helper()
	s := &stack{prefill: servers(t, "TANDEM_SGLANG_PREFILL"), decode: servers(t, "TANDEM_SGLANG_DECODE"), reference: servers(t, "TANDEM_SGLANG_REFERENCE")[0]}
	s.front, s.admin = realengines.Serve(t, s.pool(t, whole))
	return s
}

func (s *stack) pool(t *testing.T, whole bool) string {
	t.Helper()
	var b strings.Builder
	b.WriteString(`- name: tiny
  models: ["*"]
  kvTransfer: sglang
  split: always
  prefillTimeout: {base: 2m} # of servers that share two cores with whatever else runs here
  endpoints:
`)
	for _, p := range s.prefill {
		_, port, err := net.SplitHostPort(p)
		require.NoError(t, err)
		n, err := strconv.Atoi(port)
		require.NoError(t, err)
		fmt.Fprintf(&b, "  - {address: %q, role: prefill, transfer: {bootstrapPort: %d}}\n", p, n+1000)
	}
	for _, d := range s.decode {
		fmt.Fprintf(&b, "  - {address: %q, role: decode}\n", d)
	}
	if whole {
		fmt.Fprintf(&b, "  - {address: %q, role: both}\n", s.reference)
	}
	return b.String()
}

// load is one server's answer to GET /v1/loads.
type load struct {
	Running        int `json:"num_running_reqs"`
	Waiting        int `json:"num_waiting_reqs"`
	Disaggregation struct {
		Bootstrap int `json:"prefill_bootstrap_queue_reqs"`
		Inflight  int `json:"prefill_inflight_queue_reqs"`
		Prealloc  int `json:"decode_prealloc_queue_reqs"`
		Transfer  int `json:"decode_transfer_queue_reqs"`
	}
}

func (l load) all() int {
	d := l.Disaggregation
	return l.Running + l.Waiting + d.Bootstrap + d.Inflight + d.Prealloc + d.Transfer
}

func loadOf(addr string) (load, error) {
	answer, err := http.Get("http://" + addr + "/v1/loads")
	if err != nil {
		return load{}, err
	}
	defer func() { _ = answer.Body.Close() }()
	var v struct{ Loads []load }
	if err := json.NewDecoder(answer.Body).Decode(&v); err != nil || len(v.Loads) == 0 {
		return load{}, fmt.Errorf("/v1/loads of %s: %d loads: %w", addr, len(v.Loads), err)
	}
	return v.Loads[0], nil
}

// idle waits until no server has a request, in any queue, and returns the time that it took.
func (s *stack) idle(t *testing.T, servers ...string) time.Duration {
	t.Helper()
	began := time.Now()
	require.Eventually(t, func() bool {
		for _, addr := range servers {
			if l, err := loadOf(addr); err != nil || l.all() > 0 {
				return false
			}
		}
		return true
	}, 2*time.Minute, 200*time.Millisecond, "requests are left in a server")
	return time.Since(began)
}
