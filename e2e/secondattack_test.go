package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The attacks of the second round, which came through doors that the first had not tried. make attack runs them too.

// Clients that send most of a large body and then nothing hold the memory that all share: while it is short, the slowest
// end, and others' bodies of 4 MiB pass although the stalled clients stay. Inside, Envoy has what they send: they hold
// nothing of the memory that requests share, and none ends.
func TestStalledUploads(t *testing.T) {
	t.Parallel()
	// an eighth of the usual memory: 128 MiB for all, 32 MiB for a connection of Envoy
	f := start(t, options{concurrency: 8, memory: "256MiB", engineArgs: []string{"--record=false"}})
	address := strings.TrimPrefix(f.url, "http://")
	const clients, piece = 24, 512 << 10
	var stalled []net.Conn
	for range clients {
		conn, err := net.Dial("tcp", address)
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		stalled = append(stalled, conn)
	}
	var sending sync.WaitGroup
	text := strings.Repeat("w ", piece/2)
	for _, conn := range stalled {
		sending.Go(func() {
			_ = conn.SetWriteDeadline(time.Now().Add(patience))
			_, _ = io.WriteString(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
			for i := range 20 {
				text := text
				if i == 0 {
					text = `{"model":"tiny","max_tokens":4,"messages":[{"role":"user","content":"` + text
				}
				if _, err := fmt.Fprintf(conn, "%x\r\n%s\r\n", len(text), text); err != nil {
					return
				}
			}
		})
	}
	var held float64
	inside := runsInside()
	soon(t, "the stalled have sent what they send", func() bool {
		held = metric(t, f.admins[0], "tandem_held_bytes")
		return held > 96*(1<<20) || inside && f.envoyStat("http.openai.downstream_cx_rx_bytes_total") >= clients*20*piece
	})
	body := question("stalled", 1_000_000)
	began, refused := time.Now(), 0
	for passed := 0; passed < 3; {
		require.Less(t, time.Since(began), patience, "bodies of 4 MiB do not pass")
		var busy atomic.Int64
		var round sync.WaitGroup
		for range 3 {
			round.Go(func() {
				got, err := f.try(t.Context(), http.MethodPost, "/v1/chat/completions", body)
				if err != nil || got.status != 200 {
					busy.Add(1)
				}
			})
		}
		if round.Wait(); busy.Load() == 0 {
			passed++
			continue
		}
		refused += int(busy.Load())
		time.Sleep(100 * time.Millisecond) // the clients come again
	}
	took := time.Since(began)
	for _, conn := range stalled {
		_ = conn.SetWriteDeadline(time.Now())
	}
	sending.Wait()
	ended := 0
	for _, conn := range stalled {
		_ = conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if resp, err := http.ReadResponse(bufio.NewReader(conn), nil); err == nil {
			require.Contains(t, []int{503, 408}, resp.StatusCode)
			_ = resp.Body.Close()
			ended++
		}
		_ = conn.Close()
	}
	t.Logf("%d stalled clients held %.0f MiB; 3 times 3 bodies of 4 MiB had passed %.1f s later, %d before were refused; %d of the stalled were ended",
		clients, held/(1<<20), took.Seconds(), refused, ended)
	if inside {
		require.Zero(t, held)
		require.Zero(t, ended+refused)
		return
	}
	require.Positive(t, ended)
	require.Less(t, ended, clients, "no more end than there is too much")
}

// The replan port gives a stranger no ticket, nor an engine one for a path of its choice: without a ticket, with an
// invented one, with one that an engine has kept, and with one of a hop that still runs, which counts once.
func TestReplanPortGivesStrangersNothing(t *testing.T) {
	beside(t, "there is no replan port")
	t.Parallel()
	f := start(t, options{})
	config, err := os.ReadFile(f.config)
	require.NoError(t, err)
	address := string(regexp.MustCompile(`replan: \{listen: "([^"]+)"`).FindSubmatch(config)[1])
	ask := func(id, path, ticket string, restart bool) (int, http.Header) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+address+path, strings.NewReader(apis[0].body))
		require.NoError(t, err)
		r.Host = "evil.host"
		r.Header = http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {id}}
		if ticket != "" {
			r.Header.Set("x-tandem-ticket", ticket)
		}
		if restart {
			r.Header.Set("x-tandem-restart", "true")
		}
		resp, err := http.DefaultTransport.RoundTrip(r)
		require.NoError(t, err)
		_ = resp.Body.Close()
		return resp.StatusCode, resp.Header
	}
	require.Equal(t, 200, f.post(apis[0].path, apis[0].body, "x-request-id", "kept").status)
	kept := f.requests("kept", f.prefills...)[0].Headers["X-Tandem-Ticket"][0]
	if status, headers := ask("kept", "/sleep", kept, false); status == 307 { // as if that hop had failed: once, and where the client asked
		require.Equal(t, "http://tandem"+apis[0].path, headers.Get("location"))
	}
	for _, path := range []string{apis[0].path, "/sleep", "/collective_rpc", "/v1/load_lora_adapter", "/pause?x=1"} {
		for _, restart := range []bool{false, true} {
			for _, ticket := range []string{"", "AAAA", strings.Repeat("A", 100), kept, kept[:len(kept)-2]} {
				status, headers := ask("kept", path, ticket, restart)
				require.Equal(t, 503, status, "%s %v %.10s", path, restart, ticket)
				require.Empty(t, headers.Get("x-tandem-ticket"))
				require.Empty(t, headers.Get("location"))
			}
		}
	}

	for _, p := range f.prefills {
		f.inject(p, `{"mode":"slow","delay":"3s","leg":"prefill","count":1}`)
	}
	done := make(chan answer, 1)
	go func() {
		got, _ := f.try(t.Context(), http.MethodPost, apis[0].path, apis[0].body, "x-request-id", "running")
		done <- got
	}()
	var running []seen
	soon(t, "prefill has the hop", func() bool { running = f.requests("running", f.prefills...); return len(running) > 0 })
	ticket := running[0].Headers["X-Tandem-Ticket"][0]
	status, headers := ask("another", "/sleep", ticket, false)
	require.Equal(t, 503, status, "another request's")
	require.Empty(t, headers.Get("x-tandem-ticket"))
	status, headers = ask("running", "/sleep", ticket, false)
	if status == 307 { // an engine may have its own hop planned again, and only where the client asked
		require.Equal(t, "http://tandem"+apis[0].path, headers.Get("location"))
		status, headers = ask("running", "/sleep", ticket, false)
	}
	require.Equal(t, 503, status, "a second time")
	require.Empty(t, headers.Get("x-tandem-ticket"))
	got := <-done
	require.Contains(t, []int{200, 503}, got.status, got.body)
	require.Empty(t, f.requests("another", f.engines()...))
	for _, s := range f.requests("", f.engines()...) {
		require.Equal(t, apis[0].path, s.Path)
	}
	soon(t, "nothing is reserved", func() bool { return metric(t, f.admins[0], "tandem_reservations") == 0 })
	f.lenient = true // P's blocks of the hop whose ticket was taken
}

// What an engine refuses for good (405, 417, 431) is the client's answer, not a 503 to try again; what another engine
// may do better is tried there.
func TestEnginesRefusalsReachTheClient(t *testing.T) {
	t.Parallel()
	f := start(t, options{})
	f.lenient = true
	for _, status := range []int{405, 417, 431, 422} {
		for _, leg := range []string{"prefill", "decode"} {
			want := status
			for _, e := range f.engines() {
				f.inject(e, fmt.Sprintf(`{"mode":"status","status":%d,"leg":"%s"}`, status, leg))
			}
			got := f.post(apis[0].path, apis[0].body)
			if status == 422 && leg == "prefill" {
				want = 200 // P's body is another one than the client's: decode alone decides
			}
			require.Equal(t, want, got.status, "%s: %s", leg, got.body)
			require.Empty(t, got.header.Get("Retry-After"))
			for _, e := range f.engines() {
				f.clear(e)
			}
		}
	}
	require.Equal(t, 200, f.post(apis[0].path, apis[0].body).status)
}

// So they do with every dialect, whether requests are bound late or at once, and the next request is served. A list of
// one prompt is split like the prompt.
func TestEveryDialectsRefusalsAndLists(t *testing.T) {
	t.Parallel()
	all := kinds()
	for _, name := range []string{"nixl", "nixl-push", "sglang", "mooncake", "moriio", "moriio-read"} {
		all = append(all, kind{name: name, kv: name})
	}
	for _, k := range all {
		for _, binding := range []string{"late", "immediate"} {
			if binding == "immediate" && os.Getenv("TANDEM_ATTACK") == "" {
				continue // make attack has both
			}
			t.Run(k.name+" "+binding, func(t *testing.T) {
				t.Parallel() // mostly waits
				k := k
				k.pool += "  binding: " + binding + "\n"
				var f *fleet
				if k.engine == "" {
					f = start(t, options{dialect: k.kv, prefills: 1, decodes: 1, pool: k.pool, engineArgs: []string{"--transfer-timeout", "8s"}})
				} else {
					f = startKind(t, k, 1, 1)
				}
				prompt := strings.Repeat("a list of one is split ", 40)
				list := fmt.Sprintf(`{"model":"tiny","prompt":[%q],"max_tokens":8}`, prompt)
				got := f.post("/v1/completions", list, "x-request-id", "list")
				require.Equal(t, 200, got.status, got.body)
				require.Len(t, f.requests("", f.prefills...), 1, "legs at prefill")
				require.Len(t, f.requests("", f.decodes...), 1, "legs at decode")
				f.lenient = true
				for _, status := range []int{405, 417, 422, 431} {
					for _, e := range f.engines() {
						f.inject(e, fmt.Sprintf(`{"mode":"status","status":%d,"leg":"any","path":"/v1/completions"}`, status))
					}
					got := f.post("/v1/completions", list)
					require.Equal(t, status, got.status, got.body)
					require.Empty(t, got.header.Get("Retry-After"))
					for _, e := range f.engines() {
						f.clear(e)
					}
				}
				require.Equal(t, 200, f.post("/v1/completions", list).status)
			})
		}
	}
}

// An engine that forges what only Tandem says: redirects with tickets, Envoy's and Tandem's headers once and twice.
// Clients see none of it, no request fails but those it answers, and nothing stays reserved.
func TestEnginesForgeNothing(t *testing.T) {
	t.Parallel()
	for _, role := range []string{"decode", "both"} {
		var redirect, hits atomic.Int64
		engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodPost {
				return
			}
			hits.Add(1)
			h := w.Header()
			if n := redirect.Load(); n > 0 {
				h.Set("location", "http://tandem/v1/chat/completions")
				h["X-Tandem-Ticket"] = []string{"", "A", strings.Repeat("A", 100), r.Header.Get("x-tandem-ticket")}[n-1 : n]
				h["X-Tandem-Leg"] = []string{"decode", "decode"}
				w.WriteHeader(http.StatusTemporaryRedirect)
				return
			}
			for _, name := range []string{
				"x-envoy-upstream-service-time", "x-envoy-ratelimited", "x-envoy-immediate-health-check-fail", "x-envoy-overloaded",
				"x-envoy-attempt-count", "x-tandem-ticket", "x-tandem-leg", "x-tandem-explain", "x-gateway-destination-endpoint",
			} {
				h[http.CanonicalHeaderKey(name)] = []string{"1", "2"}
			}
			h.Set("content-type", "application/json")
			_, _ = io.WriteString(w, `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}`)
		}))
		defer engine.Close()
		f := start(t, options{prefills: 1, pools: fmt.Sprintf(`pools:
- {name: chat, models: ["*"], kvTransfer: nixl, decodeAlone: fallback, endpoints: [{address: %%P, role: prefill}, {address: %q, role: %s}]}
`, engine.Listener.Addr(), role)})
		f.lenient = true // P's blocks are not fetched
		settled := func() {
			soon(t, "nothing is reserved", func() bool { return metric(t, f.admins[0], "tandem_reservations") == 0 })
		}
		for range 4 {
			got := f.post(apis[0].path, question("forged", 2000))
			require.Equal(t, 200, got.status, got.body)
			for name := range got.header {
				name = strings.ToLower(name)
				require.False(t, strings.HasPrefix(name, "x-envoy-") || strings.HasPrefix(name, "x-tandem-") || strings.HasPrefix(name, "x-gateway-"), "%s reaches a client", name)
			}
		}
		settled()
		for n := range 4 {
			redirect.Store(int64(n + 1))
			before := hits.Load()
			for range 5 {
				got := f.post(apis[0].path, question(fmt.Sprint("forged ", n), 2000))
				require.GreaterOrEqual(t, got.status, 300, got.body)
				require.Empty(t, got.header.Get("x-tandem-ticket"))
			}
			settled()
			require.LessOrEqual(t, hits.Load()-before, int64(5*6), "a redirect is not followed again and again")
		}
		require.True(t, f.tandems[0].running())
	}
}
