//go:build vllm

package vllm

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRealBoth runs two engines that are P and D at once, with KV memory for two prompts each, and more prompts than
// that: each could hold prompts for the other until neither has memory to fetch (docs/adr/0052). Every request is
// answered with the text of the reference.
//
//	BOTH=1 ENGINES=1 e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealBoth -v ./e2e/vllm
func TestRealBoth(t *testing.T) {
	if os.Getenv("TANDEM_VLLM_BOTH") == "" {
		t.Skip("engines with one role each")
	}
	s := &suite{stack: runningEngines(t), prompts: prompts{rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))}, report: &report{}}
	s.report.versions = s.versions(t)
	defer s.report.print(t)
	perWord := s.tokens(t, s.prompts.words(200)) / 200
	for _, c := range []struct {
		name             string
		requests, tokens int
		settings         string
	}{
		{"four prompts", 4, 3800, "  split: always\n"},
		{"always, late binding", 12, 3800, "  split: always\n"},
		{"always, immediate binding", 12, 3800, "  split: always\n  binding: immediate\n"},
		{"auto", 12, 3800, "  split: auto\n"},
		{"short prompts", 48, 600, "  split: always\n"},
	} {
		s.run(t, c.name, func(t *testing.T) { s.crowd(t, c.name, c.requests, int(float64(c.tokens)/perWord), c.settings) })
	}
}

// tokens returns how many tokens a prompt has.
func (s *suite) tokens(t *testing.T, prompt string) float64 {
	t.Helper()
	body, err := json.Marshal(map[string]string{"model": "tiny", "prompt": prompt})
	require.NoError(t, err)
	res, err := http.Post("http://"+s.reference.addr+"/tokenize", "application/json", strings.NewReader(string(body)))
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	var got struct{ Count float64 }
	require.NoError(t, json.NewDecoder(res.Body).Decode(&got))
	require.Positive(t, got.Count)
	return got.Count
}

// crowd sends so many prompts at once, every second one for a stream.
func (s *suite) crowd(t *testing.T, name string, n, words int, settings string) {
	s.serveBoth(t, s.engines(), settings)
	requests, want := make([]request, n), make([]answer, n)
	for i := range requests {
		requests[i] = request{api: completions, prompt: s.prompts.words(words), tokens: 16, stream: i%2 == 1}
		want[i] = s.fromReference(t, requests[i])
	}
	began, errs := time.Now(), make([]error, n)
	var all sync.WaitGroup
	for i := range requests {
		all.Go(func() {
			got, err := send(t.Context(), s.front.addr, requests[i], 0)
			if err == nil && (got.status != 200 || !slices.Equal(got.text, want[i].text)) {
				err = fmt.Errorf("status %d, text %q, the reference's is %q: %s", got.status, got.text, want[i].text, got.raw)
			}
			errs[i] = err
		})
	}
	all.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	m, err := scrape(s.admin)
	require.NoError(t, err)
	split := m.sum("tandem_decisions_total", `route="split"`)
	require.Positive(t, split)
	s.report.row("Both roles, "+name, n, fmt.Sprintf("text as aggregated, in %.0f s; %.0f split", time.Since(began).Seconds(), split))
	requireAlive(t, s.engines())
}
