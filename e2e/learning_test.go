package e2e

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"slices"
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
// modelled, for short prompts and for long ones; and equal engines get equal shares. It takes minutes: make speed.
//
// With 200 tokens and fast engines prefill takes 4 ms, no more than a busy machine adds. So a new fleet may show it if
// the first did not, twice; and one stall does not count for more than four usual requests, as in what is learned.
func TestSpeedsAreLearned(t *testing.T) {
	if os.Getenv("TANDEM_SPEED") == "" {
		t.Skip("minutes: make speed")
	}
	for _, slow := range []float64{4, .25} {
		for _, tokens := range []int{200, 4000} {
			t.Run(fmt.Sprintf("%g times, %d tokens", slow, tokens), func(t *testing.T) {
				var wrong []string
				for range 3 {
					if wrong = learn(t, slow, tokens); len(wrong) == 0 {
						return
					}
					t.Log(wrong)
				}
				t.Fatal("three fleets of three did not learn their speeds: ", wrong)
			})
		}
	}
}

// learn sends a new fleet 100 requests an endpoint, and returns what it did not learn.
func learn(t *testing.T, slow float64, tokens int) (wrong []string) {
	t.Helper()
	step := time.Duration(float64(12100*time.Microsecond) * slow)
	f := start(t, options{
		engineArgs: []string{"--prefill-speed", fmt.Sprint(16000 / slow), "--decode-step", step.String()},
	})
	const requests, clients = 220, 2
	answerTokens := int(20 / min(slow, 1)) // short steps need more of them, or HTTP and timers weigh as much as decoding
	var sent atomic.Int64
	f.burst(clients, func(int) (a answer) {
		for i := sent.Add(1); i <= requests; i = sent.Add(1) {
			body := fmt.Sprintf(`{"model":"tiny","max_tokens":%d,"messages":[{"role":"user","content":%q}]}`, answerTokens, fmt.Sprint(i, " ", strings.Repeat(fmt.Sprintf(" w%06d", i), tokens/2)))
			a = f.post("/v1/chat/completions", body)
			require.Equal(t, 200, a.status, "%.300s", a.body)
		}
		return a
	})
	return f.notLearned(t, step)
}

// notLearned returns what the fleet has not learned of its engines, whose decode steps take step.
func (f *fleet) notLearned(t *testing.T, step time.Duration) (wrong []string) {
	t.Helper()
	var traces []learnedTrace
	require.NoError(t, getJSON(f.admins[0]+"/debug/requests?n=100", &traces))
	require.Len(t, traces, 100)
	slices.SortFunc(traces, func(a, b learnedTrace) int { return cmp.Compare(a.PrefillTime, b.PrefillTime) })
	median := traces[len(traces)/2].PrefillTime
	var expected, took time.Duration
	shares := map[string]int{}
	for _, trace := range traces {
		expected, took = expected+trace.ExpectedPrefill, took+min(trace.PrefillTime, 4*median)
		shares[trace.Prefill]++
		shares[trace.Decode]++
	}
	within := func(is, learned float64, what string) {
		if !(math.Abs(learned-is) <= .15*is) {
			wrong = append(wrong, fmt.Sprintf("%s: learned %v, is %v", what, learned, is))
		}
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
	within(took.Seconds(), expected.Seconds(), "when prefill answers")
	paces := 0
	for _, c := range explained.Candidates {
		if c.Role == "decode" {
			within(step.Seconds()/.0121, c.Decode, "pace of "+c.Endpoint)
			paces++
		}
		if n := shares[c.Endpoint]; n < 40 || n > 60 {
			wrong = append(wrong, fmt.Sprintf("share of %s: %d of 100", c.Endpoint, n))
		}
	}
	require.Equal(t, 2, paces)
	return wrong
}
