package e2e

import (
	"fmt"
	"math"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// learnedTrace is the part of /debug/requests about a request's prefill.
type learnedTrace struct {
	Prefill         string        `json:"prefill"`
	Decode          string        `json:"decode"`
	ExpectedPrefill time.Duration `json:"expected_prefill_ns"`
	PrefillTime     time.Duration `json:"prefill_ns"`
}

// Speeds are learned from real answers and real metrics: after 100 requests an endpoint the expected time of prefill
// is within 15 % of the real one, and so is the pace of decode, whether engines are four times slower or faster than
// modelled, for short prompts and for long ones; and equal engines get equal shares. It takes minutes and an idle
// machine: make speed.
func TestSpeedsAreLearned(t *testing.T) {
	if os.Getenv("TANDEM_SPEED") == "" {
		t.Skip("minutes, and an idle machine: make speed")
	}
	for _, slow := range []float64{4, .25} {
		for _, tokens := range []int{200, 4000} {
			t.Run(fmt.Sprintf("%g times, %d tokens", slow, tokens), func(t *testing.T) {
				step := time.Duration(float64(12100*time.Microsecond) * slow)
				f := start(t, options{
					engineArgs: []string{"--prefill-speed", fmt.Sprint(16000 / slow), "--decode-step", step.String()},
				})
				const requests, clients = 220, 2
				var sent atomic.Int64
				f.burst(clients, func(int) (a answer) {
					for i := sent.Add(1); i <= requests; i = sent.Add(1) {
						body := fmt.Sprintf(`{"model":"tiny","max_tokens":20,"messages":[{"role":"user","content":%q}]}`, fmt.Sprint(i, " ", strings.Repeat(fmt.Sprintf(" w%06d", i), tokens/2)))
						a = f.post("/v1/chat/completions", body)
						require.Equal(t, 200, a.status, "%.300s", a.body)
					}
					return a
				})
				f.holdsWhatWasLearned(t, step)
			})
		}
	}
}

func (f *fleet) holdsWhatWasLearned(t *testing.T, step time.Duration) {
	t.Helper()
	var traces []learnedTrace
	require.NoError(t, getJSON(f.admins[0]+"/debug/requests?n=100", &traces))
	var expected, took time.Duration
	shares := map[string]int{}
	for _, trace := range traces {
		expected, took = expected+trace.ExpectedPrefill, took+trace.PrefillTime
		shares[trace.Prefill]++
		shares[trace.Decode]++
	}
	var explained struct {
		Candidates []struct {
			Endpoint string  `json:"endpoint"`
			Role     string  `json:"role"`
			Prefill  float64 `json:"prefill_learned"`
			Decode   float64 `json:"decode_learned"`
		} `json:"candidates"`
	}
	require.NoError(t, getJSON(f.admins[0]+"/debug/explain?tokens=1000", &explained))
	t.Logf("prefill expected %v, took %v; shares %v; %+v", expected/100, took/100, shares, explained.Candidates)
	require.InEpsilon(t, took.Seconds(), expected.Seconds(), .15, "when prefill answers")
	paces := 0
	for _, c := range explained.Candidates {
		if c.Role == "decode" {
			require.InEpsilon(t, step.Seconds()/.0121, c.Decode, .15, "pace of %s", c.Endpoint)
			paces++
		}
		require.LessOrEqual(t, math.Abs(float64(shares[c.Endpoint])-50), 10., "share of %s", c.Endpoint)
	}
	require.Equal(t, 2, paces)
}
