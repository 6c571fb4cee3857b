package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// loadFleet has two engines of each role, and a first prefill engine whose KV no decode engine can load.
func loadFleet(t *testing.T, replicas int) *fleet {
	f := start(t, options{prefills: 2, decodes: 2, replicas: replicas, engineArgs: []string{"--load-timeout", "300ms", "--lease", "5s"}})
	f.lenient = true // blocks that could not be loaded wait for their lease
	f.inject(f.prefills[0], `{"mode":"unreachable"}`)
	return f
}

func loadBody(api string, i int, stream bool) (path, body string) {
	prompt := fmt.Sprintf("%d ", i) + strings.Repeat("all is well. ", 20)
	switch api {
	case "completions":
		return "/v1/completions", fmt.Sprintf(`{"model":"tiny","stream":%t,"max_tokens":1,"prompt":%q}`, stream, prompt)
	case "responses":
		return "/v1/responses", fmt.Sprintf(`{"model":"tiny","stream":%t,"max_output_tokens":1,"input":%q}`, stream, prompt)
	case "generate":
		ids := strings.TrimSuffix(strings.Repeat(fmt.Sprintf("%d,", i+1), 64), ",")
		return "/inference/v1/generate", fmt.Sprintf(`{"model":"tiny","stream":%t,"token_ids":[%s],"sampling_params":{"max_tokens":1}}`, stream, ids)
	case "messages":
		return "/v1/messages", fmt.Sprintf(`{"model":"tiny","stream":%t,"max_tokens":1,"messages":[{"role":"user","content":%q}]}`, stream, prompt)
	}
	return "/v1/chat/completions", fmt.Sprintf(`{"model":"tiny","stream":%t,"max_tokens":1,"messages":[{"role":"user","content":%q}]}`, stream, prompt)
}

// complete reports whether a stream has its last event, and no error.
func complete(stream string) bool {
	return !strings.Contains(stream, "error") &&
		(strings.HasSuffix(stream, "data: [DONE]\n\n") || strings.Contains(stream, "response.completed") || strings.Contains(stream, "message_stop"))
}

// Streams whose KV load failed are lost, since the status has been sent by then. Each pair loses one, and is avoided
// from then on; the shortest complete answers are not mistaken for such.
func TestStreamsWhoseKVLoadFails(t *testing.T) {
	t.Parallel()
	for _, api := range []string{"chat", "completions", "responses", "generate"} {
		t.Run(api, func(t *testing.T) {
			t.Parallel()
			f := loadFleet(t, 2)
			lost := 0
			for i := range 20 {
				path, body := loadBody(api, i, true)
				got := f.post(path, body)
				require.Equal(t, 200, got.status, got.body)
				if complete(got.body) {
					continue
				}
				lost++
				for _, admin := range f.admins {
					soon(t, "the failure is known", func() bool {
						return metric(t, admin, "tandem_kv_load_failures_total", `seen="stream"`) == float64(lost)
					})
				}
			}
			require.LessOrEqual(t, lost, len(f.decodes), "one for each pair")
			require.Positive(t, lost, "nothing failed")
			failed, ok := 0., 0.
			soon(t, "all are counted", func() bool {
				failed, ok = 0, 0
				for _, admin := range f.admins {
					failed += metric(t, admin, "tandem_request_duration_seconds_count", `result="failed"`)
					ok += metric(t, admin, "tandem_request_duration_seconds_count", `result="ok"`)
				}
				return failed+ok == 20
			})
			require.InDelta(t, lost, failed, 0, "and no complete one")
			require.NotEmpty(t, f.requests("", f.prefills[1]), "the other prefill engine is used")
			f.noneLeftOut()
		})
	}
}

// Answers that are not streamed are repaired: by another pair, without excluding a decode engine, and without
// computing a prompt on one.
func TestAnswersWhoseKVLoadFails(t *testing.T) {
	t.Parallel()
	f := loadFleet(t, 1)
	slow := 0
	for i := range 20 {
		got := f.post(loadBody("chat", i, false))
		require.Equal(t, 200, got.status, got.body)
		if got.took > 300*time.Millisecond {
			slow++
		}
	}
	failures := metric(t, f.admins[0], "tandem_kv_load_failures_total", `seen="answer"`)
	require.Positive(t, failures, "nothing failed")
	require.LessOrEqual(t, failures, float64(len(f.decodes)), "once for each pair")
	speed(t, slow <= len(f.decodes), "%d answers waited for a load that failed", slow)
	require.Zero(t, metric(t, f.admins[0], "tandem_decisions_total", `route="decode_alone"`), "split: always")
	for _, r := range f.requests("", f.decodes...) {
		require.Equal(t, "decode", r.Leg)
	}
	f.noneLeftOut()
}

// With the policy "recompute" decode computes what it could not load, and only its own count of failed transfers shows
// it.
func TestCountsOfFailedTransfersAreRead(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 1, decodes: 1, engineArgs: []string{"--load-timeout", "300ms", "--lease", "5s", "--kv-load-failure", "recompute"}})
	f.lenient = true // blocks that could not be loaded wait for their lease
	f.inject(f.prefills[0], `{"mode":"unreachable"}`)
	i := 0
	soon(t, "the pair is blamed", func() bool {
		got := f.post(loadBody("chat", i, true))
		require.Equal(t, 200, got.status, got.body)
		require.True(t, complete(got.body), got.body)
		i++
		return metric(t, f.admins[0], "tandem_kv_load_failures_total", `seen="count"`) == 1
	})
	f.noneLeftOut()
}

// noneLeftOut requires that no endpoint was ever marked as failed.
func (f *fleet) noneLeftOut() {
	for _, x := range f.tandems {
		text, err := os.ReadFile(x.log)
		require.NoError(f.t, err)
		require.NotContains(f.t, string(text), "endpoint is back")
		require.NotContains(f.t, string(text), "endpoint is out")
	}
}

// Requests that prefill can refuse are refused before it computes: no blocks are held for them. Decode refuses them, too,
// and says so in its own words.
func TestPrefillRefusesWhatDecodeWould(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 1, decodes: 1})
	for path, members := range map[string][]string{
		"/v1/chat/completions": {`"logprobs":true,"top_logprobs":21`, `"max_tokens":0`, `"max_completion_tokens":-5`, `"min_tokens":-1`, `"stream_options":{"include_usage":true}`},
		"/v1/completions":      {`"logprobs":21`, `"max_tokens":-1`, `"stream_options":{"include_usage":true}`},
	} {
		for _, member := range members {
			body := `{"model":"tiny",` + member + `,"messages":[{"role":"user","content":"A prompt."}]}`
			if path == "/v1/completions" {
				body = `{"model":"tiny",` + member + `,"prompt":"A prompt."}`
			}
			got := f.post(path, body)
			require.Equal(t, 400, got.status, "%s %s: %s", path, member, got.body)
		}
	}
	require.Len(t, f.requests("", f.prefills...), 8)
	require.Len(t, f.requests("", f.decodes...), 8)
	f.noneLeftOut()
	require.Zero(t, metric(t, "http://"+f.prefills[0].addr, "enginesim_handovers_total", `outcome="given"`))
}
