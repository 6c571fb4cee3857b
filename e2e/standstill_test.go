package e2e

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A decode engine whose core stands still until P's leases are over, and whose /health, /metrics and stream headers
// answer, goes on with KV that is another prompt's by then. No client sees a text made from it: plain requests are
// planned again or refused, streams end with an error event. Then the engine is back.
func TestAStandingCoreShowsNoForeignText(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		dialect, pool string
		decodes       int
		reason        string
		fail          string // of decode engines
	}{
		"one decode engine":   {"nixl", "  nixl: {lease: 12s}\n", 1, "standstill", ""},
		"two":                 {"nixl", "  nixl: {lease: 12s}\n", 2, "standstill", ""},
		"one of moriio-read":  {"moriio-read", "  kvTimeout: 12s\n", 1, "late", ""},
		"two of moriio-read":  {"moriio-read", "  kvTimeout: 12s\n", 2, "late", ""},
		"comments come first": {"nixl", "  nixl: {lease: 12s}\n", 1, "standstill", `{"mode":"comment"}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := start(t, options{
				dialect: tt.dialect, prefills: 1, decodes: tt.decodes, pool: tt.pool,
				engineArgs: []string{"--lease", "12s", "--transfer-timeout", "12s", "--blocks", "400", "--faithful"},
			})
			f.lenient = true // the engine that stood answers what nobody gets
			body := func(i int) string {
				b := question(fmt.Sprintf("stands-%d", i), 60)
				if i%2 > 0 {
					b = strings.Replace(b, `{`, `{"stream":true,`, 1)
				}
				return b
			}
			if tt.decodes == 1 { // two have not worked before
				require.Equal(t, 200, f.post("/v1/chat/completions", question("warm", 60)).status)
			}

			for _, d := range f.decodes {
				f.inject(d, `{"mode":"stall"}`)
				if tt.fail != "" {
					f.inject(d, tt.fail)
				}
			}
			go func() {
				time.Sleep(2 * time.Second)
				for i := range 12 { // these get the blocks that P frees
					resp, err := client.Post("http://"+f.prefills[0].addr+"/v1/chat/completions", "application/json",
						strings.NewReader(question(fmt.Sprintf("fills-%d", i), 1000)))
					if err == nil {
						_ = resp.Body.Close()
					}
				}
				time.Sleep(18 * time.Second)
				for _, d := range f.decodes {
					f.clear(d)
				}
			}()
			answers := f.burst(8, func(i int) answer {
				got, err := f.try(context.Background(), http.MethodPost, "/v1/chat/completions", body(i))
				if err != nil {
					return answer{body: err.Error(), header: http.Header{}}
				}
				return got
			})
			refused := 0
			for i, got := range answers {
				if got.status != 200 || strings.Contains(got.body, "kv_outdated") {
					refused++
					require.NotContains(t, got.body, `"delta"`, "an event before the error")
					continue
				}
				require.Equal(t, f.post("/v1/chat/completions", body(i)).text(t), got.text(t), "request %d", i)
			}
			if runsInside() { // headers wait there, so all are planned again
				require.Zero(t, refused)
			} else if tt.decodes == 1 || tt.reason == "late" { // else all may be planned again
				require.Positive(t, refused, "streams had their headers, and nothing else could be done")
				require.Positive(t, metric(t, f.admins[0], "tandem_kv_outdated_total", `reason="`+tt.reason+`"`))
			}
			if tt.reason == "standstill" {
				require.Positive(t, metric(t, f.admins[0], "tandem_endpoint_health_changes_total", `cause="standstill"`, `to="out"`))
			}
			require.Eventually(t, func() bool {
				got, err := f.try(context.Background(), http.MethodPost, "/v1/chat/completions", question("after", 60))
				return err == nil && got.status == 200
			}, time.Minute, 100*time.Millisecond)
		})
	}
}

// A decode engine that has worked compiles for its first request with log probabilities, for longer than two requests
// in turn may wait for KV. It is the only one, or the other one is killed meanwhile. Everybody is answered, with the
// right text: what may be outdated is computed again, and the engine is waited for.
func TestACompilingEngineIsWaitedFor(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		decodes int
		split   string
	}{
		"1+1":                {1, ""},
		"1+1, never alone":   {1, "always\n  decodeAlone: never"},
		"1+2, one is killed": {2, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := options{
				prefills: 1, decodes: tt.decodes, split: tt.split, pool: "  nixl: {lease: 12s}\n",
				engineArgs: []string{"--lease", "12s", "--transfer-timeout", "12s", "--faithful"},
				engine: func(role string, _ int, _ func() string) (args []string, fields string) {
					if role == "decode" {
						args = []string{"--first-logprobs", "25s"}
					}
					return args, ""
				},
			}
			if runsInside() {
				o.pool += insurance
			}
			f := start(t, o)
			f.lenient = true // an engine is killed
			const path = "/v1/chat/completions"
			for i := 0; !f.allDecoded(); i++ {
				require.Equal(t, 200, f.post(path, question(fmt.Sprintf("warm-%d", i), 60)).status)
			}

			body := func(i int) string {
				b := question(fmt.Sprintf("compiles-%d", i), 60)
				switch {
				case i == 0:
					b = strings.Replace(b, `{`, `{"logprobs":true,"top_logprobs":1,`, 1)
				case i%2 > 0 && runsInside(): // beside, the headers of a stream have gone, and it ends with an error
					b = strings.Replace(b, `{`, `{"stream":true,`, 1)
				}
				return b
			}
			id := func(i int) string { return fmt.Sprintf("compiles-%d", i) }
			compiling := func() *engine {
				for _, d := range f.decodes {
					if len(f.requests(id(0), d)) > 0 {
						return d
					}
				}
				return nil
			}
			answers := f.burst(8, func(i int) answer {
				if i > 0 {
					for compiling() == nil {
						time.Sleep(10 * time.Millisecond)
					}
				}
				if i == 1 {
					for _, d := range f.decodes {
						if d != compiling() {
							d.stop(syscall.SIGKILL)
						}
					}
				}
				got, err := f.try(context.Background(), http.MethodPost, path, body(i), "x-request-id", id(i))
				if err != nil {
					return answer{body: err.Error(), header: http.Header{}}
				}
				return got
			})
			for i, got := range answers {
				t.Log(i, got.status, got.took)
			}
			for i, got := range answers {
				require.Equal(t, 200, got.status, "request %d after %v: %s", i, got.took, got.body)
				var again answer
				soon(t, "the same request is answered again", func() bool {
					again = f.post(path, body(i))
					return again.status == 200
				})
				require.Equal(t, again.text(t), got.text(t), "request %d", i)
			}
		})
	}
}

// Streams that come while the only decode engine is known to compile are whole, beside Envoy too, where they have their
// headers long before it goes on: it computes their prompts, and waits for no KV whose lease ends meanwhile.
func TestStreamsThatComeWhileTheLastCompiles(t *testing.T) {
	t.Parallel()
	f := start(t, options{
		prefills: 1, decodes: 1, pool: "  nixl: {lease: 12s}\n",
		engineArgs: []string{"--lease", "12s", "--transfer-timeout", "12s", "--faithful"},
		engine: func(role string, _ int, _ func() string) (args []string, fields string) {
			if role == "decode" {
				args = []string{"--first-logprobs", "35s"}
			}
			return args, ""
		},
	})
	const path = "/v1/chat/completions"
	require.Equal(t, 200, f.post(path, question("warm", 60)).status)
	body := func(i int) string {
		return strings.Replace(question(fmt.Sprintf("comes-%d", i), 60), `{`, `{"stream":true,`, 1)
	}
	before := make(chan []answer, 1)
	go func() {
		before <- f.burst(4, func(i int) answer { // it must have requests that it does not see
			ask := question(fmt.Sprintf("compiles-%d", i), 60)
			if i == 0 {
				ask = strings.Replace(ask, `{`, `{"logprobs":true,"top_logprobs":1,`, 1)
			} else {
				soon(t, "it compiles", func() bool { return len(f.requests("compiles", f.decodes[0])) > 0 })
			}
			got, err := f.try(context.Background(), http.MethodPost, path, ask, "x-request-id", []string{"compiles", fmt.Sprint(i)}[min(i, 1)])
			if err != nil {
				return answer{body: err.Error(), header: http.Header{}}
			}
			return got
		})
	}()
	soon(t, "the engine is known to stand still", func() bool {
		return metric(t, f.admins[0], "tandem_endpoint_health_changes_total", `cause="standstill"`, `to="out"`) > 0
	})
	answers := f.burst(4, func(i int) answer {
		got, err := f.try(context.Background(), http.MethodPost, path, body(i))
		if err != nil {
			return answer{body: err.Error(), header: http.Header{}}
		}
		return got
	})
	for i, got := range answers {
		require.Equal(t, 200, got.status, got.body)
		require.NotContains(t, got.body, "kv_outdated", "request %d after %v", i, got.took)
		require.Equal(t, f.post(path, body(i)).text(t), got.text(t), "request %d", i)
	}
	for i, got := range <-before {
		require.Equal(t, 200, got.status, "request %d: %s", i, got.body)
	}
	require.Positive(t, metric(t, f.admins[0], "tandem_decisions_total", `reason="standstill"`))
}

// allDecoded reports whether each decode engine has served a request.
func (f *fleet) allDecoded() bool {
	return !slices.ContainsFunc(f.decodes, func(d *engine) bool { return len(f.requests("", d)) == 0 })
}
