package e2e

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What one request meets costs no other: a D that never comes for a prompt leaves P with a request that waits, and D with
// one of which it shows nothing, for longer than an engine may stand still. Both go on answering others.
func TestAPartnerThatNeverComes(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"sglang", "mooncake", "nixl-push"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			f := start(t, options{prefills: 1, decodes: 1, dialect: dialect, pool: "  prefillTimeout: {base: 60s}\n"})
			f.lenient = true // the one request leaves KV behind
			require.Equal(t, 200, f.post("/v1/chat/completions", question("warm", 100)).status)
			f.inject(f.decodes[0], `{"mode":"hang","leg":"any","contains":"lost","count":1}`)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() { _, _ = f.try(ctx, "POST", "/v1/chat/completions", question("lost", 100)) }()
			time.Sleep(14 * time.Second) // nothing else moves the counters meanwhile
			require.Zero(t, metric(t, f.admins[0], "tandem_endpoint_health_changes_total", `to="out"`))
			require.Equal(t, 200, f.post("/v1/chat/completions", question("another", 100)).status)
		})
	}
}

// An engine whose one step takes seconds, with others in its queue, is not taken for one that stands. Real engines compute
// longer prompts in several steps, each of which shows in their use of memory.
func TestALongPromptBeforeAFullQueue(t *testing.T) {
	t.Parallel()
	f := start(t, options{
		prefills: 1, decodes: 1, engineArgs: []string{"--prefill-speed", "1000", "--blocks", "4000"},
		pool: "  binding: immediate\n  prefillTimeout: {base: 60s}\n",
	})
	require.Equal(t, 200, f.post("/v1/chat/completions", question("warm", 100)).status)
	answers := f.burst(6, func(i int) answer {
		if i == 0 {
			return f.post("/v1/chat/completions", question("long", 6000))
		}
		time.Sleep(time.Second)
		return f.post("/v1/chat/completions", question("short", 100+i))
	})
	for _, a := range answers {
		require.Equal(t, 200, a.status, a.body)
	}
	require.Zero(t, metric(t, f.admins[0], "tandem_endpoint_health_changes_total", `to="out"`))
}
