//go:build vllm

package vllm

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/realengines"
)

// engine is an HTTP server at an address: a vLLM, or Envoy that looks like one.
type engine struct{ addr string }

// metrics are the samples of a Prometheus text exposition, by name and labels as they are written there.
type metrics map[string]float64

func (e engine) metrics(t *testing.T) metrics {
	t.Helper()
	m, err := scrape(e.addr)
	require.NoError(t, err)
	return m
}

func scrape(addr string) (metrics, error) {
	answer, err := http.Get("http://" + addr + "/metrics")
	if err != nil {
		return nil, err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(answer.Body)
		return nil, fmt.Errorf("metrics of %s: %d %.200s", addr, answer.StatusCode, text)
	}
	m := metrics{}
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() {
		line := lines.Text()
		i := strings.LastIndexByte(line, ' ')
		if strings.HasPrefix(line, "#") || i < 0 {
			continue
		}
		if m[line[:i]], err = strconv.ParseFloat(line[i+1:], 64); err != nil {
			return nil, fmt.Errorf("metrics of %s: %q: %w", addr, line, err)
		}
	}
	return m, lines.Err()
}

// sum adds the samples of a metric that have the label, written as name="value"; "" takes all.
func (m metrics) sum(name, label string) float64 {
	var total float64
	for sample, value := range m {
		if base, labels, _ := strings.Cut(sample, "{"); base == name && strings.Contains(labels, label) {
			total += value
		}
	}
	return total
}

// tokens are the prompt tokens of some engines by where their KV came from.
type tokens struct{ computed, cached, transferred float64 }

func (a tokens) minus(b tokens) tokens {
	return tokens{a.computed - b.computed, a.cached - b.cached, a.transferred - b.transferred}
}

func (a tokens) plus(b tokens) tokens {
	return tokens{a.computed + b.computed, a.cached + b.cached, a.transferred + b.transferred}
}

func (a tokens) all() float64 { return a.computed + a.cached + a.transferred }

func (a tokens) String() string {
	return fmt.Sprintf("%.0f transferred, %.0f from its own cache, %.0f computed", a.transferred, a.cached, a.computed)
}

func promptTokens(t *testing.T, engines ...engine) tokens {
	t.Helper()
	const name = "vllm:prompt_tokens_by_source_total"
	var sum tokens
	for _, e := range engines {
		m := e.metrics(t)
		sum.computed += m.sum(name, `source="local_compute"`)
		sum.cached += m.sum(name, `source="local_cache_hit"`)
		sum.transferred += m.sum(name, `source="external_kv_transfer"`)
	}
	return sum
}

func total(t *testing.T, engines []engine, name string) float64 {
	t.Helper()
	var sum float64
	for _, e := range engines {
		sum += e.metrics(t).sum(name, "")
	}
	return sum
}

// requireAlive requires every engine to answer, with nothing running or waiting in it within 10 s.
func requireAlive(t *testing.T, engines []engine) {
	t.Helper()
	for _, e := range engines {
		require.True(t, realengines.OK(e.addr, "/health"), "engine %s is dead", e.addr)
	}
	require.Eventually(t, func() bool {
		return total(t, engines, "vllm:num_requests_running")+total(t, engines, "vllm:num_requests_waiting") == 0
	}, 30*time.Second, 100*time.Millisecond, "requests still run")
}
