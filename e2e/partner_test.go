package e2e

import (
	"context"
	"fmt"
	"strings"
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

// An engine that was restarted is another one when it is back: it has another name. A replica knows that, too, if the
// requests that failed there were another replica's.
func TestEnginesComeBackAsOthers(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "nixl-push", "mooncake"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			f := start(t, options{prefills: 1, decodes: 1, dialect: dialect, replicas: 2, top: startRedis(t).yaml()})
			f.lenient = true // a restarted engine loses its counts
			alone := startAlone(t)
			body := func(text string) string {
				return strings.Replace(question(text, 100), "{", `{"stream":true,`, 1)
			}
			ask := func(text string) {
				want, _ := whole(t.Context(), alone, body(text))
				for i := range 6 { // of both replicas
					r := send(t.Context(), f.url, fmt.Sprintf("%s %d", text, i), body(text))
					<-r.done
					require.Equal(t, "200 whole", r.kind(want), "%s, %d: %s", text, i, r.body.String())
				}
			}
			ask("warm")
			e := f.prefills[0]
			for i := range 3 {
				changed := func(to string) (n float64) {
					for _, admin := range f.admins {
						n += metric(t, admin, "tandem_endpoint_health_changes_total", `to="`+to+`"`, `endpoint="`+e.addr+`"`)
					}
					return n
				}
				out, in := changed("out"), changed("up")
				f.inject(e, `{"mode":"restart","delay":"1s","warmup":"2s"}`)
				soon(t, "both replicas know that it is out", func() bool {
					<-send(t.Context(), f.url, "during", body("during")).done
					return changed("out") >= out+2
				})
				soon(t, "both replicas know that it is back", func() bool { return changed("up") >= in+2 })
				ask(fmt.Sprintf("after restart %d", i))
			}
		})
	}
}
