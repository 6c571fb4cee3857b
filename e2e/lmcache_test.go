package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A notification that never comes costs only its timeout: D computes.
func TestLMCacheWithoutNotices(t *testing.T) {
	t.Parallel()
	k := kind{name: "silent", engine: "lmcache", kv: "lmcache", more: []string{"--notices", "never"}, pool: "  lmcache: {noticeTimeout: 300ms}\n"}
	f := startKind(t, k, 1, 1)
	a := ask("tiny", 0)
	got := f.post(a.path, a.body, "x-request-id", a.id)
	require.Equal(t, 200, got.status, got.body)
	require.GreaterOrEqual(t, got.took, 300*time.Millisecond)
	require.Equal(t, f.want(a, f.decodes[0]), got.text(t))
	require.Equal(t, 1, int(metric(t, f.admins[0], "tandem_kv_notice_waits_total", `result="missed"`)))

	skipping := kind{engine: "lmcache", kv: "lmcache", more: []string{"--notices", "never", "--kv-delay", "-1ms"}, pool: "  lmcache: {skipNotices: true}\n"}
	f = start(t, skipping.setUp(options{prefills: 1, decodes: 1}, "127.0.0.1:1", "tiny"))
	got = f.post(a.path, a.body, "x-request-id", a.id)
	require.Equal(t, 200, got.status, got.body)
	_, d := f.hops(a.id)
	require.Positive(t, d.ExternalTokens)
}

// A notification that comes before its prefill answers is kept for notices.keep, and no longer.
func TestLMCacheEarlyNoticesAreKept(t *testing.T) {
	t.Parallel()
	for keep, result := range map[string]string{"1m": "there", "1s": "missed"} {
		t.Run(keep, func(t *testing.T) {
			t.Parallel() // mostly waits
			notices := ports(t, 1)[0]
			k := kind{engine: "lmcache", kv: "lmcache", more: []string{"--kv-delay", "-4s"}, pool: "  lmcache: {noticeTimeout: 300ms}\n"}
			o := k.setUp(options{prefills: 1, decodes: 1}, notices, "tiny")
			o.top = fmt.Sprintf("notices: {listen: %q, keep: %s}\n", notices, keep)
			f := start(t, o)
			a := ask("tiny", 0)
			got := f.post(a.path, a.body, "x-request-id", a.id)
			require.Equal(t, 200, got.status, got.body)
			require.Equal(t, f.want(a, f.decodes[0]), got.text(t))
			require.Equal(t, 1, int(metric(t, f.admins[0], "tandem_kv_notice_waits_total", `result="`+result+`"`)))
			require.Equal(t, 1, int(sum(t, f, "tandem_kv_notice_waits_total")))
		})
	}
}

// Engines send their notifications to one replica, and the legs wait at both: a notification at one wakes those at the
// other, through Redis.
func TestLMCacheNoticesReachEveryReplica(t *testing.T) {
	t.Parallel()
	redis := startRedis(t)
	_, port, _ := net.SplitHostPort(ports(t, 1)[0])
	k := kind{engine: "lmcache", kv: "lmcache", more: []string{"--kv-delay", "20ms"}}
	o := k.setUp(options{prefills: 2, decodes: 2, replicas: 2}, "127.0.0.10:"+port, "tiny")
	o.top = fmt.Sprintf("notices: {listen: \"127.0.0.1%%i:%s\"}\n%s", port, redis.yaml())
	f := start(t, o)
	late := func() float64 { return sum(t, f, "tandem_redis_errors_total") } // notifications are dropped while Redis is slow
	for i := range 24 {
		a := ask("tiny", i)
		got := f.post(a.path, a.body, "x-request-id", a.id)
		require.Equal(t, 200, got.status, got.body)
		if _, d := f.hops(a.id); late() == 0 {
			require.Positive(t, d.ExternalTokens)
		}
	}
	if late() == 0 {
		require.Zero(t, sum(t, f, "tandem_kv_notice_waits_total", `result="missed"`))
	}
	require.InDelta(t, 24, sum(t, f, "tandem_kv_notice_waits_total"), 0)
	require.InDelta(t, 24, metric(t, f.admins[0], "tandem_kv_notices_total", `result="taken"`), 0)
	require.Positive(t, metric(t, f.admins[1], "tandem_kv_notice_waits_total", `result="woken"`)+metric(t, f.admins[1], "tandem_kv_notice_waits_total", `result="there"`))
	require.Zero(t, metric(t, f.admins[1], "tandem_kv_notices_total", `result="taken"`))
}

// With bufferTokens prompts get D's buffer one after the other, and none waits with a part of it; D computes a prompt
// larger than the buffer.
func TestLMCacheBufferIsShared(t *testing.T) {
	t.Parallel()
	k := kind{engine: "lmcache", kv: "lmcache", more: []string{"--pd-buffer", "4096", "--pd-allocation-timeout", "30s", "--prefill-speed", "40000"}}
	notices := ports(t, 1)[0]
	o := k.setUp(options{prefills: 2, decodes: 1, top: fmt.Sprintf("notices: {listen: %q}\n", notices)}, notices, "tiny")
	plain := o.engine
	o.engine = func(role string, i int, free func() string) ([]string, string) {
		args, fields := plain(role, i, free)
		return args, strings.Replace(fields, "lmcache: {", "lmcache: {bufferTokens: 4096, ", 1)
	}
	f := start(t, o)
	body := func(i, words int) string {
		return fmt.Sprintf(`{"model":"tiny","max_tokens":4,"prompt":"%d %s"}`, i, strings.Repeat("abcdefg ", words))
	}
	var clients sync.WaitGroup
	for i := range 12 {
		clients.Go(func() {
			got, err := f.try(context.Background(), http.MethodPost, "/v1/completions", body(i, 1200), "x-request-id", fmt.Sprint("turn-", i))
			if err != nil || got.status != 200 {
				t.Errorf("request %d: %v %s", i, err, got.body)
			}
		})
	}
	clients.Wait()
	got := f.post("/v1/completions", body(99, 20_000), "x-request-id", "large")
	require.Equal(t, 200, got.status, got.body)
	require.Empty(t, f.requests("large", f.prefills...))
	require.Equal(t, 1, int(metric(t, f.admins[0], "tandem_decisions_total", `reason="buffer_too_small"`)))
	require.Positive(t, metric(t, f.admins[0], "tandem_decisions_total", `route="split"`))
}

// Prompts that D holds already are not pushed into its buffer, where nobody would take them, and D takes the one chunk
// of prompts that are too short for Tandem to know: repeats and later turns fit into a buffer of one prompt, and none
// waits.
func TestLMCacheRepeatsLeaveTheBufferFree(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ size, words, chunk int }{{128, 50, 256}, {1024, 400, 256}, {1024, 400, 64}} {
		size, words := tt.size, tt.words // about two tokens a word
		t.Run(fmt.Sprint(size, " of ", tt.chunk), func(t *testing.T) {
			t.Parallel()
			notices := ports(t, 1)[0]
			k := kind{engine: "lmcache", kv: "lmcache", more: []string{"--pd-buffer", fmt.Sprint(size), "--pd-allocation-timeout", "1s",
				"--lmcache-chunk", fmt.Sprint(tt.chunk)}, pool: fmt.Sprintf("  lmcache: {chunkSize: %d}\n", tt.chunk)}
			o := k.setUp(options{prefills: 1, decodes: 1, top: fmt.Sprintf("notices: {listen: %q}\n", notices)}, notices, "tiny")
			plain := o.engine
			o.engine = func(role string, i int, free func() string) ([]string, string) {
				args, fields := plain(role, i, free)
				return args, strings.Replace(fields, "lmcache: {", fmt.Sprintf("lmcache: {bufferTokens: %d, ", size), 1)
			}
			f := start(t, o)
			complete := func(id, prompt string) {
				got := f.post("/v1/completions", fmt.Sprintf(`{"model":"tiny","max_tokens":4,"prompt":%q}`, prompt), "x-request-id", id)
				require.Equal(t, 200, got.status, got.body)
			}
			for prompt := range 4 {
				text := fmt.Sprintf("%04d ", prompt) + strings.Repeat("abcdefg ", words)
				for i := range 12 {
					id := fmt.Sprintf("%d-%d", prompt, i)
					complete(id, text)
					require.Equal(t, i == 0 || size == 128, len(f.requests(id, f.prefills...)) == 1, id)
				}
				complete(fmt.Sprint("turn-", prompt), text+"and so on")
			}
			reasons := func(reason string) int {
				return int(metric(t, f.admins[0], "tandem_decisions_total", fmt.Sprintf("reason=%q", reason)))
			}
			require.Equal(t, map[int]int{128: 0, 1024: 4 * 12}[size], reasons("held_by_decode"))
			require.Zero(t, reasons("buffer_full"))
			if size == 1024 { // a turn of half a chunk, or of two
				f.lenient = tt.chunk == 64 // what D holds of a turn stays in its buffer
				complete("longer", "0000 "+strings.Repeat("abcdefg ", words+60))
				require.Equal(t, tt.chunk == 64, len(f.requests("longer", f.prefills...)) == 1)
			}
			require.Zero(t, metric(t, f.admins[0], "tandem_kv_notice_waits_total", `result="missed"`))
		})
	}
}

// P's first token comes from Tandem, and D's tokens become those of one chat: the same members, roles, usage and ends
// as in a single engine's answer. Requests that D could not continue go the other way.
func TestLMCacheFirstToken(t *testing.T) {
	t.Parallel()
	f := startKind(t, kind{engine: "lmcache", kv: "lmcache", pool: "  lmcache: {retFirstToken: true}\n"}, 1, 1)
	type usage struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
		TotalTokens      int `json:"total_tokens"`
	}
	type document struct {
		ID, Object, Model string
		Choices           []struct {
			FinishReason string `json:"finish_reason"`
			Message      struct{ Role, Content string }
			Delta        struct{ Role, Content string }
			Text         string
		}
		Usage *usage
	}
	read := func(text string) (d document) {
		t.Helper()
		require.NoError(t, json.Unmarshal([]byte(text), &d), text)
		return d
	}
	for i := range 8 {
		a := ask("tiny", i)
		got := f.post(a.path, a.body, "x-request-id", a.id)
		require.Equal(t, 200, got.status, got.body)
		p, d := f.hops(a.id)
		require.Equal(t, "/v1/completions", d.Path)
		chat, id := a.path == "/v1/chat/completions", "cmpl-"+a.id
		object := "text_completion"
		if chat {
			object, id = "chat.completion", "chatcmpl-"+a.id
		}
		want := &usage{p.PromptTokens, 5 + i%9, p.PromptTokens + 5 + i%9}
		if i/2%2 == 0 {
			whole := read(got.body)
			require.Equal(t, []string{id, object, "tiny"}, []string{whole.ID, whole.Object, whole.Model})
			require.Equal(t, want, whole.Usage)
			require.Equal(t, "length", whole.Choices[0].FinishReason)
			require.Equal(t, chat, whole.Choices[0].Message.Role == "assistant")
			continue
		}
		events := got.events()
		if chat {
			object += ".chunk"
			first := read(events[0])
			require.Equal(t, "assistant", first.Choices[0].Delta.Role)
			require.Len(t, events, 1+5+i%9+1+1, "role, tokens, usage, [DONE]")
		} else {
			require.Len(t, events, 5+i%9+1+1)
		}
		for j, e := range events[:len(events)-1] {
			chunk := read(e)
			require.Equal(t, []string{id, object, "tiny"}, []string{chunk.ID, chunk.Object, chunk.Model})
			switch {
			case j == len(events)-2:
				require.Empty(t, chunk.Choices)
				require.Equal(t, want, chunk.Usage)
			case j == len(events)-3:
				require.Equal(t, "length", chunk.Choices[0].FinishReason)
			default:
				require.Empty(t, chunk.Choices[0].FinishReason)
			}
		}
	}
	for i, more := range []string{`,"tools":[{"type":"function","function":{"name":"f"}}]`, `,"seed":7`, `,"logprobs":true`, `,"stop":["zzz"]`} {
		a := ask("tiny", 100+4*i)
		a.body = strings.TrimSuffix(a.body, "}") + more + "}"
		got := f.post(a.path, a.body, "x-request-id", a.id)
		require.Equal(t, 200, got.status, got.body)
		p, d := f.hops(a.id)
		require.Equal(t, a.path, d.Path, more)
		require.NotContains(t, p.Body, "ret_first_tok")
		require.Positive(t, d.ExternalTokens)
	}
	// An answer that its first token ends.
	a := ask("tiny", 200)
	token := []byte(f.want(a, f.decodes[0])[:4])
	a.body = strings.TrimSuffix(a.body, "}") + fmt.Sprintf(`,"stop_token_ids":[%d]}`, uint32(token[0])|uint32(token[1])<<8|uint32(token[2])<<16|uint32(token[3])<<24)
	got := f.post(a.path, a.body, "x-request-id", a.id)
	require.Equal(t, 200, got.status, got.body)
	require.Contains(t, got.body, `"finish_reason":"stop"`)
	require.NotContains(t, got.body, "first_tok")
	require.NotContains(t, got.body, "prompt_token_ids\":[")
	require.Empty(t, f.requests(a.id, f.decodes...))

	// If D fails, the request is repeated as the original chat, whichever path its first try used.
	f.inject(f.decodes[0], `{"mode":"status","status":500,"leg":"any","count":1,"path":"/v1/completions"}`)
	again := ask("tiny", 300)
	answered := f.post(again.path, again.body, "x-request-id", again.id)
	require.Equal(t, 200, answered.status, answered.body)
	require.Contains(t, answered.body, `"object":"chat.completion"`)
	require.Equal(t, f.want(again, f.decodes[0]), answered.text(t))
}
