//go:build vllm

package vllm

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/realengines"
)

// TestRealRoles runs two and three engines that are P and D at once, under roles auto, with traffic that shifts: first
// prompts, then answers, then prompts again. Of three engines another one changes its role each time, while its
// requests run; two have one role each. Every request is answered with the text of the reference, within a minute.
//
//	BOTH=1 ENGINES=1 DECODES=2 e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealRoles -v ./e2e/vllm
func TestRealRoles(t *testing.T) {
	if os.Getenv("TANDEM_VLLM_BOTH") == "" || len(strings.Split(os.Getenv("TANDEM_VLLM_DECODE"), ",")) < 2 {
		t.Skip("other engines")
	}
	s := &suite{stack: runningEngines(t), prompts: prompts{rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))}, report: &report{}}
	s.report.versions = s.versions(t)
	defer s.report.print(t)
	perWord := s.tokens(t, s.prompts.words(200)) / 200
	// In a case nothing is asked twice: conversations that come back would have all engines serve both legs (ADR 99).
	prompts := s.questions(t, 36, int(3800/perWord), 8)
	answers := s.questions(t, 160, int(100/perWord), 128)
	again := s.questions(t, 36, int(3800/perWord), 8)
	for _, c := range []struct {
		engines  int
		settings string
	}{
		{2, "  split: always\n"}, {2, "  split: auto\n"},
		{3, "  split: always\n"}, {3, "  split: always\n  binding: immediate\n"},
	} {
		name := fmt.Sprintf("%d engines, %s", c.engines, strings.ReplaceAll(strings.TrimSpace(c.settings), "\n  ", ", "))
		s.run(t, name, func(t *testing.T) {
			engines := s.engines()[:c.engines]
			for _, e := range engines { // what was asked in the case before is computed again
				res, err := http.Post("http://"+e.addr+"/reset_prefix_cache", "", nil)
				require.NoError(t, err)
				require.NoError(t, res.Body.Close())
				require.Equal(t, http.StatusOK, res.StatusCode)
			}
			s.serveBoth(t, engines, c.settings+"  roles: auto\n")
			began := time.Now()
			var sent, most int
			for i, phase := range []struct {
				of       []question
				clients  int
				prefills int // engines that shall prefill, of three
			}{{prompts, 24, 2}, {answers, 32, 1}, {again, 24, 2}} {
				want := phase.prefills
				if c.engines == 2 {
					want = 1
				}
				sent += s.until(t, phase.of, phase.clients, fmt.Sprintf("phase %d: %d of %d prefill", i, want, c.engines), func() bool {
					m, err := scrape(s.admin)
					most = max(most, int(m.sum("tandem_endpoint_word", `role="prefill"`)))
					return err == nil && int(m.sum("tandem_endpoint_word", `role="prefill"`)) == want
				})
			}
			m, err := scrape(s.admin)
			require.NoError(t, err)
			require.Less(t, most, c.engines, "one engine is left for answers")
			split := m.sum("tandem_decisions_total", `route="split"`)
			require.Positive(t, split)
			s.report.row(name, sent, fmt.Sprintf("all equal, in %.0f s; %.0f split", time.Since(began).Seconds(), split))
			requireAlive(t, engines)
		})
	}
}

// question is a request, and the reference's answer.
type question struct {
	request
	want []string
}

func (s *suite) questions(t *testing.T, n, words, tokens int) []question {
	t.Helper()
	out := make([]question, n)
	errs := make([]error, n)
	var next atomic.Int64
	for i := range out {
		out[i].request = request{api: completions, prompt: s.prompts.words(words), tokens: tokens, stream: i%2 == 1}
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				a, err := send(t.Context(), s.reference.addr, out[i].request, 0)
				if out[i].want, errs[i] = a.text, err; err == nil && a.status != 200 {
					errs[i] = fmt.Errorf("status %d: %s", a.status, a.raw)
				}
			}
		})
	}
	all.Wait()
	for i := range out {
		require.NoError(t, errs[i], "reference, %s", out[i].request)
	}
	return out
}

// until sends the questions, each once, from so many clients, until done says so or all are answered, and returns how
// many were sent.
func (s *suite) until(t *testing.T, of []question, clients int, what string, done func() bool) int {
	t.Helper()
	var sent atomic.Int64
	var failed atomic.Pointer[error]
	stop := make(chan struct{})
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			for failed.Load() == nil {
				n := int(sent.Add(1)) - 1
				select {
				case <-stop:
					n = len(of)
				default:
				}
				if n >= len(of) {
					sent.Add(-1)
					return
				}
				q := &of[n]
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				got, err := send(ctx, s.front.addr, q.request, 0)
				cancel()
				if err == nil && (got.status != 200 || !slices.Equal(got.text, q.want)) {
					err = fmt.Errorf("%s: status %d, text %q, the reference's is %q: %s", q, got.status, got.text, q.want, got.raw)
				}
				if err != nil {
					failed.Store(&err)
				}
			}
		})
	}
	ok := false
	for limit := time.Now().Add(2 * time.Minute); !ok && failed.Load() == nil && time.Now().Before(limit); {
		time.Sleep(100 * time.Millisecond)
		ok = done()
	}
	close(stop)
	all.Wait()
	if err := failed.Load(); err != nil {
		require.NoError(t, *err, what)
	}
	require.True(t, ok, "not within two minutes: %s", what)
	return int(sent.Load())
}

// serveBoth runs Tandem and Envoy for engines that do both.
func (s *suite) serveBoth(t *testing.T, engines []engine, settings string) {
	t.Helper()
	pool := "- name: tiny\n  models: [\"*\"]\n  kvTransfer: nixl\n" + settings + "  endpoints:\n"
	for _, e := range engines {
		pool += fmt.Sprintf("  - {address: %q, role: both}\n", e.addr)
	}
	s.front.addr, s.admin = realengines.Serve(t, pool)
	require.Eventually(t, func() bool {
		m, err := scrape(s.admin)
		return err == nil && m.sum("tandem_scrapes_total", `result="ok"`) >= float64(len(engines))
	}, time.Minute, 100*time.Millisecond)
}
