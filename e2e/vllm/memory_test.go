//go:build vllm

package vllm

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// conversation is what a client asks, turn after turn, and what the reference answers. Each prompt begins with the one
// before it, and its answer.
type conversation struct {
	turns  []question
	prompt []int64 // tokens of each
}

// TestRealMemory plays conversations in a closed loop on two engines whose KV memory does not hold all of them, let
// alone twice. Every text is the reference's, and what conversations had is computed again least under Tandem's
// defaults: more if every request is split, since a pair keeps two copies, and most if turns go to the engine with the
// fewest requests, as behind an Envoy without Tandem.
//
//	BOTH=1 ENGINES=1 e2e/vllm/run.sh go test -tags vllm -count 1 -run TestRealMemory -v ./e2e/vllm
func TestRealMemory(t *testing.T) {
	if os.Getenv("TANDEM_VLLM_BOTH") == "" || strings.Contains(os.Getenv("TANDEM_VLLM_DECODE"), ",") {
		t.Skip("other engines")
	}
	s := &suite{stack: runningEngines(t), prompts: prompts{rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))}, report: &report{}}
	s.report.versions = s.versions(t)
	defer s.report.print(t)
	perWord := s.tokens(t, s.prompts.words(200)) / 200
	again := map[string]float64{}
	for _, c := range []struct{ name, settings string }{
		{"default", "  split: auto\n"}, {"split: always", "  split: always\n"}, {"without Tandem, the engine with the fewest requests", ""},
	} {
		s.run(t, c.name, func(t *testing.T) { again[c.name] = s.converse(t, c.name, c.settings, perWord) })
	}
	for name, share := range again {
		if name != "default" {
			require.Less(t, again["default"], .7*share, name)
		}
	}
}

// converse plays new conversations, and returns the share of what they had that was computed again.
func (s *suite) converse(t *testing.T, name, settings string, perWord float64) float64 {
	t.Helper()
	const clients, each, turns = 8, 2, 8
	all := make([]conversation, clients*each)
	words := func(tokens int) string { return s.prompts.words(int(float64(tokens) / perWord)) }
	for i := range all {
		text := words(900)
		for range turns {
			q := question{request: request{api: completions, prompt: text, tokens: 16, stream: i%2 == 1}}
			a := s.fromReference(t, q.request)
			q.want = a.text
			all[i].turns = append(all[i].turns, q)
			all[i].prompt = append(all[i].prompt, int64(s.tokens(t, text)))
			text += a.text[0] + " " + words(180)
		}
	}
	if settings != "" {
		s.serveBoth(t, s.engines(), settings)
	}
	before, began := promptTokens(t, s.engines()...), time.Now()
	var inFlight [2]atomic.Int64
	errs := make([]error, clients)
	var playing sync.WaitGroup
	for n := range clients {
		random := rand.New(rand.NewPCG(7, uint64(n)))
		playing.Go(func() {
			for _, c := range all[n*each : (n+1)*each] {
				for _, q := range c.turns {
					time.Sleep(time.Duration(random.ExpFloat64() * float64(time.Second)))
					at, to := s.front.addr, &inFlight[0]
					if settings == "" {
						i := 0
						if a, b := inFlight[0].Load(), inFlight[1].Load(); b < a || a == b && random.IntN(2) == 0 {
							i = 1
						}
						at, to = s.engines()[i].addr, &inFlight[i]
					}
					to.Add(1)
					got, err := send(t.Context(), at, q.request, 0)
					to.Add(-1)
					if err == nil && (got.status != 200 || !slices.Equal(got.text, q.want)) {
						err = fmt.Errorf("%s: status %d, text %q, the reference's is %q: %s", q, got.status, got.text, q.want, got.raw)
					}
					if err != nil {
						errs[n] = err
						return
					}
				}
			}
		})
	}
	playing.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	var had, fresh float64
	for _, c := range all {
		fresh += float64(c.prompt[0])
		for i := 1; i < turns; i++ {
			had, fresh = had+float64(c.prompt[i-1]), fresh+float64(c.prompt[i]-c.prompt[i-1])
		}
	}
	computed := promptTokens(t, s.engines()...).minus(before).computed
	again := (computed - fresh) / had
	s.report.row("Conversations, "+name, len(all)*turns, fmt.Sprintf("texts equal, in %.0f s; %.0f tokens computed, %.0f of them again: %.0f %% of what conversations had",
		time.Since(began).Seconds(), computed, computed-fresh, 100*again))
	requireAlive(t, s.engines())
	return again
}
